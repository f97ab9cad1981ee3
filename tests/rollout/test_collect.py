"""One prompt becomes a group: seeds, text, rewards, and what happens when a completion fails."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
from chat_templates import byte_tokenizer, source
from fake_servers import EOS, Writer, completion_of, refusing, silent
from hypothesis import given
from hypothesis import strategies as st
from pools import pool_of, until
from several_rows import groups_of_rows

from megarl.rewards.result import RewardResult
from megarl.rollout.collect import Completions, for_completion, text_of
from megarl.rollout.collector.messages import pack, unpack
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Completion, LostRollout, Prompt, Sample, VersionSpan

PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=4)
PROMPT = Prompt("0-7", [5, 6, 9], "x")


async def number_of_tokens(prompt, completions):
    return [RewardResult(float(len(completion.token_ids)), {"n": 1.0}) for completion in completions]


class Listed(Completions):
    def _text(self, completion):
        return f"{completion.token_ids}"


async def collect(pool, n=2, params=PARAMS, prompt=PROMPT, score=number_of_tokens, **how):
    return await Listed(pool, None, score).group(prompt, n, params, **how)


async def test_a_group_is_written_with_a_seed_for_each_completion_then_decoded_and_scored():
    async with pool_of(Writer()) as (pool, _, seen):
        for piece_tokens in (0, 1, 4):
            pool.settings = replace(pool.settings, piece_tokens=piece_tokens)
            group = await collect(pool, n=3)
            assert [sample.learnt_ids for sample in group] == [
                completion_of(for_completion(PARAMS, "0-7", index).sampling_seed, 3, 6) for index in range(3)
            ]
            for sample in group:
                tokens = sample.learnt_ids
                assert (sample.text, sample.reward) == (f"{tokens}", float(len(tokens)))
                assert (sample.prompt, sample.reward_extra, sample.greedy_reward) == (PROMPT, {"n": 1.0}, None)
        assert [body["sampling_params"]["n"] for body in seen[0][:3]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("finish", "special_tokens", "text"),
    [
        ("stop", False, "12 = 3"),
        ("stop", True, "<think>12</think> = 3"),
        ("length", False, "12 = 3"),
        ("length", True, "<think>12</think> = 3<|im_end|>"),
    ],
)
def test_rewards_read_special_tokens_if_they_are_to(finish, special_tokens, text):
    """As of models whose tags of reasoning are special tokens."""
    tokenizer = byte_tokenizer(source("chatml"), special_tags=True)
    written = Completion(tokenizer.encode("<think>12</think> = 3<|im_end|>"), [], finish, ())
    assert text_of(tokenizer, written, special_tokens=special_tokens) == text


def test_seeds_depend_on_the_run_the_visit_and_the_index_alone():
    seeds = {for_completion(PARAMS, f"0-{i}", index).sampling_seed for i in range(100) for index in range(8)}
    assert len(seeds) == 800
    assert for_completion(PARAMS, "0-1", 2) == for_completion(PARAMS, "0-1", 2)
    assert for_completion(PARAMS, "0-1", 2) != for_completion(SamplingParams(6, sampling_seed=5), "0-1", 2)
    assert for_completion(SamplingParams(), "0-1", 0).sampling_seed is None


async def test_the_completions_of_a_prompt_prefer_one_server():
    async with pool_of(Writer(), Writer()) as (pool, _, seen):
        prompts = [Prompt(f"0-{i}", [5, i], "x") for i in range(8)]
        await asyncio.gather(*(collect(pool, n=4, prompt=prompt) for prompt in prompts))
        for bodies in seen:
            asked = [body["input_ids"][1] for body in bodies]
            assert len(asked) == 16 and all(asked.count(prompt) == 4 for prompt in asked)


class Greedy(Writer):
    """A request without a seed is the greedy one."""

    async def write(self, body, ended):
        if "sampling_seed" in body["sampling_params"]:
            return await super().write(body, ended)
        return [7, 8, EOS], "stop"


async def test_a_greedy_completion_is_asked_for_once_and_gives_its_reward_to_all():
    drawn = SamplingParams(temperature=0.5, top_p=0.5, top_k=3, max_new_tokens=6, sampling_seed=4)
    async with pool_of(Greedy()) as (pool, _, seen):
        group = await collect(pool, params=drawn, greedy=True)
        assert [sample.greedy_reward for sample in group] == [3.0, 3.0] and len(seen[0]) == 3
        (greedy,) = [b["sampling_params"] for b in seen[0] if b["sampling_params"]["temperature"] == 0]
        assert (greedy["top_p"], greedy["top_k"], greedy["max_new_tokens"]) == (1.0, -1, 6)
        assert unpack(pack(group), PROMPT) == group


class Failing(Writer):
    """Refuses the request of one seed as soon as all others are being written."""

    def __init__(self, seed, others):
        super().__init__(stops_after=0)
        self.seed, self.others = seed, others

    async def write(self, body, ended):
        if body["sampling_params"].get("sampling_seed") != self.seed:
            return await super().write(body, ended)
        await until(lambda: len(self.ended) > self.others)
        return [], "length"  # no tokens: a failed attempt


@pytest.mark.parametrize("greedy", [False, True])
async def test_one_lost_completion_loses_its_group_and_frees_the_servers(greedy):
    server = Failing(for_completion(PARAMS, "0-7", 1).sampling_seed, others=2 + greedy)
    async with pool_of(server, retries=0) as (pool, *_):
        lost = await collect(pool, n=3, greedy=greedy)
        assert isinstance(lost, LostRollout) and lost.prompt == PROMPT
        assert lost.reason.startswith("1 attempts failed: http") and "before the first token" in lost.reason
        await until(lambda: not server.ended)  # the others are cancelled, and the server hears of it
        assert pool.counters()["in_flight"] == 0


async def test_the_tokens_of_a_lost_or_cancelled_group_are_counted():
    first, second = (for_completion(PARAMS, "0-7", index) for index in range(2))
    tokens = completion_of(first.sampling_seed, 3, 6)

    async def refuses_one(request):
        if (await request.json())["sampling_params"]["sampling_seed"] != second.sampling_seed:
            return await writer(request)
        await until(lambda: pool.counters()["pieces"])
        return await (silent if cancelled else refusing)(request)

    writer, cancelled = Writer(), False
    async with pool_of(refuses_one) as (pool, *_):
        assert isinstance(await collect(pool), LostRollout)
        assert pool.counters()["wasted_lost"] == pool.counters()["tokens"] == len(tokens)
    cancelled = True
    async with pool_of(refuses_one) as (pool, *_):
        asked = asyncio.create_task(collect(pool))
        await until(lambda: pool.counters()["pieces"])
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pool.counters()["wasted_cancelled"] >= len(tokens)


def test_packing_a_group_loses_nothing():
    columns = {"experts": np.arange(10, dtype=np.uint8).reshape(5, 2)}
    spans = (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2))
    completion = Completion([4, 1], [-1.0, -0.1], "stop", spans, "ab", columns)
    group = [Sample.of(PROMPT, completion, 0.5, {"a": 1.0}, 2.0), Sample.of(PROMPT, completion, 1.5)]
    found = unpack(pack(group), PROMPT)
    assert found == group
    for sample in found:
        assert sample.rows[0].columns["experts"].dtype == np.uint8
        assert np.array_equal(sample.rows[0].columns["experts"], columns["experts"])
    lost = LostRollout(PROMPT, "why")
    assert unpack(pack(lost), PROMPT) == lost


@given(st.integers(0, 10**6), st.booleans())
def test_packing_samples_of_several_rows_loses_nothing_and_sends_no_prompt(seed, rewards):
    (group,) = groups_of_rows(seed, 1, rewards=rewards)
    prompt = group[0].prompt
    packed = pickle.loads(pickle.dumps(pack(group)))
    assert unpack(packed, prompt) == group
    for sample, (rows, *_) in zip(group, packed, strict=True):
        for row, (num_shared, token_ids, *_) in zip(sample.rows, rows, strict=True):
            size = len(prompt.token_ids) * (row.token_ids[: len(prompt.token_ids)] == prompt.token_ids)
            assert (num_shared, len(token_ids)) == (size, len(row.token_ids) - size)


def refusing_to_score(*places):
    """Rewards of 1, and none for the completions at these places."""

    async def score(prompt, completions):
        return [f"no judge {at}" if at in places else RewardResult(1.0) for at in range(len(completions))]

    return score


async def test_a_completion_without_a_reward_leaves_its_group():
    async with pool_of(Writer()) as (pool, *_):
        whole = await collect(pool, n=4)
        group = await collect(pool, n=4, score=refusing_to_score(1, 3))
        assert [s.learnt_ids for s in group] == [whole[at].learnt_ids for at in (0, 2)]
        left = sum(whole[at].num_learnt for at in (1, 3))
        assert pool.counters()["wasted_unscored"] == left


@pytest.mark.parametrize(
    ("n", "greedy", "places", "reason"),
    [
        (3, False, (0, 2), "2 of 3 completions could not be scored; the first: no judge 0"),
        (1, False, (0,), "1 of 1 completions could not be scored; the first: no judge 0"),
        (3, True, (3,), "1 of 4 completions could not be scored; the first: no judge 3"),
    ],
)
async def test_a_group_in_which_nothing_is_left_to_compare_is_lost(n, greedy, places, reason):
    async with pool_of(Writer()) as (pool, *_):
        lost = await collect(pool, n=n, greedy=greedy, score=refusing_to_score(*places))
        assert lost == LostRollout(PROMPT, reason, unscored=len(places))
        assert unpack(pack(lost), PROMPT) == lost
        counters = pool.counters()
        assert counters["wasted_unscored"] == counters["tokens"]
