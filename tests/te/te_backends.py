"""Which attention Transformer-Engine chooses for a model and a layout: its own filters are asked, as on an H100.

A layer's attention is built with the product's settings and called with a packed row, up to the choice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.enums import AttnMaskType
from te_cases import fusions_of_gpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.arch.layout import Layout
from megarl.mcore.models import execution, model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.packed_rows import make_row, micro_batches
from megarl.samples.batch import Batch

LENGTHS = (3000, 800, 17)  # one is longer than the windows of gpt-oss


@dataclass(frozen=True)
class Question:
    """One layout of a model with this config.json, on rank 0 of so many."""

    hf: dict[str, Any]
    layout: Layout
    num_ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    exchanges_heads: bool | None = None  # None: as the product decides


class _ChosenError(Exception):
    """Carries the choice out of the call."""


def ask(questions: Sequence[Question]) -> list[str]:
    """Of each question the choice for its layers: fused, unfused or none; several if they differ."""
    import te_on_cpu

    te_on_cpu.activate()
    dist.destroy_process_group()
    with (
        mock.patch.object(execution, "has_transformer_engine", lambda: True),
        mock.patch.object(model, "available_fusions", fusions_of_gpu),
    ):
        return [", ".join(dict.fromkeys(_choices(question))) for question in questions]


def _choices(question: Question) -> Iterator[str]:
    with fake_world(question.layout, question.num_ranks):
        engine = ExecutionOptions(transformer_impl="transformer_engine")
        config: Any = model.transformer_config(question.hf, question.layout, question.dtype, engine)
        if question.exchanges_heads is not None:
            config = replace(config, cp_comm_type="a2a" if question.exchanges_heads else None)
        for layer in (1, 2):  # of those with windows in every second layer, one with and one without
            yield _choice(config, question, layer)


@contextmanager
def fake_world(layout: Layout, num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Groups of one rank of so many, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        make_groups(layout)
        yield
    finally:
        destroy_groups()
        dist.destroy_process_group()


def _choice(config: Any, question: Question, layer: int) -> str:
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as attention

    size, value_size = config.kv_channels, config.kv_channels
    if config.multi_latent_attention:
        size, value_size = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    core = te.TEDotProductAttention(
        config=config,
        layer_number=layer,
        attn_mask_type=AttnMaskType.padding_causal,
        attention_type="self",
        k_channels=size,
        v_channels=value_size,
        cp_comm_type=config.cp_comm_type,
    )
    batch = Batch(torch.zeros(sum(LENGTHS), dtype=torch.int64), torch.tensor(LENGTHS))
    row = make_row(micro_batches(batch, [len(LENGTHS)])[0], question.layout, torch.device("cpu"))
    tokens, heads = row.tokens.numel(), config.num_attention_heads // question.layout.tp
    groups = heads if config.multi_latent_attention else config.num_query_groups // question.layout.tp
    q, k, v = (
        torch.zeros(tokens, count, wide, dtype=question.dtype)
        for count, wide in ((heads, size), (groups, size), (groups, value_size))
    )
    with mock.patch.object(attention.dpa_utils, "get_attention_backend", _stopping(attention)):
        try:
            core(q, k, v, None, AttnMaskType.padding_causal, packed_seq_params=row.packed)
        except _ChosenError as chosen:
            return str(chosen)
    raise AssertionError("Transformer-Engine has not chosen")


def _stopping(attention: Any) -> Any:
    stock = attention.dpa_utils.get_attention_backend
    attention._attention_backends["backend_selection_requires_update"] = True

    def choose(asked: Any) -> None:
        _, _, fused, _, unfused, _ = stock(asked)
        raise _ChosenError("fused" if fused else "unfused" if unfused else "none")

    return choose
