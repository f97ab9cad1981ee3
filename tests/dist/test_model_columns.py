"""Columns and gradients of whole models: tied and not, bf16, a reference, and logits that are not finite."""

import math
from typing import Any

import pytest
import torch
from chunks import named_parameters, parameters
from logprobs_plain import plain_columns
from spawn import Ranks
from torch import Tensor

from megarl.algo.loss import ActorLoss
from megarl.arch.hf_config import completed
from megarl.arch.layout import Layout
from megarl.mcore.logprobs.fused import NAMES
from megarl.mcore.models.model import Model, build_model, output_weight, unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import make_row
from megarl.mcore.training.step import Outputs, backward, forward_only
from megarl.samples.batch import Batch, LossOutput, MicroBatch

pytestmark = pytest.mark.dist

CPU, LAYOUT = torch.device("cpu"), Layout()
HF: dict[str, Any] = completed(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": True,
        "vocab_size": 45,
    }
)
G = torch.Generator().manual_seed(0)
TOKENS, LENGTHS = torch.randint(0, 44, (17,), generator=G), torch.tensor([5, 12])
FACTORS = torch.randn(4, 17, generator=G)
Pairs = dict[str, tuple[Tensor, Tensor]]  # what we give, and what is right


def run(case: str, *args: Any) -> Any:
    """One of the functions below, in groups of its own."""
    make_groups(LAYOUT)
    try:
        return globals()[case](*args)
    finally:
        destroy_groups()


def actor(*, tied: bool = True, seed: int = 1, dtype: str = "float32", vocab_size: int = 45) -> Model:
    torch.manual_seed(seed)
    hf = {**HF, "tie_word_embeddings": tied, "vocab_size": vocab_size}
    model = build_model(hf, LAYOUT, dtype=dtype)
    with torch.no_grad():  # Megatron's initial weights are small: every softmax would be flat
        for param in parameters(model):
            param.mul_(3)
    return model


def micros(**columns: Tensor) -> list[MicroBatch]:
    return [MicroBatch(Batch(TOKENS, LENGTHS, columns))]


def weighted(_: Any, columns: dict[str, Tensor]) -> LossOutput:
    """sum of FACTORS times the columns."""
    return LossOutput((torch.stack([columns[name] for name in NAMES]) * FACTORS).sum())


def plain(model: Model, reference: Model | None = None) -> dict[str, Tensor]:
    """In the graph of the model's own parameters."""
    row = make_row(micros()[0], LAYOUT, CPU)

    def sides(model: Model) -> tuple[Tensor, Tensor]:
        hidden = model[0](row.tokens, row.positions, None, packed_seq_params=row.packed)
        return hidden[0], output_weight(model[0])

    frozen = None if reference is None else [side.detach() for side in sides(reference)]
    found = plain_columns(*sides(model), row.labels, 45, 0.8, frozen)
    return {name: row.column(column) for name, column in found.items()}


def whole_gradients(tied: bool) -> Pairs:
    """With all four columns."""
    model, reference = actor(tied=tied), actor(tied=False, seed=2)
    params = dict(named_parameters(model))
    expected = torch.autograd.grad(weighted(None, plain(model, reference)).loss, list(params.values()))
    outputs, wrapped = Outputs(LAYOUT, 45, 0.8, NAMES), wrap_for_training(model, LAYOUT)
    backward(wrapped, micros(), outputs, weighted, num_tokens=17, device=CPU, reference=reference)
    return {name: (p.main_grad.clone(), t.float()) for (name, p), t in zip(params.items(), expected, strict=True)}


def columns(names: tuple[str, ...], dtype: str) -> Pairs:
    """Of a model in this type, beside the definition at the float32 model's."""
    found = forward_only(
        actor(dtype=dtype), micros(), Outputs(LAYOUT, 45, 0.8, names), CPU, actor(seed=2, dtype=dtype)
    )[0]
    expected = plain(actor(), actor(seed=2))
    return {name: (column, expected[name].detach().float()) for name, column in found.items()}


def head() -> dict[str, Any]:
    model = actor(tied=False)
    layer, calls = unwrap(model[0]).output_layer, []
    layer.register_forward_pre_hook(lambda *args: calls.append(args))
    forward_only(model, micros(), Outputs(LAYOUT, 45), CPU)
    return {
        "parameters": [name for name, _ in named_parameters(model) if "output" in name],
        "checkpoint": [name for name in unwrap(model[0]).sharded_state_dict() if name == "output_layer.weight"],
        "calls": len(calls),
    }


def place_of_bad_logit(bad: float) -> tuple[str, int, int]:
    """The last hidden states of the seventh token of the second sequence are not finite."""
    model = actor(tied=False)

    def spoil(_: Any, __: Any, hidden: Tensor) -> Tensor:
        return hidden.index_fill(0, torch.tensor([5 + 6]), bad)

    unwrap(model[0]).decoder.final_layernorm.register_forward_hook(spoil)
    columns = {name: torch.zeros(17) for name in ("old_log_probs", "advantages")}
    columns |= {"response_mask": torch.ones(17), "weight": torch.full((17,), 1 / 17)}
    columns["response_mask"][[0, 5]] = 0.0
    wrapped, batch = wrap_for_training(model, LAYOUT), micros(**columns)
    outputs = Outputs(LAYOUT, 45, names=("log_probs", "entropy"))
    found = backward(wrapped, batch, outputs, ActorLoss("ppo"), num_tokens=17, device=CPU).bad
    assert found is not None
    return found.column, found.sequence, found.token


def refusal(names: tuple[str, ...], role: str, ref_vocab_size: int | None) -> str:
    reference = None if ref_vocab_size is None else actor(vocab_size=ref_vocab_size)
    with pytest.raises(ValueError) as caught:
        forward_only(build_model(HF, LAYOUT, role=role), micros(), Outputs(LAYOUT, 45, names=names), CPU, reference)
    return str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_in_megatrons_buffers_are_autograds(one_rank: Ranks, tied: bool) -> None:
    (pairs,) = one_rank.run(run, "whole_gradients", tied)
    for name, (got, expected) in pairs.items():
        scale = expected.abs().max().item()
        assert (got - expected).abs().max().item() <= 1e-4 * scale, name
        assert scale > 1e-4, name
    assert ("output_layer.weight" in pairs) is not tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_are_those_of_the_definition(one_rank: Ranks, dtype: str) -> None:
    (pairs,) = one_rank.run(run, "columns", NAMES, dtype)
    assert tuple(pairs) == NAMES
    close = 2e-5 if dtype == "float32" else 0.3
    for name, (got, expected) in pairs.items():
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, expected, atol=close, rtol=close, msg=name)
    assert pairs["full_kl"][0].max() > 0.1
    assert pairs["full_kl"][0].min() >= -1e-6
    assert list(one_rank.run(run, "columns", NAMES[2:3], dtype)[0]) == [NAMES[2]], "only the columns asked for"


def test_the_head_keeps_its_name_and_is_called_with_its_hooks(one_rank: Ranks) -> None:
    (found,) = one_rank.run(run, "head")
    assert found == {"parameters": ["output_layer.weight"], "checkpoint": ["output_layer.weight"], "calls": 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_names_its_place(one_rank: Ranks, bad: float) -> None:
    # What a token's hidden states predict is the token after it.
    assert one_rank.run(run, "place_of_bad_logit", bad) == [("log_probs", 1, 7)]


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
    one_rank: Ranks, names: tuple[str, ...], role: str, ref_vocab_size: int | None, words: str
) -> None:
    assert words in one_rank.run(run, "refusal", names, role, ref_vocab_size)[0]
