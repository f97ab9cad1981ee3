"""Whole steps: their stages, what fits, and what is said of it."""

from dataclasses import replace

import pytest
from plan_jobs import FREE, GPU, HF, job

from megarl.arch.layout import Layout, padded_vocab_size
from megarl.plan.constants import CONSTANTS
from megarl.plan.gpu_budget import gpu_budgets
from megarl.plan.job import Role
from megarl.plan.memory import COMMUNICATOR_BYTES, RESERVE_BYTES, SERVER_BYTES, communicator_bytes, push_bucket_bytes
from megarl.plan.predict import STAGES, predict, step_time
from megarl.plan.serving import rollout, step_ahead
from megarl.plan.training import training
from megarl.plan.transfers import mapped_push
from megarl.weights.count import whole

LARGE = replace(GPU, memory_bytes=10**11)


def own(**changes):
    return job(**{"gpu": LARGE, **changes})


def role(name, **changes):
    return Role(name, HF, Layout(), 1, max_tokens=100, log_prob_tokens=100, **changes)


def test_a_step_is_its_stages_one_after_the_other():
    found = predict(own())
    assert list(found.stages) == ["gen", "old_log_prob", "update_actor", "update_weights", "other"]
    assert found.step_s == pytest.approx(sum(found.stages.values())) == step_time(own())
    assert found.tokens_per_s_per_gpu == pytest.approx(800 / found.step_s)
    assert found.mfu_step == pytest.approx(found.mfu * training(own()).seconds / found.step_s)


def test_all_models_make_all_stages():
    many = own(critic=role("critic"), reference=role("ref", optimizer=None))
    assert tuple(predict(many).stages) == tuple(name for name in STAGES if name != "teachers")
    teacher = role("teachers.a", optimizer=None)
    assert tuple(predict(replace(many, teachers=(teacher,))).stages) == STAGES


def test_teachers_share_the_samples_and_stay_on_the_gpu():
    one, other = (role(f"teachers.{name}", optimizer=None) for name in "ab")
    alone, both = predict(own(teachers=(one,))), predict(own(teachers=(one, other)))
    assert both.stages["teachers"] == pytest.approx(alone.stages["teachers"])
    weights = alone.memory["teachers.a"]["weights"]
    assert alone.memory["actor"]["others"] == weights > 0
    assert both.memory["actor"]["others"] == 2 * weights


def test_heads_of_teachers_are_on_the_actor_s_last_stage():
    teacher = role("teachers.a", optimizer=None)
    found = predict(own(teachers=(teacher, teacher), reads_heads=True, layout=Layout(pp=2), num_ranks=2))
    size = 2 * HF["hidden_size"] * padded_vocab_size(HF["vocab_size"], 1) * 2
    budgets = [found.memory[f"actor stage {stage}"] for stage in (0, 1)]
    assert [budget.get("teacher_heads", 0) for budget in budgets] == [0, size]
    assert "teacher_heads" not in predict(own(teachers=(teacher,))).memory["actor"]


def test_ahead_of_the_training_the_slower_half_counts():
    apart = own(shared=False, ahead=1)
    found = predict(apart)
    learning = found.stages["old_log_prob"] + found.stages["update_actor"] + found.stages["other"]
    written = rollout(apart)
    assert found.step_s == pytest.approx(step_ahead(apart, written, learning) + found.push_s)
    assert found.step_s >= max(found.stages["gen"], learning) + found.push_s
    assert predict(replace(apart, ahead=0)).step_s > found.step_s
    assert apart.num_gpus == 2


def test_a_push_that_drains_waits_for_the_servers_tail():
    apart = own(shared=False, ahead=1, drains=True, longest=500)
    constants = replace(FREE, tail=2.0)
    found = predict(replace(apart, constants=constants))
    learning = sum(found.stages.values()) - found.stages["gen"] - found.push_s
    assert found.step_s == pytest.approx(max(found.stages["gen"], learning) + found.push_s)
    assert found.step_s > predict(replace(apart, drains=False, constants=constants)).step_s
    long = replace(apart, response_tokens=1e6, longest=10**7, gpu=replace(LARGE, host_bytes=None))
    assert any("ahead=1 and update=drain the trainer waits" in why for why in predict(long).why)


def test_a_step_of_turns_is_the_servers_turn_and_the_trainers():
    short, long = (predict(own(ahead=1, turn_s=each)) for each in (1e-9, 1e9))
    plain = predict(own())
    assert long.step_s == pytest.approx(plain.step_s)  # all that was begun is finished
    assert short.step_s == pytest.approx(plain.step_s - plain.stages["gen"] + short.stages["gen"])
    assert short.stages["gen"] < plain.stages["gen"]


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


@pytest.mark.parametrize(
    ("layout", "ranks", "has_experts", "groups"),
    [
        (Layout(), 1, False, 0),
        (Layout(tp=8, pp=2), 64, False, 4),  # all, tp, pp, and those with the same part of the model
        (Layout(tp=2, cp=2), 8, False, 5),  # also cp, and tp with cp
        (Layout(tp=2, pp=2, ep=8, etp=1), 64, True, 6),  # also those that share experts, and those with the same ones
    ],
)
def test_each_group_with_several_ranks_has_a_communicator(layout, ranks, has_experts, groups):
    assert communicator_bytes(layout, ranks, has_experts=has_experts) == groups * COMMUNICATOR_BYTES


