"""What a rank evaluates on a packed micro-batch: the total actor loss and the critic loss, with their statistics.

    actor:   loss = sum_t weight_t (policy_t - entropy_coeff H_t + kl_loss_coef KL_t)
    critic:  loss = sum_t weight_t value_loss_t

Both are plain settings that are called with a Batch and the model's [T] columns; no logits, no model, no ranks here.
Masked places may hold anything: they are 0 before any arithmetic and taken out again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algo.kl import kl_estimate
from megarl.algo.policy import POLICY_LOSSES, importance_ratio
from megarl.algo.registry import keyword_names
from megarl.algo.segments import clean
from megarl.algo.tally import Tally
from megarl.algo.value import value_loss
from megarl.sample import Batch, LossOutput

CLIP_KEYS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "clip_c": "clip_ratio_c"}


@dataclass(frozen=True)
class ActorLoss:
    """Policy loss, entropy bonus and KL to the reference, through one weight column.

    Example: ActorLoss("ppo", clip_high=0.28, clip_c="off", use_kl_loss=True)(batch, {"log_probs": l}).loss.backward()
    """

    policy_loss: str = "ppo"  # a name of POLICY_LOSSES
    clip_low: float | None = None  # None: the loss's own default, here and in the next two
    clip_high: float | None = None
    clip_c: float | str | None = None  # "off" switches the dual clip off
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"  # a name of KL_ESTIMATORS, "+" allowed
    kl_importance: bool = False  # the KL times the ratio r, whose gradient belongs to it: unbiased off-policy

    def __post_init__(self) -> None:
        """Raises: ValueError for settings that do not fit together, before any model is there."""
        if self.policy_loss not in POLICY_LOSSES:
            names = ", ".join(POLICY_LOSSES)
            raise ValueError(f"algorithm.policy_loss_fn={self.policy_loss!r}: want one of {names}")
        known = keyword_names(POLICY_LOSSES[self.policy_loss])
        for knob in self._knobs():
            if knob not in known:
                raise ValueError(
                    f"actor.{CLIP_KEYS[knob]}={getattr(self, knob)}: "
                    f"the policy loss {self.policy_loss} has no such clip, leave it unset"
                )
        if self.kl_importance and not self.use_kl_loss:
            raise ValueError("actor.kl_importance=true: has no effect without actor.use_kl_loss=true")
        self._rehearse()

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that a call needs."""
        base = ("weight", "response_mask", "old_log_probs", "advantages")
        return (*base, "ref_log_probs") if self.use_kl_loss else base

    @property
    def needs_entropy(self) -> bool:
        """Whether outputs must hold a differentiable "entropy"; without this it is a statistic, if it is there."""
        return self.entropy_coeff != 0

    def __call__(self, batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
        """The loss of one micro-batch and its statistics.

        Args: batch: the columns of `self.columns`, [T]; outputs: "log_probs" [T] and, if needed or at hand,
            "entropy" [T].
        Returns: loss [], in the graph of outputs even where no token is trainable; Stats with the weights of the loss.
        Raises: NonFiniteError where an unmasked entry is not finite.
        """
        mask = batch.columns["response_mask"] != 0
        segment_ids = batch.segment_ids.to(mask.device)  # lengths stay on the CPU when columns go to a GPU
        given = {name: batch.columns[name] for name in self.columns if name != "response_mask"} | {
            name: outputs[name] for name in ("log_probs", "entropy") if name in outputs
        }
        col = {name: clean(column, mask) for name, column in given.items()}
        log_probs, old_log_probs, weight = col["log_probs"], col["old_log_probs"], col["weight"]
        tally = Tally(weight, mask, segment_ids)
        for name, column in given.items():
            tally.watch(name, column)

        token_loss, info = self._policy(log_probs, old_log_probs, col["advantages"], mask, segment_ids)
        tally.mean("actor/pg_loss", token_loss)
        for name, column in info.items():
            tally.mean(f"actor/{name}", column)
        ratio = importance_ratio(log_probs, old_log_probs)
        if "entropy" in col:
            tally.mean("actor/entropy", col["entropy"])
        if self.needs_entropy:
            token_loss = token_loss - self.entropy_coeff * col["entropy"]
        if self.use_kl_loss:
            kl = kl_estimate(self.kl_loss_type, log_probs, col["ref_log_probs"])
            if self.kl_importance:  # with "+" the gradient is k2's alone, so r only weighs it
                kl = kl * (ratio.detach() if self.kl_loss_type.endswith("+") else ratio)
            tally.mean("actor/kl_loss", kl)
            token_loss = token_loss + self.kl_loss_coef * kl

        tally.mean("actor/ppo_kl", old_log_probs - log_probs)
        tally.mean("actor/ratio_mean", ratio)
        tally.std("actor/ratio_std", ratio)
        tally.extremes("actor/ratio_min", "actor/ratio_max", ratio)
        return LossOutput((weight * clean(token_loss, mask)).sum(), tally.stats())

    def _knobs(self) -> dict[str, Any]:
        """The clips that were set, as the policy loss wants them."""
        given = {"clip_low": self.clip_low, "clip_high": self.clip_high, "clip_c": self.clip_c}
        return {name: None if value == "off" else value for name, value in given.items() if value is not None}

    def _policy(self, *columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        token_loss, info = POLICY_LOSSES[self.policy_loss](*columns, **self._knobs())
        for name, column in {"its token loss": token_loss, **info}.items():
            if column.shape != columns[0].shape:
                raise ValueError(
                    f"policy loss {self.policy_loss}: {name} has shape {tuple(column.shape)}, "
                    f"want one number a token, {tuple(columns[0].shape)}"
                )
        return token_loss, info

    def _rehearse(self) -> None:
        """Two tokens through the functions, so that a wrong clip, name or shape is refused before a run starts."""
        x, mask, segment_ids = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
        self._policy(x, x, x, mask, segment_ids)
        kl_estimate(self.kl_loss_type, x, x)


@dataclass(frozen=True)
class CriticLoss:
    """The clipped value loss through the step's weights.  Example: CriticLoss(0.5)(batch, {"values": v})."""

    cliprange_value: float | None = 0.5  # None: no clip

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that a call needs; `values` are those from before the first optimizer step."""
        return ("weight", "response_mask", "values", "returns")

    @property
    def needs_entropy(self) -> bool:
        """A critic has no distribution."""
        return False

    def __call__(self, batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
        """The loss of one micro-batch and its statistics.

        Args: batch: the columns of `self.columns`, [T]; outputs: "values" [T], by the critic being trained.
        Raises: NonFiniteError where an unmasked entry is not finite.
        """
        mask = batch.columns["response_mask"] != 0
        given = {"weight": batch.columns["weight"], "old values": batch.columns["values"]} | {
            "returns": batch.columns["returns"],
            "values": outputs["values"],
        }
        col = {name: clean(column, mask) for name, column in given.items()}
        tally = Tally(col["weight"], mask, batch.segment_ids.to(mask.device))
        for name, column in given.items():
            tally.watch(name, column)
        token_loss, clipped = value_loss(
            col["values"], col["old values"], col["returns"], cliprange=self.cliprange_value
        )
        tally.mean("critic/vf_loss", token_loss)
        tally.mean("critic/vf_clipfrac", clipped)
        tally.mean("critic/vpred_mean", col["values"])
        tally.explained_variance("critic/vf_explained_var", col["values"], col["returns"])
        return LossOutput((col["weight"] * clean(token_loss, mask)).sum(), tally.stats())
