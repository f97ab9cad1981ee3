"""The total actor loss and the critic loss of a packed micro-batch, with their statistics, as a rank computes them.

    actor:   loss = sum_t weight_t (w_t policy_t - entropy_coeff H_t + kl_loss_coef KL_t + distill_weight_t D_t
                                    + mtp_coef M_t)
    critic:  loss = sum_t weight_t value_loss_t

Both are settings objects, called with a Batch and the model's [T] columns; logits, models and ranks are not used here.
Masked places may hold any value: they are set to 0 before any arithmetic and removed again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from megarl.algo.distillation import Distillation
from megarl.algo.documented.losses import DocumentedLoss
from megarl.algo.hyperparameters import check_hyperparameters, hyperparameters_of, keyword_names
from megarl.algo.kl import FULL, kl_estimate, with_gradient_of_k2
from megarl.algo.losses.ratio import importance_ratio
from megarl.algo.losses.value import value_loss
from megarl.algo.registry import COLUMN_KEYWORDS, POLICY_LOSSES
from megarl.algo.segments import clean
from megarl.algo.tally import Tally
from megarl.samples.batch import Batch, LossOutput

OLD = "old_log_probs"  # a column of the batch
MTP = "mtp_log_probs"  # an output [T, MTP layers]
OWN_STATS = (
    *("pg_loss", "pg_loss_level", "drift_good", "drift_bad", "ppo_kl", "entropy", "kl_loss"),
    *("ratio_mean", "ratio_std", "ratio_min", "ratio_max", "mtp_loss", "mtp_acceptance"),
)


@dataclass(frozen=True)
class ActorLoss:
    """Policy loss, entropy bonus and KL to the reference, with the same token weights.

    Example: ActorLoss("ppo", clip_high=0.28, clip_c="off", use_kl_loss=True)(batch, {"log_probs": l}).loss.backward()
    """

    policy_loss: str = "ppo"  # a name of POLICY_LOSSES
    clip_low: float | None = None  # None: the loss's own default, here and in the next two
    clip_high: float | None = None
    clip_c: float | str | None = None  # "off" switches the dual clip off
    args: Mapping[str, float] = field(default_factory=dict)  # the loss's other hyperparameters: {"tau_pos": 1.0}
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"  # a name of KL_ESTIMATORS or "full", "+" allowed
    kl_importance: bool = False  # multiply the KL by the ratio r, with r's gradient: unbiased off-policy
    use_rollout_weight: bool = False  # multiply the policy loss by the column rollout_weight
    distillation: Distillation | None = None  # add the divergence from teachers
    mtp_coef: float = 0.0  # add the cross entropy of MTP layers, the mean over them; 0: the model has none

    def __post_init__(self) -> None:
        """Raises: ValueError for unknown hyperparameters; `rehearsal.rehearse` tests the functions themselves."""
        check_hyperparameters(self.policy_loss, self._clips(), self.args)
        assert self.use_kl_loss or not self.kl_importance, "kl_importance weighs the KL, and there is none"
        assert not (self.kl_importance and self.kl_is_full), "the full KL samples nothing that a ratio could correct"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that a call needs, and those that the model's side of its outputs needs.

        At the weights with which the iteration began old_log_probs are the output log_probs, and may be left out.
        """
        return (*self._own_columns, *(self.distillation.columns if self.distillation else ()))

    @property
    def _own_columns(self) -> tuple[str, ...]:
        """Those of one number per token."""
        names = ["weight", "response_mask", OLD, "advantages"]
        if self.use_kl_loss and self.kl_loss_type != FULL:
            names.append("ref_log_probs")
        if self.use_rollout_weight:
            names.append("rollout_weight")
        return (*names, *self.column_keywords)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The model's columns that a call needs, all differentiable; the entropy is always used as a statistic."""
        own = (*self._own_outputs, MTP) if self.mtp_coef else self._own_outputs
        return (*own, *(self.distillation.outputs if self.distillation else ()))

    @property
    def _own_outputs(self) -> tuple[str, ...]:
        base = ("log_probs", "entropy")
        return (*base, "full_kl") if self.use_kl_loss and self.kl_is_full else base

    @property
    def per_sequence(self) -> bool:
        """Whether a token's loss needs the others of its sample, so that all its rows have to be in one call."""
        return POLICY_LOSSES[self.policy_loss].per_sequence

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Every number that was set, with the name used by the policy loss and its selection."""
        return {name: None if value == "off" else value for name, value in self._clips().items()} | dict(self.args)

    def select(self, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, generator: Generator) -> Tensor:
        """[N] bool: the tokens of a whole optimizer step that the policy loss treats differently (column `selected`).

        Raises: ValueError for a selection that does not return one bool per token.
        """
        function = POLICY_LOSSES[self.policy_loss].select
        assert function is not None, f"policy loss {self.policy_loss} selects no tokens"
        chosen = function(
            old_log_probs, advantages, mask, generator=generator, **hyperparameters_of(function, self.hyperparameters)
        )
        if chosen.shape != mask.shape or chosen.dtype != torch.bool:
            raise ValueError(
                f"policy loss {self.policy_loss}: its selection has shape {tuple(chosen.shape)} and type "
                f"{chosen.dtype}, expected one bool a token, {tuple(mask.shape)}"
            )
        return chosen & mask

    def require_agg_mode(self, agg_mode: str) -> None:
        """Raises: ValueError if the policy loss aggregates by itself and does not support this mode."""
        function = POLICY_LOSSES[self.policy_loss].function
        modes = function.agg_modes if isinstance(function, DocumentedLoss) else None
        if modes is not None and agg_mode not in modes:
            raise ValueError(
                f"actor.loss_agg_mode={agg_mode}: the policy loss {self.policy_loss} does not look at its "
                f"loss_agg_mode and always computes {modes[0]}, expected that"
            )

    def __call__(self, batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
        """The loss of one micro-batch and its statistics.

        Args: batch: the columns of `self.columns`, [T]; without old_log_probs r is 1, with its gradient; outputs: those
            of `self.outputs`, [T]; "entropy" may be left out if entropy_coeff is 0.
        Returns: loss [], in the graph of outputs even if no token is trainable, NaN if an unmasked entry is not finite;
            statistics with the weights of the loss.
        """
        mask = batch.columns["response_mask"] != 0
        segment_ids = batch.segment_ids
        given = {OLD: outputs["log_probs"].detach(), **batch.columns}
        given = {name: given[name] for name in self._own_columns if name != "response_mask"} | {
            name: outputs[name] for name in self._own_outputs if name in outputs
        }
        col = {name: clean(column, mask) for name, column in given.items()}
        log_probs, old_log_probs, weight = col["log_probs"], col[OLD], col["weight"]
        tally = Tally(weight, mask, segment_ids)
        for name, column in given.items():
            tally.watch(name, column)

        extra = {name: col[name] for name in self.column_keywords}
        token_loss, info = self.policy(log_probs, old_log_probs, col["advantages"], mask, segment_ids, **extra)
        tally.watch(f"token loss of {self.policy_loss}", token_loss)
        pull = col["advantages"]
        if self.use_rollout_weight:
            token_loss, pull = col["rollout_weight"] * token_loss, col["rollout_weight"] * pull
        tally.mean("actor/pg_loss", token_loss)
        tally.mean("actor/pg_loss_level", -pull)  # the loss -A r at r = 1
        for name, column in info.items():
            tally.mean(f"actor/{name}", column)
        ratio = importance_ratio(log_probs, old_log_probs)
        drift = ((ratio - 1) * pull).detach()
        tally.mean("actor/drift_good", torch.where(pull > 0, drift, 0.0))
        tally.mean("actor/drift_bad", torch.where(pull < 0, drift, 0.0))
        if "entropy" in col:
            tally.mean("actor/entropy", col["entropy"])
        if self.entropy_coeff != 0:
            token_loss = token_loss - self.entropy_coeff * col["entropy"]
        if self.use_kl_loss:
            kl = self._kl(col, ratio)
            tally.mean("actor/kl_loss", kl)
            token_loss = token_loss + self.kl_loss_coef * kl
        if self.distillation is not None:
            token_loss = token_loss + self.distillation(batch.columns, outputs, mask, tally)
        if self.mtp_coef:
            token_loss = token_loss + self.mtp_coef * self._mtp(outputs[MTP], log_probs, mask, tally)

        tally.mean("actor/ppo_kl", old_log_probs - log_probs)
        tally.mean("actor/ratio_mean", ratio)
        tally.std("actor/ratio_std", ratio)
        tally.extremes("actor/ratio_min", "actor/ratio_max", ratio)
        return tally.output((weight * clean(token_loss, mask)).sum())

    @property
    def kl_is_full(self) -> bool:
        """Whether the KL is the sum over the whole vocabulary."""
        return self.kl_loss_type.removesuffix("+") == FULL

    @property
    def column_keywords(self) -> tuple[str, ...]:
        """The columns that the policy loss takes as keywords."""
        known = keyword_names(POLICY_LOSSES[self.policy_loss].function)
        return tuple(name for name in COLUMN_KEYWORDS if name in known)

    def _mtp(self, drafted: Tensor, log_probs: Tensor, mask: Tensor, tally: Tally) -> Tensor:
        """M [T]: the cross entropy of MTP layers on the tokens that the policy learns.  drafted [T, layers]: log q.

        Servers accept a draft of the first layer with the probability sum_v min(p, q), which is the mean of
        min(1, q / p) over tokens that p has drawn.
        """
        drafted = clean(drafted, mask[:, None])
        loss = -drafted.mean(1)
        tally.watch("loss of MTP layers", loss)
        tally.mean("actor/mtp_loss", loss)
        tally.mean("actor/mtp_acceptance", (drafted[:, 0] - log_probs).clamp(max=0).exp())
        return loss

    def _clips(self) -> dict[str, Any]:
        given = {"clip_low": self.clip_low, "clip_high": self.clip_high, "clip_c": self.clip_c}
        return {name: value for name, value in given.items() if value is not None}

    def _kl(self, col: Mapping[str, Tensor], ratio: Tensor) -> Tensor:
        if self.kl_loss_type == FULL:
            return col["full_kl"]
        if self.kl_is_full:
            return with_gradient_of_k2(col["full_kl"], col["log_probs"], col["ref_log_probs"])
        kl = kl_estimate(self.kl_loss_type, col["log_probs"], col["ref_log_probs"])
        if self.kl_importance:  # with "+" the gradient is k2's alone, so r is only a weight
            kl = kl * (ratio.detach() if self.kl_loss_type.endswith("+") else ratio)
        return kl

    def policy(self, *columns: Tensor, **extra: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The registered function's token loss [T] and its statistics; ValueError for a result of another form."""
        function = POLICY_LOSSES[self.policy_loss].function
        result = function(*columns, **extra, **hyperparameters_of(function, self.hyperparameters))
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise ValueError(
                f"policy loss {self.policy_loss}: expected it to return (token loss, {{statistic: column}})"
            )
        token_loss, info = result
        for name, column in {"its token loss": token_loss, **info}.items():
            if column.shape != columns[0].shape:
                raise ValueError(
                    f"policy loss {self.policy_loss}: {name} has shape {tuple(column.shape)}, "
                    f"expected one number a token, {tuple(columns[0].shape)}"
                )
        return token_loss, info


