"""The driver's handles on its models: methods take whole batches and return columns and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megarl.algo.finite import BadNumber, stop
from megarl.algo.loss import OLD, ActorLoss
from megarl.algo.spikes import Spikes
from megarl.algo.step_columns import step_columns
from megarl.arch.layout import shares_prefixes
from megarl.data.batch import mini_batches
from megarl.data.packing import RankPlan, plan, unpack
from megarl.data.prefix_tree import prefix_groups
from megarl.group import Group, Reply
from megarl.group.message import decoded
from megarl.roles import messages
from megarl.roles.bad_step import bad_number, of_ranks
from megarl.roles.settings import LoadSettings, Packing, Update
from megarl.samples.batch import Batch, Stat, Stats, merge_stats, token_positions
from megarl.weights.mapping.blocks import Role as Kind
from megarl.weights.push.report import PushReport
from megarl.weights.push.settings import PushSettings
from megarl.weights.verify.canary import Canary

LATER = "later_old_log_probs"  # [N] those of the samples after the first optimizer step, 0 for its own


class SaveError(RuntimeError):
    """A checkpoint could not be written; models and ranks are unharmed."""


@dataclass
class Role:
    """A model in a group."""

    name: str
    group: Group
    packing: Packing
    temperature: float = 1.0
    inputs: tuple[str, ...] = ()  # columns that its passes read: of router replay, supports
    kind: Kind = field(default="actor", init=False)
    hidden_size: int = field(default=1024, init=False)  # of the loaded model: for the cost of attention in packing
    lacks_transformer_engine: str = field(default="", init=False)  # on a GPU: why there is no Transformer-Engine
    shares_prefixes: bool = field(default=False, init=False)  # it should, and the loaded model can
    offloads: bool = field(default=False, init=False)  # some of it is in host memory between calls

    def load(self, folder: str, settings: LoadSettings | None = None) -> None:
        """Build the model on the ranks from an HF folder."""
        settings = settings or LoadSettings()
        engine = dict(settings.engine)
        if self.packing.share_prefixes == "on" and engine.get("transformer_impl", "auto") == "auto":
            engine["transformer_impl"] = "local"
        replies = self.group.call(messages.Load(self.name, self.kind, folder, replace(settings, engine=engine)))
        found = decoded(messages.Loaded, replies[0].result)
        self.hidden_size, self.lacks_transformer_engine = found.hidden_size, found.lacks_transformer_engine
        self.offloads = any(engine.get(name) for name in ("param_offload", "optimizer_offload"))
        asked = self.packing.share_prefixes
        self.shares_prefixes = shares_prefixes(asked, self.name, found.device, can_share=found.can_share)

    def offload(self) -> None:
        """Offload the whole role to host memory; later calls onload what they need and offload it again."""
        self.group.call(messages.Offload(self.name, by_default=False))

    def onload(self, *, by_default: bool = False, moments: bool | None = None) -> None:
        """Onload the whole role; it stays on the device.  `by_default`: only what its options leave there.

        `moments`: of that the optimizer's state alone, or, if False, all but it.
        """
        self.group.call(messages.Onload(self.name, by_default, moments))

    def save(self, folder: Path, *, in_background: bool = False) -> None:
        """Write a checkpoint of the role; `in_background`: return when it is in the ranks' host memory."""
        self.group.call(messages.Save(self.name, str(folder), in_background))

    def is_saved(self) -> bool:
        """Whether no rank writes to the last save any more; raises a SaveError if one could not write its part."""
        found = self.group.call_each(messages.IsSaved(self.name))
        if not all(result["is_done"] for result in found):
            return False
        for rank, result in enumerate(found):
            if result["error"] is not None:
                raise SaveError(f"rank {rank} of {self.name} could not write: {result['error']}")
        return True

    def faults(self, folder: Path) -> list[str]:
        """A sentence for each damaged file of a checkpoint of the role; every rank reads a share of the files."""
        return [f for each in self.group.call_each(messages.Faults(str(folder))) for f in each["faults"]]

    def restore(self, folder: Path) -> None:
        self.group.call(messages.Restore(self.name, str(folder)))

    def export(self, folder: Path, *, adapter: Path | None = None) -> None:
        """Write the model as an HF folder, adapters merged; `adapter`: also write the adapters as a PEFT folder."""
        self.group.call(messages.Export(self.name, str(folder), None if adapter is None else str(adapter)))

    def columns(
        self,
        batch: Batch,
        names: Sequence[str],
        *,
        temperature: float | None = None,
        reference: str | None = None,
        inputs: Sequence[str] | None = None,
        top_k: int = 0,
        vocab_size: int | None = None,
    ) -> dict[str, Tensor]:
        """Each named column [N, ...] of the batch under the current weights: log_probs, entropy, full_kl, values ...

        And ROUTED_EXPERTS [N, layers, experts of a token], which it chose, with LoadSettings(router_replay=True).
        `temperature`, `inputs`: instead of those of the role.  `reference`: the reference role of full_kl, in the same
        group.  `top_k`: how many of the most likely tokens, and `vocab_size`, among how many of the first ones.
        """
        batch = batch.by_row()
        # An input that the pass computes is not there yet.
        given = self._given(batch, [name for name in (self.inputs if inputs is None else inputs) if name not in names])
        plans, _ = self._plan(batch)
        scale = self.temperature if temperature is None else temperature
        message = messages.Columns(
            self.name, scale, self.shares_prefixes, reference, tuple(names), top_k=top_k, vocab_size=vocab_size
        )
        replies = self.group.call(message, [payload(batch, p, given) for p in plans])
        return {name: unpacked(batch, plans, replies, name) for name in names}

    def log_probs(
        self, batch: Batch, *, temperature: float | None = None, inputs: Sequence[str] | None = None
    ) -> Tensor:
        """[N] log-probs of the batch's tokens under the current weights; see `columns`."""
        return self.columns(batch, ("log_probs",), temperature=temperature, inputs=inputs)["log_probs"]

    def _given(self, batch: Batch, inputs: Sequence[str]) -> tuple[str, ...]:
        missing = [name for name in inputs if name not in batch.columns]
        if missing:
            raise ValueError(f"role {self.name} reads the column {missing[0]} of tokens: expected a batch that has it")
        shared = ("response_mask",) if inputs and self.shares_prefixes else ()  # says how much of a row can be
        return (*inputs, *(name for name in shared if name in batch.columns))

    def _plan(self, batch: Batch) -> tuple[list[RankPlan], int]:
        """Which samples each replica runs, and the places computed at most; all rows of one share a micro-batch."""
        ranks, hidden_size = self.group.num_replicas, self.hidden_size
        tokens, sequences = self.packing.max_tokens, self.packing.max_sequences
        together, num_places = None, batch.num_tokens
        if self.shares_prefixes:
            together = prefix_groups(batch, ranks, max_tokens=tokens, max_sequences=sequences, hidden_size=hidden_size)
            num_places = sum(group.size for group in together)
        lengths = batch.sample_lengths.tolist()
        plans = plan(
            lengths, ranks, max_tokens=tokens, max_sequences=sequences, hidden_size=hidden_size, groups=together
        )
        return plans, num_places


