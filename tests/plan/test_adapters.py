"""The planner's count of adapters against the shapes of the adapters that are trained."""

from math import prod
from typing import Any

import pytest
from plan_jobs import HF, MOE, changed, job

from megarl.arch.layout import Layout, padded_vocab_size
from megarl.arch.projections import ALL
from megarl.mcore.models.lora import LoraSettings
from megarl.plan.adapters import of_adapters, of_server, trained
from megarl.plan.gpu_budget import gpu_budgets
from megarl.plan.job import Role
from megarl.plan.memory import of_stage_bytes
from megarl.plan.serving import Server
from megarl.weights.count import whole
from megarl.weights.hf.adapter import adapter_table
from megarl.weights.mapping.names import ShardCoordinate

MODELS: dict[str, dict[str, Any]] = {
    "llama": HF,
    "mixtral": MOE,
    "qwen3_moe": HF
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    | {"mlp_only_layers": [1], "head_dim": 8},
    "deepseek_v3": HF
    | {"model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    | {"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 10}
    | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4},
}
MODELS["deepseek_v3 plain"] = MODELS["deepseek_v3"] | {"q_lora_rank": None}
LAYOUTS = [Layout(), Layout(tp=2, sequence_parallel=True), Layout(ep=2), Layout(tp=2, ep=2, etp=1), Layout(ep=2, etp=2)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("layout", "targets"), [*((layout, (ALL,)) for layout in LAYOUTS), (LAYOUTS[3], ("o_proj", "down_proj"))], ids=str
)
def test_a_rank_has_as_many_numbers_as_its_shards(model: str, targets: tuple[str, ...], layout: Layout) -> None:
    hf, here = MODELS[model], ShardCoordinate(tp=layout.tp, ep=layout.ep, etp=layout.expert_tp)
    count = {False: 0, True: 0}
    for op in adapter_table(hf, LoraSettings(3, 6.0, targets)):
        if op.held_by(here):
            count[op.expert is not None] += prod(op.shape_at(here))
    assert of_adapters(hf, layout, 0, 3, targets) == (count[False], count[True])


def test_stages_have_their_own_layers() -> None:
    first, last = (of_adapters(MODELS["deepseek_v3"], Layout(pp=2), stage, 3, (ALL,)) for stage in (0, 1))
    whole = of_adapters(MODELS["deepseek_v3"], Layout(), 0, 3, (ALL,))
    assert (first.dense + last.dense, first.experts + last.experts) == whole
    assert last.experts == 2 * first.experts, "the first layer is dense"


def test_a_server_has_room_for_every_part_of_its_stacked_matrices() -> None:
    """By hand, of rank 1, from the shapes of SGLang's buffers: A has `in` numbers for each part, B has the rows."""
    dense = changed(job(hf=MODELS["llama"]), lora_rank=1, lora_slots=2)
    qkv, up, down = 3 * 16 + 16 + 2 * 8, 2 * 16 + 2 * 32, 32 + 16
    assert of_server(changed(dense, lora_targets=("q_proj", "v_proj"))) == 4 * qkv, "k too"
    assert of_server(changed(dense, lora_targets=("gate_proj", "down_proj"))) == 4 * (up + down), "up too"
    cut = changed(dense, lora_targets=("q_proj", "v_proj", "down_proj"), server_gpus=2)
    assert of_server(cut) == 4 * (3 * 16 + 8 + 2 * 4 + 16 + 16)


def test_a_server_has_room_for_experts_in_every_layer_and_for_whole_latents() -> None:
    hf = MODELS["deepseek_v3"]
    of = changed(job(hf=hf), lora_rank=3, lora_slots=2, server_gpus=4, server_ep=2)
    latents = 2 * 16 + 12 + 10 + 2
    assert of_server(changed(of, lora_targets=("q_a_proj", "kv_a_proj_with_mqa"))) == 3 * 4 * latents
    dense, shared, expert = 32 // 4 + 16, 16 // 4 + 16, 8 // 2 + 16
    assert of_server(changed(of, lora_targets=("down_proj",))) == 3 * (dense + 3 * shared + 4 * 2 * expert)


def test_a_servers_memory_for_adapters_is_not_there_for_its_cache() -> None:
    plain = job(hf=MODELS["llama"])
    held = changed(plain, lora_rank=8, lora_slots=3)
    taken = 2 * 3 * of_server(held)  # in bfloat16
    assert Server(plain).cache_bytes - Server(held).cache_bytes == taken > 0
    assert gpu_budgets(held)["server"]["adapters"] == taken


def test_gradients_and_moments_are_those_of_the_adapters() -> None:
    role = Role("actor", MODELS["llama"], Layout(), 4, lora_rank=2)
    own = trained(role, 0).total
    assert own == 4 * 2 * (2 * 32 + 2 * 24 + 3 * 48)  # per layer q and o 16 + 16, k and v 8 + 16, the others 16 + 32
    base = whole(MODELS["llama"]) + padded_vocab_size(64, 1) * 2 * 16 - 64 * 2 * 16
    assert of_stage_bytes(role, 0)[:3] == (2 * (base + own), 4 * own, 12 * own)
    sharded = Role("actor", MODELS["llama"], Layout(use_distributed_optimizer=True), 4, dtype="float32", lora_rank=2)
    assert of_stage_bytes(sharded, 0)[:3] == (4 * (base + own), 4 * own, 8 * own // 4)
