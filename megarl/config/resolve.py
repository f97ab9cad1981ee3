"""Final values of a configuration: every default that follows another key is replaced by that key's value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.arch.layout import KEYS, Layout
from megarl.arch.megatron_fields import OVERRIDES, RECOMPUTED
from megarl.config.aliases import RENAMED_VALUES
from megarl.config.keys import fits, is_free, mapping_of, type_name, type_of
from megarl.config.names import DEFAULT_MOMENTUM
from megarl.config.schema import Config, Megatron
from megarl.config.settings import ConfigError, show

_PLAIN = re.compile(r"\$\{([\w.]+)\}")
_REFERENCE = re.compile(r"(?<!\\)\$\{[\w.\-\[\]]+\}")  # no function: that has a colon
RESTARTS = 3  # of failed ranks, without a new step in between, where there are checkpoints
DEFAULT_MAX_TOKENS = 16384  # per micro-batch and rank, if no key sets the micro-batch size


# how a pipeline is split; critic and reference follow the actor only with the same number of pipeline ranks
PIPELINE_KEYS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


# the keys that split a step into micro-batches, of which at most one is set: sequences, or tokens, on one rank
CUTS = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")


def resolved(config: Config) -> Config:
    """A new Config in which every null and reference to another key is replaced by that key's value; idempotent."""
    return settled(followed_by_roles(to_config(OmegaConf.structured(config))))


def to_config(composed: DictConfig) -> Config:
    """Convert OmegaConf's form to dataclasses; resolves references and renames values, also in `composed`."""
    _put_in_references(composed)
    for key, names in RENAMED_VALUES.items():
        if (value := OmegaConf.select(composed, key)) in names:
            OmegaConf.update(composed, key, names[value])
    try:
        config = OmegaConf.to_object(composed)
    except (OmegaConfBaseException, AssertionError) as error:  # the second: a list where a group of keys belongs
        otherwise = f"expected the groups of keys of the schema ({' '.join(str(error).split()) or 'another shape'})"
        raise ConfigError(*(_wrong_references(composed) or [otherwise])) from None
    assert isinstance(config, Config), "the schema makes it a Config"
    return config


def _put_in_references(composed: DictConfig) -> None:
    """Replace each plain "${a.b}" by the value of a.b, because OmegaConf takes a millisecond for each.

    References that are not plain, have no target or have the wrong type are left to OmegaConf and its error messages.
    Raises ConfigError for a value in the place of a list, which OmegaConf would take, and for other "${" than those of
    references: OmegaConf would call a function, as "${oc.env:NAME}", whose result config.yaml and trackers would get.
    """
    raw = dict(_leaves(OmegaConf.to_container(composed, resolve=False), ""))
    wanted = "expected a value, or references to other keys alone, such as ${trainer.seed}"
    faults = [f"{key}={show(value)}: {wanted}" for key, value in raw.items() if "${" in _REFERENCE.sub("", str(value))]
    if faults:
        raise ConfigError(*faults)
    for key, value in raw.items():
        reference, seen = _PLAIN.fullmatch(str(value)), {key}
        if reference and is_free(mapping_of(key) or ""):  # whose names may have dots
            continue
        while reference and reference[1] in raw and reference[1] not in seen:
            seen.add(reference[1])
            value = raw[reference[1]]
            reference = _PLAIN.fullmatch(str(value))
        if len(seen) > 1 and not (isinstance(value, str) and "${" in value):
            if get_origin(wanted := type_of(key)) is list and not fits(value, wanted):
                faults.append(f"{key}={show(raw[key])}: it is {show(value)}; expected {type_name(wanted)}")
            with suppress(OmegaConfBaseException):
                OmegaConf.update(composed, key, value)
    if faults:
        raise ConfigError(*faults)


def _wrong_references(composed: DictConfig) -> list[str]:
    """One sentence for each key whose "${...}" has no value, or one that does not fit."""
    faults = []
    for key, value in _leaves(OmegaConf.to_container(composed, resolve=False), ""):
        if "${" in str(value):
            try:
                if OmegaConf.is_config(node := OmegaConf.select(composed, key)):
                    OmegaConf.to_container(node, resolve=True)
            except OmegaConfBaseException as error:
                what = str(error).splitlines()[0]
                faults.append(f"{key}={show(value)}: {what}; expected ${{another.key}} that exists and fits")
    return faults


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def followed_by_roles(config: Config) -> Config:
    """Fill in, in `config` itself, the nulls that follow another key only under a condition."""
    actor = config.actor
    followers: tuple[Any, ...] = (config.critic, config.ref, *config.teachers.values())
    for role in followers:
        if role.megatron.pipeline_model_parallel_size == actor.megatron.pipeline_model_parallel_size:
            for key in PIPELINE_KEYS:
                if getattr(role.megatron, key) is None:
                    setattr(role.megatron, key, getattr(actor.megatron, key))
        for group in OVERRIDES:
            if not getattr(role.megatron, group):
                setattr(role.megatron, group, dict(getattr(actor.megatron, group)))
                if role.megatron.recompute_granularity != actor.megatron.recompute_granularity:
                    getattr(role.megatron, group).pop(RECOMPUTED, None)  # they are the actor's way of selective
        if not role.model.config and role.model.path == config.model.path:
            role.model.config = dict(config.model.config)
    for node in (actor, *followers):
        if node.num_ranks is None:
            node.num_ranks = max(1, config.trainer.num_ranks - node.first_rank)
    if config.agent.max_tokens is None:
        config.agent.max_tokens = config.data.max_prompt_length + config.data.max_response_length
    if config.trainer.max_restarts is None:
        config.trainer.max_restarts = RESTARTS if config.trainer.saves else 0
    for optim in (actor.optim, config.critic.optim):
        if optim.momentum is None:
            optim.momentum = DEFAULT_MOMENTUM.get(optim.name, 0.0)
    return config


def settled(config: Config) -> Config:
    """Set, in `config` itself, each role's limit of a micro-batch: its own, else the actor's."""
    actor = config.actor
    if not _cuts(actor):
        actor.ppo_max_token_len_per_gpu = max(DEFAULT_MAX_TOKENS, config.longest[1])
    for node in (config.critic, config.ref, *config.teachers.values()):
        if not _cuts(node):
            for key, value in _cuts(actor).items():
                setattr(node, key, value)
    return config


def layout_of(megatron: Megatron) -> Layout:
    """The keys of a role's `megatron` group as a Layout, the form that all other packages use."""
    values: dict[str, Any] = {field: getattr(megatron, key) for field, key in KEYS.items()}
    return Layout(**values | {field: values[field] or 1 for field in ("ep", "vpp")})


def data_parallel_size(config: Config, role: str) -> int:
    """Copies of the role's model over its ranks.  Raises: ConfigError if the layout does not divide them."""
    node = config.role(role)
    try:
        return layout_of(node.megatron).data_parallel_size(node.num_ranks)
    except ValueError as error:
        raise ConfigError(f"{role}.megatron: {error}") from None


def invalid_cuts(config: Config, role: str) -> Iterator[str]:
    """One sentence if both of a role's limits of a micro-batch are set."""
    given = [f"{role}.{key}={value}" for key, value in _cuts(config.role(role)).items()]
    if len(given) > 1:
        yield f"{' and '.join(given)}: expected only one of them, the other null"


def _cuts(node: Any) -> dict[str, int]:
    """Those of its keys that split a step into micro-batches and are set."""
    return {key: value for key in CUTS if (value := getattr(node, key)) is not None}
