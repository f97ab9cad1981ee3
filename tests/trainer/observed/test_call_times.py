"""What the plan says of the calls to the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config import Config, load_config
from megarl.plan.from_config import job_of
from megarl.plan.gpus import find
from megarl.plan.limits import update_s
from megarl.plan.predict import predict, step_time, training_time
from megarl.plan.time.constants import CONSTANTS
from megarl.trainer.observed.call_times import lost_at_an_end, predicted_s


def composed(*words: str) -> Config:
    recipe = ["recipe=grpo_qwen2_5_7b_1x8h100", "data.train_files=[train.jsonl]"]
    return load_config([*recipe, *words], command="config")[0]


def test_calls_take_the_time_of_their_stage_and_updates_that_of_an_optimizer_step() -> None:
    config = composed("data.train_batch_size=64", "actor.ppo_mini_batch_size=16", "actor.ppo_epochs=2")
    job = replace(job_of(config, find("h100")), old_share=1.0)
    stages = predict(job).stages
    expected = {"columns actor": stages["old_log_prob"], "update actor": update_s(job, job.actor, CONSTANTS)}
    if "ref" in stages:
        expected["columns ref"] = stages["ref"]
    found = predicted_s(config, "NVIDIA H100 80GB HBM3")
    assert found == pytest.approx(expected) and min(found.values()) > 0
    assert found["update actor"] >= training_time(job) / 8, "the first of them waits for moments"


def test_a_pass_that_single_iterations_make_is_known_too() -> None:
    for mini, share in ((64, 0), (16, 0.75)):
        config = composed("data.train_batch_size=64", f"actor.ppo_mini_batch_size={mini}")
        job = job_of(config, find("h100"))
        assert job.old_share == share
        stages, whole = predict(job).stages, predict(replace(job, old_share=1.0)).stages
        assert share * whole["old_log_prob"] <= stages.get("old_log_prob", 0) < whole["old_log_prob"], "not the offload"
        assert predicted_s(config, "NVIDIA H100 80GB HBM3")["columns actor"] == whole["old_log_prob"]


@pytest.mark.parametrize("device", ["cpu", "", "NVIDIA A10", "NVIDIA H100 PCIe"])
def test_nothing_is_said_of_other_devices(device: str) -> None:
    assert predicted_s(composed(), device) == {}


def test_nor_of_a_model_that_is_not_known() -> None:
    """Its folder is made when the run starts."""
    config, _ = load_config(["recipe=quickstart", "model.path=nowhere"], command="config")
    assert predicted_s(config, "NVIDIA H100 80GB HBM3") == {}


def test_a_run_whose_saves_are_far_apart_and_whose_steps_outlast_the_grace_says_what_it_may_lose() -> None:
    """Its step does not end in the time that a scheduler leaves: what counts is the time since the last save."""
    device, words = "NVIDIA H100 80GB HBM3", ["data.train_batch_size=2048", "trainer.save_every_s=null"]
    config = composed(*words)
    step_s = step_time(job_of(config, find("h100")))
    assert 20 * step_s > 3600 and 20 < step_s < 1800, "it saves every 20 steps"
    assert lost_at_an_end(config, device, 500) == (
        f"a step takes about {step_s:.0f} s (predicted), longer than trainer.term_grace_s=20: a run that is asked to "
        f"end may lose the work of {20 * step_s / 3600:.1f} hours since its last save; expected "
        "trainer.save_every_s=1800, or more time where the scheduler gives it"
    )
    assert lost_at_an_end(composed(*words, f"trainer.term_grace_s={step_s + 1}"), device, 500) == "", "it can be saved"
    assert lost_at_an_end(composed(words[0], "trainer.save_every_s=1800"), device, 500) == ""
    never = composed(*words, "trainer.save_freq=-1")
    assert f"the work of {30 * step_s / 3600:.1f} hours" in lost_at_an_end(never, device, 30)
    assert lost_at_an_end(never, device, 1) == "", "it is short"
    assert lost_at_an_end(config, "cpu", 500) == ""
