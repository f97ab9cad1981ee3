"""Columns of tokens from hidden states and the vocabulary head, without holding all logits in memory.

16384 tokens with a vocabulary of 152k are 10 GB of logits in float32, and a plain softmax makes seven such tensors.
Here the logits of a chunk are computed, used and discarded, in the forward and again in the backward pass.

Saved from the forward pass: the hidden states, the weight, and a few numbers for each token.  In addition each pass
needs one buffer of CHUNK_ELEMENTS logits (shared between the two models if a reference's logits are needed too) and, in
backward, the products of that chunk.  The gradient overwrites the logits.  On a GPU logits of a 16-bit model are
float32, as those of its servers (`servers/sglang.py`): rounded to bfloat16, a logit of 20 is off by up to 0.06.  On a
CPU, where torch has no such product, they have the model's dtype.

A chunk is some tokens times some rows of the vocabulary.  It has many tokens, because each group of tokens costs a pass
over the weight and its main_grad; but not all, because each group of rows costs a pass over the tokens' gradients.
`token_statistics.py` merges chunks; `fused_triton.py` (NVIDIA GPUs) and `fused_torch.py` (everything else) compute one
chunk and have the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from megarl.mcore.logprobs import fused_torch
from megarl.mcore.logprobs.main_grad import LogitGradients
from megarl.mcore.logprobs.support import Support
from megarl.mcore.logprobs.token_statistics import all_reduce_, columns_of, empty_statistics, factors_of, merged
from megarl.mcore.models.model import unwrap

gpu_kernels: Any = fused_torch
if torch.cuda.is_available() and find_spec("triton"):
    from megarl.mcore.logprobs import fused_triton

    gpu_kernels = fused_triton

CHUNK_ELEMENTS = 2**26 if torch.cuda.is_available() else 2**23  # 256 MiB; a CPU gains nothing above 32 MiB
CHUNK_TOKENS = 2**13
IDS_SHARE = 16  # a chunk's tokens have one id in their supports for so many logits: about 40 bytes of indices each
NAMES = ("log_probs", "entropy", "sum_pi_squared", "full_kl")


@dataclass(frozen=True)
class Job:
    """What to compute for every token."""

    names: tuple[str, ...]
    vocab_size: int
    temperature: float = 1.0
    sequence_parallel: bool = False
    fused_accumulation: bool = False

    @property
    def group(self) -> Any:
        return ps.get_tensor_model_parallel_group()

    def num_real(self, rows: int) -> int:
        """Number of this rank's `rows` of the padded vocabulary that are real (not padding); they come first."""
        return min(rows, max(0, self.vocab_size - self.group.rank() * rows))


@dataclass(frozen=True)
class ReferenceStates:
    """The frozen model for `full_kl`: its last-stage hidden states of the same tokens, and its head."""

    hidden: Tensor  # like `hidden` of the actor; may be in host memory
    weight: Tensor  # [V/tp, H of the reference]


def token_columns(
    job: Job,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reference: ReferenceStates | None = None,
    support: Support | None = None,
) -> dict[str, Tensor]:
    """hidden [T, H] ([T/tp, H] under sequence parallelism) of the last chunk, whose head is weight [V/tp, H], and
    labels [T] -> {name: [T] float32}, for the job's names.

    All use the softmax p of logits / temperature over the true vocabulary: padding rows have no probability.  Where a
    label has a support, p (and q) is renormalised over it: the other ids have no probability either.
    `log_probs` of the labels; `entropy` = -sum_v p log p; `sum_pi_squared` = sum_v p^2; `full_kl` = sum_v p (log p -
    log q), q of the reference at the same temperature.
    All are differentiable in the hidden states and the weight.
    ValueError for an unknown name, or full_kl without a reference of the same vocabulary.
    """
    _check(job.names, weight, reference)
    sides = () if reference is None or "full_kl" not in job.names else (reference.hidden, reference.weight)
    return columns_of_chunks(job, hidden, weight, labels, *sides, support=support) if job.names else {}


def job_of(chunk: nn.Module, names: Sequence[str], vocab_size: int, temperature: float) -> Job:
    """How the columns of a model's last chunk are computed."""
    config = unwrap(chunk).config
    return Job(
        tuple(names),
        vocab_size,
        temperature,
        sequence_parallel=config.sequence_parallel,
        fused_accumulation=config.gradient_accumulation_fusion,
    )


