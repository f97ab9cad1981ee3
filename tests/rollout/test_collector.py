"""The collector process with a real server and small rewards of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from tiny_server import ALPHABET, EOS, VOCAB
from transformers import Qwen3ForCausalLM

from megarl.rollout.collect import collect_group, for_prompt
from megarl.rollout.collector import pack, unpack
from megarl.rollout.collector_client import CollectorClient, CollectorError
from megarl.rollout.pool import RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Completion, LostRollout, Prompt, VersionSpan

PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=4)


@dataclass(frozen=True)
class Result:
    reward: float
    extra: dict[str, float] = field(default_factory=dict)


class Scorer:
    """Rewards by the number of tokens; a prompt whose ground truth is "boom" breaks it, "slow" keeps it waiting."""

    def __init__(self, bonus=0.0):
        self.bonus, self.started = bonus, False

    def start(self):
        self.started = True

    async def score(self, prompt, completions):
        assert self.started
        if prompt.ground_truth == "boom":
            raise RuntimeError("the reward is broken")
        if prompt.ground_truth == "slow":
            await asyncio.sleep(600)
        heavy = float(any(name.split(".")[0] == "megatron" for name in sys.modules))
        return [Result(len(c.token_ids) + self.bonus, {"megatron": heavy}) for c in completions]

    def stop(self):
        self.started = False


class Reader(Scorer):
    """The tokens of a completion as one number."""

    async def score(self, prompt, completions):
        return [Result(number_of(completion.token_ids)) for completion in completions]


def number_of(token_ids):
    return sum(float(token) * VOCAB**place for place, token in enumerate(token_ids))


def prompts(count, first=0, ground_truth=None):
    return [Prompt(f"0-{first + i}", [5, 6, 2 + i % 20], "x", ground_truth) for i in range(count)]


def groups_of(collector, ticket, limit_s=200):
    while not collector.ready(ticket, limit_s=limit_s):
        pass
    return collector.take(ticket)


@pytest.fixture
def make_collector(hf_served, tmp_path):
    streams = []

    def make(**options):
        settings = {"urls": [hf_served.url], "token": hf_served.token, "timeout_s": 200}
        settings |= {"make_scorer": partial(Scorer, bonus=0.5), **options}
        collector = CollectorClient(
            tokenizer_path=hf_served.model_path, log_path=tmp_path / "collector.log", **settings
        )
        streams.append(collector)
        return collector

    yield make
    for collector in streams:
        collector.close()


def test_groups_come_back_in_the_order_of_their_prompts_and_tickets_in_any(server, make_collector):
    collector = make_collector()
    progress = []
    first = collector.submit(prompts(20), n=3, params=PARAMS)
    second = collector.submit(prompts(5, first=20), n=2, params=PARAMS)
    late = groups_of(collector, second)
    while not collector.ready(first, limit_s=200):
        progress.append(collector.progress(first))
    early = collector.take(first)
    assert [group[0].prompt.uid for group in [*early, *late]] == [f"0-{i}" for i in range(25)]
    assert {len(group) for group in early} == {3} and {len(group) for group in late} == {2}
    assert all(done <= total == 20 for done, total in progress)
    for sample in early[0]:
        assert sample.reward == len(sample.completion.token_ids) + 0.5
        assert sample.reward_extra == {"megatron": 0.0}, "the collector must not load megatron"
        assert sample.completion.versions == (VersionSpan(0, 0, len(sample.completion.token_ids)),)
        visible = [ALPHABET[token - 2] for token in sample.completion.token_ids if token >= 2]
        assert sample.completion.text == "".join(visible), "special tokens are no text"
    with pytest.raises(KeyError):
        collector.ready(first)

    again = groups_of(collector, collector.submit(prompts(20), n=3, params=PARAMS))
    for group, same in zip(early, again, strict=True):
        assert [s.completion.token_ids for s in group] == [s.completion.token_ids for s in same]

    aborted = collector.submit(prompts(1), n=2, params=SamplingParams(max_new_tokens=3000, ignore_eos=True))
    deadline = time.monotonic() + 200
    while not server.engine.server_info()["internal_states"][0]["num_running_reqs"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.engine.abort(everything=True)
    (lost,) = groups_of(collector, aborted)
    assert isinstance(lost, LostRollout) and "2 of 2 completions were aborted" in lost.reason

    ticket = collector.submit(prompts(1, ground_truth="slow"), n=1, params=PARAMS)
    assert not collector.ready(ticket, timeout_s=0.0), "it waits no longer than one asks it to"
    with pytest.raises(CollectorError, match=r"0 of 1 prompts within 0\.2 s.*collector\.log"):
        groups_of(collector, ticket, limit_s=0.2)
    os.kill(collector.pid, signal.SIGKILL)
    with pytest.raises(CollectorError, match=r"ended with exit code -9.*collector\.log"):
        groups_of(collector, ticket)
    with pytest.raises(CollectorError, match="exit code -9"):
        collector.submit(prompts(1), n=1, params=PARAMS)


@torch.inference_mode()
def likeliest_tokens(model, prompt_ids, count):
    """Token after token by a plain forward pass over everything so far."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + count and (len(ids) == len(prompt_ids) or ids[-1] != EOS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def test_the_greedy_completion_that_a_server_writes_is_the_likeliest_one(server, make_collector):
    collector = make_collector(make_scorer=Reader)
    groups = groups_of(collector, collector.submit(prompts(6), n=3, params=PARAMS, greedy=True))
    model = Qwen3ForCausalLM.from_pretrained(server.model_path, dtype=torch.float32).eval()
    for group in groups:
        (greedy,) = {sample.greedy_reward for sample in group}
        assert greedy == number_of(likeliest_tokens(model, group[0].prompt.token_ids, PARAMS.max_new_tokens))
        assert [sample.reward for sample in group] == [number_of(sample.completion.token_ids) for sample in group]
    assert any(sample.reward != sample.greedy_reward for group in groups for sample in group), "the others are drawn"


