"""Host memory of sampling-mask replay, counted by hand."""

from dataclasses import replace

from config_helpers import DENSE, load
from plan_jobs import GPU, job

from megarl.plan.from_config import job_of
from megarl.plan.memory.host import host_budget
from megarl.plan.memory.support import COPIES, driver_bytes

QWEN = f"{DENSE[:-1]},model_type:qwen3}}"
NARROWED = job(most_drawn=20, num_servers=1)


def test_each_generated_token_has_the_most_ids_and_every_token_their_number():
    """8 prompts of one completion, 50 + 50 tokens."""
    assert driver_bytes(NARROWED) == COPIES * (8 * 50 * 20 + 8 * 100) * 4
    assert driver_bytes(replace(NARROWED, ahead=3)) == (COPIES + 3) * (8 * 50 * 20 + 8 * 100) * 4


def test_it_is_counted_on_the_machine_of_the_driver():
    assert host_budget(NARROWED)["support"] == driver_bytes(NARROWED)


def test_without_narrowing_nothing_is_counted():
    assert driver_bytes(job()) == 0


def test_the_most_ids_are_those_of_top_k_or_the_vocabulary():
    """QWEN has a vocabulary of 120."""
    for words, most in ((["top_k=20"], 20), (["top_k=500"], 120), (["top_p=0.5"], 120), ([], 0)):
        config = load(QWEN, "rollout.engine=hf", *(f"rollout.{word}" for word in words))
        assert job_of(config, GPU).most_drawn == most
