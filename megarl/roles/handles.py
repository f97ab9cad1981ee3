"""The driver's handles on its models: methods take whole batches and return columns and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algo.finite import BadNumber, stop
from megarl.algo.loss import OLD, ActorLoss, CriticLoss
from megarl.algo.spikes import Spikes
from megarl.algo.step_columns import step_columns
from megarl.batch import Batch, Stat, Stats, merge_stats
from megarl.data.batch import mini_batches
from megarl.data.packing import RankPlan, plan
from megarl.data.prefix_tree import families
from megarl.group import Group, Reply
from megarl.layout import shares_prefixes
from megarl.roles.bad_step import bad_number, of_ranks
from megarl.roles.columns import payload, unpacked, with_values
from megarl.roles.push_settings import PushSettings


class SaveError(RuntimeError):
    """A checkpoint could not be written; models and ranks are unharmed."""


@dataclass(frozen=True)
class Packing:
    """How sequences are packed into micro-batches; never changes a result.

    A sequence is a row; for a loss with one ratio per sequence it is a sample, whose rows stay together.
    """

    max_tokens: int | None = 16384  # tokens per micro-batch
    max_sequences: int | None = None  # or sequences per micro-batch
    share_prefixes: str = "off"  # auto | on | off: see data/prefix_tree.py; auto: on CPUs, where the ranks can


@dataclass(frozen=True)
class Update:
    """How a batch is split into optimizer steps, and their loss."""

    loss: ActorLoss | CriticLoss
    prompts_per_step: int
    epochs: int = 1
    agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    normalize: bool = False  # scale the weights of rollout correction to mean 1 over a step
    bypass: bool = False  # the ratio uses the server's log-probs
    reference: str | None = None  # the reference role for the full KL

    @property
    def divergence(self) -> tuple[str, float] | None:
        """The name and beta of a divergence over the vocabulary, which the ranks compute; None: there is none."""
        taught = self.loss.distillation if isinstance(self.loss, ActorLoss) else None
        return (taught.divergence, taught.beta) if taught and not taught.top_k else None


@dataclass
class Role:
    """A model in a group."""

    name: str
    group: Group
    packing: Packing
    temperature: float = 1.0
    inputs: tuple[str, ...] = ()  # columns that its passes read: of router replay, supports
    kind: str = field(default="actor", init=False)
    hidden_size: int = field(default=1024, init=False)  # of the loaded model: for the cost of attention in packing
    lacks_transformer_engine: str = field(default="", init=False)  # on a GPU: why there is no Transformer-Engine
    shares_prefixes: bool = field(default=False, init=False)  # it should, and the loaded model can
    offloads: bool = field(default=False, init=False)  # some of it is in host memory between calls

    def load(
        self,
        folder: str,
        *,
        dtype: str = "float32",
        optim: dict[str, Any] | None = None,
        plugins: Sequence[str] = (),
        lora: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        reads_weights: bool = True,
        base: str | None = None,
        router_replay: bool = False,
    ) -> int:
        """Build the model on the ranks from an HF folder; returns the parameters of a rank of the last stage.

        `reads_weights` False: a restore follows, which brings all of them, and the folder's are not read.

        `lora` freezes the model and trains adapters: {"rank": 16, "alpha": 32, "targets": ["q_proj", ...], "seed": 0}.
        `engine`: the fields of mcore.training.execution.ExecutionOptions that differ from the defaults; where prefixes
        must be shared, its `auto` layers are local.
        `base`: the name of a loaded role of the group with the same folder and `dtype`, which is frozen or trains
        adapters: this role shares its base and its engine (`engine` None, or the same), and has adapters of its own, or
        none.
        `router_replay`: the experts of tokens can be given and noted.
        """
        arguments: dict[str, Any] = {"folder": folder, "dtype": dtype, "optim": optim, "plugins": list(plugins)}
        engine = dict(engine or {})
        if self.packing.share_prefixes == "on" and engine.get("transformer_impl", "auto") == "auto":
            engine["transformer_impl"] = "local"
        arguments |= {"lora": lora, "engine": engine, "reads_weights": reads_weights, "base": base}
        arguments["router_replay"] = router_replay
        replies = self.group.call("load", {"role": self.name, "kind": self.kind, **arguments})
        self.hidden_size = replies[0].result["hidden_size"]
        self.lacks_transformer_engine = str(replies[0].result["lacks_transformer_engine"])
        can_share, device = bool(replies[0].result["can_share"]), str(replies[0].result["device"])
        self.offloads = any(engine.get(name) for name in ("param_offload", "optimizer_offload"))
        self.shares_prefixes = shares_prefixes(self.packing.share_prefixes, self.name, device, can_share=can_share)
        return int(replies[0].result["parameters_per_rank"])

    def offload(self) -> None:
        """Offload the whole role to host memory; later calls onload what they need and offload it again."""
        self.group.call("offload", {"role": self.name, "by_default": False})

    def onload(self, *, by_default: bool = False, moments: bool | None = None) -> None:
        """Onload the whole role; it stays on the device.  `by_default`: only what its options leave there.

        `moments`: of that the optimizer's state alone, or, if False, all but it.
        """
        self.group.call("onload", {"role": self.name, "by_default": by_default, "moments": moments})

    def save(self, folder: Path, *, in_background: bool = False) -> None:
        """Write a checkpoint of the role; `in_background`: return when it is in the ranks' host memory."""
        self.group.call("save", {"role": self.name, "folder": str(folder), "in_background": in_background})

    def is_saved(self) -> bool:
        """Whether no rank writes to the last save any more; raises a SaveError if one could not write its part."""
        found = self.group.call_each("is_saved", {"role": self.name})
        if not all(result["is_done"] for result in found):
            return False
        for rank, result in enumerate(found):
            if result["error"] is not None:
                raise SaveError(f"rank {rank} of {self.name} could not write: {result['error']}")
        return True

    def faults(self, folder: Path) -> list[str]:
        """A sentence for each damaged file of a checkpoint of the role; every rank reads a share of the files."""
        return [f for each in self.group.call_each("faults", {"folder": str(folder)}) for f in each["faults"]]

    def restore(self, folder: Path) -> None:
        self.group.call("restore", {"role": self.name, "folder": str(folder)})

    def export(self, folder: Path, *, adapter: Path | None = None) -> None:
        """Write the model as an HF folder, adapters merged; `adapter`: also write the adapters as a PEFT folder."""
        where = {"folder": str(folder), "adapter": None if adapter is None else str(adapter)}
        self.group.call("export", {"role": self.name, **where})

    def _columns(
        self,
        batch: Batch,
        names: Sequence[str],
        *,
        temperature: float | None = None,
        reference: str | None = None,
        inputs: Sequence[str] | None = None,
        **more: int,
    ) -> dict[str, Tensor]:
        """Each named column [N, ...] of the batch under the current weights.

        `inputs`: instead of those of the role; `more`: arguments of the call.
        """
        batch = batch.by_row()
        # An input that the pass computes is not there yet.
        given = self._given(batch, [name for name in (self.inputs if inputs is None else inputs) if name not in names])
        plans, _ = self._plan(batch)
        scale = self.temperature if temperature is None else temperature
        arguments: dict[str, Any] = {"role": self.name, "temperature": scale, "names": list(names), **more}
        arguments |= {"reference": reference, "shares_prefixes": self.shares_prefixes}
        replies = self.group.call("columns", arguments, [payload(batch, p, given) for p in plans])
        return {name: unpacked(batch, plans, replies, name) for name in names}

    def _given(self, batch: Batch, inputs: Sequence[str]) -> tuple[str, ...]:
        missing = [name for name in inputs if name not in batch.columns]
        if missing:
            raise ValueError(f"role {self.name} reads the column {missing[0]} of tokens: expected a batch that has it")
        shared = ("response_mask",) if inputs and self.shares_prefixes else ()  # says how much of a row can be
        return (*inputs, *(name for name in shared if name in batch.columns))

    def _plan(self, batch: Batch) -> tuple[list[RankPlan], int]:
        """Which samples each replica runs, and the places computed at most; all rows of one share a micro-batch."""
        ranks, packing = self.group.num_replicas, self.packing
        how = {"max_tokens": packing.max_tokens, "max_sequences": packing.max_sequences}
        together = families(batch, ranks, hidden_size=self.hidden_size, **how) if self.shares_prefixes else None
        num_places = batch.num_tokens if together is None else sum(family.size for family in together)
        lengths = batch.sample_lengths.tolist()
        return plan(lengths, ranks, hidden_size=self.hidden_size, families=together, **how), num_places


