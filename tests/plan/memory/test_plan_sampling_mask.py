"""Memory of sampling-mask replay, counted by hand."""

from dataclasses import replace

import numpy as np
from config_helpers import DENSE, load
from plan_jobs import GPU, job

from megarl.plan.from_config import job_of
from megarl.plan.memory.gpu_budget import gpu_budgets_of_trainer
from megarl.plan.memory.host import host_budget
from megarl.plan.memory.support import COPIES, driver_bytes
from megarl.ragged import Ragged

QWEN = f"{DENSE[:-1]},model_type:qwen3}}"
NARROWED = job(most_drawn=20, num_servers=1)


def test_each_token_in_training_has_places_for_the_most_ids_and_every_token_their_number():
    """8 prompts of one completion, 50 + 50 tokens.  One sequence of long lists gives every token as many places."""
    assert driver_bytes(NARROWED) == COPIES * (8 * 100 * 20 + 8 * 100) * 4
    assert driver_bytes(replace(NARROWED, ahead=3)) == driver_bytes(NARROWED) + 3 * (8 * 50 * 20 + 8 * 100) * 4


def test_the_batch_of_a_driver_takes_no_more_than_is_counted():
    """7 sequences whose tokens have one id, and one of a prompt of 1 token and an answer of 99, each with 20 ids."""
    rows = [*[[]] * 50, *[[7]] * 50] * 7 + [[], *[list(range(20))] * 99]
    columns = Ragged.of(rows).spread(np.full(8, 100))
    assert 0.95 * driver_bytes(NARROWED) < COPIES * sum(column.nbytes for column in columns) <= driver_bytes(NARROWED)


def test_the_last_stage_has_the_ids_of_a_micro_batch_and_their_places_in_a_chunk():
    """100 tokens of 20 ids: 4 bytes each and 40 bytes of indices; 64 logits of each token, a byte each."""
    plain, narrowed = (gpu_budgets_of_trainer(each)["actor"] for each in (job(num_servers=1), NARROWED))
    more = 100 * 20 * (4 + 40) + 100 * 64
    assert narrowed["log_prob_chunk"] - plain["log_prob_chunk"] == narrowed["total"] - plain["total"] == more


def test_it_is_counted_on_the_machine_of_the_driver():
    assert host_budget(NARROWED)["support"] == driver_bytes(NARROWED)


def test_without_narrowing_nothing_is_counted():
    assert driver_bytes(job()) == 0


def test_the_most_ids_are_those_of_top_k_or_the_vocabulary():
    """QWEN has a vocabulary of 120."""
    for words, most in ((["top_k=20"], 20), (["top_k=500"], 120), (["top_p=0.5"], 120), ([], 0)):
        config = load(QWEN, "rollout.engine=hf", *(f"rollout.{word}" for word in words))
        assert job_of(config, GPU).most_drawn == most
