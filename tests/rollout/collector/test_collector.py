"""Collector processes: every ticket is filled once, whatever happens to the collectors and to their servers."""

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial

import psutil
import pytest
from fake_servers import Writer, babbling, completion_of, serving_in_a_process, serving_in_a_thread
from states import fenced, held, trusted
from tiny_server import ALPHABET

from megarl.processes import programs
from megarl.rewards.result import RewardResult
from megarl.rollout.collect import for_completion
from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_client import CollectorError, Collectors, Ticket
from megarl.rollout.collector.messages import Order
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Prompt, VersionSpan

PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=4)
LIMIT_S = 240.0


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
            return [RewardResult(0.0, {"bad": Breaking("there", prompt.ground_truth.breaks)})]
        heavy = float(any(name.split(".")[0] == "megatron" for name in sys.modules))
        return [RewardResult(len(c.token_ids) + self.bonus, {"megatron": heavy}) for c in completions]

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


def seeds_of(ticket, n):
    return [for_completion(PARAMS, ticket.prompt.uid, index).sampling_seed for index in range(n)]


def check(tickets, n):
    """Every ticket has the completions of its own prompt: what `Writer` writes for it."""
    for ticket in tickets:
        size = len(ticket.prompt.token_ids)
        expected = [completion_of(seed, size, PARAMS.max_new_tokens) for seed in seeds_of(ticket, n)]
        assert [sample.learnt_ids for sample in ticket.group] == expected
        assert all(sample.prompt is ticket.prompt for sample in ticket.group)


@pytest.fixture
def make_collectors(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(
        programs, "_forked", frozenset()
    )  # as on machines with GPUs: they import for themselves what they need
    made = []

    def make(urls, *, token="", make_scorer=None, **options):
        """`options`: of the generation, and of Collectors."""
        make_scorer = make_scorer or partial(Scorer, bonus=0.5)
        names = options.keys() & {field.name for field in fields(GenerationSettings)}
        generation = GenerationSettings(timeout_s=200, **{name: options.pop(name) for name in names})
        log = tmp_path / "collector.log"
        settings = CollectorSettings(tuple(urls), token, model_path, generation, make_scorer, log)
        collectors = Collectors(settings, **options)
        made.append(collectors)
        return collectors

    yield make
    for collectors in made:
        collectors.close()


@pytest.fixture
def collecting(make_collectors):
    """With servers in a thread; yields (collectors, urls, a function that calls another one beside the servers)."""

    @contextmanager
    def run(*handlers, **options):
        with serving_in_a_thread(*handlers) as (urls, call):
            yield make_collectors(urls, **options), urls, call

    return run


@pytest.mark.full
def test_groups_of_a_real_server(server, make_collectors):
    collectors = make_collectors([server.url], token=server.token, piece_tokens=4)
    many = collectors.submit(prompts(20), n=3, params=PARAMS)
    few = collectors.submit(prompts(5, first=20), n=2, params=PARAMS)
    early, late = filled(collectors, many), filled(collectors, few)
    assert [group[0].prompt.uid for group in [*early, *late]] == [f"0-{i}" for i in range(25)]
    assert all(0 < ticket.generated_at < ticket.came_at <= time.monotonic() for ticket in [*many, *few])
    assert {len(group) for group in early} == {3} and {len(group) for group in late} == {2}
    for sample in early[0]:
        assert sample.reward == sample.num_learnt + 0.5
        assert sample.reward_extra == {"megatron": 0.0}, "the collector must not load megatron"
        assert sample.versions == (VersionSpan(0, 0, sample.num_learnt),)
        visible = [ALPHABET[token - 2] for token in sample.learnt_ids if token >= 2]
        assert sample.text == "".join(visible), "special tokens are no text"
    tokens = sum(sample.num_learnt for group in [*early, *late] for sample in group)
    until(collectors, lambda: collectors.counters["tokens"] == tokens)
    assert collectors.counters["in_flight"] == collectors.counters["orders"] == 0


@pytest.mark.full
def test_prompts_may_hold_ids_that_the_model_has_and_the_tokenizer_has_not(collecting):
    """A model writes ids of the padding of its vocabulary, which are in the prompt of the next turn."""
    with collecting(Writer(), num_ids=400) as (collectors, *_):
        padded, outside = (Prompt(f"0-{highest}", [5, highest], "x", None) for highest in (399, 400))
        (group,), (lost,) = (filled(collectors, collectors.submit([p], n=2, params=PARAMS)) for p in (padded, outside))
        assert len(group) == 2
        assert "the prompt holds token ids outside 0 .. 399" in lost.reason


@pytest.mark.full
@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("boom", "RuntimeError: the reward is broken"),
        # asyncio lets it leave the event loop; another collector with the same seeds would meet it again.
        ("exit", "SystemExit: 3: code of a reward or an agent ended its collector"),
        *(
            (Breaking(way, breaks), f"ValueError: this cannot be {breaks}; ")  # it cannot cross the pipe
            for way in ("there", "back")
            for breaks in ("sent", "read")
        ),
    ],
    ids=["boom", "exit", "there_sent", "there_read", "back_sent", "back_read"],
)
def test_a_broken_reward_or_message_ends_the_run_with_its_cause(collecting, truth, why):
    with collecting(Writer()) as (collectors, urls, _):
        tickets = collectors.submit(prompts(1, ground_truth=truth), n=1, params=PARAMS)
        for _ in range(1 if truth == "exit" else 2):
            with pytest.raises(CollectorError, match=rf"{why}.*collector\.log"):
                filled(collectors, tickets)


