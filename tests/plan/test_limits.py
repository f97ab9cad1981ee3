"""Predicted times against the limits of a configuration, with numbers that can be followed by hand."""

import json
from dataclasses import replace

import pytest
from plan_jobs import FREE, GPU, HF, job

from megarl import cli
from megarl.config import load_config
from megarl.plan.from_config import job_of
from megarl.plan.gpus import find
from megarl.plan.job import Role, TimeLimits
from megarl.plan.limits import Limit, limits, piece_s, piece_tokens, save_s, update_s, wait_s
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import fullest
from megarl.plan.predict import predict, training_time
from megarl.plan.time.serving import Rollout
from megarl.plan.time.training import training

LARGE = replace(GPU, memory_bytes=10**11)
PLENTY = TimeLimits(1e9, 0, 1e9, 1e9, loads_servers=True, saves=True)
STAGES = {"gen": 40.0, "old_log_prob": 5.0, "update_actor": 30.0, "update_weights": 7.0, "other": 1.0}
WRITTEN = Rollout(1000.0, 0.0, 0.0, 16.0, 0.1, "cache", 16.0)  # 16 completions at a time, 0.1 s a token


def limited(**changes):
    return job(**{"gpu": LARGE, "time_limits": PLENTY, **changes})


def found(run, stages=STAGES):
    return [(limit.what, limit.seconds, limit.key) for limit in limits(run, stages, WRITTEN, FREE)]


@pytest.mark.parametrize(
    ("seconds", "state", "expected"),
    [(50.0, "ok", 100), (50.1, "near", 200), (100.0, "near", 200), (100.1, "exceeded", 300)],
)
def test_half_of_a_limit_is_near_it(seconds, state, expected):
    limit = Limit("gen", seconds, 100.0, "rollout.request_timeout_s")
    assert (limit.state, limit.expected_s) == (state, expected)


def test_a_limit_is_told_with_its_key_and_what_is_expected():
    said = str(Limit("old_log_prob", 130.0, 120.0, "trainer.call_timeout_s"))
    assert said == "trainer.call_timeout_s=120: old_log_prob takes 130 s; expected 300 or more"


def test_a_request_that_takes_longer_is_cut_and_continued():
    request = Limit("a request of 256 tokens", 130.0, 120.0, "rollout.request_timeout_s", continues=True)
    assert request.state == "cut" and replace(request, seconds=120.0).state == "ok"
    assert str(request) == (
        "rollout.request_timeout_s=120: a request of 256 tokens takes 130 s, so it is cut, and another request "
        "continues it; expected 300 or more"
    )


def test_every_time_with_a_limit_is_compared():
    weights = whole(HF)
    run = limited(mini_batch=4)
    assert run.optimizer_steps == 2
    calls = "trainer.call_timeout_s"
    assert found(run) == [
        ("the wait for a first token", 0.0, "rollout.request_timeout_s"),
        ("a request of 50 tokens", 5.0, "rollout.request_timeout_s"),
        ("old_log_prob", 5.0, calls),
        ("update_weights", 7.0, calls),
        ("update_actor, one call", update_s(run, run.actor, FREE), calls),
        ("loading a server", 2 * weights / FREE.disk, "rollout.start_timeout_s"),
        ("saving actor", 14 * weights / FREE.disk, calls),
    ]
    assert found(replace(run, time_limits=None)) == []
    few = replace(PLENTY, loads_servers=False, saves=False)
    assert [what for what, _, _ in found(replace(run, time_limits=few))][-1] == "update_actor, one call"


def test_the_longest_call_of_an_update_is_its_first_which_waits_for_moments():
    plain = limited(mini_batch=4, shared=False)
    assert update_s(plain, plain.actor, FREE) == pytest.approx(training_time(plain, FREE) / 2)
    offloaded = replace(plain, optimizer_offload=True)
    waited = fullest(plain.actor).optimizer / 1e8 - training(plain, None, FREE).passes_s
    assert waited > 0
    assert update_s(offloaded, offloaded.actor, FREE) == pytest.approx(training_time(plain, FREE) / 2 + waited)


def test_a_save_in_the_background_is_no_long_call():
    assert not [what for what, _, _ in found(limited(async_save=True)) if what.startswith("saving")]


def seconds(written=WRITTEN, constants=FREE, piece=0, **changes):
    run = job(**changes)
    return piece_s(run, piece_tokens(run, replace(PLENTY, piece_tokens=piece), constants), written)


def test_a_request_waits_in_its_server_and_is_as_long_as_the_longest_completion():
    # 8 prompts of one completion on one server that holds 16: nothing waits, and 50 tokens take 5 s
    assert seconds() == pytest.approx(50 * 0.1)
    # 48 completions: two turns of 50 tokens before the last ones
    assert seconds(n=6) == pytest.approx((32 / 16 * 50 + 50) * 0.1)
    assert seconds(n=6, num_servers=3) == pytest.approx(50 * 0.1)
    # no more than max_running requests are in flight; ahead of training there are those of two iterations
    assert seconds(prompts=10_000, max_running=64) == pytest.approx((48 / 16 * 50 + 50) * 0.1)
    assert seconds(n=6, shared=False, ahead=1) == pytest.approx((80 / 16 * 50 + 50) * 0.1)
    assert seconds(n=6, shared=False, ahead=1, max_in_flight=64) == pytest.approx((48 / 16 * 50 + 50) * 0.1)
    assert seconds(n=6, shared=False, ahead=1, drains=True) == pytest.approx((32 / 16 * 50 + 50) * 0.1)
    assert seconds(n=6, ahead=1, turn_s=1.0) == pytest.approx((80 / 16 * 50 + 50) * 0.1)
    assert seconds(replace(WRITTEN, seconds=12.0), n=6) == 12.0  # no longer than all of them
    assert seconds(constants=replace(FREE, tail=2.0)) == pytest.approx(50 * 0.1)  # the limit is 100 - 50
    assert seconds(constants=replace(FREE, tail=2.0), longest=150) == pytest.approx(100 * 0.1)


