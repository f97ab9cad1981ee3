"""One forward pass, or one gradient, over this rank's micro-batches; the only file with Megatron's loss scaling.

A loss is `sum_t weight_t * token_loss_t`, with weights computed once for the whole optimizer step.  With
`calculate_per_token_loss`, Megatron sums gradients over micro-batches and data- and context-parallel ranks and divides
them by the global number of tokens.  So we pass true token counts (its MoE losses need them) and multiply the loss by
their global sum: the division cancels, and the gradient is that of the loss, however the step was split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megarl.algo.divergences import Divergence
from megarl.algo.finite import NonFiniteError
from megarl.algo.loss import MTP
from megarl.algo.spikes import Limits
from megarl.arch.layout import Layout
from megarl.arch.routed_experts import REPLAYED, ROUTED_EXPERTS
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import ReferenceStates, job_of, keep_hidden, token_columns
from megarl.mcore.logprobs.top_k import log_probs_of_ids, top_k_of_chunks
from megarl.mcore.models.model import CriticModel, Model, output_weight, unwrap
from megarl.mcore.training.gradient_check import agreed
from megarl.mcore.training.optimizer import Optimizer, reduce_in_last
from megarl.mcore.training.packed_rows import PackedRow, Rows, in_whole_turns, on_device
from megarl.mcore.training.router_replay import Routing
from megarl.samples.batch import SEGMENT_IDS, Batch, LossOutput, MicroBatch, Stats, Unread, merge_stats
from megarl.samples.ragged import names_in_batch
from megarl.samples.sample import SUPPORT, TEACHER_HIDDEN, TEACHER_IDS

Columns = dict[str, Tensor]
LossFn = Callable[[Batch, Columns], LossOutput]

DIVERGENCE = "divergence"  # the column [N] of the divergence from each token's teacher, at the same temperature
OF_IDS = "log_probs_of_ids"  # the columns [N, K] of the log-probs of TEACHER_IDS
HIDDEN = "hidden_states"  # the column [N, H] from which a head computes the logits of each token
TOP_K = ("top_ids", "top_log_probs")  # the columns [N, K] of the most likely tokens
TEACHER = "teacher"  # the column of a batch that says which teacher's TEACHER_HIDDEN is: see TeacherStates
# Columns that the model's side of a step reads, and no loss.
MODEL_INPUTS = (TEACHER_HIDDEN, TEACHER_IDS, *REPLAYED, *names_in_batch(SUPPORT))


@dataclass(frozen=True)
class Outputs:
    """Converts the output of a model's last chunk for a row into the micro-batch's packed columns [N], `names`."""

    layout: Layout
    vocab_size: int
    temperature: float = 1.0
    # actor: of logprobs.NAMES, DIVERGENCE, OF_IDS, in training MTP; (HIDDEN,) or TOP_K alone; critic: ("values",)
    names: tuple[str, ...] = ("log_probs",)
    divergence: Divergence | None = None  # the one from the teachers
    heads: Sequence[Tensor] = ()  # of the teachers, on the last stage: see TeacherStates
    top_k: int = 0  # tokens of TOP_K

    def __call__(
        self,
        chunk: nn.Module,
        row: PackedRow,
        output: Tensor,
        given: Mapping[str, Tensor],
        reference: ReferenceStates | None = None,
    ) -> Columns:
        """`given`: the micro-batch's columns, from which DIVERGENCE and OF_IDS read the teachers'."""
        if isinstance(unwrap(chunk), CriticModel):
            if self.names != ("values",):
                raise ValueError(f"names={list(self.names)}: a critic gives values only")
            return {"values": row.column(output[0, :, 0])}
        if self.names == (HIDDEN,):
            parts = output[0]
            whole = gather_from_sequence_parallel_region(parts) if self.layout.sequence_parallel else parts
            return {HIDDEN: row.column(whole).cpu()}  # one row's at a time: those of a step do not fit on a device
        if self.names == TOP_K:
            job = job_of(chunk, (), self.vocab_size, self.temperature)
            found = top_k_of_chunks(job, output[0], output_weight(chunk), self.top_k)
            return {name: row.column(column) for name, column in zip(TOP_K, found, strict=True)}
        hidden, weight = output[0], output_weight(chunk)
        own = [name for name in self.names if name not in (DIVERGENCE, OF_IDS, MTP)]
        job = job_of(chunk, own, self.vocab_size, self.temperature)
        columns = token_columns(job, hidden, weight, row.labels, reference=reference, support=row.support_there())
        if DIVERGENCE in self.names:
            assert self.divergence is not None, f"the column {DIVERGENCE} needs a divergence"
            teachers = self._teachers(row, given, output.device)
            columns[DIVERGENCE] = divergence_of_chunks(job, self.divergence, hidden, weight, teachers)
        if OF_IDS in self.names:
            ids = on_device([row.slice(given[TEACHER_IDS])], output.device)[0]
            columns[OF_IDS] = log_probs_of_ids(job, hidden, weight, ids)
        of_mtp = {MTP: self._of_mtp(chunk, row, output[1:])} if MTP in self.names else {}
        return {name: row.column(column) for name, column in columns.items()} | of_mtp

    def _of_mtp(self, chunk: nn.Module, row: PackedRow, hidden: Tensor) -> Tensor:
        """hidden [layers, T, H] of MTP layers -> [N, layers]: each token's log-prob by each, 0 where it has none."""
        weight = output_weight(chunk).detach() if unwrap(chunk).config.mtp_detach_heads else output_weight(chunk)
        job, labels = job_of(chunk, ("log_probs",), self.vocab_size, self.temperature), row.packed.labels
        found = (token_columns(job, hidden[i], weight, labels[i + 1])["log_probs"] for i in range(len(hidden)))
        return torch.stack([row.later(row.column(each), depth) for depth, each in enumerate(found, 1)], 1)

    def _teachers(self, row: PackedRow, given: Mapping[str, Tensor], device: torch.device) -> TeacherStates:
        teacher, hidden = (row.slice(given[name]) for name in (TEACHER, TEACHER_HIDDEN))
        return TeacherStates(on_device([teacher], device)[0], hidden, self.heads)


