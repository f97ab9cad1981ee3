"""How a choice by name finds its function, and how a user's file adds one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.algo.advantages import ADV_ESTIMATORS
from megarl.algo.kl import KL_ESTIMATORS
from megarl.algo.policy import POLICY_LOSSES

F = TypeVar("F", bound=Callable[..., Any])


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Add a policy loss: f(log_probs, old_log_probs, advantages, mask, segment_ids, *, knobs) -> loss [T], {name: [T]}.

    Example:
        @register_policy_loss("squared")
        def squared(log_probs, old_log_probs, advantages, mask, segment_ids):
            return 0.5 * (log_probs - old_log_probs - advantages) ** 2, {}
    """
    return _register(POLICY_LOSSES, "policy loss", name)


def register_adv_est(name: str) -> Callable[[F], F]:
    """Add an estimator: f(rewards, mask, segment_ids, *, what it asks for by name) -> (advantages [N], returns [N])."""
    return _register(ADV_ESTIMATORS, "advantage estimator", name)


def register_kl(name: str) -> Callable[[F], F]:
    """Add a KL estimator: f(log_probs [T], ref_log_probs [T]) -> [T]."""
    if name.endswith("+"):
        raise ValueError(f'KL estimator {name!r}: want a name without "+", which every name may carry')
    return _register(KL_ESTIMATORS, "KL estimator", name)


def keyword_names(function: Callable[..., Any]) -> dict[str, bool]:
    """The keyword-only arguments of a function: name -> has it a default?"""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def load_plugins(specs: Sequence[str]) -> None:
    """Import each module ("my_package.losses") or file ("my/losses.py"), whose decorators fill the tables.

    The same file twice is loaded once.
    Raises: ValueError for a file or module that is not there; whatever the plugin itself raises.
    """
    for spec in specs:
        if spec.endswith(".py"):
            _load_file(spec)
        elif importlib.util.find_spec(spec.partition(".")[0]) is None:
            raise ValueError(f"algorithm.plugins has {spec!r}: no such module; want a module or a path ending in .py")
        else:
            importlib.import_module(spec)


def _load_file(spec: str) -> None:
    path = Path(spec).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"algorithm.plugins has {spec!r}: no such file")
    name = f"megarl_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None, f"{path} ends in .py and exists, so it has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that a second try runs it again
        raise


def _register(table: dict[str, Any], kind: str, name: str) -> Callable[[F], F]:
    def add(function: F) -> F:
        """The decorator: put the function into its table and leave it as it is."""
        if name in table:
            raise ValueError(f"{kind} {name!r} exists already: want another name")
        table[name] = function
        return function

    return add