def test_a_request_is_no_longer_than_a_piece():
    assert seconds(piece=20) == pytest.approx(20 * 0.1)
    assert seconds(piece=20, n=6) == pytest.approx((32 / 16 * 20 + 20) * 0.1)  # others' pieces are that short, too
    assert seconds(piece=80, constants=replace(FREE, tail=2.0), longest=150) == pytest.approx(80 * 0.1)
    run = limited(time_limits=replace(PLENTY, piece_tokens=20))
    assert found(run)[1] == ("a request of 20 tokens", pytest.approx(2.0), "rollout.request_timeout_s")


def test_a_request_has_no_token_while_others_are_written():
    assert wait_s(job(), 50, WRITTEN) == 0
    assert wait_s(job(n=6), 50, WRITTEN) == pytest.approx(32 / 16 * 50 * 0.1)  # two turns before the last ones
    assert wait_s(job(n=6), 20, WRITTEN) == pytest.approx(32 / 16 * 20 * 0.1)
    assert wait_s(job(n=6), 50, replace(WRITTEN, seconds=3.0)) == 3.0  # the servers' turn is over


@pytest.mark.parametrize(
    ("changes", "each"), [({}, 14), ({"dtype": "float32"}, 12), ({"optimizer": "sgd"}, 10)], ids=str
)
def test_a_save_is_written_by_all_machines(changes, each):
    role = Role("actor", HF, job().layout, 16, **changes)
    assert save_s(job(), role, FREE) == pytest.approx(each * whole(HF) / (2 * FREE.disk))


def test_adapters_are_a_small_save():
    role = Role("actor", HF, job().layout, 16)
    adapters = save_s(job(), replace(role, lora_rank=1, lora_targets=("q_proj", "o_proj")), FREE)
    assert adapters == pytest.approx(14 * 4 * 2 * 32 / (2 * FREE.disk))


def test_what_takes_too_long_does_not_fit():
    short = limited(time_limits=replace(PLENTY, call_s=1e-9))
    plain, late = predict(limited(), FREE), predict(short, FREE)
    assert plain.fits and not late.fits and not late.fits_local
    assert late.why[0].startswith("trainer.call_timeout_s=1e-09: old_log_prob takes")
    assert predict(replace(short, time_limits=None), FREE).fits


def test_only_a_request_that_waits_too_long_for_its_first_token_does_not_fit():
    short = limited(time_limits=replace(PLENTY, request_s=1e-9))
    cut, late = predict(short, FREE), predict(replace(short, memory_fraction=6e-7), FREE)
    assert cut.fits and any("a request of 50 tokens takes" in why and "it is cut" in why for why in cut.why)
    assert late.concurrency < short.sequences
    assert not late.fits and late.why[0].startswith("rollout.request_timeout_s=1e-09: the wait for a first token takes")


def test_a_configuration_has_its_limits():
    words = ["model=qwen3_8b", "layout=8x80", "rollout.engine=sglang", "trainer.call_timeout_s=77"]
    words += ["trainer.save_freq=5", "rollout.request_timeout_s=33", "rollout.piece_tokens=256"]
    config, _ = load_config(words, command="config")
    start = config.rollout.start_timeout_s
    assert job_of(config, find("h100")).time_limits == TimeLimits(33, 256, start, 77, loads_servers=False, saves=True)


def test_the_plan_shows_what_is_late(capsys):
    words = ["plan", "recipe=grpo_qwen2_5_7b_1x8h100", "rollout.request_timeout_s=40", "trainer.call_timeout_s=30"]
    words.append("rollout.sglang.args=[--enable-dp-attention]")
    assert cli.main(words) == cli.main([*words, "--json"]) == 0
    *text, line = capsys.readouterr().out.splitlines()
    said, answer = "\n".join(text), json.loads(line)
    assert "IT DOES NOT FIT" in said and "- trainer.call_timeout_s=30: " in said
    assert "- rollout.request_timeout_s=40: a request of 2048 tokens takes" in said and "time limits that are " in said
    argument = "rollout.sglang.args=--enable-dp-attention"
    assert f"not modelled: {argument}\n" in said and answer["not_modelled"] == [argument]
    late = {each["key"]: each for each in answer["limits"] if each["state"] in ("exceeded", "cut")}
    assert not answer["fits"] and late["trainer.call_timeout_s"]["state"] == "exceeded"
    request = late["rollout.request_timeout_s"]
    assert (request["limit_s"], request["state"]) == (40, "cut") and request["expected_s"] >= 2 * request["seconds"]