@dataclass
class Trainable(Role):
    """A role with an optimizer."""

    update_settings: Update | None = None
    spikes: Spikes | None = None  # None: a spike is a number like any other
    on_bad: Callable[[BadNumber], None] = stop  # called for a step that was not made; raises, or the next one comes

    def update(
        self, batch: Batch, *, seed: int = 0, prepare: Callable[[Batch], Batch] | None = None
    ) -> tuple[Batch, Stats]:
        """Run all optimizer steps of a batch: epochs times mini-batches of whole prompt groups.

        `prepare` adds columns to the batch of each optimizer step, which would be too large for all at once.
        Statistics are merged over the steps; `first_ppo_kl` is `ppo_kl` of the first step alone.  A step without a
        trainable token is skipped and counted, and not prepared.  A step whose numbers are bad is not made either:
        `on_bad` is called, and it has no statistics.

        A policy's batch may lack old_log_probs: the first step gives those of its samples, by its own forward pass at
        weights that have not moved; Actor.with_old_log_probs brings those of the others.  The batch that is returned
        has them all.  Nothing was compared then, so `first_ppo_kl` is left out.
        """
        how = self.update_settings
        assert how is not None, f"role {self.name} has no loss to train with"
        self._require_room(batch, how)
        batch = batch.with_per_sequence(index=torch.arange(batch.num_sequences))  # so that an error can name the sample
        notes = isinstance(how.loss, ActorLoss) and OLD not in batch.columns
        stats: list[Stats] = []
        with self._onloaded_once() if prepare is None else nullcontext():  # beside it other roles need the device
            for members in chain.from_iterable(self._steps(batch, seed, epoch) for epoch in range(how.epochs)):
                mini = batch.select(members)
                noted, found = self._step(mini, how, seed=seed * 1000 + len(stats), prepare=prepare)
                stats.append(found)
                if notes and OLD not in batch.columns:
                    columns = dict(batch.columns)
                    others = columns.pop(LATER, None)
                    assert others is not None or len(members) == batch.num_sequences, "others are not known any more"
                    if noted is None:  # the step was not made
                        noted = self.log_probs(mini)
                    columns[OLD] = with_values(others, batch, members, noted)
                    batch = replace(batch, columns=columns)
        merged = merge_stats(stats)
        kl, is_compared = f"{self.kind}/ppo_kl", how.bypass or not notes
        if is_compared and kl in merged:  # the weights have not moved, so any difference does not come from training
            merged[f"{self.kind}/first_ppo_kl"] = next(step[kl] for step in stats if kl in step)
        return batch, merged

    def _steps(self, batch: Batch, seed: int, epoch: int) -> list[list[int]]:
        """The samples of each optimizer step of an epoch, counted from 0, of an update with this seed."""
        assert self.update_settings is not None, f"role {self.name} has no loss to train with"
        return mini_batches(batch, self.update_settings.prompts_per_step, seed=seed * 1000 + epoch)

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
        self.group.call(messages.Offload(self.name, by_default=True))

    def _require_room(self, batch: Batch, how: Update) -> None:
        """Raises ValueError for a sample whose rows have to share a micro-batch and do not fit into one."""
        longest = int(batch.sample_lengths.max())
        limit = self.packing.max_tokens
        loss = how.loss
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
        notes = ("log_probs",) if isinstance(how.loss, ActorLoss) and OLD not in batch.columns else ()
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
        message = messages.Update(
            self.name,
            self.temperature,
            self.shares_prefixes,
            how.reference,
            how.loss,
            num_tokens=batch.num_tokens,
            limits=self.spikes.limits if self.spikes else None,
            notes=notes,
        )
        read = [name for name in how.loss.columns if name != OLD or OLD in batch.columns]
        columns = (*read, *self._given(packed, self.inputs))
        replies = self.group.call(message, [payload(packed, p, columns) for p in plans])
        found = [decoded(messages.Updated, reply.result) for reply in replies]
        if not found[0].made:
            self.on_bad(bad_number(self.name, self.spikes, found, plans, packed, batch))
            return None, {}
        if self.spikes is not None:
            self.spikes.add(found[0].grad_norm, found[0].loss)
        noted = unpacked(packed, plans, replies, "log_probs") if notes else None
        return noted, merge_stats([step.stats for step in found]) | {
            f"{self.kind}/grad_norm": Stat("mean", found[0].grad_norm),
            f"{self.kind}/lr": Stat("mean", found[0].lr),
            f"{self.kind}/skipped_steps": Stat("sum", 0.0),
            f"{self.kind}/computed_share": Stat("mean", float(num_places), float(packed.num_tokens)),
        }


