"""Collector processes: every ticket is filled once, whatever happens to the collectors and to their servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import psutil
import pytest
import torch
from fake_servers import Writer, babbling, completion_of, serving_in_a_process, serving_in_a_thread
from tiny_server import ALPHABET, EOS, VOCAB
from transformers import Qwen3ForCausalLM

from megarl.processes import warm
from megarl.rollout.collect import for_completion
from megarl.rollout.collector.collector_client import CollectorError, Collectors, Ticket
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Prompt, VersionSpan

PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=4)
LIMIT_S = 240.0


@dataclass(frozen=True)
class Result:
    reward: float
    extra: dict[str, float] = field(default_factory=dict)
    pred: str | None = None


@dataclass(frozen=True)
class Breaking:
    """Cannot be pickled, or not be unpickled, when it goes the way "there".  On the way "back" it is sent as it is."""

    way: str
    breaks: str

    def __reduce__(self):
        if self.way == "back":
            return Breaking, (self.way, self.breaks)
        if self.breaks == "sent":
            raise ValueError("this cannot be sent")
        return refuse, ("this cannot be read",)


def refuse(why):
    raise ValueError(why)


class Scorer:
    """Rewards by the number of tokens; a prompt whose ground truth is "boom" breaks it."""

    first_errors = {}

    def __init__(self, bonus=0.0):
        self.bonus, self.started = bonus, False

    def start(self):
        self.started = True

    async def score(self, prompt, completions):
        assert self.started
        if prompt.ground_truth == "boom":
            raise RuntimeError("the reward is broken")
        if prompt.ground_truth == "exit":
            await asyncio.create_task(self.exit())
        if isinstance(prompt.ground_truth, Breaking) and prompt.ground_truth.way == "back":
            return [Result(0.0, {"bad": Breaking("there", prompt.ground_truth.breaks)})]
        heavy = float(any(name.split(".")[0] == "megatron" for name in sys.modules))
        return [Result(len(c.token_ids) + self.bonus, {"megatron": heavy}) for c in completions]

    async def exit(self):
        sys.exit(3)

    def stop(self):
        self.started = False


class Failing(Scorer):
    """Its audit fails on the first group, and its reward on the next ones; all have a number nevertheless."""

    def __init__(self):
        super().__init__()
        self.first_errors = {}

    async def score(self, prompt, completions):
        kind = "trained" if self.first_errors else "audit"
        self.first_errors.setdefault(kind, f"{kind}: no such unit")
        return await super().score(prompt, completions)


class Reader(Scorer):
    """The tokens of a completion as one number."""

    async def score(self, prompt, completions):
        return [Result(number_of(completion.token_ids)) for completion in completions]


def number_of(token_ids):
    return sum(float(token) * VOCAB**place for place, token in enumerate(token_ids))


def prompts(count, first=0, ground_truth=None):
    return [Prompt(f"0-{first + i}", [5, 6, 2 + i % 20], "x", ground_truth) for i in range(count)]


def until(collectors, condition):
    """Wait as a driver does."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        collectors.wait(0.05)
        assert time.monotonic() < deadline, "it has not happened"


def filled(collectors, tickets):
    until(collectors, lambda: all(ticket.group is not None for ticket in tickets))
    return [ticket.group for ticket in tickets]


def expected(prompt, n, params=PARAMS):
    """What `Writer` writes for it."""
    seeds = [for_completion(params, prompt.uid, index).sampling_seed for index in range(n)]
    return [completion_of(seed, len(prompt.token_ids), params.max_new_tokens) for seed in seeds]


def check(tickets, n):
    """Every ticket has the completions of its own prompt."""
    for ticket in tickets:
        assert [sample.learnt_ids for sample in ticket.group] == expected(ticket.prompt, n)
        assert all(sample.prompt is ticket.prompt for sample in ticket.group)


