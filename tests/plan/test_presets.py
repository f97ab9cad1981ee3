"""configs/model: every layout of every preset can be, and fits on the GPUs that it is named by."""

import pytest
from preset_files import MINIS, NAMES, PUBLISHED, cases_of, content_of, hf_of

from megarl.config import load_config
from megarl.layout import misfits, numbers_of, rank_misfits
from megarl.mcore.models.families import family_of
from megarl.plan.gpus import of_memory
from megarl.plan.job import Job
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import gpu_budgets
from megarl.plan.memory.memory import Work, of_stage_bytes

ISSUED = """
    qwen2_5_0_5b qwen2_5_1_5b qwen2_5_3b qwen2_5_7b qwen2_5_14b qwen2_5_32b qwen2_5_72b
    qwen3_0_6b qwen3_1_7b qwen3_4b qwen3_8b qwen3_14b qwen3_32b qwen3_30b_a3b qwen3_235b_a22b
    llama3_2_1b llama3_2_3b llama3_1_8b llama3_1_70b llama3_1_405b
    mistral_7b mistral_7b_v0_1 mixtral_8x7b mixtral_8x22b deepseek_v3_671b
    kimi_k2_1t glm4_5_355b glm4_5_air_106b minimax_m2_229b gpt_oss_20b gpt_oss_120b
    qwen2_5_mini qwen3_mini qwen3_moe_mini llama3_mini mistral_mini mixtral_mini deepseek_v3_mini
    kimi_k2_mini glm4_5_mini minimax_m2_mini gpt_oss_mini
"""
CACHE_BYTES = 8 * 10**9  # the least that a server wants beside its weights
DATA = "data.train_files=[train.jsonl]"


def test_these_models_have_a_preset():
    assert sorted(ISSUED.split()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_megatron_knows_the_model(name):
    assert family_of(hf_of(name)).settings(hf_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_suits_the_model_and_its_ranks(name):
    for case in cases_of(name):
        wrong = [*misfits(numbers_of(hf_of(name)), case.layout), *rank_misfits(case.layout, case.num_ranks)]
        assert not wrong, f"{name} {case.name}: {wrong}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_layout_fits_into_its_gpus(name):
    """Actor, critic and reference each, with the micro-batches of 16384 tokens that are the default."""
    hf = hf_of(name)
    for case in cases_of(name):
        room = int(case.name.split("x")[1]) * 10**9
        for role, optimizer in (("actor", "adamw"), ("critic", "adamw"), ("ref", None)):
            work = Work(num_ranks=case.num_ranks, recompute=case.recomputes, optimizer=optimizer)
            for stage in range(case.layout.pp):
                memory = of_stage_bytes(hf, case.layout, stage, work, role)
                assert memory.total <= room, f"{name} {case.name} {role} stage {stage}: {memory.total / 1e9:.1f} GB"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layout_is_named_by_its_gpus_all_of_which_serve(name):
    for case in cases_of(name):
        gpus, memory = (int(part) for part in case.name.split("x"))
        rollout = case.content["rollout"]
        size = rollout.get("tensor_model_parallel_size", 1)
        assert case.num_ranks == gpus == rollout["num_servers"] * size
        weights = 2 * whole(hf_of(name)) / size
        room = rollout["memory_fraction"] * memory * 10**9
        assert weights + CACHE_BYTES < room, f"{name} {case.name}: no room for a server's KV cache"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_push_and_a_server_that_writes_fit_into_their_gpus(name):
    for case in cases_of(name):
        gpu, rollout = of_memory(int(case.name.split("x")[1])), case.content["rollout"]
        assert rollout["placement"] == "shared"
        sizes = {"server_gpus": rollout.get("tensor_model_parallel_size", 1), "num_servers": rollout["num_servers"]}
        fraction = rollout["memory_fraction"]
        job = Job(hf_of(name), gpu, case.layout, case.num_ranks, memory_fraction=fraction, **sizes)
        taken = {kind: room["total"] for kind, room in gpu_budgets(job).items() if kind in ("push", "server")}
        assert max(taken.values()) <= gpu.memory_bytes, f"{name} {case.name}: {taken}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_parallelism_stays_within_a_machine(name):
    for case in cases_of(name):
        assert case.layout.tp <= case.content["trainer"]["n_gpus_per_node"] <= 8


@pytest.mark.parametrize("name", PUBLISHED)
def test_layouts_grow_up_to_hundreds_of_gpus(name):
    sizes = {tuple(int(part) for part in case.name.split("x")) for case in cases_of(name)}
    for memory in (80, 141):
        for gpus in (64, 256):
            assert {(gpus, memory)} <= sizes or whole(hf_of(name)) * 18 > gpus * memory * 10**9 * 0.8


@pytest.mark.parametrize("name", MINIS)
def test_a_mini_is_small(name):
    assert whole(hf_of(name)) < 10**6
    assert [case.name for case in cases_of(name)] == ["1xcpu", "2xcpu", "4xcpu", "8xcpu"]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_composes_with_its_smallest_layout(name):
    assert_composes(cases_of(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_composes_with_every_layout(name):
    for case in cases_of(name):
        assert_composes(case)


def assert_composes(case):
    config, warnings = load_config([*case.words, DATA], command="train")
    assert not warnings
    assert config.model.path == content_of(case.preset)["model"]["path"]
    assert config.trainer.num_ranks == case.num_ranks
    assert config.actor.megatron.tensor_model_parallel_size == case.layout.tp
    assert config.critic.megatron.pipeline_model_parallel_size == case.layout.pp
    assert config.model.config == hf_of(case.preset)
