"""What a pass takes beyond its inputs: chunks, whatever the number of tokens and the size of the vocabulary."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from logprobs_plain import ALL

from benchmarks.common.tensor_memory import TensorMemory
from megarl.mcore.logprobs import fused, fused_torch
from megarl.mcore.logprobs.fused import Job, columns_of_chunks

CHUNK, BLOCK, HIDDEN = 2**12, 2**10, 4


def measured(
    num_tokens: int, vocab_size: int, names: tuple[str, ...], chunk: int = CHUNK, dtype: torch.dtype = torch.float32
) -> tuple[TensorMemory, int]:
    """Forward and backward, the weight's gradient into main_grad; and the bytes of what has a row for each token."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(vocab_size, HIDDEN)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=g)
    ref = (hidden.detach() + 1, weight.detach() + 1) if "full_kl" in names else (None, None)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fused, "CHUNK_ELEMENTS", chunk))
        stack.enter_context(mock.patch.object(fused, "CHUNK_TOKENS", 64))
        stack.enter_context(mock.patch.dict(fused_torch.BLOCK_ELEMENTS, cpu=BLOCK))
        memory = stack.enter_context(TensorMemory())
        columns = columns_of_chunks(Job(names, vocab_size), hidden, weight, labels, *ref)
        sum(column.sum() for column in columns.values()).backward()  # type: ignore[union-attr]
    return memory, num_tokens * 4


@pytest.mark.parametrize("names", [("log_probs",), ALL])
def test_the_peak_is_a_chunk_and_a_few_numbers_for_each_token(names: tuple[str, ...]) -> None:
    memory, column_bytes = measured(256, 1024, names)
    assert memory.largest_elements <= CHUNK < 256 * 1024 / 50, "no tensor is larger than a chunk"
    # The chunk, the blocks in float32 that are read from it, the products of a chunk, and columns of the tokens.
    products = (64 + CHUNK // 64) * HIDDEN * 4
    assert memory.peak_bytes < 4 * CHUNK + 6 * 4 * BLOCK + products + 80 * column_bytes


@pytest.mark.full
def test_the_peak_does_not_grow_with_the_vocabulary() -> None:
    small, large = (measured(512, vocab_size, ALL)[0].peak_bytes for vocab_size in (1024, 4096))
    assert large <= 1.01 * small


def test_the_peak_grows_with_the_tokens_by_some_columns_only() -> None:
    few, many = (measured(num_tokens, 512, ALL) for num_tokens in (256, 512))
    assert many[0].peak_bytes - few[0].peak_bytes < 80 * (many[1] - few[1])


def test_groups_of_tokens_use_the_same_buffer_after_each_other() -> None:
    chunk = 2**14  # of 64 tokens: more bytes than the columns of the second group
    one, two = (measured(num_tokens, 512, ("log_probs",), chunk) for num_tokens in (64, 128))
    assert two[0].peak_bytes - one[0].peak_bytes < 80 * (two[1] - one[1]) < 4 * chunk


def test_one_gradient_in_16_bits_lives_beside_float32_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where torch multiplies 16-bit factors into float32."""
    monkeypatch.setattr(fused, "_logits_dtype", lambda hidden: torch.float32)
    monkeypatch.setattr(fused, "_product", lambda left, right, out: torch.mm(left.float(), right.float(), out=out))
    chunk = 2**14
    memory, column_bytes = measured(64, 1024, ("log_probs",), chunk, torch.bfloat16)  # four chunks
    assert memory.peak_bytes < (4 + 2) * chunk + 80 * column_bytes < (4 + 2 + 2) * chunk