@pytest.mark.full
def test_the_first_error_of_the_audit_and_of_the_reward_each_have_a_warning(collecting):
    said = []
    with collecting(Writer(), make_scorer=Failing, warn=said.append) as (collectors, urls, _):
        for number in range(3):
            filled(collectors, collectors.submit(prompts(1, first=number), n=2, params=PARAMS))
        collectors.close()
    kinds = [sentence.partition("; more errors are in ")[0] for sentence in said]
    assert kinds == ["audit: no such unit", "trained: no such unit"]


@pytest.mark.full
def test_a_cancelled_order_is_never_filled_and_the_server_stops_writing(collecting):
    writer = Writer(stops_after=0)
    with collecting(writer) as (collectors, _, call):
        wanted, unwanted = (collectors.submit(prompts(4, first), n=2, params=PARAMS) for first in (0, 4))
        until(collectors, lambda: len(writer.ended) == 16)
        collectors.cancel([*unwanted, Ticket(Order(-1, prompts(1)[0], 2, PARAMS))])
        until(collectors, lambda: len(writer.ended) == 8)
        call(writer.go.set)
        filled(collectors, wanted)
        check(wanted, 2)
        assert all(ticket.group is None for ticket in unwanted)
        until(collectors, lambda: collectors.counters.get("in_flight") == 0)
        assert collectors.counters["orders"] == 0


@pytest.mark.full
def test_a_held_server_waits_for_its_trust(collecting):
    writer = Writer("3")
    with collecting(writer, fenced=True, salted=True) as (collectors, urls, _):
        tickets = collectors.submit(prompts(2), n=1, params=PARAMS)
        collectors.update(trusted(urls[0], 3))
        filled(collectors, tickets)
        assert {body["cache_salt"].split(".")[1] for body in writer.bodies} == {"3"}
        collectors.update(held(urls[0]))
        later = collectors.submit(prompts(2, first=2), n=1, params=PARAMS)
        for _ in range(20):
            collectors.wait(0.02)
        assert len(writer.bodies) == 2
        collectors.update(trusted(urls[0], 4))
        writer.version = "4"
        filled(collectors, later)
        check([*tickets, *later], 1)