def test_a_broken_reward_reaches_the_driver_as_one_error(server, make_collector):
    collector = make_collector()
    ticket = collector.submit([*prompts(3), *prompts(1, ground_truth="boom")], n=1, params=PARAMS)
    with pytest.raises(CollectorError, match=r"RuntimeError: the reward is broken.*collector\.log"):
        groups_of(collector, ticket)


class FakePool:
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def generate(self, prompt_ids, n, params, rid=None):
        self.asked.append((n, params))
        answer = self.answer.get(n) if isinstance(self.answer, dict) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer


def collect(pool, params=PARAMS, **how):
    scorer = Scorer()
    scorer.start()
    (prompt,) = prompts(1)
    return asyncio.run(collect_group(pool, prompt, 2, params, scorer.score, decode=lambda ids: f"{ids}", **how))


def completion(reason="stop"):
    return Completion([4, 1], [-1.0, -0.5], reason, (VersionSpan(2, 0, 2),))


def test_a_group_is_decoded_and_scored():
    group = collect(FakePool([completion(), completion("length")]))
    assert [sample.completion.text for sample in group] == ["[4, 1]"] * 2
    assert [sample.reward for sample in group] == [2.0, 2.0]


def test_a_greedy_completion_is_asked_for_once_and_gives_its_reward_to_all():
    greedy = Completion([4, 5, 6, 1], [-1.0] * 4, "stop", (VersionSpan(2, 0, 4),))
    pool = FakePool({2: [completion(), completion("length")], 1: [greedy]})
    drawn = SamplingParams(temperature=0.5, top_p=0.5, top_k=3, max_new_tokens=6, sampling_seed=4)
    group = collect(pool, drawn, greedy=True)
    assert [(sample.reward, sample.greedy_reward) for sample in group] == [(2.0, 4.0), (2.0, 4.0)]
    assert pool.asked[1] == (1, SamplingParams(temperature=0.0, max_new_tokens=6))
    assert unpack(pack(group), group[0].prompt) == group
    assert [sample.greedy_reward for sample in collect(FakePool([completion()] * 2))] == [None, None]


def test_a_lost_or_aborted_greedy_completion_loses_its_group():
    drawn = [completion(), completion()]
    lost = collect(FakePool({2: drawn, 1: RolloutFailed("3 attempts failed")}), greedy=True)
    assert lost == LostRollout(prompts(1)[0], "3 attempts failed")
    aborted = collect(FakePool({2: drawn, 1: [completion("abort")]}), greedy=True)
    assert isinstance(aborted, LostRollout) and "1 of 3" in aborted.reason


def test_a_failed_rollout_becomes_a_value():
    lost = collect(FakePool(RolloutFailed("3 attempts failed")))
    assert lost == LostRollout(prompts(1)[0], "3 attempts failed")


def test_an_aborted_completion_loses_its_group():
    lost = collect(FakePool([completion(), completion("abort")]))
    assert isinstance(lost, LostRollout)
    assert "1 of 2" in lost.reason


def test_every_prompt_has_a_seed_of_its_own():
    seeds = {for_prompt(PARAMS, f"0-{i}").sampling_seed for i in range(100)}
    assert len(seeds) == 100
    assert for_prompt(PARAMS, "0-1") == for_prompt(PARAMS, "0-1")
    assert for_prompt(SamplingParams(), "0-1").sampling_seed is None


def test_packing_a_group_loses_nothing():
    group = collect(FakePool([completion(), completion("length")]))
    assert unpack(pack(group), group[0].prompt) == group
    lost = LostRollout(group[0].prompt, "why")
    assert unpack(pack(lost), lost.prompt) == lost
