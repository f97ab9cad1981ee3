"""Supervised fine-tuning on prompts and responses, with the actor of the RL loop: packed rows, prompts masked out.

The loss is REINFORCE with an advantage of 1 on every response token: -log p, averaged over the step's response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megarl.algo.loss import ActorLoss
from megarl.config import Config
from megarl.data.sft import SftExamples
from megarl.roles.handles import Actor
from megarl.samples.batch import Batch
from megarl.trainer.stage import Stage, run_stage


class Sft(Stage):
    """Rows of prompts and responses."""

    name = "sft"
    role = "actor"
    rows = SftExamples
    agg_mode = "token-mean"
    logged = {
        "sft/loss": "actor/pg_loss",
        "sft/grad_norm": "actor/grad_norm",
        "sft/lr": "actor/lr",
        **{f"sft/mtp_{name}": f"actor/mtp_{name}" for name in ("loss", "acceptance")},
    }

    def loss(self, config: Config) -> ActorLoss:
        return ActorLoss("reinforce", mtp_coef=config.actor.mtp_coef)

    def prepared(self, batch: Batch) -> Batch:
        """Add the columns with which REINFORCE is the cross entropy: advantages 1, old log-probs 0."""
        ones, zeros = torch.ones(batch.num_tokens), torch.zeros(batch.num_tokens)
        groups = torch.arange(batch.num_sequences)
        return replace(batch, per_sequence={"group": groups}).with_columns(advantages=ones, old_log_probs=zeros)

    @torch.inference_mode()
    def measured(self, model: Actor, held_out: SftExamples, config: Config) -> dict[str, float]:
        """-log p of a response token, averaged over all response tokens of the examples."""
        total, count = 0.0, 0.0
        for batch in held_out.batches(config.sft.batch_size):
            mask = batch.columns["response_mask"]
            total -= float((model.log_probs(batch) * mask).sum())
            count += float(mask.sum())
        return {"val/loss": total / count}


def sft(config: Config) -> dict[str, Any]:
    """Train for trainer.total_training_steps or sft.epochs, write `hf/` into the run's folder, return the summary."""
    return run_stage(Sft(), config)
