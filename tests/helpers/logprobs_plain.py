"""The columns by their definitions: whole logits in float64, log_softmax, autograd."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.mcore.logprobs import fused, fused_torch
from megarl.mcore.logprobs.fused import Job, columns_of_chunks

ALL = ("log_probs", "entropy", "sum_pi_squared", "full_kl")


@dataclass(frozen=True)
class Case:
    """Sizes of random hidden states and a weight, and the chunks in which their logits are computed."""

    num_tokens: int
    vocab_size: int
    padding: int  # of the vocabulary
    temperature: float
    chunk: tuple[int, int, int]  # of `chunks_of`
    dtype: torch.dtype
    seed: int

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @property
    def close(self) -> float:
        """Of values and gradients to those in float64."""
        return 1e-9 if self.dtype is torch.float64 else 2e-5

    def sides(self, g: torch.Generator, width: int = 5) -> tuple[Tensor, Tensor]:
        """(hidden [T, width], weight [V + padding, width]), normal."""
        hidden, weight = (
            torch.randn(n, width, generator=g).to(self.dtype) for n in (self.num_tokens, self.vocab_size + self.padding)
        )
        return hidden, weight

    def check_gradients(self, found: Sequence[Tensor], expected: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """`values`: what was differentiated; a gradient has the rounding of the log-probs of which a value is a sum."""
        largest = max([1.0, *(value.abs().max().item() for value in values)])
        for ours, theirs in zip(found, expected, strict=True):
            size = max(largest, theirs.abs().max().item())
            torch.testing.assert_close(ours, theirs, atol=self.close * size, rtol=self.close)


def cases(smallest: int = 2, temperatures: Sequence[float] = (1.0, 0.7, 2.0)) -> st.SearchStrategy[Case]:
    """Vocabularies of `smallest` to 40 tokens."""
    return st.builds(
        Case,
        num_tokens=st.integers(1, 9),
        vocab_size=st.integers(smallest, 40),
        padding=st.integers(0, 9),
        temperature=st.sampled_from(temperatures),
        chunk=st.sampled_from([(64, 3, 40), (17, 100, 1), (2**20, 2, 2**18)]),
        dtype=st.sampled_from([torch.float64, torch.float32]),
        seed=st.integers(0, 999),
    )


@contextmanager
def chunks_of(elements: int, tokens: int, block: int = 2**18) -> Iterator[None]:
    """Chunks of so many logits, of so many tokens, processed in blocks of so many logits."""
    with (
        mock.patch.object(fused, "CHUNK_ELEMENTS", elements),
        mock.patch.object(fused, "CHUNK_TOKENS", tokens),
        mock.patch.dict(fused_torch.BLOCK_ELEMENTS, cpu=block),
    ):
        yield


def plain_columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, temperature: float = 1.0, reference: Any = None
) -> dict[str, Tensor]:
    """`reference` is (hidden, weight) of the frozen model; without it there is no full_kl."""

    def log_softmax(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden.double() @ weight[:vocab_size].double().T / temperature).log_softmax(-1)

    log_p = log_softmax(hidden, weight)
    p = log_p.exp()
    out = {
        "log_probs": log_p.gather(-1, labels[:, None]).squeeze(-1),
        "entropy": -(p * log_p).sum(-1),
        "sum_pi_squared": p.square().sum(-1),
    }
    if reference is not None:
        out["full_kl"] = (p * (log_p - log_softmax(*reference))).sum(-1)
    return out


def masked_columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, excluded: Tensor, temperature: float, reference: Any
) -> dict[str, Tensor]:
    """Of softmaxes without the ids that are `excluded` [T, V]."""

    def log_softmax(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden.double() @ weight[: excluded.size(1)].double().T / temperature
        return logits.masked_fill(excluded, -1e300).log_softmax(-1)

    log_p, log_q = log_softmax(hidden, weight), log_softmax(*reference)
    p = log_p.exp()
    return {
        "log_probs": log_p.gather(-1, labels[:, None]).squeeze(-1),
        "entropy": -(p * log_p).masked_fill(excluded, 0.0).sum(-1),
        "sum_pi_squared": p.square().sum(-1),
        "full_kl": (p * (log_p - log_q)).masked_fill(excluded, 0.0).sum(-1),
    }


def fused_columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, temperature: float = 1.0, reference: Any = None
) -> dict[str, Tensor]:
    """What is tested, called as the plain one."""
    names = ALL if reference is not None else ALL[:3]
    job = Job(names, vocab_size, temperature)
    return columns_of_chunks(job, hidden, weight, labels, *(reference or (None, None)))


def logits_as(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden, weight) whose product is exactly these logits [T, V]."""
    return torch.eye(len(logits), dtype=logits.dtype), logits.T.clone()


def total(columns: dict[str, Tensor], factors: Tensor) -> Tensor:
    """sum of factors [K, T] times columns, in the order of their names in ALL."""
    named = [columns[name] for name in ALL if name in columns]
    return torch.stack([(column * factor).sum() for column, factor in zip(named, factors, strict=False)]).sum()


def gradients(columns: dict[str, Tensor], factors: Tensor, *to: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total(columns, factors), to)