@pytest.fixture
def make_collectors(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "_warm", None)  # as on machines with GPUs: they import for themselves what they need
    made = []

    def make(urls, **options):
        settings = {"token": "", "timeout_s": 200, "make_scorer": partial(Scorer, bonus=0.5), **options}
        collectors = Collectors(urls=urls, tokenizer_path=model_path, log_path=tmp_path / "collector.log", **settings)
        made.append(collectors)
        return collectors

    yield make
    for collectors in made:
        collectors.close()


@pytest.mark.slow
def test_groups_of_a_real_server(server, make_collectors, tmp_path):
    collectors = make_collectors([server.url], token=server.token, piece_tokens=4)
    many = collectors.submit(prompts(20), n=3, params=PARAMS)
    few = collectors.submit(prompts(5, first=20), n=2, params=PARAMS)
    early, late = filled(collectors, many), filled(collectors, few)
    assert [group[0].prompt.uid for group in [*early, *late]] == [f"0-{i}" for i in range(25)]
    assert all(0 < ticket.written_at < ticket.came_at <= time.monotonic() for ticket in [*many, *few])
    assert {len(group) for group in early} == {3} and {len(group) for group in late} == {2}
    for sample in early[0]:
        assert sample.reward == sample.num_learnt + 0.5
        assert sample.reward_extra == {"megatron": 0.0}, "the collector must not load megatron"
        assert sample.versions == (VersionSpan(0, 0, sample.num_learnt),)
        visible = [ALPHABET[token - 2] for token in sample.learnt_ids if token >= 2]
        assert sample.text == "".join(visible), "special tokens are no text"

    again = filled(collectors, collectors.submit(prompts(20), n=3, params=PARAMS))
    for group, same in zip(early, again, strict=True):
        assert [s.learnt_ids for s in group] == [s.learnt_ids for s in same]

    long = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    tickets = collectors.submit(prompts(1), n=2, params=long)
    until(collectors, server.num_running)
    server.engine.abort(everything=True)
    assert [sample.num_learnt for sample in filled(collectors, tickets)[0]] == [1000, 1000]
    tokens = sum(s.num_learnt for group in [*early, *late, *again] for s in group) + 2000
    until(collectors, lambda: collectors.counters["tokens"] == tokens)
    assert collectors.counters["in_flight"] == collectors.counters["orders"] == 0