@dataclass
class Actor(Trainable):
    """The policy."""

    def load_heads(self, folders: Sequence[str]) -> None:
        """Read the output rows of its teachers' vocabularies from HF folders, for a divergence over the vocabulary.

        Raises: ValueError for a vocabulary that is smaller than the policy's.
        """
        self.group.call(messages.LoadHeads(self.name, tuple(folders)))

    def with_old_log_probs(
        self, batch: Batch, columns: Sequence[str], *, seed: int, reference: str | None = None
    ) -> Batch:
        """The batch with the log-probs under the current weights that an update with this seed needs beforehand.

        `columns`: what a pass over the whole batch computes, `log_probs` (its old_log_probs) among them, see `columns`.
        Empty: no such pass is made.  The first optimizer step then gives the log-probs of its own samples, and a pass
        over the others alone gives theirs, as the column LATER.
        """
        if columns:
            found = self.columns(batch, columns, reference=reference)
            return batch.with_columns(**{OLD: found.pop("log_probs")}, **found)
        _, *others = self._steps(batch, seed, epoch=0)
        rest = sorted(chain.from_iterable(others))
        if not rest:
            return batch
        return batch.with_columns(**{LATER: with_values(None, batch, rest, self.log_probs(batch.select(rest)))})

    def connect(self, settings: PushSettings) -> None:
        """Send the push settings to the ranks, once after `load`.  No server is contacted yet."""
        self.group.call(messages.Connect(self.name, settings))

    def push(self, version: int, *, only: Sequence[str] | None = None, canary: Canary | None = None) -> PushReport:
        """Push the weights to the servers and verify them.

        `only`: push to these urls alone.  The report names the servers that failed, even if all failed; only a failure
        of the ranks raises an error, and BadNumber a weight that is not finite: then no server gets any.
        """
        message = messages.Push(self.name, version, None if only is None else tuple(only), canary)
        told = self.group.call_leader(message).result
        if "where" in told:
            weights = f"a weight of {self.name} is not finite{of_ranks(told['where'])}"
            raise BadNumber(f"{weights}: no server gets these weights")
        return decoded(PushReport, told)