def _check(names: Sequence[str], weight: Tensor, reference: ReferenceStates | None) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"names={list(names)}: there is no column {unknown[0]}; expected some of {', '.join(NAMES)}")
    if "full_kl" not in names:
        return
    if reference is None:
        raise ValueError(
            "names: full_kl without a reference; expected a reference model in the actor's group and layout"
        )
    # Rows include padding; different vocabularies with the same padded size are detected from config.json at the start.
    if len(reference.weight) != len(weight):
        raise ValueError(
            f"full_kl: the reference has {len(reference.weight)} rows of the vocabulary on this rank and the actor "
            f"{len(weight)}; expected one vocabulary and one layout"
        )


def keep_hidden(hidden: Tensor) -> Tensor:
    """A copy for later without the autograd graph: in pinned host memory if it is on a GPU, else not copied."""
    if not hidden.is_cuda:
        return hidden.detach()
    kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    return kept.copy_(hidden.detach(), non_blocking=True)


def columns_of_chunks(
    job: Job,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    *,
    support: Support | None = None,
) -> dict[str, Tensor]:
    """hidden [T, H] (its part of T under sequence parallelism), weight [V/tp, H], labels [T] -> {name: [T]}.

    The gradient of the weight goes to its `main_grad` if Megatron gave it one.  `support`: of the labels.
    """
    columns = _Columns.apply(job, hidden, weight, labels, ref_hidden, ref_weight, support)
    return dict(zip(job.names, columns, strict=True))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ref_hidden: Tensor | None,
        ref_weight: Tensor | None,
        support: Support | None,
    ) -> tuple[Tensor, ...]:
        chunks = Chunks(job, weight, ref_weight, support)
        index = labels - job.group.rank() * len(weight)  # index of the label in this rank's rows, if it is there
        found = empty_statistics(len(labels), hidden)
        for at, sides in chunks.lots(all_tokens(hidden, job, weight), all_tokens(ref_hidden, job, weight)):
            for chunk in chunks.of(sides, index[at], at):
                how = (chunk.index, chunk.num_real, job.temperature, job.names)
                found[:, at] = merged(found[:, at], chunk.kernels.statistics(chunk.logits, chunk.ref_logits, *how))
                del chunk  # else the next group's buffer is made beside this one
        all_reduce_(found, job.group)
        ctx.job, ctx.support = job, support
        ctx.save_for_backward(hidden, weight, index, found, ref_hidden, ref_weight)
        ctx.set_materialize_grads(False)
        columns = columns_of(found)
        return tuple(columns[name] for name in job.names)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, index, found, ref_hidden, ref_weight = ctx.saved_tensors
        job: Job = ctx.job
        wanted = {name: grad for name, grad in zip(job.names, grads, strict=True) if grad is not None}
        if not wanted:
            return (None,) * 7
        if "full_kl" not in wanted:
            ref_hidden = ref_weight = None
        chunks = Chunks(job, weight, ref_weight, ctx.support)
        whole, factors = all_tokens(hidden, job, weight), factors_of(found, wanted)
        gradients = gradients_of(job, whole, weight, found.dtype, learns_weight=ctx.needs_input_grad[2])
        for at, sides in chunks.lots(whole, all_tokens(ref_hidden, job, weight), _reached(wanted)):
            with gradients.of_lot(at, sides[0]) as add:
                for chunk in chunks.of(sides, index[at], at):
                    how = (chunk.index, factors[:, at], chunk.num_real, job.temperature)
                    chunk.kernels.gradient_(chunk.logits, chunk.ref_logits, *how)
                    add(chunk.rows, chunk.logits)
                    del chunk  # else the next group's buffer is made beside this one
        own = sum_over_ranks(gradients.of_hidden, job) if ctx.needs_input_grad[1] else None
        return None, own, gradients.of_weight(), None, None, None, None


@dataclass(frozen=True)
class Chunk:
    """The logits of some tokens over a part of the vocabulary, and those of the model that they are compared with."""

    rows: slice  # of this rank's part of the vocabulary
    logits: Tensor  # [C, W]
    ref_logits: Tensor | None
    index: Tensor  # [C] column of the label, -1 if it is not in this chunk
    num_real: int  # number of columns of the true vocabulary; they come first

    @property
    def kernels(self) -> Any:
        """Float64, used only to check gradients, runs in plain torch."""
        is_plain = not self.logits.is_cuda or self.logits.dtype is torch.float64
        return fused_torch if is_plain else gpu_kernels


