"""Columns and gradients of whole models: tied and not, bf16, LoRA, a reference, and logits that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from model_columns_cases import Pairs, run
from spawn import Ranks

from megarl.mcore.logprobs.logprobs import NAMES

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def assert_gradients(pairs: Pairs) -> None:
    for name, (got, expected) in pairs.items():
        scale = expected.abs().max().item()
        assert (got - expected).abs().max().item() <= 1e-4 * scale, name
        assert scale > 1e-4, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_in_megatrons_buffers_are_autograds(rank: Ranks, tied: bool, overlap: bool) -> None:
    (pairs,) = rank.run(run, "whole_gradients", tied, overlap)
    assert_gradients(pairs)
    assert ("output_layer.weight" in pairs) is not tied


def test_with_adapters_the_head_is_frozen_and_the_adapters_learn(rank: Ranks) -> None:
    ((pairs, is_left_alone),) = rank.run(run, "adapters_gradients")
    assert_gradients(pairs)
    assert all(".lora." in name for name in pairs)
    assert is_left_alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_are_those_of_the_definition(rank: Ranks, dtype: str) -> None:
    (pairs,) = rank.run(run, "columns", NAMES, dtype)
    assert tuple(pairs) == NAMES
    close = 2e-5 if dtype == "float32" else 0.3
    for name, (got, expected) in pairs.items():
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, expected, atol=close, rtol=close, msg=name)
    assert pairs["full_kl"][0].max() > 0.1
    assert pairs["full_kl"][0].min() >= -1e-6


def test_only_the_columns_asked_for_are_given(rank: Ranks) -> None:
    (pairs,) = rank.run(run, "columns", ("sum_pi_squared",), "float32")
    assert list(pairs) == ["sum_pi_squared"]


def test_the_head_keeps_its_name_and_is_called_with_its_hooks(rank: Ranks) -> None:
    (found,) = rank.run(run, "head")
    assert found == {"parameters": ["output_layer.weight"], "checkpoint": ["output_layer.weight"], "calls": 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_names_its_place(rank: Ranks, bad: float) -> None:
    # What a token's hidden states predict is the token after it.
    assert rank.run(run, "place_of_bad_logit", bad) == [("log_probs", 1, 7)]


@pytest.mark.parametrize(
    ("names", "role", "ref_vocab_size", "words"),
    [
        (("full_kl",), "actor", None, "full_kl without a reference; expected a reference model"),
        (("full_kl",), "actor", 60, "64 rows of the vocabulary on this rank and the actor 48; expected one vocabulary"),
        (("perplexity",), "actor", None, "there is no column perplexity; expected some of log_probs, entropy"),
        (("log_probs",), "critic", None, "a critic gives values only"),
    ],
)
def test_columns_that_cannot_be_given_are_refused(
    rank: Ranks, names: tuple[str, ...], role: str, ref_vocab_size: int | None, words: str
) -> None:
    assert words in rank.run(run, "refusal", names, role, ref_vocab_size)[0]
