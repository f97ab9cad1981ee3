"""Frequencies of rope by hand, and against transformers' for every kind and setting."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    _get_thd_freqs_on_this_cp_rank,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.arch.hf_config import completed
from megarl.arch.settings.rope import make_rope, rope_settings
from megarl.mcore.models.rope import packed_angles, turned


def theirs(kind: str, head_dim: int, parameters: dict[str, Any], longest: int = 4096) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """As it is read from a file."""
    return completed({"model_type": "llama", **hf})


def test_settings_are_read_from_old_and_new_configs() -> None:
    assert rope_settings(read({})) == {"rope_theta": 10000.0, "rope_type": "default"}, "transformers' default"
    assert rope_settings(read({"rope_theta": 7.0, "rope_scaling": None}))["rope_theta"] == 7.0
    assert rope_settings(read({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5.0}}))["rope_theta"] == 5.0
    assert rope_settings(read({"rope_scaling": {"type": "linear", "factor": 2.0}}))["rope_type"] == "linear"


def test_the_original_context_is_taken_from_wherever_it_stands() -> None:
    inside = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}
    assert rope_settings(read(inside))["original_max_position_embeddings"] == 16
    assert (
        rope_settings(read({**inside, "original_max_position_embeddings": 8}))["original_max_position_embeddings"] == 8
    )
    without = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 64}
    assert rope_settings(read(without))["original_max_position_embeddings"] == 64
    open_factor = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    assert rope_settings(read({"rope_parameters": open_factor, "max_position_embeddings": 64}))["factor"] == 4.0


@given(
    head_dim=st.sampled_from([4, 16, 64, 128]),
    theta=st.sampled_from([500.0, 10000.0, 500000.0]),
    factor=st.floats(1.5, 40.0),
    low=st.floats(0.5, 2.0),
    above=st.floats(0.5, 6.0),
    original=st.sampled_from([32, 1024, 8192]),
)
def test_llama3_equals_transformers_for_all_four_numbers(
    head_dim: int, theta: float, factor: float, low: float, above: float, original: int
) -> None:
    parameters = {"factor": factor, "low_freq_factor": low, "high_freq_factor": low + above, "rope_theta": theta}
    parameters["original_max_position_embeddings"] = original
    rope = make_rope({"rope_parameters": {"rope_type": "llama3", **parameters}}, head_dim)
    torch.testing.assert_close(rope.frequencies, theirs("llama3", head_dim, parameters)[0], rtol=1e-5, atol=0)


OF_YARN = (
    *({}, {"beta_fast": 20, "beta_slow": 2}, {"attention_factor": 1.25}, {"mscale": 0.7, "mscale_all_dim": 1.1}),
    {"truncate": False},
)


@given(
    head_dim=st.sampled_from([8, 64, 128]),
    theta=st.sampled_from([500.0, 10000.0, 1000000.0]),
    factor=st.floats(0.5, 40.0),
    original=st.sampled_from([32, 4096]),
    more=st.sampled_from(OF_YARN),
)
def test_yarn_and_linear_equal_transformers(
    head_dim: int, theta: float, factor: float, original: int, more: dict[str, Any]
) -> None:
    parameters = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original, **more}
    for kind in ("yarn", "linear"):
        rope = make_rope({"rope_parameters": {"rope_type": kind, **parameters}}, head_dim)
        frequencies, factor_of_theirs = theirs(kind, head_dim, parameters)
        torch.testing.assert_close(rope.frequencies, frequencies, rtol=1e-5, atol=1e-12)
        assert rope.factor == pytest.approx(factor_of_theirs)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0], "long_factor": [2.0]}
PARTIAL = "partial_rotary_factor=0.5"


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, **LONG}},
            "'longrope' is not supported; expected one of default, linear, ",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; expected one of default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "Missing required keys in .*'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, f"{PARTIAL} is not supported; exp"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, f"{PARTIAL} is not supported; expected 1.0"),
        ({"model_type": "glm4_moe", "rope_parameters": YARN}, f"rope type 'yarn' is not supported with {PARTIAL}"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_sentence(hf: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"{expected}[^\n]*$"):
        make_rope(read(hf), 8)


@given(units=st.lists(st.integers(1, 6), min_size=1, max_size=5), cp=st.sampled_from([1, 2, 4]))
@settings(max_examples=20)
def test_angles_of_a_packed_row_are_those_that_megatron_slices(units: list[int], cp: int) -> None:
    lengths = [n * (2 * cp if cp > 1 else 1) for n in units]
    ends, angles = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), torch.rand(max(lengths), 1, 1, 4)
    for rank in range(cp):
        slices = [_get_thd_freqs_on_this_cp_rank(rank, cp, torch.empty(n // cp), angles) for n in lengths]
        ours = packed_angles(angles, ends, sum(lengths) // cp, cp=cp, rank=rank)
        assert torch.equal(ours, torch.cat(slices))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_a_turned_row_and_its_gradient_equal_megatrons_to_the_last_bit(in_pairs: bool, dtype: torch.dtype) -> None:
    lengths, factor = [5, 1, 7], 1.25
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    angles = torch.outer(torch.arange(7.0), torch.rand(4)).repeat(1, 2)[:, None, None]
    ours = torch.randn(13, 3, 8).to(dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    got = turned(ours, angles, ends, factor=factor, in_pairs=in_pairs, cp=1, rank=0)
    of_tokens = torch.cat([angles[:n] for n in lengths])
    how = {"multi_latent_attention": in_pairs, "mscale": factor}
    expected = _apply_rotary_pos_emb_bshd(theirs[:, None], of_tokens, **how)[:, 0]
    up = torch.randn(13, 3, 8).to(dtype)
    got.backward(up)
    expected.backward(up)
    assert torch.equal(got, expected)
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("hf", "pairs"),
    [
        ({"model_type": "glm4_moe"}, 4),  # a half of each head where config.json does not say
        ({"model_type": "glm4_moe", "partial_rotary_factor": 0.25}, 2),
        ({"model_type": "glm4_moe", "rope_parameters": {"partial_rotary_factor": 1.0}}, 8),
        ({"model_type": "minimax_m2", "rotary_dim": 4, "head_dim": 16}, 2),
        ({"model_type": "minimax_m2", "rope_parameters": {"partial_rotary_factor": 0.5}, "rotary_dim": 16}, 4),
        ({"model_type": "minimax_m2"}, 8),
    ],
)
def test_some_families_rotate_a_part_of_each_head(hf: dict[str, Any], pairs: int) -> None:
    rope = make_rope(read({"rope_theta": 10000.0, "head_dim": 16, **hf}), head_dim=16)
    assert rope.frequencies.tolist() == pytest.approx([10000.0 ** (-i / pairs) for i in range(pairs)])


def test_dimensions_behind_the_angles_stay() -> None:
    ends, angles = torch.tensor([0, 5]), torch.outer(torch.arange(5.0), torch.rand(2)).repeat(1, 2)[:, None, None]
    t = torch.randn(5, 3, 8, requires_grad=True)
    got = turned(t, angles, ends, cp=1, rank=0)
    assert torch.equal(got, _apply_rotary_pos_emb_bshd(t[:, None], angles)[:, 0])
    assert torch.equal(got[..., 4:], t[..., 4:])
    (gradient,) = torch.autograd.grad(got[..., 4:].sum(), t)
    assert torch.equal(gradient, torch.cat([torch.zeros(5, 3, 4), torch.ones(5, 3, 4)], dim=-1))
