"""The tables of the loss layer, and the decorators that register a function in them, ours or a user's.

    algorithm.plugins=[my_losses.py]   algorithm.policy_loss_fn=my_loss

A function is recognised by its parameters: our form takes packed [T] columns; verl's documented form, on
[batch, sequence] tensors, is wrapped (verl_compat/); any other is refused.  Parameter names are checked in order:
columns are passed by position, so two in another order would silently compute something else.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from megarl.algo.documented.estimators import DocumentedEstimator
from megarl.algo.documented.losses import DocumentedLoss
from megarl.algo.documented.signatures import is_documented_estimator, is_documented_loss

F = TypeVar("F", bound=Callable[..., Any])

LOSS_FORM = ("log_probs", "old_log_probs", "advantages", "mask", "segment_ids")
SELECTION_FORM = ("old_log_probs", "advantages", "mask")
ESTIMATOR_FORM = ("rewards", "mask", "segment_ids")
KL_FORM = ("log_probs", "ref_log_probs")
COLUMN_KEYWORDS = ("selected", "rollout_log_probs")  # keywords of a loss that are columns, not hyperparameters
FULL = "full"  # reserved name of the exact KL, see kl.py

# f(old_log_probs, advantages, mask, *, generator, hyperparameters) -> [N] bool: the tokens of a whole optimizer step
# that the loss treats differently; computed before the step is split, so that no split changes it.
Selection = Callable[..., Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and the options of its decorator: see register_policy_loss."""

    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    select: Selection | None = None
    per_sequence: bool = False
    uses_ratio: bool = True
    uses_old: bool = True
    agg_mode: str | None = None


@dataclass(frozen=True)
class AggMode:
    """An aggregation: the scale of every sequence [B] from StepCounts, and whether it needs loss_scale_factor."""

    function: Callable[[Any], Tensor]
    needs_scale: bool = False


POLICY_LOSSES: dict[str, PolicyLoss] = {}
ADV_ESTIMATORS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
AGG_MODES: dict[str, AggMode] = {}


def import_folder(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that its decorators run."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def register_policy_loss(
    name: str,
    *aliases: str,
    select: Selection | None = None,
    per_sequence: bool = False,
    uses_ratio: bool = True,
    uses_old: bool = True,
    agg_mode: str | None = None,
) -> Callable[[F], F]:
    """Register a policy loss under a name and its aliases.

    f(log_probs, old_log_probs, advantages, mask, segment_ids, *, hyperparameters) -> loss [T], {name: [T]}.

    A sequence, in `segment_ids`, is what a sample learns, in all its rows.
    `select`: f(old_log_probs, advantages, mask, *, generator, hyperparameters) -> [N] bool, computed from a whole
    optimizer step; the loss gets it as the keyword `selected`.  `per_sequence`: a token's loss needs the others of its
    sequence: all rows of a sample then share a micro-batch, and the weight of rollout correction is one number per
    sequence.  `uses_ratio`: its gradient contains r, so that an additional weight would correct twice if old_log_probs
    are the server's.  `uses_old`: it reads old_log_probs.  `agg_mode`: the aggregation with which it was published, if
    that matters; another mode gives a warning.

    Example:
        @register_policy_loss("squared")
        def squared(log_probs, old_log_probs, advantages, mask, segment_ids):
            return 0.5 * (log_probs - old_log_probs - advantages) ** 2, {}

    A function of verl's documented form works unchanged, its import of this decorator too (megarl/plugins/load.py).
    """
    names = (name, *aliases)

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        documented = is_documented_loss(function)
        entry: Callable[..., Any] = DocumentedLoss(names[0], function) if documented else function
        if not documented:
            _require_form("policy loss", names[0], function, LOSS_FORM, "hyperparameters after *")
        if select is not None:
            rest = "generator and hyperparameters after *"
            _require_form("selection of policy loss", names[0], select, SELECTION_FORM, rest)
        loss = PolicyLoss(entry, select, per_sequence or documented, uses_ratio, uses_old, agg_mode)
        _add(POLICY_LOSSES, "policy loss", names, loss)
        return function

    return add


def register_adv_est(name: str, *aliases: str) -> Callable[[F], F]:
    """Register an estimator: f(rewards, mask, segment_ids, *, inputs by name) -> (advantages [N], returns [N]).

    `rewards` are float64 if single turns have rewards, so that equal totals have equal sums; else float32.
    A function of verl's documented form, (rewards, values, dones, gamma, gae_lambda, **kwargs), works unchanged.
    """
    names = (name, *aliases)

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        entry: Callable[..., Any] = function
        if is_documented_estimator(function):
            entry = DocumentedEstimator(names[0], function)
        else:
            _require_form("advantage estimator", names[0], function, ESTIMATOR_FORM, "what it asks for after *")
        _add(ADV_ESTIMATORS, "advantage estimator", names, entry)
        return function

    return add


def register_kl(name: str, *aliases: str, zero_gradient: bool = False) -> Callable[[F], F]:
    """Register a KL estimator: f(log_probs [T], ref_log_probs [T]) -> [T].

    `zero_gradient`: as a loss its expected gradient is zero; for a built-in estimator the configuration warns then.
    """
    names = (name, *aliases)
    for name in names:
        if name.endswith("+"):
            raise ValueError(f'KL estimator {name!r}: expected a name without "+", which every name may carry')
        if name == FULL:
            raise ValueError(f"KL estimator {name!r} exists already: use another name")

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        _require_form("KL estimator", names[0], function, KL_FORM)
        _add(KL_ESTIMATORS, "KL estimator", names, function)
        return function

    return add


def register_agg_mode(name: str, *aliases: str, needs_scale: bool = False) -> Callable[[F], F]:
    """Register an aggregation: f(StepCounts) -> scale per sequence, [B]; `needs_scale`: it reads loss_scale_factor."""
    names = (name, *aliases)

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        _add(AGG_MODES, "aggregation", names, AggMode(function, needs_scale))
        return function

    return add


def _add(table: dict[str, Any], kind: str, names: tuple[str, ...], entry: Any) -> None:
    """Add all names, or none if one exists already."""
    for name in names:
        if name in table:
            raise ValueError(f"{kind} {name!r} exists already: use another name")
    table.update(dict.fromkeys(names, entry))


def _require_form(kind: str, name: str, function: Callable[..., Any], form: tuple[str, ...], rest: str = "") -> None:
    """Raises: ValueError for a function whose columns do not match `form` by name and order."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    columns = [str(p) for p in bare if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]  # *args keeps its star
    if columns != list(form):
        taken = inspect.Signature(bare)
        wanted = ", ".join((f"these columns, by name and in this order: ({', '.join(form)})", *filter(None, [rest])))
        raise ValueError(f"{kind} {name!r}: it takes {taken}; expected {wanted}")