@dataclass(frozen=True)
class Gradient:
    """What `backward` knows of this rank's micro-batches beside the gradient; on the last stage, elsewhere nothing."""

    stats: Stats
    loss: Tensor | None  # [] float64, the sum over the micro-batches
    bad: NonFiniteError | None  # the first of their numbers that is not finite
    noted: list[Columns]  # what was to be noted of each micro-batch, without dummies


@dataclass(frozen=True)
class Step:
    """What came of an optimizer step; `grad_norm`, `lr`, `loss` and `made` are the same on all ranks."""

    stats: Stats  # of this replica
    grad_norm: float  # before clipping
    lr: float
    loss: float  # of the whole step if it was compared with limits, else 0
    made: bool
    bad: NonFiniteError | None  # in this replica's sequences
    noted: list[Columns]  # as in Gradient


@torch.no_grad()
def _references(model: Model | None, rows: Sequence[PackedRow], outputs: Outputs) -> list[ReferenceStates | None]:
    """The frozen model's hidden states and head for each row, if the outputs need them (last stage; elsewhere [])."""
    if model is None or "full_kl" not in outputs.names:
        return [None] * len(rows)
    for chunk in model:
        chunk.eval()
    hidden = _run(model, rows, lambda i, out: keep_hidden(out[0]), _chosen_freely, forward_only=True)
    return [ReferenceStates(own, output_weight(model[-1])) for own in hidden]