class Chunks:
    """Groups of tokens, and for each group the chunks of its logits, which all use the same memory."""

    def __init__(self, job: Job, weight: Tensor, ref_weight: Tensor | None, support: Support | None = None) -> None:
        self.weights = [weight] if ref_weight is None else [weight, ref_weight]
        self.support, self.first_id = support, job.group.rank() * len(weight)
        self.num_real = job.num_real(len(weight))
        # A multiple of eight rows keeps matrix products aligned; the vocabulary is padded to such a multiple.
        self.width = min(len(weight), -(-self.num_real // 8) * 8)
        self.elements = CHUNK_ELEMENTS // len(self.weights)

    def lots(
        self, hidden: Tensor, ref_hidden: Tensor | None, tokens: Tensor | None = None
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """(indices of tokens, [their hidden states, the reference's]) for each group; `tokens` None: all tokens."""
        if tokens is None:
            tokens = torch.arange(len(hidden), device=hidden.device)
        for several in tokens.split(max(1, min(CHUNK_TOKENS, self.elements // 8))):
            for at in self._by_support(several):
                if self.width and len(at):
                    yield at, [hidden[at]] if ref_hidden is None else [hidden[at], ref_hidden[at]]

    def _by_support(self, tokens: Tensor) -> Sequence[Tensor]:
        """So few tokens each that the indices of their supports take about the memory of a chunk."""
        return [tokens] if self.support is None else self.support.split(tokens, max(1, CHUNK_ELEMENTS // IDS_SHARE))

    def of(self, sides: list[Tensor], index: Tensor, at: Tensor) -> Iterator[Chunk]:
        """The chunks of logits of the tokens `at`; index [C] of their labels in this rank's part of the vocabulary."""
        num_tokens, support = len(index), None if self.support is None else self.support.at(at)
        most = min(self.width, max(8, self.elements // num_tokens // 8 * 8))
        buffers = [side.new_empty(num_tokens * most, dtype=_logits_dtype(side)) for side in sides]
        for first in range(0, self.width, most):
            rows = slice(first, min(first + most, self.width))
            size, num_real = rows.stop - first, min(rows.stop, self.num_real) - first
            logits = [
                _product(side, weight[rows].T, buffer[: num_tokens * size].view(num_tokens, size))
                for side, weight, buffer in zip(sides, self.weights, buffers, strict=True)
            ]
            if support is not None:
                for each in logits:
                    support.exclude_(each, self.first_id + first, num_real)
            here = torch.where((index >= first) & (index < first + num_real), index - first, -1)
            yield Chunk(rows, logits[0], logits[1] if len(logits) > 1 else None, here, num_real)


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    """Of the logits of these hidden states."""
    has_product = hidden.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads()  # torch >= 2.8
    return torch.float32 if has_product and hidden.dtype in (torch.bfloat16, torch.float16) else hidden.dtype


def _product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """out = left @ right, summed in float32 and rounded once, to the dtype of `out`."""
    if out.dtype == left.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def _reached(grads: dict[str, Tensor]) -> Tensor:
    """Indices of tokens with a non-zero gradient: logits of prompts and padding are not recomputed.

    The host waits here for the device, once a row.  The batch's masks, which the host has, would tell less: a loss,
    which may be a plug-in, also leaves tokens out by a clipped ratio or a mask of its own.  That their logits would
    take longer than the wait is assumed, not measured.
    """
    return torch.stack([grad != 0 for grad in grads.values()]).any(0).nonzero().squeeze(1)


def all_tokens(hidden: Any, job: Job, weight: Tensor) -> Any:
    """All tokens' hidden states on the weight's device; gathered under sequence parallelism."""
    if hidden is None:
        return None
    hidden = hidden.to(weight.device, non_blocking=True)  # a reference's may be in host memory
    if not job.sequence_parallel or job.group.size() == 1:
        return hidden
    whole = hidden.new_empty(job.group.size() * len(hidden), hidden.size(1))
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=job.group)
    return whole


def sum_over_ranks(grad: Tensor, job: Job) -> Tensor:
    """The sum over all parts of the vocabulary; under sequence parallelism for this rank's tokens only."""
    if job.group.size() == 1:
        return grad
    if not job.sequence_parallel:
        dist.all_reduce(grad, group=job.group)
        return grad
    own = grad.new_empty(len(grad) // job.group.size(), grad.size(1))
    dist.reduce_scatter_tensor(own, grad, group=job.group)
    return own


def gradients_of(job: Job, whole: Tensor, weight: Tensor, dtype: torch.dtype, *, learns_weight: bool) -> LogitGradients:
    """Of all tokens' hidden states and this rank's part of the vocabulary, for a backward pass."""
    return LogitGradients(whole, weight, dtype, learns_weight=learns_weight, fused_accumulation=job.fused_accumulation)
