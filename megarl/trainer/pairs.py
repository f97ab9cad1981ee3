"""Training on pairs of answers: DPO of a policy, and a reward model, which PPO then uses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.algo.pairs import PairLoss
from megarl.algo.step_columns import step_columns
from megarl.config import Config
from megarl.data.pairs import PairExamples, to_be_scored
from megarl.metrics.computing.stats import finalise
from megarl.metrics.trackers.console import warn
from megarl.roles.handles import Actor, Critic
from megarl.samples.batch import Batch, Stats, merge_stats
from megarl.trainer.stage import Stage, StagePlan, run_stage

_AT_ONCE = 512  # pairs that are measured together, and whose reference is asked for: the same numbers to the last bit
STATISTICS = ("loss", "accuracy", "chosen", "rejected", "margin")


def _logged(name: str, kind: str) -> dict[str, str]:
    own = {f"{name}/{each}": f"pairs/{each}" for each in STATISTICS}
    return own | {f"{name}/{each}": f"{kind}/{each}" for each in ("grad_norm", "lr")}


class PairStage(Stage):
    """Rows of pairs; the loss is a mean over pairs."""

    rows = PairExamples
    agg_mode = "seq-mean-token-mean"

    @abstractmethod
    def loss(self, config: Config) -> PairLoss: ...

    @abstractmethod
    def column(self, model: Any, batch: Batch) -> Tensor:
        """[N] what the loss reads of the model."""

    def check(self, examples: PairExamples, config: Config) -> None:
        where, longest = examples.longest(int(self.to_its_end))
        limit = config.actor.ppo_max_token_len_per_gpu
        if limit is not None and longest > limit:
            raise ValueError(
                f"actor.ppo_max_token_len_per_gpu={limit}: both answers of a pair are in one micro-batch, and those of "
                f"{where} have {longest} tokens with their prompts; expected at least {longest}, or a lower "
                "sft.max_length with sft.overlong_rows=filter"
            )

    @torch.inference_mode()
    def measured(self, model: Any, held_out: PairExamples, config: Config) -> dict[str, float]:
        loss, found = self.loss(config), list[Stats]()
        for batch in held_out.batches(_AT_ONCE):
            given = step_columns(self.prepared(batch), loss=loss, agg_mode=self.agg_mode)
            # Every pair counts the same, in a smaller last batch too.
            given = given.with_columns(weight=given.columns["weight"] * given.num_sequences)
            found.append(loss(given, {loss.output: self.column(model, given)}).stats)
        numbers = finalise(merge_stats(found))
        return {f"val/{name}": numbers[f"pairs/{name}"] for name in STATISTICS}


class Dpo(PairStage):
    """The policy; the reference is the model at the start, whose log-probs are computed once."""

    name = "dpo"
    role = "actor"
    logged = _logged("dpo", "actor")

    def loss(self, config: Config) -> PairLoss:
        dpo = config.dpo
        return PairLoss(dpo.loss, beta=dpo.beta, label_smoothing=dpo.label_smoothing)

    def prepared(self, batch: Batch) -> Batch:
        return batch

    def column(self, model: Actor, batch: Batch) -> Tensor:
        return model.log_probs(batch)

    def compares(self, config: Config) -> bool:
        return not config.dpo.reference_free

    def check(self, examples: PairExamples, config: Config) -> None:
        super().check(examples, config)
        if examples.num_margins:
            warn(f"{examples.num_margins:,} rows have a margin, which `megarl rm` reads and `megarl dpo` does not")

    def begin(self, model: Actor, plan: StagePlan, told: Callable[[int, int], None]) -> None:
        count = plan.num_steps * plan.config.sft.batch_size
        for examples, visits in ((plan.examples, count), (plan.held_out, len(plan.held_out or ()))):
            if examples is not None:
                assert isinstance(examples, PairExamples), "its rows are pairs"
                examples.fill_references(visits, _AT_ONCE, model.log_probs, told)


class Rm(PairStage):
    """A model with a head of one number, which it gives at the last token: a critic that is trained on pairs."""

    name = "rm"
    role = "reward_model"
    handle = Critic
    to_its_end = True
    logged = _logged("rm", "critic")

    def loss(self, config: Config) -> PairLoss:  # noqa: ARG002
        return PairLoss(beta=1.0, output="values")

    def prepared(self, batch: Batch) -> Batch:
        return to_be_scored(batch)

    def column(self, model: Critic, batch: Batch) -> Tensor:
        return model.values(batch)


def dpo(config: Config) -> dict[str, Any]:
    """Train on sft.train_files as `megarl sft` does, with the loss of dpo.*; the model is in `hf/`."""
    return run_stage(Dpo(), config)


def rm(config: Config) -> dict[str, Any]:
    """The same with a head of one number; `hf/` is a model for sequence classification."""
    return run_stage(Rm(), config)