def _chosen_freely(index: int, chunk: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG001
    """No experts are given."""
    return nullcontext()


def _run(
    model: Model,
    rows: Sequence[PackedRow],
    finish: Callable[[int, Tensor], Any],
    around: Callable[[int, nn.Module], AbstractContextManager[None]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Megatron's pipeline schedule over these rows; `finish(i, output)` runs after the last chunk of the last stage.

    `around(i, chunk)`: what surrounds the forward pass of a chunk over row i.
    """
    # Otherwise Float16Module makes a float32 copy of the hidden states.
    more = {"fp32_output": False} if unwrap(model[0]).config.bf16 else {}

    def forward_step(indices: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        i = next(indices)
        row = rows[i]
        with around(i, chunk):
            output = chunk(row.tokens, row.positions, None, packed_seq_params=row.packed, **more)
        return output, lambda out, non_loss_data=False: finish(i, out)  # noqa: ARG005

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(len(rows))) for _ in model],
        model=model,
        num_microbatches=len(rows),
        seq_length=1,  # not read, since variable_seq_lengths is set
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def forward_only(
    model: Model,
    micros: list[MicroBatch],
    outputs: Outputs,
    device: torch.device,
    reference: Model | None = None,
    *,
    notes_experts: bool = False,
) -> list[Columns]:
    """Columns of each micro-batch (without dummies) on the last pipeline stage; elsewhere an empty list.

    `reference` is the frozen model of full_kl, in the same layout.  `notes_experts`: the column of routing replay
    too, with what the model's routers choose; without it they take what the micro-batches have in this column.
    """
    micros = in_whole_turns(micros, outputs.layout)
    rows = Rows(micros, outputs.layout, device)
    references = _references(reference, rows, outputs)
    for chunk in model:
        chunk.eval()
    routing = Routing(model, micros, rows, notes=notes_experts)

    def finish(i: int, out: Tensor) -> Columns:
        return outputs(model[-1], rows[i], out, micros[i].batch.columns, references[i])

    found = _run(model, rows, finish, routing.step, forward_only=True)
    columns = [columns for columns, micro in zip(found, micros, strict=False) if not micro.is_dummy]
    if notes_experts:
        chosen = routing.columns()
        return [own | {ROUTED_EXPERTS: experts} for own, experts in zip(columns, chosen, strict=False)]
    return columns


def backward(
    model: Model,
    micros: list[MicroBatch],
    outputs: Outputs,
    loss_fn: LossFn,
    *,
    num_tokens: int,
    device: torch.device,
    reference: Model | None = None,
    notes: Sequence[str] = (),
) -> Gradient:
    """Compute the gradient of the optimizer step's loss into Megatron's gradient buffers, reduced over all ranks.

    `num_tokens` is the number of tokens of the whole optimizer step, prompts included, over all data-parallel ranks.
    `reference` is the frozen model of full_kl.  Experts are those of the micro-batches' column of routing replay, if
    they have one and the model is prepared for it.  A micro-batch with a number that is not finite gets a gradient of
    NaN: the rank goes on, as the others wait for it, and all ranks see it in the norm.
    `notes`: the outputs of the forward pass, so of the weights before the step, that are returned.
    """
    micros = in_whole_turns(micros, outputs.layout)
    is_last = ps.is_pipeline_last_stage(ignore_virtual=True)
    of_loss = [name for name in micros[0].batch.columns if name not in MODEL_INPUTS]
    of_loss = [*of_loss, SEGMENT_IDS] if is_last else []
    rows = Rows(micros, outputs.layout, device, of_loss, unwrap(model[0]).config.mtp_num_layers or 0)
    references = _references(reference, rows, outputs)
    trained: list[Any] = model  # each wrapped for training
    reduce_in_last(model)
    for chunk in trained:
        chunk.train()
        chunk.zero_grad_buffer()

    losses: list[Tensor] = []
    unread: dict[int, Unread] = {}
    noted: dict[int, Columns] = {}

    def finish(i: int, output: Tensor) -> tuple[Tensor, Tensor, None]:
        batch = micros[i].batch
        found = outputs(model[-1], rows[i], output, batch.columns, references[i])
        if notes and not micros[i].is_dummy:
            noted[i] = {name: found[name].detach() for name in notes}
        spoilt: list[Tensor] = []
        result = loss_fn(replace(batch, columns=dict(rows[i].columns)), _Spoilt.of(found, spoilt))
        rows[i].columns.clear()
        if result.unread is not None:
            spoilt.append(result.unread.is_bad)
        losses.append(result.loss.detach().double())
        if result.unread is not None and not micros[i].is_dummy:
            unread[i] = result.unread
        own = torch.full((), rows[i].num_own_tokens, dtype=torch.int, device=device)
        return result.loss * num_tokens, own, None

    routing = Routing(model, micros, rows, trains=True)
    _run(model, rows, finish, routing.step, forward_only=False)
    stats, bad = _read(unread, micros)
    loss = torch.stack(losses).sum() if losses else None
    return Gradient(stats, loss, bad, [noted[i] for i in sorted(noted)])


class _Spoilt(torch.autograd.Function):
    """Outputs as they are.  Their gradient is NaN if the loss has met a number that is not finite.

    A loss of NaN is not enough: where a clip or a maximum lets no gradient through, none comes of it.
    """

    @staticmethod
    def of(outputs: Columns, spoilt: list[Tensor]) -> Columns:
        """`spoilt`: gets the loss's [] bool before the backward pass."""
        learnt = {name: column for name, column in outputs.items() if column.requires_grad}
        return outputs | dict(zip(learnt, _Spoilt.apply(spoilt, *learnt.values()), strict=True)) if learnt else outputs

    @staticmethod
    def forward(ctx: Any, spoilt: list[Tensor], *columns: Tensor) -> tuple[Tensor, ...]:
        ctx.spoilt = spoilt
        ctx.set_materialize_grads(False)
        return tuple(column.view_as(column) for column in columns)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.spoilt:
            return None, *grads
        return None, *(None if grad is None else torch.where(ctx.spoilt[0], math.nan, grad) for grad in grads)


def _read(unread: Mapping[int, Unread], micros: list[MicroBatch]) -> tuple[Stats, NonFiniteError | None]:
    """The statistics of these micro-batches, and the first error, with its place among the sequences of all."""
    if not unread:
        return {}, None
    sizes = [len(one.numbers) for one in unread.values()]
    found, bad = list[Stats](), None
    numbers = torch.cat([one.numbers for one in unread.values()]).cpu().split(sizes)
    for (i, one), own in zip(unread.items(), numbers, strict=True):
        try:
            found.append(one.read(own.tolist()))
        except NonFiniteError as error:
            before = [micro.batch.num_sequences for micro in micros[:i] if not micro.is_dummy]
            bad = bad or error.moved(sum(before))
    return merge_stats(found), bad


def train_step(
    optimizer: Optimizer,
    gradient: Callable[[], Gradient],
    *,
    limits: Limits | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Step:
    """One optimizer step.  It is not made if its gradient is not finite, or if a number is above `limits`.

    All ranks decide the same, before any of them changes a weight, a moment or the schedule.
    `gradient`: computes it, by `backward`.
    `before_step`: until it returns, the optimizer's state is neither read nor written.
    """
    lr = optimizer.lr
    optimizer.zero_grad()
    found = gradient()
    grad_norm, loss = optimizer.gradient_norm(), 0.0
    if limits is not None:
        grad_norm, loss = agreed(grad_norm, found.loss)
    made = (limits or Limits()).allow(grad_norm, loss)
    if made:
        before_step()
        optimizer.step(grad_norm)
    return Step(found.stats, grad_norm, lr, loss, made, found.bad, found.noted)
