"""The hyperparameters of each policy loss, and the checks of the values that a user sets."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.algo.registry import COLUMN_KEYWORDS, POLICY_LOSSES
from megarl.plugins.declared import argument_faults

CLIP_KEYS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "clip_c": "clip_ratio_c"}


def keyword_names(function: Callable[..., Any]) -> dict[str, bool]:
    """The keyword-only arguments of a function: name -> has it a default?"""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether it ends in **kwargs."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def hyperparameter_names(policy_loss: str) -> dict[str, bool]:
    """The hyperparameters of a policy loss and of its selection: name -> has it a default?"""
    loss = POLICY_LOSSES[policy_loss]
    names = keyword_names(loss.function) | (keyword_names(loss.select) if loss.select else {})
    return {name: default for name, default in names.items() if name not in (*COLUMN_KEYWORDS, "generator")}


def hyperparameters_of(function: Callable[..., Any], hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that this function takes; the others belong to its selection or its loss."""
    if takes_any_keyword(function):
        return dict(hyperparameters)
    known = keyword_names(function)
    return {name: value for name, value in hyperparameters.items() if name in known}


def key_of(hyperparameter: str) -> str:
    """The key of the configuration that sets a hyperparameter."""
    return (
        f"actor.{CLIP_KEYS[hyperparameter]}"
        if hyperparameter in CLIP_KEYS
        else f"algorithm.policy_loss_args.{hyperparameter}"
    )


def with_keys(policy_loss: str, sentence: str) -> str:
    """A loss's sentence about its hyperparameters, with the keys of the configuration instead of their names."""
    for hyperparameter in hyperparameter_names(policy_loss):
        sentence = re.sub(rf"\b{hyperparameter}\b", key_of(hyperparameter), sentence)
    return f"{sentence} (algorithm.policy_loss_fn={policy_loss})"


def check_hyperparameters(policy_loss: str, clips: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    """Raises: ValueError for an unknown loss, an unknown clip or argument, or a missing or invalid number.

    Args: clips: clip_low, clip_high, clip_c, those that are set; args: algorithm.policy_loss_args.
    """
    if policy_loss not in POLICY_LOSSES:
        raise ValueError(f"algorithm.policy_loss_fn={policy_loss!r}: expected one of {', '.join(POLICY_LOSSES)}")
    known, any_name = hyperparameter_names(policy_loss), takes_any_keyword(POLICY_LOSSES[policy_loss].function)
    for name, value in clips.items():
        if name not in known:
            raise ValueError(f"{key_of(name)}={value}: the policy loss {policy_loss} has no such clip, leave it unset")
    for name, value in args.items():
        key = f"algorithm.policy_loss_args.{name}={value}"
        if name in CLIP_KEYS:
            raise ValueError(f"{key}: expected actor.{CLIP_KEYS[name]} for a clip")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{key}: expected a finite number")
    own = {name: default for name, default in known.items() if name not in clips and name not in CLIP_KEYS}
    own |= dict.fromkeys(args, True) if any_name else {}
    for sentence in argument_faults(f"algorithm.policy_loss_fn={policy_loss}", "algorithm.policy_loss_args", own, args):
        raise ValueError(sentence)
    for name in CLIP_KEYS:
        if name in known and not known[name] and name not in clips:
            raise ValueError(
                f"algorithm.policy_loss_fn={policy_loss}: expected a number in {key_of(name)}, it has no default"
            )
