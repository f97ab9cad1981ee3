"""Whole steps: their stages, what fits, and what is said of it."""

from dataclasses import replace

import pytest
from plan_jobs import FREE, GPU, HF, job

from megarl.layout import Layout
from megarl.plan.job import Role
from megarl.plan.memory.gpu_budget import gpu_budgets, work_of
from megarl.plan.memory.memory import RESERVE_BYTES, SERVER_BYTES, of_push
from megarl.plan.predict import STAGES, predict, push_time, rollout_time, step_time, training_time

LARGE = replace(GPU, memory_bytes=10**11)


def own(**changes):
    return job(**{"gpu": LARGE, **changes})


def role(name, **changes):
    return Role(name, HF, Layout(), 1, max_tokens=100, log_prob_tokens=100, **changes)


def test_a_step_is_its_stages_one_after_the_other():
    found = predict(own(), FREE)
    assert list(found.stages) == ["gen", "old_log_prob", "update_actor", "update_weights", "other"]
    assert found.step_s == pytest.approx(sum(found.stages.values())) == step_time(own(), FREE)
    assert found.tokens_per_s_per_gpu == pytest.approx(800 / found.step_s)
    assert found.mfu_step == pytest.approx(found.mfu * training_time(own(), FREE) / found.step_s)


def test_all_models_make_all_stages():
    many = own(critic=role("critic"), reference=role("ref", optimizer=None))
    assert tuple(predict(many, FREE).stages) == STAGES


def test_parts_can_be_asked_alone():
    found = predict(own(shared=False), FREE)
    assert found.stages["gen"] == rollout_time(own(shared=False), FREE)
    assert found.stages["update_actor"] == training_time(own(shared=False), FREE)
    assert found.push_s == push_time(own(shared=False), FREE)


def test_ahead_of_the_training_the_slower_half_counts():
    apart = own(shared=False, ahead=1)
    found = predict(apart, FREE)
    learning = found.stages["old_log_prob"] + found.stages["update_actor"] + found.stages["other"]
    assert found.step_s == pytest.approx(max(found.stages["gen"], learning) + found.push_s)
    assert predict(replace(apart, ahead=0), FREE).step_s > found.step_s
    assert apart.num_gpus == 2


def test_every_part_of_every_rank_is_told():
    found = gpu_budgets(own(layout=Layout(pp=4), num_ranks=4))
    assert list(found) == ["actor stage 0", "actor stage 1-2", "actor stage 3", "save", "push", "server"]
    assert {"weights", "gradients", "optimizer", "activations", "reserve", "total"} <= found["actor stage 0"].keys()
    assert "log_prob_chunk" in found["actor stage 3"]
    assert found["server"] | {"total": 0} == {
        "weights": found["server"]["weights"], "kv_cache": int(0.5 * 10**11) - found["server"]["weights"],
        "reserve": RESERVE_BYTES + SERVER_BYTES, "total": 0,
    }  # fmt: skip
    for budget in found.values():
        assert budget["total"] == sum(size for part, size in budget.items() if part != "total")


def test_a_push_is_the_rule_of_memory():
    shared = own(num_ranks=2, server_gpus=2)
    held = of_push(HF, Layout(), 0, work_of(shared.actor), 2, shared.bucket_bytes)
    assert gpu_budgets(shared)["push"]["total"] == sum(held)
    large = gpu_budgets(replace(shared, bucket_bytes=2**33))["push"]
    assert large["total"] - gpu_budgets(shared)["push"]["total"] == 2**33 - shared.bucket_bytes
    assert "server_weights" not in gpu_budgets(replace(shared, shared=False))["push"]


def test_roles_that_stay_are_in_the_way_of_others():
    critic = role("critic")
    together = own(critic=critic)
    found, alone = gpu_budgets(together), gpu_budgets(own())
    held = found["critic"]
    assert found["actor"]["others"] == held["weights"] + held["gradients"] + held["optimizer"]
    assert found["actor"]["total"] == alone["actor"]["total"] + found["actor"]["others"]
    asleep = own(critic=replace(critic, param_offload=True, optimizer_offload=True))
    assert "others" not in gpu_budgets(asleep)["actor"]
    apart = own(critic=replace(critic, first_rank=1))
    assert "others" not in gpu_budgets(apart)["actor"]
    assert apart.num_gpus == 2


def test_adapters_learn_without_gradients_and_moments_of_the_model():
    found = gpu_budgets(own(lora_rank=8))["actor"]
    assert "gradients" not in found and "optimizer" not in found


def test_fsdp_has_a_part_of_what_is_whole_for_a_while():
    found = gpu_budgets(own(fsdp=True, num_ranks=4))["actor"]
    assert 0 < found["gathered"] < found["total"]
    assert "gathered" not in gpu_budgets(own())["actor"]


def test_a_server_takes_its_fraction_and_more():
    shared = gpu_budgets(own())["server"]["total"]
    assert shared == int(0.5 * 10**11) + SERVER_BYTES + RESERVE_BYTES
    assert gpu_budgets(own(shared=False))["server"]["total"] == shared - RESERVE_BYTES


def test_what_does_not_fit_is_named():
    found = predict(own(gpu=replace(GPU, memory_bytes=9 * 10**9)), FREE)
    assert not found.fits
    assert any(why.startswith("server: ") and "of the 9 of a GPU, most of it reserve" in why for why in found.why)
    tight = predict(own(memory_fraction=1e-7), FREE)
    assert not tight.fits
    assert "too little for one sequence of 100 tokens" in tight.why[0]


def test_what_is_slow_is_named():
    waiting = predict(own(layout=Layout(pp=4), num_ranks=4, prompts=4, mini_batch=4), FREE)
    assert any(
        why.startswith("the pipeline idles 75% of its working time, with 4 micro-batches") for why in waiting.why
    )
    full = predict(own(memory_fraction=6e-8, gpu=replace(LARGE, memory_bytes=10**12)), FREE)
    assert any("that its KV cache holds at a time: " in why for why in full.why)


def test_faster_hardware_is_never_slower():
    plain = predict(own(num_ranks=2, layout=Layout(tp=2, sequence_parallel=True), server_gpus=2)).step_s
    for field in ("bf16_flops", "memory_bandwidth", "link_bandwidth", "nic_bandwidth", "host_bandwidth"):
        faster = replace(LARGE, **{field: 2 * getattr(LARGE, field)})
        other = job(gpu=faster, num_ranks=2, layout=Layout(tp=2, sequence_parallel=True), server_gpus=2)
        assert predict(other).step_s <= plain, field