@dataclass
class Trainable(Role):
    """A role with an optimizer."""

    update_settings: Update | None = None
    spikes: Spikes | None = None  # None: a spike is a number like any other
    on_bad: Callable[[BadNumber], None] = stop  # called for a step that was not made; raises, or the next one comes

    def update(
        self,
        batch: Batch,
        *,
        seed: int = 0,
        prepare: Callable[[Batch], Batch] | None = None,
        later: Tensor | None = None,
    ) -> tuple[Batch, Stats]:
        """Run all optimizer steps of a batch: epochs times mini-batches of whole prompt groups.

        `prepare` adds columns to the batch of each optimizer step, which would be too large for all at once.
        Statistics are merged over the steps; `first_ppo_kl` is `ppo_kl` of the first step alone.  A step without a
        trainable token is skipped and counted, and not prepared.  A step whose numbers are bad is not made either:
        `on_bad` is told, and it has no statistics.

        A policy's batch may lack old_log_probs: those of the first step are the log-probs of its own forward pass, at
        weights that have not moved, and those of the others are `later`: see Actor.later_old_log_probs.  The batch that
        is returned has them.  Nothing was compared then, so `first_ppo_kl` is left out.
        """
        how = self.update_settings
        assert how is not None, f"role {self.name} has no loss to train with"
        self._require_room(batch, how)
        batch = batch.with_per_sequence(index=torch.arange(batch.num_sequences))  # so that an error can name the sample
        notes = isinstance(how.loss, ActorLoss) and OLD not in batch.columns
        stats: list[Stats] = []
        with self._onloaded_once() if prepare is None else nullcontext():  # beside it other roles need the device
            epochs = (mini_batches(batch, how.prompts_per_step, seed=seed * 1000 + n) for n in range(how.epochs))
            for members in chain.from_iterable(epochs):
                mini = batch.select(members)
                noted, found = self._step(mini, how, seed=seed * 1000 + len(stats), prepare=prepare)
                stats.append(found)
                if notes and OLD not in batch.columns:
                    assert later is not None or len(members) == batch.num_sequences, "others are not known any more"
                    if noted is None:  # the step was not made
                        noted = self._columns(mini, ("log_probs",))["log_probs"]
                    batch = batch.with_columns(**{OLD: with_values(later, batch, members, noted)})
        merged = merge_stats(stats)
        kl, is_compared = f"{self.kind}/ppo_kl", how.bypass or not notes
        if is_compared and kl in merged:  # the weights have not moved, so any difference does not come from training
            merged[f"{self.kind}/first_ppo_kl"] = next(step[kl] for step in stats if kl in step)
        return batch, merged

    @contextmanager
    def _onloaded_once(self) -> Iterator[None]:
        """The whole role stays on the device for all steps of an update, with the same peak as a step of its own.

        After an error nothing is offloaded: it ends these ranks.
        """
        if not self.offloads:
            yield
            return
        self.onload()
        yield
        self.group.call("offload", {"role": self.name, "by_default": True})

    def _require_room(self, batch: Batch, how: Update) -> None:
        """Raises ValueError for a sample whose rows have to share a micro-batch and do not fit into one."""
        longest, limit, loss = int(batch.sample_lengths.max()), self.packing.max_tokens, how.loss
        if limit is None or longest <= max(limit, int(batch.lengths.max())):
            return
        if isinstance(loss, ActorLoss) and loss.per_sequence:
            raise ValueError(
                f"{self.name}.ppo_max_token_len_per_gpu={limit}: algorithm.policy_loss_fn={loss.policy_loss} has one "
                f"ratio for all rows of a sample, and those of one have {longest} tokens together; expected at least "
                f"{longest}, or a loss with a ratio per token"
            )

    def _step(
        self, batch: Batch, how: Update, *, seed: int, prepare: Callable[[Batch], Batch] | None
    ) -> tuple[Tensor | None, Stats]:
        """An optimizer step: its statistics, and if it was made without old_log_probs the log-probs [N] before it."""
        notes = ["log_probs"] if isinstance(how.loss, ActorLoss) and OLD not in batch.columns else []
        batch = step_columns(
            batch,
            loss=how.loss,
            agg_mode=how.agg_mode,
            loss_scale_factor=how.loss_scale_factor,
            seed=seed,
            normalize=how.normalize,
            bypass=how.bypass,
        )
        if not batch.columns["weight"].any():
            return None, {f"{self.kind}/skipped_steps": Stat("sum", 1.0)}
        batch = prepare(batch) if prepare else batch
        packed = batch if how.loss.per_sequence else batch.by_row()
        plans, num_places = self._plan(packed)
        arguments = {
            "role": self.name,
            "temperature": self.temperature,
            "names": list(how.loss.outputs),
            "reference": how.reference,
            "loss": asdict(how.loss),
            "divergence": how.divergence,
            "num_tokens": batch.num_tokens,
            "limits": self.spikes and self.spikes.limits,
            "shares_prefixes": self.shares_prefixes,
            "notes": notes,
        }
        read = [name for name in how.loss.columns if name != OLD or OLD in batch.columns]
        columns = (*read, *self._given(packed, self.inputs))
        replies = self.group.call("update", arguments, [payload(packed, p, columns) for p in plans])
        if not replies[0].result["made"]:
            self.on_bad(bad_number(self.name, self.spikes, replies, plans, packed, batch))
            return None, {}
        if self.spikes is not None:
            self.spikes.add(replies[0].result["grad_norm"], replies[0].result["loss"])
        noted = unpacked(packed, plans, replies, "log_probs") if notes else None
        return noted, merge_stats([_stats(reply) for reply in replies]) | {
            f"{self.kind}/grad_norm": Stat("mean", replies[0].result["grad_norm"]),
            f"{self.kind}/lr": Stat("mean", replies[0].result["lr"]),
            f"{self.kind}/skipped_steps": Stat("sum", 0.0),
            f"{self.kind}/computed_share": Stat("mean", float(num_places), float(packed.num_tokens)),
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

    def load_heads(self, folders: Sequence[str]) -> None:
        """Read the output rows of its teachers' vocabularies from HF folders, for a divergence over the vocabulary.

        Raises: ValueError for a vocabulary that is smaller than the policy's.
        """
        self.group.call("load_heads", {"role": self.name, "folders": list(folders)})

    def log_probs(
        self, batch: Batch, *, temperature: float | None = None, inputs: Sequence[str] | None = None
    ) -> Tensor:
        """[N] log-probs of the batch's tokens under the current weights; temperature None: that of rollout.

        `inputs`: columns that the pass reads; None: those of the role.
        """
        return self._columns(batch, ("log_probs",), temperature=temperature, inputs=inputs)["log_probs"]

    def columns(self, batch: Batch, names: Sequence[str], *, reference: str | None = None) -> dict[str, Tensor]:
        """Named columns [N] of the batch under the current weights: log_probs, entropy, sum_pi_squared, full_kl.

        And ROUTED_EXPERTS [N, layers, experts of a token], which it chose, with `load(router_replay=True)`.
        `reference`: the reference role of full_kl, in the same group.
        """
        return self._columns(batch, names, reference=reference)

    def later_old_log_probs(self, batch: Batch, *, seed: int) -> Tensor | None:
        """[N] log-probs before an update with this seed, 0 where its first optimizer step gives them; None: it does so
        for the whole batch."""
        assert self.update_settings is not None, f"role {self.name} has no loss to train with"
        _, *others = mini_batches(batch, self.update_settings.prompts_per_step, seed=seed * 1000)
        rest = sorted(sample for members in others for sample in members)
        return with_values(None, batch, rest, self.log_probs(batch.select(rest))) if rest else None

    def connect(self, settings: PushSettings) -> None:
        """Send the push settings to the ranks, once after `load`.  No server is contacted yet."""
        self.group.call("connect", {"role": self.name, "settings": asdict(settings)})

    def push(
        self, version: int, *, only: Sequence[str] | None = None, canary: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Push the weights to the servers and verify them; returns the report (weights.push.report.PushReport).

        `only`: push to these urls alone.  `canary`: the fields of a weights.verify.canary.Canary.  The report names
        the servers that failed, even if all failed; only a failure of the ranks raises an error, and BadNumber a weight
        that is not finite: then no server gets any.
        """
        which = {"only": None if only is None else list(only), "canary": canary}
        report = self.group.call_leader("push", {"role": self.name, "version": version, **which}).result
        if "where" in report:
            weights = f"a weight of {self.name} is not finite{of_ranks(report['where'])}"
            raise BadNumber(f"{weights}: no server gets these weights")
        return report


@dataclass
class Critic(Trainable):
    """The value function."""

    kind: str = field(default="critic", init=False)

    def values(self, batch: Batch) -> Tensor:
        """[N] values before each token of the batch."""
        return self._columns(batch, ("values",))["values"]


def _stats(reply: Reply) -> Stats:
    """The statistics in a reply of a rank's `update`."""
    return {name: Stat(kind, value, weight) for name, (kind, value, weight) in reply.result["stats"].items()}