@dataclass(frozen=True)
class CriticLoss:
    """The clipped value loss with the step's token weights.  Example: CriticLoss(0.5)(batch, {"values": v})."""

    cliprange_value: float | None = 0.5  # None: no clip
    per_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises: ValueError for a range that is not above 0."""
        if self.cliprange_value is not None and not self.cliprange_value > 0:
            raise ValueError(f"critic.cliprange_value={self.cliprange_value}: expected a number above 0, or null")

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that a call needs; `values` are those from before the first optimizer step."""
        return ("weight", "response_mask", "values", "returns")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The model's columns that a call needs."""
        return ("values",)

    def __call__(self, batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
        """The loss of one micro-batch and its statistics.

        Args: batch: the columns of `self.columns`, [T]; outputs: "values" [T] of the critic in training.
        Returns: as of ActorLoss.
        """
        mask = batch.columns["response_mask"] != 0
        given = {"weight": batch.columns["weight"], "old values": batch.columns["values"]} | {
            "returns": batch.columns["returns"],
            "values": outputs["values"],
        }
        col = {name: clean(column, mask) for name, column in given.items()}
        tally = Tally(col["weight"], mask, batch.segment_ids)
        for name, column in given.items():
            tally.watch(name, column)
        token_loss, clipped = value_loss(
            col["values"], col["old values"], col["returns"], cliprange=self.cliprange_value
        )
        tally.mean("critic/vf_loss", token_loss)
        tally.mean("critic/vf_clipfrac", clipped)
        tally.mean("critic/vpred_mean", col["values"])
        tally.explained_variance("critic/vf_explained_var", col["values"], col["returns"])
        return tally.output((col["weight"] * clean(token_loss, mask)).sum())
