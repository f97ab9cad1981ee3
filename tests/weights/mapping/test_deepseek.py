"""DeepSeek-V3's table by hand, against transformers' own folder, and what folders may and may not hold besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import RANDOM_WEIGHTS
from megarl.weights.hf.export import finish_folder
from megarl.weights.hf.folder import open_hf
from megarl.weights.hf.load import check_names
from megarl.weights.mapping.families import ignorable, table_for
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.mapping.server_map import server_table
from megarl.weights.push.buckets import plan_buckets

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 4,
    "num_nextn_predict_layers": 1,
    "vocab_size": 21,
    "tie_word_embeddings": False,
}


def layer(config: dict[str, Any], number: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{number}."
    shapes = {name: shape for op in table_for(config) for name, shape in op.hf_shapes.items()}
    return {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}


ATTENTION = {
    "self_attn.kv_a_proj_with_mqa.weight": (12, 8),
    "self_attn.kv_a_layernorm.weight": (10,),
    "self_attn.kv_b_proj.weight": (14, 10),
    "self_attn.o_proj.weight": (8, 6),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
QUERIES = {
    "self_attn.q_a_proj.weight": (6, 8),
    "self_attn.q_a_layernorm.weight": (6,),
    "self_attn.q_b_proj.weight": (12, 6),
}


def gated(prefix: str, ffn: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}_proj.weight": (ffn, 8) for name in ("gate", "up")} | {
        f"{prefix}.down_proj.weight": (8, ffn)
    }


def test_layers_by_hand() -> None:
    assert layer(CONFIG, 0) == ATTENTION | QUERIES | gated("mlp", 12)
    experts: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (4, 8), "mlp.gate.e_score_correction_bias": (4,)}
    for n in range(4):
        experts |= gated(f"mlp.experts.{n}", 4)
    assert layer(CONFIG, 1) == ATTENTION | QUERIES | experts | gated("mlp.shared_experts", 8)
    assert layer(CONFIG | {"q_lora_rank": None}, 0) == ATTENTION | {"self_attn.q_proj.weight": (12, 8)} | gated(
        "mlp", 12
    )


def test_kimi_k2_is_named_and_cut_as_deepseek_v3() -> None:
    kimi = CONFIG | {"model_type": "kimi_k2"}
    assert table_for(kimi) == table_for(CONFIG)
    assert server_table("sglang", kimi) == server_table("sglang", CONFIG)


def test_a_rank_holds_whole_norms_and_biases_and_its_share_of_the_rest() -> None:
    coordinate = ShardCoordinate(tp_rank=1, tp=2, ep_rank=1, ep=2)
    held = {op.param: op.shape_at(coordinate) for op in table_for(CONFIG) if op.held_by(coordinate) and op.layer == 1}
    attention, mlp = "decoder.layers.1.self_attention", "decoder.layers.1.mlp"
    assert held[f"{attention}.linear_q_down_proj.weight"] == (3, 8)
    assert held[f"{attention}.linear_kv_down_proj.weight"] == (6, 8)
    assert held[f"{attention}.linear_kv_up_proj.weight"] == (7, 10)
    assert held[f"{attention}.kv_layernorm.weight"] == (10,)
    assert held[f"{mlp}.router.expert_bias"] == (4,)
    assert held[f"{mlp}.shared_experts.linear_fc1.weight"] == (8, 8)
    experts = sorted(name for name in held if ".local_experts." in name)
    assert experts == [f"{mlp}.experts.local_experts.{n}.linear_fc{i}.weight" for n in (2, 3) for i in (1, 2)]
    assert held[experts[0]] == (8, 8), "experts are cut over etp, here 1"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", family="deepseek_v3", tied=False, hidden=32, ffn=48)


def rewrite(folder: Path, added: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file)


def check(folder: Path, **changes: Any) -> int:
    """How many tensors the folder holds, each of which has its place in the table."""
    config = json.loads((folder / "config.json").read_text()) | changes
    with open_hf(folder) as held:
        check_names(held, table_for(config), ignorable(config, "actor"))
        return len(held.shapes)


def test_the_table_is_what_transformers_writes(tiny: Path) -> None:
    plain = write_tiny_model(tiny.with_name("plain"), family="deepseek_v3", tied=False, hidden=32, q_lora_rank=None)
    with_lora, without = check(tiny), check(plain)
    assert with_lora - without == 2 * 3, "q_a_proj, its norm and q_b_proj in place of q_proj, in each of three layers"


def test_layers_that_predict_further_tokens_are_passed_over_as_far_as_config_json_counts_them(tiny: Path) -> None:
    rewrite(
        tiny, {"model.layers.3.eh_proj.weight": torch.ones(2), "model.layers.3.shared_head.norm.weight": torch.ones(2)}
    )
    check(tiny, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match="not of this model: model.layers.3.eh_proj.weight"):
        check(tiny)
    rewrite(tiny, {"model.layers.4.eh_proj.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="not of this model: model.layers.4.eh_proj.weight$"):
        check(tiny, num_nextn_predict_layers=1)


def test_an_fp8_folder_is_refused_in_one_sentence(tiny: Path) -> None:
    rewrite(tiny, {"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="o_proj.weight_scale_inv says that its weights are in fp8; expected"):
        check(tiny)


def test_tensors_that_a_server_fuses_share_a_bucket() -> None:
    sizes = {name: (shape, torch.float32) for op in table_for(CONFIG) for name, shape in op.hf_shapes.items()}
    for bucket_bytes in (1, 400, 700, 4_000):
        plan = plan_buckets(sizes, bucket_bytes)
        assert [name for names in plan for name in names] == list(sizes)
        pairs = [names for names in plan if any(".q_a_proj." in name for name in names)]
        assert all(any(".kv_a_proj_with_mqa." in name for name in names) for names in pairs)
    assert len(plan_buckets(sizes, 1)) == len(sizes) - 2, "every other tensor has a bucket of its own"


def test_the_biases_of_a_bf16_model_are_one_bucket_of_float32(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    ops = table_for(config)
    sizes = {
        name: (shape, torch.float32 if op.keeps_dtype else torch.bfloat16)
        for op in ops
        for name, shape in op.hf_shapes.items()
    }
    plan = plan_buckets(sizes, 1 << 30)
    assert [len(names) for names in plan][1] == 2, "one for each layer with experts"
    assert [sizes[names[0]][1] for names in plan] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("q_rank", [6, None])
def test_an_sglang_rank_holds_the_latents_whole_and_its_heads_of_what_they_expand_to(q_rank: int | None) -> None:
    config = CONFIG | {"q_lora_rank": q_rank}
    coordinate = ShardCoordinate(tp_rank=1, tp=2, etp_rank=1, etp=2, attn_rank=1, attn=2)
    table = {op.param.removeprefix("model.layers.1."): op for op in server_table("sglang", config) if op.layer == 1}
    shapes = {name: op.shape_at(coordinate) for name, op in table.items()}
    queries = {
        "self_attn.fused_qkv_a_proj_with_mqa.weight": (18, 8),
        "self_attn.q_a_layernorm.weight": (6,),
        "self_attn.q_b_proj.weight": (6, 6),
    }
    plain = {"self_attn.q_proj.weight": (6, 8), "self_attn.kv_a_proj_with_mqa.weight": (12, 8)}
    assert shapes == (queries if q_rank else plain) | {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.kv_a_layernorm.weight": (10,),
        "self_attn.kv_b_proj.weight": (7, 10),
        "self_attn.o_proj.weight": (8, 3),
        "mlp.gate.weight": (4, 8),
        "mlp.gate.e_score_correction_bias": (4,),
        "mlp.experts.w13_weight": (4, 4, 8),
        "mlp.experts.w2_weight": (4, 8, 2),
        "mlp.shared_experts.gate_up_proj.weight": (8, 8),
        "mlp.shared_experts.down_proj.weight": (8, 4),
    }


def test_an_exported_folder_claims_no_layers_that_were_passed_over(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    given = {"num_nextn_predict_layers": 1, RANDOM_WEIGHTS: True}  # nor that it has no weights
    (tiny / "config.json").write_text(json.dumps(config | given))
    (tmp_path / "out").mkdir()
    finish_folder(tmp_path / "out", tiny, "actor", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"dtype": "bfloat16"}
