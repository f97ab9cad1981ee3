"""Prompts that are computed once for their completions, by hand and as the run packs them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_jobs import changed, job

from megarl.arch.gpus import find
from megarl.arch.layout import Layout
from megarl.config import load_config
from megarl.data.prefix_tree import MIN_SHARED, CommonPrefixes, PrefixTree, prefix_groups
from megarl.plan import lengths
from megarl.plan.from_config import job_of
from megarl.plan.job import Job, Role
from megarl.plan.lengths import PrefixGroup, context_of, prefix_group_of
from megarl.plan.predict import computed_tokens
from megarl.plan.training import MicroBatches, RoleOnGpus, computed, micro_batches, scoring, training
from megarl.samples.batch import Batch

ROOMY: dict[str, Any] = {"max_tokens": 1000, "log_prob_tokens": 1000}
# 2 prompts of 50 tokens, 4 completions of 50 each: 800 tokens.
SHARED = job(n=4, prompts=2, mini_batch=2, shares_prefixes=True, **ROOMY)
# of all 8 sequences: 2 prompts, and 8 completions with the last token of their prompt
WHOLE = 2 * 50 + 8 * 51
# where two families share a prompt's completions
HALVES = 4 * 50 + 8 * 51


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, WHOLE),
        ({"shares_prefixes": False}, 800),
        ({"n": 1, "prompts": 8, "mini_batch": 8}, 800),
        ({"num_ranks": 2}, WHOLE),
        ({"num_ranks": 4}, HALVES),
        ({"num_ranks": 8}, 800),
        ({"max_sequences": 2}, HALVES),
        ({"max_sequences": 1}, 800),
        ({"max_tokens": 250, "log_prob_tokens": 250}, HALVES - 2),  # 100 and twice 52 fit; one is left
        ({"max_tokens": 151, "log_prob_tokens": 151}, 800),
    ],
)
def test_a_prompt_counts_once_for_the_completions_that_are_packed_with_it(changes: dict[str, Any], tokens: int) -> None:
    own = changed(SHARED, **changes)
    assert computed(own, own.actor, learns=False) == pytest.approx(tokens)
    assert computed(own, own.actor, learns=True) == pytest.approx(tokens)
    assert _in_a_run(own) == tokens, "the run does the same"


def _in_a_run(own: Job) -> int:
    """Places of the trees of such a step."""
    rows = [[*range(50), *([1000 + 100 * prompt + i] * 50)] for prompt in range(own.prompts) for i in range(own.n)]
    tokens = torch.tensor([row[0:50] for row in rows]) + 60 * (torch.arange(own.sequences) // own.n)[:, None]
    batch = Batch(
        torch.cat([tokens, torch.tensor([row[50:] for row in rows])], 1).flatten(), torch.full((own.sequences,), 100)
    )
    if not own.actor.shares_prefixes:
        return batch.num_tokens
    limits = {"max_tokens": own.actor.max_tokens, "max_sequences": own.actor.max_sequences}
    packed = prefix_groups(batch, own.actor.copies, hidden_size=16, **limits)
    parts = [batch.select(group.members) for group in packed]
    return sum(PrefixTree.of(part, CommonPrefixes.of(part)).num_places for part in parts)


def test_an_optimizer_step_has_fewer_prompts_than_a_pass() -> None:
    """Each of 4 steps has one prompt for 2 replicas, a pass has both."""
    own = changed(SHARED, num_ranks=2, mini_batch=1, epochs=2)
    assert computed(own, own.actor, learns=False) == pytest.approx(WHOLE)
    assert computed(own, own.actor, learns=True) == pytest.approx(2 * HALVES)


def test_a_prompt_of_too_few_tokens_is_not_shared() -> None:
    assert lengths.MIN_SHARED == MIN_SHARED
    own = replace(SHARED, prompt_tokens=MIN_SHARED - 1)
    assert computed(own, own.actor, learns=False) == own.tokens


def test_a_computed_token_attends_to_its_prompt() -> None:
    group = prefix_group_of(SHARED, SHARED.actor, 800, 1000)
    assert group == PrefixGroup(4, 254)
    assert context_of(SHARED, group) == pytest.approx((50**2 + 4 * (2 * 50 * 51 + 50**2)) / 254)


def test_micro_batches_have_whole_families() -> None:
    assert micro_batches(SHARED, SHARED.actor, 800, 1000) == MicroBatches(count=1, tokens=508)
    assert micro_batches(SHARED, SHARED.actor, 800, 350) == MicroBatches(count=2, tokens=254)


def test_passes_and_updates_take_the_time_of_what_they_compute() -> None:
    passes = RoleOnGpus(SHARED, SHARED.actor).stage(0, 508, (50**2 + 4 * (2 * 50 * 51 + 50**2)) / 254)
    assert scoring(SHARED, None) == pytest.approx(passes.forward)
    assert training(SHARED).work_s == pytest.approx(passes.both)


def test_each_stage_has_its_own_number() -> None:
    critic, reference = (Role(name, SHARED.actor.hf, Layout(), 1, **ROOMY) for name in ("critic", "ref"))
    own = replace(SHARED, old_share=0.5, critic=critic, reference=replace(reference, shares_prefixes=True))
    assert computed_tokens(own) == pytest.approx(
        {"old_log_prob": WHOLE / 2, "ref": WHOLE, "values": 800, "update_critic": 800, "update_actor": WHOLE}
    )


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        (["trainer.device=cpu"], True),
        (["trainer.device=cpu", "trainer.share_prefixes=on"], True),
        (["trainer.device=cpu", "trainer.share_prefixes=off"], False),
        (["trainer.device=auto"], False),
        (["trainer.device=auto", "trainer.share_prefixes=on"], True),
        (["trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor.megatron.context_parallel_size=2"], False),
    ],
)
def test_it_is_shared_where_the_run_shares_it(words: list[str], *, shares: bool) -> None:
    config, _ = load_config(["recipe=quickstart", "model=qwen2_5_0_5b", *words], command="config")
    own = job_of(config, find("h100"))
    assert own.actor.shares_prefixes is own.actor.shares_prefixes is shares
    if "trainer.share_prefixes=on" in words:
        assert own.actor.local
