"""The driver's handles on its models: whole batches in, columns and statistics out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algo.aggregate import token_weights
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.data.batch import mini_batches
from megarl.data.packing import RankPlan, plan, unpack
from megarl.group import Group, Reply
from megarl.sample import Batch, Stat, Stats, merge_stats


@dataclass(frozen=True)
class Packing:
    """How sequences are packed into micro-batches; never changes a result."""

    max_tokens: int | None = 16384  # tokens of a packed row
    max_sequences: int | None = None  # or sequences of a row


@dataclass(frozen=True)
class Update:
    """How a batch becomes optimizer steps."""

    loss: ActorLoss | CriticLoss
    prompts_per_step: int
    epochs: int = 1
    agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None


@dataclass(frozen=True)
class Servers:
    """Where weights are pushed."""

    urls: tuple[str, ...]
    token: str
    dtype: str = "float32"  # what the servers hold
    bucket_bytes: int = 64 * 2**20
    timeout_s: float = 120.0
    pause_mode: str = "retract"  # what happens to requests that run during a push: retract | in_place | abort


@dataclass
class Role:
    """One model in a group."""

    name: str
    group: Group
    packing: Packing
    temperature: float = 1.0
    kind: str = field(default="actor", init=False)

    def load(
        self, folder: str, *, dtype: str = "float32", optim: dict[str, Any] | None = None, plugins: Sequence[str] = ()
    ) -> int:
        """Build the model on the ranks from an HF folder; returns parameters a rank of the last stage holds."""
        arguments = {"folder": folder, "dtype": dtype, "optim": optim, "plugins": list(plugins)}
        replies = self.group.call("load", {"role": self.name, "kind": self.kind, **arguments})
        return int(replies[0].result["parameters_per_rank"])

    def save(self, folder: Path) -> None:
        self.group.call("save", {"role": self.name, "folder": str(folder)})

    def restore(self, folder: Path) -> None:
        self.group.call("restore", {"role": self.name, "folder": str(folder)})

    def export(self, folder: Path) -> None:
        """Write the model as an HF folder."""
        self.group.call("export", {"role": self.name, "folder": str(folder)})

    def _columns(self, batch: Batch, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Each named column [N] of the batch, as the model says it now."""
        plans = self._plan(batch)
        arguments = {"role": self.name, "temperature": self.temperature, "entropy": "entropy" in names}
        replies = self.group.call("columns", arguments, [_payload(batch, p, ()) for p in plans])
        lengths = batch.lengths.tolist()
        empty = torch.zeros(0)
        return {n: unpack(plans, [r.tensors.get(n, empty) for r in replies], lengths) for n in names}

    def _plan(self, batch: Batch) -> list[RankPlan]:
        return plan(
            batch.lengths.tolist(),
            self.group.num_replicas,
            max_tokens=self.packing.max_tokens,
            max_sequences=self.packing.max_sequences,
        )


@dataclass
class Trainable(Role):
    """A role with an optimizer."""

    update_settings: Update | None = None

    def update(self, batch: Batch, *, seed: int = 0) -> dict[str, Stat]:
        """All optimizer steps of one batch: epochs times mini-batches of whole prompt groups.

        Statistics are merged over the steps, and `first_ppo_kl` is that of the first step taken alone; a step without
        a trainable token is skipped, and counted.
        """
        how = self.update_settings
        assert how is not None, f"role {self.name} has no loss to train with"
        stats = [
            self._step(mini, how)
            for epoch in range(how.epochs)
            for mini in mini_batches(batch, how.prompts_per_step, seed=seed * 1000 + epoch)
        ]
        merged = merge_stats(stats)
        kl = f"{self.kind}/ppo_kl"
        if kl in merged:  # nothing has moved yet: whatever this is, it is not the policy
            merged[f"{self.kind}/first_ppo_kl"] = next(step[kl] for step in stats if kl in step)
        return merged

    def _step(self, batch: Batch, how: Update) -> Stats:
        weight = token_weights(
            how.agg_mode,
            batch.columns["response_mask"],
            batch.segment_ids,
            group_ids=batch.rows["group"],
            loss_scale_factor=how.loss_scale_factor,
        )
        if not weight.any():
            return {f"{self.kind}/skipped_steps": Stat("sum", 1.0)}
        batch = batch.with_columns(weight=weight)
        plans = self._plan(batch)
        arguments = {
            "role": self.name,
            "temperature": self.temperature,
            "entropy": self.kind == "actor",
            "loss": asdict(how.loss),
            "num_tokens": batch.num_tokens,
        }
        replies = self.group.call("update", arguments, [_payload(batch, p, how.loss.columns) for p in plans])
        return merge_stats([_stats(reply) for reply in replies]) | {
            f"{self.kind}/grad_norm": Stat("mean", replies[0].result["grad_norm"]),
            f"{self.kind}/lr": Stat("mean", replies[0].result["lr"]),
            f"{self.kind}/skipped_steps": Stat("sum", 0.0),
        }


@dataclass
class Reference(Role):
    """A frozen model."""

    def log_probs(self, batch: Batch) -> Tensor:
        """[N] log-probabilities of the batch's tokens."""
        return self._columns(batch, ("log_probs",))["log_probs"]


@dataclass
class Actor(Trainable):
    """The policy."""

    def log_probs(self, batch: Batch) -> Tensor:
        """[N] log-probabilities of the batch's tokens under the present weights."""
        return self._columns(batch, ("log_probs",))["log_probs"]

    def push(self, servers: Servers, version: int) -> dict[str, Any]:
        """Give the servers these weights and verify what they hold; returns the report (weights.push.PushReport)."""
        return self.group.call_leader("push", {"role": self.name, "version": version, **asdict(servers)}).result


@dataclass
class Critic(Trainable):
    """The value function."""

    kind: str = field(default="critic", init=False)

    def values(self, batch: Batch) -> Tensor:
        """[N] the value just before each token of the batch."""
        return self._columns(batch, ("values",))["values"]


def _payload(batch: Batch, part: RankPlan, columns: tuple[str, ...]) -> dict[str, Tensor]:
    mine = batch.select(part.indices).keep_columns(*columns)
    sizes = torch.tensor(part.micro_sizes, dtype=torch.int64)
    return {"tokens": mine.tokens.int(), "lengths": mine.lengths, "micro_sizes": sizes, **mine.columns}


def _stats(reply: Reply) -> Stats:
    """What a rank's `update` returned, as statistics again."""
    return {name: Stat(kind, value, weight) for name, (kind, value, weight) in reply.result["stats"].items()}
