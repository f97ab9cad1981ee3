"""Host memory of what teachers say of tokens, counted by hand."""

from dataclasses import replace

import pytest
from config_helpers import DENSE, load
from plan_jobs import GPU, HF, job

from megarl.layout import Layout
from megarl.plan.from_config import job_of
from megarl.plan.job import Role
from megarl.plan.memory.host import host_budget
from megarl.plan.memory.taught import RANK_COPIES, STEP_COPIES, driver_bytes, rank_bytes

NARROW, WIDE = (
    Role(f"teachers.{size}", HF | {"hidden_size": size}, Layout(), 1, max_tokens=100, log_prob_tokens=100)
    for size in (8, 24)
)
# 8 prompts of one completion, 50 + 50 tokens; two optimizer steps.
WHOLE = job(teachers=(NARROW, WIDE), reads_heads=True, mini_batch=4, num_ranks=4, layout=Layout(tp=2))
LIKELIEST = replace(WHOLE, reads_heads=False, teacher_top_k=6)


def test_hidden_states_of_the_widest_teacher_travel_one_optimizer_step_at_a_time():
    assert driver_bytes(WHOLE) == STEP_COPIES * 400 * 24 * 2
    assert driver_bytes(replace(WHOLE, dtype="float32")) == 2 * driver_bytes(WHOLE)
    assert driver_bytes(replace(WHOLE, mini_batch=16)) == 2 * driver_bytes(WHOLE)


def test_every_rank_has_those_of_its_replica():
    """Two replicas of two ranks."""
    assert rank_bytes(WHOLE) == RANK_COPIES * 200 * 24 * 2
    assert host_budget(replace(WHOLE, shared=False))["taught"] == driver_bytes(WHOLE) + 4 * rank_bytes(WHOLE)


def test_likeliest_tokens_take_eight_bytes_each_in_the_whole_batch():
    assert driver_bytes(LIKELIEST) == 4 * 800 * 6 * 8
    assert rank_bytes(LIKELIEST) == RANK_COPIES * 200 * 6 * 8


def test_a_machine_of_further_ranks_has_no_driver():
    there = {"first_rank": 8, "gpus_per_node": 8, "shared": False, "teachers": (replace(WIDE, first_rank=8),)}
    large = replace(WHOLE, num_ranks=16, **there)
    assert host_budget(large)["taught"] == 8 * rank_bytes(large)


@pytest.mark.parametrize(
    ("words", "reads_heads", "top_k"),
    [
        ([], True, 0),
        (["distill.top_k=16"], False, 16),
        (["distill.form=reward"], False, 0),
        (["teachers.a.engine=server", "distill.top_k=16", "rollout.engine=hf"], False, 16),
        (None, False, 0),
    ],
)
def test_a_configuration_says_what_travels(words, reads_heads, top_k):
    qwen = f"{DENSE[:-1]},model_type:qwen3}}"
    taught = [] if words is None else ["teachers.a.model.path=t", f"teachers.a.{qwen}", *words]
    found = job_of(load(qwen, *taught), GPU)
    assert (found.reads_heads, found.teacher_top_k) == (reads_heads, top_k)
    assert ("taught" in host_budget(found)) == (reads_heads or top_k > 0)
