"""Adapters on one rank: where their rows go, what they refuse, and that the base stays what it was."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_configs import hf_of

from megarl.arch.layout import Layout
from megarl.arch.projections import ALL, projections_of
from megarl.mcore.checkpoint.checkpoint import adapter_identity
from megarl.mcore.models.lora import LoraSettings, adapted, apply_lora, attached, detach, merged_weight, settings_of
from megarl.mcore.models.model import build_model

HF = hf_of("qwen3", num_hidden_layers=2, tie_word_embeddings=True)  # 4 heads of 16 in 2 groups


def adapted_model(settings: LoraSettings, *, seed: int = 0, dtype: str = "float32") -> Any:
    model = build_model(HF, Layout(), dtype=dtype)
    apply_lora(model, settings, seed=seed)
    return model


def linears(model: Any) -> dict[str, Any]:
    return dict(adapted(model))


def test_a_new_adapter_adds_nothing() -> None:
    linear = linears(adapted_model(LoraSettings(4, 8.0)))["decoder.layers.1.self_attention.linear_qkv"]
    x = torch.randn(5, 1, 32)
    assert torch.equal(linear(x)[0], F.linear(x, linear.weight))
    assert torch.equal(merged_weight(linear), linear.weight)
    assert linear.lora.q_proj.A.any()


def test_a_projections_rows_stand_where_megatron_keeps_them() -> None:
    """In linear_qkv: q0 q1 k0 v0 | q2 q3 k1 v1, 16 rows each."""
    model = adapted_model(LoraSettings(1, 1.0))
    linear = linears(model)["decoder.layers.0.self_attention.linear_qkv"]
    with torch.no_grad():
        for number, projection in enumerate(("q_proj", "k_proj", "v_proj"), start=1):
            low_rank = getattr(linear.lora, projection)
            low_rank.A.fill_(1.0)
            low_rank.B.copy_(100 * number + torch.arange(len(low_rank.B))[:, None] // 16)
    rows = linear.lora.merged()[::16, 0]
    assert rows.tolist() == [100, 101, 200, 300, 102, 103, 201, 301]
    linear = linears(model)["decoder.layers.0.mlp.linear_fc1"]
    with torch.no_grad():
        for projection, number in (("gate_proj", 2.0), ("up_proj", 4.0)):
            getattr(linear.lora, projection).A.fill_(1.0)
            getattr(linear.lora, projection).B.fill_(number)
    assert linear.lora.merged()[:, 7].tolist() == [2.0] * 48 + [4.0] * 48, "gate stands over up"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_weight_does_what_linear_and_adapter_do(dtype: str) -> None:
    model = adapted_model(LoraSettings(4, 8.0), dtype=dtype)
    assert len(linears(model)) == 2 * 4
    for name, linear in linears(model).items():
        for low_rank in linear.lora.projections.values():
            torch.nn.init.normal_(low_rank.B)
        x, before = torch.randn(5, 1, linear.input_size).to(linear.weight.dtype), linear.weight.clone()
        together, merged = linear(x)[0], merged_weight(linear)
        assert together.dtype is merged.dtype is linear.weight.dtype
        # Numbers up to about 10: bf16 has 8 bits, and rounds the sums, the merged weight, and each product's result.
        error = (F.linear(x, merged) - together).abs().max().item()
        assert error < (1e-5 if dtype == "float32" else 0.5), name
        assert torch.equal(linear.weight, before)


def test_only_adapters_are_trained_and_only_those_of_targets() -> None:
    model = adapted_model(LoraSettings(2, 4.0, ("v_proj", "down_proj")))
    names = sorted(name for name, param in model[0].named_parameters() if param.requires_grad)
    of_layer = ("mlp.linear_fc2.lora.down_proj", "self_attention.linear_qkv.lora.v_proj")
    assert names == [f"decoder.layers.{i}.{path}.{x}" for i in range(2) for path in of_layer for x in "AB"]


def test_adapters_are_drawn_by_seed_and_name_whatever_else_is_adapted() -> None:
    every = (ALL,)

    def drawn(targets: tuple[str, ...], seed: int) -> torch.Tensor:
        linear = linears(adapted_model(LoraSettings(2, 4.0, targets), seed=seed))["decoder.layers.1.mlp.linear_fc2"]
        return linear.lora.down_proj.A

    assert torch.equal(drawn(every, 3), drawn(("down_proj",), 3))
    assert not torch.equal(drawn(every, 3), drawn(every, 4))
    assert drawn(every, 3).abs().max() <= 48**-0.5


def test_a_model_says_what_it_is_adapted_by_and_on_which_base() -> None:
    plain = build_model(HF, Layout())
    assert settings_of(plain) is None
    assert adapter_identity(plain) is None
    settings = LoraSettings(2, 4.0, ("q_proj",))
    model = adapted_model(settings)
    assert settings_of(model) == settings
    before = adapter_identity(model)
    assert before is not None
    assert (before["rank"], before["alpha"], before["targets"]) == (2, 4.0, ["q_proj"])
    with torch.no_grad():
        model[0].decoder.layers[0].self_attention.linear_qkv.lora.q_proj.A.add_(1.0)
    assert adapter_identity(model) == before, "the adapters are no part of the base"
    with torch.no_grad():
        model[0].decoder.layers[1].mlp.linear_fc2.weight[3, 5] += 1e-6
    assert adapter_identity(model) != before


@pytest.mark.parametrize(
    ("rank", "targets", "expected"),
    [
        (0, ["q_proj"], "lora.rank=0: expected at least 1"),
        *(
            (4, targets, f"lora.targets={targets}: expected all-linear, or some of q_proj, k_proj, v_proj, q_a_proj, ")
            for targets in ([], ["q_proj", "lm_head"], ["q_proj", "q_proj"], ["all-linear", "q_proj"])
        ),
        (
            4,
            ["q_a_proj", "o_proj"],
            "lora.targets=['q_a_proj', 'o_proj']: this model has no q_a_proj; expected all-lin",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(rank: int, targets: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        adapted_model(LoraSettings(rank, 8.0, tuple(targets)))
    assert str(caught.value).startswith(expected)


def test_all_linear_becomes_what_the_model_has() -> None:
    settings = settings_of(adapted_model(LoraSettings(2, 4.0)))
    assert settings is not None
    assert settings.targets == projections_of(HF)
    assert sorted(settings.targets) == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def test_a_base_computes_with_the_set_that_is_attached_and_is_itself_without_one() -> None:
    model = adapted_model(LoraSettings(2, 4.0), seed=1)
    path = "decoder.layers.1.self_attention.linear_proj"
    linear, x = linears(model)[path], torch.randn(5, 1, 64)
    before = F.linear(x, linear.weight)
    with torch.no_grad():
        linear.lora.o_proj.B.fill_(0.1)
    with_first = linear(x)[0]
    first = detach(model)
    assert settings_of(model) is None and not linears(model)
    assert torch.equal(linear(x)[0], before)
    apply_lora(model, LoraSettings(3, 3.0, ("o_proj",)), seed=2)
    with torch.no_grad():
        linear.lora.o_proj.B.fill_(-0.2)
    with_second = linear(x)[0]
    second = detach(model)
    for adapters, expected in ((first, with_first), (second, with_second), (None, before), (first, with_first)):
        with attached(model, adapters):
            assert torch.equal(linear(x)[0], expected)
            assert settings_of(model) == (adapters.settings if adapters else None)
        assert settings_of(model) is None and not linears(model)
    assert len(list(first.parameters())) == 2 * 2 * 7
