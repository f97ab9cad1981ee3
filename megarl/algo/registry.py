"""How a user's file adds a choice by name: decorators that put functions into the tables of this room.

    algorithm.plugins=[my_losses.py]   algorithm.policy_loss_fn=my_loss

A function is recognised by its parameters: ours takes packed [T] columns; one written in the documented way of verl, on
[batch, sequence] tensors, is wrapped (verl_compat/); any other is refused.  The names count, not their number: columns
are handed over by position, and two in another order would compute something else without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.algo.advantages.table import ADV_ESTIMATORS
from megarl.algo.kl import FULL, KL_ESTIMATORS
from megarl.algo.losses.table import PER_SEQUENCE, POLICY_LOSSES, SELECTIONS, WITHOUT_RATIO, Selection
from megarl.algo.verl_compat.estimators import DocumentedEstimator
from megarl.algo.verl_compat.losses import DocumentedLoss
from megarl.algo.verl_compat.signatures import is_documented_estimator, is_documented_loss

F = TypeVar("F", bound=Callable[..., Any])

LOSS_FORM = ("log_probs", "old_log_probs", "advantages", "mask", "segment_ids")
SELECTION_FORM = ("old_log_probs", "advantages", "mask")
ESTIMATOR_FORM = ("rewards", "mask", "segment_ids")
KL_FORM = ("log_probs", "ref_log_probs")


def register_policy_loss(
    name: str, *, select: Selection | None = None, per_sequence: bool = False, uses_ratio: bool = True
) -> Callable[[F], F]:
    """Add a policy loss.

    f(log_probs, old_log_probs, advantages, mask, segment_ids, *, hyperparameters) -> loss [T], {name: [T]}.

    `select`: f(old_log_probs, advantages, mask, *, generator, hyperparameters) -> [N] bool, made from a whole optimizer
    step; the loss gets it as the keyword `selected`.  `per_sequence`: a weight of rollout correction has to be one
    number a sequence.  `uses_ratio`: its gradient holds r, so that a weight beside it would count the same thing twice
    where old_log_probs are the server's.

    Example:
        @register_policy_loss("squared")
        def squared(log_probs, old_log_probs, advantages, mask, segment_ids):
            return 0.5 * (log_probs - old_log_probs - advantages) ** 2, {}

    A function of verl's documented form works as it is, its import of this decorator included (megarl/plugins.py).
    """

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        documented = is_documented_loss(function)
        entry = DocumentedLoss(name, function) if documented else function
        if not documented:
            _require_form("policy loss", name, function, LOSS_FORM, "hyperparameters after *")
        if select is not None:
            _require_form(
                "selection of policy loss", name, select, SELECTION_FORM, "generator and hyperparameters after *"
            )
        _add(POLICY_LOSSES, "policy loss", name, entry)
        if select is not None:
            SELECTIONS[name] = select
        if per_sequence or documented:
            PER_SEQUENCE.add(name)
        if not uses_ratio:
            WITHOUT_RATIO.add(name)
        return function

    return add


def register_adv_est(name: str) -> Callable[[F], F]:
    """Add an estimator: f(rewards, mask, segment_ids, *, what it asks for by name) -> (advantages [N], returns [N]).

    A function of verl's documented form, (rewards, values, dones, gamma, gae_lambda, **kwargs), works as it is.
    """

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        entry: Callable[..., Any] = function
        if is_documented_estimator(function):
            entry = DocumentedEstimator(name, function)
        else:
            _require_form("advantage estimator", name, function, ESTIMATOR_FORM, "what it asks for after *")
        _add(ADV_ESTIMATORS, "advantage estimator", name, entry)
        return function

    return add


def register_kl(name: str) -> Callable[[F], F]:
    """Add a KL estimator: f(log_probs [T], ref_log_probs [T]) -> [T]."""
    if name.endswith("+"):
        raise ValueError(f'KL estimator {name!r}: expected a name without "+", which every name may carry')
    if name == FULL:
        raise ValueError(f"KL estimator {name!r} exists already: use another name")

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        _require_form("KL estimator", name, function, KL_FORM)
        _add(KL_ESTIMATORS, "KL estimator", name, function)
        return function

    return add


def _add(table: dict[str, Any], kind: str, name: str, function: Callable[..., Any]) -> None:
    if name in table:
        raise ValueError(f"{kind} {name!r} exists already: use another name")
    table[name] = function


def _require_form(kind: str, name: str, function: Callable[..., Any], form: tuple[str, ...], rest: str = "") -> None:
    """Raises: ValueError for a function whose columns are not those of `form`, by name and in order."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    columns = [str(p) for p in bare if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]  # *args keeps its star
    if columns != list(form):
        taken = inspect.Signature(bare)
        wanted = ", ".join((f"these columns, by name and in this order: ({', '.join(form)})", *filter(None, [rest])))
        raise ValueError(f"{kind} {name!r}: it takes {taken}; expected {wanted}")