@pytest.mark.full
def test_a_server_that_answers_nonsense_is_named_once_and_asked_no_more(collecting):
    unfit = []
    with collecting(babbling, Writer(), fenced=True, reports_unfit=True) as (collectors, urls, _):
        for url in urls:
            collectors.update(trusted(url, 0))
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "options", "what"),
    [(signal.SIGKILL, {}, "ended with exit code -9"), (signal.SIGSTOP, {"heartbeat_s": 3.0}, "gave no sign of life")],
    ids=["killed", "stopped"],
)
def test_a_collector_that_is_killed_or_stopped_loses_nothing_and_doubles_nothing(collecting, end, options, what):
    writers, said = (Writer(), Writer()), []
    with collecting(*writers, fenced=True, max_restarts=100, warn=said.append, **options) as (collectors, urls, call):
        for url in urls:
            collectors.update(trusted(url, 0))
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
            assert [asked[seed] for seed in seeds_of(ticket, 2)] == [1, 1], "what was finished is not written again"
        assert collectors.counters["orders"] == 0
        assert collectors.counters["tokens"] >= num_tokens, "totals go on"


@pytest.mark.full
def test_urgent_orders_pass_those_that_wait_although_the_collector_is_full(collecting):
    """As an evaluation while iterations ahead are generated: it waits for what has begun, and for nothing else."""
    writer = Writer(stops_after=0)
    with collecting(writer, max_in_flight=2) as (collectors, urls, call):
        tickets = collectors.submit(prompts(10), n=1, params=PARAMS)
        until(collectors, lambda: len(writer.ended) == 2)
        assert collectors.counters["orders_waiting"] == 6, "the collector holds those that run, and as many that wait"
        tickets += collectors.submit(prompts(3, first=10), n=1, params=PARAMS, urgent=True)
        assert collectors.counters["orders_waiting"] == 6
        call(writer.go.set)
        filled(collectors, tickets)
        check(tickets, 1)
        asked = [body["sampling_params"]["sampling_seed"] for body in writer.bodies]
        places = [asked.index(*seeds_of(ticket, 1)) for ticket in tickets]
        assert max(places[10:]) < min(places[4:10])


@pytest.mark.full
def test_a_collector_that_ends_too_often_ends_the_run(collecting):
    with collecting(Writer(stops_after=0), max_restarts=1) as (collectors, urls, _):
        tickets = collectors.submit(prompts(4), n=1, params=PARAMS)
        os.kill(collectors.pids[0], signal.SIGKILL)
        until(collectors, lambda: collectors.counters["restarts"] == 1)
        os.kill(collectors.pids[0], signal.SIGKILL)
        with pytest.raises(CollectorError, match=r"after 1 restarts, .*ended with exit code -9.*collector\.log"):
            filled(collectors, tickets)


@pytest.mark.full
def test_the_orders_of_a_collector_without_servers_go_to_another_one(collecting, tmp_path):
    first, second = Writer(stops_after=0), Writer()
    with collecting(first, second, num_collectors=2, fenced=True, move_after_s=0.0) as (collectors, urls, call):
        tickets = collectors.submit(prompts(10), n=2, params=PARAMS)
        assert collectors.counters["orders_waiting"] == 10, "nobody has a server yet"
        collectors.update(trusted(urls[0], 0))
        until(collectors, lambda: len(first.ended) == 20)
        collectors.update(fenced(urls[0]))
        collectors.wait(0.05)
        assert collectors.counters["orders_waiting"] == 0, "while no other collector has a server they stay"
        collectors.update(trusted(urls[1], 0))
        filled(collectors, tickets)
        check(tickets, 2)
        assert len(second.bodies) == 20 and collectors.counters["restarts"] == 0
    assert len(list(tmp_path.glob("collector_[01].log"))) == 2


NUM, ROOM, PROMPT_TOKENS = 10_000, 128, 1000
SLACK = ROOM // (8 * 2)  # by which the busier of a collector's two servers may be busier
ORDER_BYTES = 64 * 1024  # far more than a prompt of so many tokens, its JSON, its completion and its task


@pytest.mark.full
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