def test_a_sharded_optimizer_begins_with_two_copies_of_the_weights():
    found = gpu_budgets(own(layout=Layout(use_distributed_optimizer=True), num_ranks=4))
    assert found["start"] == {
        "weights": 2 * 2 * whole(HF), "gradients": 4 * whole(HF), "communicators": 2 * COMMUNICATOR_BYTES,
        "reserve": RESERVE_BYTES, "total": 8 * whole(HF) + 2 * COMMUNICATOR_BYTES + RESERVE_BYTES,
    }  # fmt: skip
    assert "start" not in gpu_budgets(own(num_ranks=4))


def test_a_push_is_the_rule_of_memory():
    shared = own(num_ranks=2, server_gpus=2)
    bucket = push_bucket_bytes(shared.actor, shared.bucket_bytes)
    assert gpu_budgets(shared)["push"] == {
        "weights": 2 * whole(HF), "server_weights": whole(HF), "push_bucket": bucket,
        "reserve": RESERVE_BYTES, "total": 3 * whole(HF) + bucket + RESERVE_BYTES,
    }  # fmt: skip
    large = gpu_budgets(replace(shared, bucket_bytes=2**33))["push"]
    assert large["total"] - gpu_budgets(shared)["push"]["total"] == 2**33 - shared.bucket_bytes
    assert "server_weights" not in gpu_budgets(replace(shared, shared=False))["push"]


def test_a_mapped_push_takes_as_long_as_the_slower_of_gathering_and_loading():
    gpu = replace(own().gpu, memory_bandwidth=100.0)
    job = replace(own(push="shared", server_gpus=2), gpu=gpu, bucket_bytes=200)
    constants = replace(CONSTANTS, memory=0.5, bucket_s=1.0)
    # 1,000 bytes in ten buckets: digests 20 s; each server GPU reads and writes 500 bytes: 20 s, and 10 s of requests.
    assert mapped_push(replace(job, constants=constants), 1000, 5.0) == pytest.approx(30 + 25 / 10)
    assert mapped_push(replace(job, constants=constants), 1000, 80.0) == pytest.approx(100 + 30 / 10)


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


def test_a_server_takes_its_fraction_and_more():
    shared = gpu_budgets(own())["server"]["total"]
    assert shared == int(0.5 * 10**11) + SERVER_BYTES + RESERVE_BYTES
    assert gpu_budgets(own(shared=False))["server"]["total"] == shared - RESERVE_BYTES


def test_what_does_not_fit_is_named():
    found = predict(own(gpu=replace(GPU, memory_bytes=9 * 10**9)))
    assert not found.fits
    assert any(why.startswith("server: ") and "of the 9 of a GPU, most of it reserve" in why for why in found.why)
    tight = predict(own(memory_fraction=1e-7))
    assert not tight.fits
    assert "too little for one sequence of 100 tokens" in tight.why[0]


def test_memory_with_local_layers_is_told_beside_it():
    plain = predict(own())
    # of a token: 6 and 4 times the hidden size, 5 and 3 times the width of the feed-forward; four layers, and one twice
    fused, local = 4 * 16 + 2 * (4 + 2) * 4 + 3 * 32, 4 * 16 + 2 + 3 * (16 + 8) + 3 * 4 + 4 + 3 * 32
    more = 2 * 100 * 5 * (local - fused)
    assert plain.local_totals == {"actor": plain.memory["actor"]["total"] + more}
    assert plain.fits and plain.fits_local
    total = plain.memory["actor"]["total"]
    tight = predict(own(gpu=replace(LARGE, memory_bytes=total + more - 1), shared=False, memory_fraction=0.3))
    (said,) = [why for why in tight.why if why.startswith("without Transformer-Engine (local layers) it does not fit:")]
    assert "actor takes" in said
    assert not tight.fits_local
    both = predict(own(critic=role("critic"), reference=role("ref", optimizer=None)))
    assert set(both.local_totals) == {"actor", "critic", "ref"}
    assert predict(own(local=True)).local_totals == {}  # they are planned with them already


def test_what_is_slow_is_named():
    waiting = predict(own(layout=Layout(pp=4), num_ranks=4, prompts=4, mini_batch=4))
    assert any(
        why.startswith("the pipeline idles 75% of its working time, with 4 micro-batches") for why in waiting.why
    )
    full = predict(own(memory_fraction=6e-8, gpu=replace(LARGE, memory_bytes=10**12)))
    assert any("that its KV cache holds at a time: " in why for why in full.why)


def test_a_trainer_that_waits_ahead_is_named():
    slow = own(
        shared=False, ahead=1, order="prompts", response_tokens=1e6, longest=10**7, gpu=replace(LARGE, host_bytes=None)
    )
    (said,) = [why for why in predict(slow).why if "order=prompts the trainer waits" in why]
    assert said.startswith("with ahead=1 and order=prompts the trainer waits 9") and "% of a step" in said
    assert not [why for why in predict(replace(slow, response_tokens=1.0)).why if "the trainer waits" in why]