@torch.inference_mode()
def likeliest_tokens(model, prompt_ids, count):
    """Token after token by a plain forward pass over everything so far."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + count and (len(ids) == len(prompt_ids) or ids[-1] != EOS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


@pytest.mark.slow
def test_the_greedy_completion_that_a_server_writes_is_the_likeliest_one(server, make_collectors):
    collectors = make_collectors([server.url], token=server.token, make_scorer=Reader, piece_tokens=4)
    groups = filled(collectors, collectors.submit(prompts(6), n=3, params=PARAMS, greedy=True))
    model = Qwen3ForCausalLM.from_pretrained(server.model_path, dtype=torch.float32).eval()
    for group in groups:
        (greedy,) = {sample.greedy_reward for sample in group}
        assert greedy == number_of(likeliest_tokens(model, group[0].prompt.token_ids, PARAMS.max_new_tokens))
        assert [sample.reward for sample in group] == [number_of(sample.learnt_ids) for sample in group]
    assert any(sample.reward != sample.greedy_reward for group in groups for sample in group), "the others are drawn"


@pytest.mark.slow
def test_a_broken_reward_reaches_the_driver_as_one_error(make_collectors):
    with serving_in_a_thread(Writer()) as (urls, _):
        collectors = make_collectors(urls)
        tickets = collectors.submit([*prompts(3), *prompts(1, ground_truth="boom")], n=1, params=PARAMS)
        for _ in range(2):
            with pytest.raises(CollectorError, match=r"RuntimeError: the reward is broken.*collector\.log"):
                filled(collectors, tickets)


@pytest.mark.slow
def test_the_first_error_of_the_audit_and_of_the_reward_each_have_a_warning(make_collectors):
    said = []
    with serving_in_a_thread(Writer()) as (urls, _):
        collectors = make_collectors(urls, make_scorer=Failing, warn=said.append)
        for number in range(3):
            filled(collectors, collectors.submit(prompts(1, first=number), n=2, params=PARAMS))
        collectors.close()
    kinds = [sentence.partition("; more errors are in ")[0] for sentence in said]
    assert kinds == ["audit: no such unit", "trained: no such unit"]


@pytest.mark.slow
def test_an_exit_in_a_task_of_a_reward_ends_the_run_with_its_cause(make_collectors):
    """asyncio lets it leave the event loop; another collector with the same seeds would meet it again."""
    with serving_in_a_thread(Writer()) as (urls, _):
        collectors = make_collectors(urls)
        tickets = collectors.submit(prompts(1, ground_truth="exit"), n=1, params=PARAMS)
        with pytest.raises(CollectorError, match=r"SystemExit: 3: code of a reward or an agent ended its collector"):
            filled(collectors, tickets)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["sent", "read"])
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_message_that_cannot_cross_the_pipe_ends_the_run_with_a_sentence(make_collectors, way, breaks):
    with serving_in_a_thread(Writer()) as (urls, _):
        collectors = make_collectors(urls)
        tickets = collectors.submit(prompts(1, ground_truth=Breaking(way, breaks)), n=1, params=PARAMS)
        with pytest.raises(CollectorError, match=rf"ValueError: this cannot be {breaks}; .*collector\.log"):
            filled(collectors, tickets)


@pytest.mark.slow
def test_a_cancelled_order_is_never_filled_and_the_server_stops_writing(make_collectors):
    writer = Writer(stops_after=0)
    with serving_in_a_thread(writer) as (urls, call):
        collectors = make_collectors(urls)
        wanted, unwanted = (collectors.submit(prompts(4, first), n=2, params=PARAMS) for first in (0, 4))
        until(collectors, lambda: len(writer.ended) == 16)
        collectors.cancel([*unwanted, Ticket(prompts(1)[0])])
        until(collectors, lambda: len(writer.ended) == 8)
        call(writer.go.set)
        filled(collectors, wanted)
        check(wanted, 2)
        assert all(ticket.group is None for ticket in unwanted)
        until(collectors, lambda: collectors.counters.get("in_flight") == 0)
        assert collectors.counters["orders"] == 0


@pytest.mark.slow
def test_a_held_server_waits_for_its_trust(make_collectors):
    writer = Writer("3")
    with serving_in_a_thread(writer) as (urls, _):
        collectors = make_collectors(urls, fenced=True, salted=True)
        tickets = collectors.submit(prompts(2), n=1, params=PARAMS)
        collectors.trust(urls[0], 3)
        filled(collectors, tickets)
        assert {body["cache_salt"].split(".")[1] for body in writer.bodies} == {"3"}
        collectors.hold(urls[0])
        later = collectors.submit(prompts(2, first=2), n=1, params=PARAMS)
        for _ in range(20):
            collectors.wait(0.02)
        assert len(writer.bodies) == 2
        collectors.trust(urls[0], 4)
        writer.version = "4"
        filled(collectors, later)
        check([*tickets, *later], 1)


@pytest.mark.slow
def test_a_server_that_answers_nonsense_is_named_once_and_asked_no_more(make_collectors):
    with serving_in_a_thread(babbling, Writer()) as (urls, _):
        collectors, unfit = make_collectors(urls, fenced=True, reports_unfit=True), []
        for url in urls:
            collectors.trust(url, 0)
        tickets = collectors.submit(prompts(12), n=2, params=PARAMS)
        filled(collectors, tickets)
        check(tickets, 2)
        until(collectors, lambda: unfit.extend(collectors.take_unfit().items()) or unfit)
        ((url, reason),) = unfit
        assert url == urls[0] and reason.startswith("3 requests ")
        later = collectors.submit(prompts(12, first=12), n=2, params=PARAMS)
        filled(collectors, later)
        check(later, 2)
        assert collectors.take_unfit() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "options", "what"),
    [
        (signal.SIGKILL, {}, "ended with exit code -9"),
        (signal.SIGSTOP, {"heartbeat_s": 3.0}, "gave no sign of life"),
    ],
    ids=["killed", "stopped"],
)
def test_a_collector_that_is_killed_or_stopped_loses_nothing_and_doubles_nothing(make_collectors, end, options, what):
    writers, said = (Writer(), Writer()), []
    with serving_in_a_thread(*writers) as (urls, call):
        collectors = make_collectors(urls, fenced=True, max_restarts=100, warn=said.append, **options)
        for url in urls:
            collectors.trust(url, 0)
        early = collectors.submit(prompts(20), n=2, params=PARAMS)
        filled(collectors, early)
        early_groups = [ticket.group for ticket in early]
        num_tokens = sum(sample.num_learnt for group in early_groups for sample in group)
        until(collectors, lambda: collectors.counters.get("tokens") == num_tokens)
        for writer in writers:
            writer.stops_after = 0
        tickets = collectors.submit(prompts(40, first=20), n=2, params=PARAMS)
        until(collectors, lambda: sum(len(writer.ended) for writer in writers) == 80)
        (victim,) = collectors.pids
        os.kill(victim, end)
        until(collectors, lambda: collectors.counters["restarts"] >= 1)
        assert not psutil.pid_exists(victim) and collectors.pids != [victim]
        sentence = (
            rf"the collector \(pid {victim}\) {what}; its log: \S+; another one \(pid \d+\) has its 40 open orders"
        )
        assert re.fullmatch(sentence, said[0]), said
        for writer in writers:
            call(writer.go.set)
        filled(collectors, tickets)
        check([*early, *tickets], 2)
        assert all(ticket.group is group for ticket, group in zip(early, early_groups, strict=True))
        asked = Counter(body["sampling_params"]["sampling_seed"] for writer in writers for body in writer.bodies)
        for ticket in early:
            seeds = [for_completion(PARAMS, ticket.prompt.uid, index).sampling_seed for index in range(2)]
            assert [asked[seed] for seed in seeds] == [1, 1], "what was finished is not written again"
        assert collectors.counters["orders"] == 0
        assert collectors.counters["tokens"] >= num_tokens, "totals go on"


@pytest.mark.slow
def test_urgent_orders_pass_those_that_wait_although_the_collector_is_full(make_collectors):
    """As an evaluation while iterations ahead are generated: it waits for what has begun, and for nothing else."""
    writer = Writer(stops_after=0)
    with serving_in_a_thread(writer) as (urls, call):
        collectors = make_collectors(urls, max_in_flight=2)
        tickets = collectors.submit(prompts(10), n=1, params=PARAMS)
        until(collectors, lambda: len(writer.ended) == 2)
        assert collectors.counters["orders_waiting"] == 6, "the collector holds those that run, and as many that wait"
        tickets += collectors.submit(prompts(3, first=10), n=1, params=PARAMS, urgent=True)
        assert collectors.counters["orders_waiting"] == 6
        call(writer.go.set)
        filled(collectors, tickets)
        check(tickets, 1)
        asked = [body["sampling_params"]["sampling_seed"] for body in writer.bodies]
        places = [asked.index(for_completion(PARAMS, ticket.prompt.uid, 0).sampling_seed) for ticket in tickets]
        assert max(places[10:]) < min(places[4:10])


@pytest.mark.slow
def test_a_collector_that_ends_too_often_ends_the_run(make_collectors):
    with serving_in_a_thread(Writer(stops_after=0)) as (urls, _):
        collectors = make_collectors(urls, max_restarts=1)
        tickets = collectors.submit(prompts(4), n=1, params=PARAMS)
        os.kill(collectors.pids[0], signal.SIGKILL)
        until(collectors, lambda: collectors.counters["restarts"] == 1)
        os.kill(collectors.pids[0], signal.SIGKILL)
        with pytest.raises(CollectorError, match=r"after 1 restarts .*ended with exit code -9.*collector\.log"):
            filled(collectors, tickets)


@pytest.mark.slow
def test_two_collectors_share_four_servers(make_collectors, tmp_path):
    writers = [Writer(stops_after=0) for _ in range(4)]
    with serving_in_a_thread(*writers) as (urls, call):
        collectors = make_collectors(urls, num_collectors=2)
        tickets = collectors.submit(prompts(40), n=2, params=PARAMS)
        until(collectors, lambda: sum(len(writer.ended) for writer in writers) == 80)
        assert [len(writer.ended) for writer in writers] == [20, 20, 20, 20]
        clients = [{body["rid"].split("-")[1] for body in writer.bodies} for writer in writers]
        assert len(clients[0]) == len(clients[1]) == 1 and clients[0] != clients[1]
        assert clients[0] == clients[2] and clients[1] == clients[3]
        for writer in writers:
            call(writer.go.set)
        filled(collectors, tickets)
        check(tickets, 2)
    assert len(list(tmp_path.glob("collector_[01].log"))) == 2


@pytest.mark.slow
def test_the_orders_of_a_collector_without_servers_go_to_another_one(make_collectors):
    first, second = Writer(stops_after=0), Writer()
    with serving_in_a_thread(first, second) as (urls, call):
        collectors = make_collectors(urls, num_collectors=2, fenced=True, move_after_s=0.0)
        tickets = collectors.submit(prompts(10), n=2, params=PARAMS)
        assert collectors.counters["orders_waiting"] == 10, "nobody has a server yet"
        collectors.trust(urls[0], 0)
        until(collectors, lambda: len(first.ended) == 20)
        collectors.fence(urls[0])
        collectors.wait(0.05)
        assert collectors.counters["orders_waiting"] == 0, "while no other collector has a server they stay"
        collectors.trust(urls[1], 0)
        filled(collectors, tickets)
        check(tickets, 2)
        assert len(second.bodies) == 20 and collectors.counters["restarts"] == 0
        assert sum(c.num_learnt for t in tickets for c in t.group) > 0


NUM, ROOM, PROMPT_TOKENS = 10_000, 128, 1000
SLACK = ROOM // (8 * 2)  # by which the busier of a collector's two servers may be busier
ORDER_BYTES = 64 * 1024  # far more than a prompt of so many tokens, its JSON, its completion and its task


@pytest.mark.slow
def test_ten_thousand_orders_at_once(make_collectors):
    """None is lost, none is asked twice, and a collector holds only what it has room for.

    Twice ROOM orders bring a collector to its full size.  If it held its half of all orders, it would then grow by
    5,000 prompts of 1,000 tokens, 8 bytes each: 40 MB, beside their tasks.
    """
    with serving_in_a_process(4) as (urls, ask):
        collectors = make_collectors(urls, num_collectors=2, max_in_flight=ROOM)
        first = [Prompt(f"1-{i}", [2 + i % 20] * PROMPT_TOKENS, "") for i in range(4 * ROOM)]
        filled(collectors, collectors.submit(first, n=1, params=PARAMS))
        children = [psutil.Process(pid) for pid in collectors.pids]
        before = [child.memory_info().rss for child in children]
        work = [Prompt(f"0-{i}", [2 + i % 20] * PROMPT_TOKENS, "") for i in range(NUM)]
        tickets = collectors.submit(work, n=1, params=PARAMS)
        grown, sockets = [0, 0], [0, 0]
        while any(ticket.group is None for ticket in tickets):
            collectors.wait(0.2)
            for at, child in enumerate(children):
                grown[at] = max(grown[at], child.memory_info().rss - before[at])
                sockets[at] = max(sockets[at], len(child.net_connections("tcp")))
        check(tickets, 1)
        found = ask()
    assert sum(found["requests"]) == NUM + len(first), "a request was lost, or doubled"
    assert max(grown) < 2 * ROOM * ORDER_BYTES < 40e6
    assert max(found["most"]) <= (ROOM + SLACK) // 2
    # A connection that was idle for too long is closed in the loop's next turn, and counts beside its successor.
    assert 0 < max(sockets) <= 2 * (ROOM + SLACK)
    assert min(found["requests"]) > 0.8 * NUM / 4, "the servers are equally busy"
