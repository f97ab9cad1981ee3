"""What the plan says of the calls to the ranks."""

from __future__ import annotations

import pytest

from megarl.config import Config, load_config
from megarl.plan.from_config import job_of
from megarl.plan.gpus import find
from megarl.plan.predict import predict
from megarl.trainer.call_times import predicted_s


def composed(*words: str) -> Config:
    recipe = ["recipe=grpo_qwen2_5_7b_1x8h100", "data.train_files=[train.jsonl]"]
    return load_config([*recipe, *words], command="config")[0]


def test_calls_take_the_time_of_their_stage_and_updates_that_of_an_optimizer_step() -> None:
    config = composed("data.train_batch_size=64", "actor.ppo_mini_batch_size=16", "actor.ppo_epochs=2")
    stages = predict(job_of(config, find("h100"))).stages
    expected = {"columns actor": stages["old_log_prob"], "update actor": stages["update_actor"] / 8}
    if "ref" in stages:
        expected["columns ref"] = stages["ref"]
    found = predicted_s(config, "NVIDIA H100 80GB HBM3")
    assert found == pytest.approx(expected) and min(found.values()) > 0


@pytest.mark.parametrize("device", ["cpu", "", "NVIDIA A10", "NVIDIA H100 PCIe"])
def test_nothing_is_said_of_other_devices(device: str) -> None:
    assert predicted_s(composed(), device) == {}


def test_nor_of_a_model_that_is_not_known() -> None:
    """Its folder is made when the run starts."""
    config, _ = load_config(["recipe=quickstart", "model.path=nowhere"], command="config")
    assert predicted_s(config, "NVIDIA H100 80GB HBM3") == {}
