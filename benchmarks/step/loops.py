"""Two training loops over the same packed rows: megarl's step as a rank runs it, and Megatron-Core's own parts alone.

Both start from the same weights and make the same optimizer step, along the gradient of
sum_t weight_t advantage_t log_prob_t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megarl.algo.loss import ActorLoss
from megarl.algo.step_columns import step_columns
from megarl.arch.layout import Layout, padded_vocab_size
from megarl.mcore.models.families import family_of
from megarl.mcore.models.layers import block_spec
from megarl.mcore.models.model import DTYPES, build_model, transformer_config, unwrap
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import make_row, micro_batches
from megarl.mcore.training.step import Outputs, backward, train_step
from megarl.samples.batch import Batch

LR, LAYOUT = 1e-4, Layout()


@dataclass(frozen=True)
class Work:
    """One optimizer step: a model, sequences, and how many of them share a row."""

    hf: dict[str, Any]
    batch: Batch  # with the columns of an actor's loss
    micro_sizes: list[int]
    dtype: str
    device: torch.device


def make_work(hf: dict[str, Any], lengths: list[int], max_tokens: int, dtype: str, device: torch.device) -> Work:
    """Random sequences, the first quarter of each its prompt; rows hold at most `max_tokens`."""
    g = torch.Generator().manual_seed(0)
    total, sizes = sum(lengths), torch.tensor(lengths)
    inside = torch.cat([torch.arange(length) * 4 // length for length in lengths])
    columns = {
        "response_mask": (inside > 0).float(),
        "old_log_probs": torch.zeros(total),
        "advantages": torch.randn(total, generator=g),
    }
    batch = Batch(torch.randint(hf["vocab_size"], (total,), generator=g), sizes, columns)
    batch = step_columns(batch, loss=ActorLoss("reinforce"), agg_mode="token-mean")
    micro_sizes, room = [0], max_tokens
    for length in lengths:
        if length > room:
            micro_sizes, room = [*micro_sizes, 0], max_tokens
        micro_sizes[-1] += 1
        room -= length
    return Work(hf, batch, micro_sizes, dtype, device)


def cross_entropy_of(device: torch.device) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Megatron's faster one: the fused one where there is a GPU, whose kernels it compiles and whose backward is bf16.

    Returns its name, and logits [s, v] and labels [s] -> [s].
    """
    if device.type == "cuda":
        group = parallel_state.get_tensor_model_parallel_group
        return "fused", lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, group())
    return "plain", lambda logits, labels: tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels)


class Ours:
    """As roles/worker.py does it: the sequences as they came, rows, columns, loss layer, optimizer, statistics."""

    def __init__(self, work: Work) -> None:
        self.work, self.loss = work, ActorLoss("reinforce")
        self.model = wrap_for_training(build_model(work.hf, LAYOUT, dtype=work.dtype), LAYOUT)
        self.optimizer = Optimizer(self.model, OptimSettings(lr=LR))

    def step(self) -> float:
        """Returns the gradient's norm."""
        work = self.work
        outputs = Outputs(LAYOUT, work.hf["vocab_size"], 1.0, self.loss.outputs)
        batch = work.batch.keep_columns(*self.loss.columns)
        micros = micro_batches(batch, work.micro_sizes)
        num_tokens, device = work.batch.num_tokens, work.device
        gradient = partial(backward, self.model, micros, outputs, self.loss, num_tokens=num_tokens, device=device)
        return train_step(self.optimizer, gradient).grad_norm


class Bare:
    """GPTModel with its own vocabulary head and cross entropy, DistributedDataParallel, schedule and optimizer.

    Its rows lie ready on the device.  Megatron's local attention takes no packed rows, so that without
    Transformer-Engine both loops have megarl's.
    """

    def __init__(self, work: Work, like: Ours) -> None:
        self.work, hf = work, work.hf
        config = transformer_config(hf, LAYOUT, DTYPES[work.dtype])
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, family_of(hf).layer),
            vocab_size=padded_vocab_size(hf["vocab_size"], 1),
            max_sequence_length=hf["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_parameters"]["rope_theta"],
        ).to(work.device)
        gpt.load_state_dict(unwrap(like.model[0]).state_dict())
        wrapper = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=True)
        chunk = Float16Module(config, gpt) if config.bf16 else gpt
        self.model = [DistributedDataParallel(config, wrapper, chunk)]
        bf16 = {"bf16": config.bf16, "params_dtype": config.params_dtype}
        settings = OptimizerConfig(optimizer="adam", lr=LR, adam_beta2=0.999, weight_decay=0.01, clip_grad=1.0, **bf16)
        self.optimizer = get_megatron_optimizer(settings, self.model, use_gloo_process_groups=False)
        self.cross_entropy = cross_entropy_of(work.device)[1]
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss
        self.rows = [self._row(micro.batch, micro) for micro in micro_batches(work.batch, work.micro_sizes)]

    def _row(self, batch: Batch, micro: Any) -> dict[str, Any]:
        """What a row needs; the factor of a token stands where it is predicted."""
        row = make_row(micro, LAYOUT, self.work.device)
        factors = torch.zeros(batch.num_tokens)
        columns = batch.columns
        wanted = columns["weight"] * columns["advantages"] * columns["response_mask"]
        factors[row.predicts.cpu()] = wanted[row.predicted.cpu()]
        return {"row": row, "factors": factors.to(self.work.device)}

    def step(self) -> float:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(self.rows)],
            model=self.model,
            num_microbatches=len(self.rows),
            seq_length=max(each["row"].tokens.size(1) for each in self.rows),
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        return float(grad_norm)

    def _forward(self, rows: Any, chunk: Any) -> tuple[Tensor, Any]:
        each = next(rows)
        row, factors = each["row"], each["factors"]
        logits = chunk(row.tokens, row.positions, None, packed_seq_params=row.packed)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            per_token = self.cross_entropy(logits[0], row.labels)
            total = (factors * per_token).sum()
            own = torch.tensor(row.num_own_tokens, dtype=torch.int, device=total.device)
            return total * self.work.batch.num_tokens, own, {"loss": total.detach()}

        return logits, loss