@dataclass
class Critic(Trainable):
    """The value function."""

    kind: Kind = field(default="critic", init=False)

    def values(self, batch: Batch) -> Tensor:
        """[N] values before each token of the batch."""
        return self.columns(batch, ("values",))["values"]


def payload(batch: Batch, part: RankPlan, columns: tuple[str, ...]) -> dict[str, Tensor]:
    """The samples of a replica with these columns, in the order in which it runs them."""
    mine = batch.keep_columns(*columns).select(part.indices)
    sizes = torch.tensor(part.micro_sizes, dtype=torch.int64)
    frame = {"tokens": mine.tokens.int(), "lengths": mine.lengths, "rows": mine.rows, "micro_sizes": sizes}
    assert not frame.keys() & mine.columns.keys(), f"no column may be called {', '.join(frame)}"
    return frame | dict(mine.columns)


def unpacked(batch: Batch, plans: list[RankPlan], replies: list[Reply], name: str) -> Tensor:
    """A column [N, ...] of the batch; a replica without sequences answers without columns."""
    parts = [reply.tensors[name] for reply in replies if name in reply.tensors]
    return unpack(plans, parts, batch.sample_lengths.tolist())


def with_values(column: Tensor | None, batch: Batch, samples: list[int], values: Tensor) -> Tensor:
    """A column [N] of the batch, None for zeros, with these values of the tokens of these samples."""
    column = torch.zeros(batch.num_tokens) if column is None else column
    return column.index_copy(0, token_positions(batch.sample_lengths, torch.tensor(samples)), values)
