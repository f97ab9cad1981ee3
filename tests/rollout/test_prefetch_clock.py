"""Runs in virtual time: random lengths, deaths of servers and collectors, kills and resumes of the driver."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.async_training.lengths import Trace, lognormal_trace
from benchmarks.async_training.policies import simulate
from benchmarks.async_training.virtual_rollout import VirtualCollectors, VirtualPrompts
from megarl.data.groups import load_groups, save_groups
from megarl.data.ledger import FILTERED, LOST, TRAINED, Ledger
from megarl.rollout.group_filter import Filter
from megarl.rollout.prefetch import Prefetcher, PrefetchSettings
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Prompt, Sample

OUTCOMES = (TRAINED, FILTERED, LOST)


def visit_of(prompt: Prompt) -> int:
    number: int = prompt.extra["visit"]
    return number


@dataclass
class Schedule:
    """A run of random settings, and what became of its visits: that of steps which a resume forgets is forgotten."""

    seed: int
    folder: Path  # of the groups that wait, between two lives
    rng: random.Random = field(init=False)
    visits: dict[int, dict[str, list[int]]] = field(default_factory=dict)  # by step, as in visits.jsonl

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.num_prompts, self.num_steps, self.n = rng.randint(1, 4), rng.randint(2, 6), rng.randint(1, 2)
        self.order = rng.choice(["prompts", "finished"])
        self.keep = rng.choice([None, Filter(max_batches=99), Filter(refill=False)])
        self.drains = rng.random() < 0.3
        self.turn_s = rng.choice([None, None, 4.0])
        self.loses = self.num_prompts == 4 and rng.random() < 0.5  # so rarely that no iteration loses all it has
        self.saved: Any = (0, json.dumps(Ledger("data").state_dict()), {})

    def lengths(self, prompt: Prompt, n: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{prompt.uid}")
        return [min(40, int(rng.lognormvariate(1.5, 1.0)) + 1) for _ in range(n)]

    def reward(self, prompt: Prompt, index: int) -> float:
        return float(index) if random.Random(f"{self.seed}:{prompt.uid}").random() < 0.6 else 1.0

    def is_lost(self, prompt: Prompt) -> bool:
        return self.loses and visit_of(prompt) % 6 == 5

    def live(self, dies_at: float) -> bool:
        """One life from the last save; returns whether it reached the end of the run before `dies_at`."""
        step, ledger_state, waiting = self.saved
        self.version, self.ahead = step, self.rng.randint(0, 3)
        save_groups(self.folder, waiting)
        waiting = load_groups(self.folder)
        ledger = Ledger("data")
        ledger.load_state_dict(json.loads(ledger_state), finished=waiting)
        servers = VirtualCollectors(
            self.lengths, servers=2, max_running=3, piece_tokens=self.rng.choice([0, 4]), version=step,
            num_collectors=2, reward=self.reward, is_lost=self.is_lost,
        )  # fmt: skip
        settings = PrefetchSettings(
            self.num_prompts, self.n, SamplingParams(max_new_tokens=40, sampling_seed=1), self.ahead, self.order,
            self.num_steps, keep=self.keep if self.n > 1 else None, turn_s=self.turn_s,
        )  # fmt: skip
        clock = lambda: servers.now  # noqa: E731
        prefetcher = Prefetcher(
            servers, ledger, VirtualPrompts(7), settings, first_step=step, waiting=waiting, clock=clock
        )
        for _ in range(self.rng.randrange(4)):
            harm(servers, self.rng, lambda: self.version)
        left_open = len(ledger.open)
        while step < self.num_steps:
            while not prefetcher.ready():
                bound = self.num_prompts * ((self.ahead if self.turn_s is None else max(self.ahead, 1)) + 1)
                assert len(ledger.open) <= max(bound, left_open)
                if servers.now > dies_at:
                    return False
            batch = prefetcher.take()
            self.visits[step] = batch.visits
            servers.sleep(self.rng.choice([0.0, 1.0, 20.0]))
            while self.drains and not prefetcher.is_idle:
                prefetcher.wait()
            step += 1
            self.version = step
            servers.push(step)
            if servers.now > dies_at:
                return False
            if self.rng.random() < 0.5:
                self.saved = step, json.dumps(ledger.state_dict()), prefetcher.waiting
        assert ledger.open == []
        return True


def harm(servers: VirtualCollectors, rng: random.Random, version: Callable[[], int]) -> None:
    """A server or a collector dies, and comes back; `version`: of the weights by then."""
    when, url = rng.uniform(0, 60), rng.choice(servers.urls)
    if rng.random() < 0.5:
        servers.at(when, lambda: servers.kill_collector(rng.randrange(2)))
        return
    servers.at(when, lambda: servers.die(url))
    servers.at(when + 5, lambda: servers.trust(url, version()))


@pytest.mark.full
def test_a_thousand_runs_settle_every_visit_once_whatever_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life has its own lead.  With order=prompts the visits are trained in their order, over all lives."""
    monkeypatch.setattr("megarl.data.groups.os.fsync", lambda file: None)  # its time is that of the disk
    kills = 0
    for seed in range(1000):
        run = Schedule(seed, tmp_path)
        while not run.live(dies_at=run.rng.choice([10.0, 40.0, float("inf")])):
            kills += 1
        settled = Counter(visit for by in run.visits.values() for outcome in OUTCOMES for visit in by[outcome])
        assert set(settled.values()) == {1}, f"seed {seed}: a visit is settled twice"
        assert sorted(settled) == list(range(len(settled))), f"seed {seed}: a visit is missing"
        in_order = [visit for step in sorted(run.visits) for visit in run.visits[step][TRAINED]]
        assert run.order == "finished" or in_order == sorted(in_order), f"seed {seed}: a visit overtook another one"
        trained = len(in_order)
        if run.keep is None or run.n == 1:
            assert len(settled) == run.num_prompts * run.num_steps
        elif run.keep.refill:
            assert trained == run.num_prompts * run.num_steps
    assert kills > 500


def groups_of_steps(seed: int, chance: int) -> list[list[list[Sample]]]:
    """What each step of a run trains that drains, in order, with a refill.  `seed`: lengths and rewards; `chance`: all
    that takes time, and what dies."""
    rng, step = random.Random(chance), 0

    def rng_of(prompt: Prompt) -> random.Random:
        return random.Random(f"{seed}/{prompt.uid}")

    servers = VirtualCollectors(
        lambda prompt, n: [rng_of(prompt).randint(1, 20) for _ in range(n)],
        servers=2, max_running=rng.randint(1, 4), tokens_per_s=rng.choice([0.5, 2.0]), piece_tokens=rng.choice([0, 4]),
        num_collectors=2, reward=lambda prompt, index: index * float(rng_of(prompt).random() < 0.5),
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=20, sampling_seed=1)
    settings = PrefetchSettings(3, 2, params, ahead=2, order="prompts", num_steps=5, keep=Filter(max_batches=99))
    prefetcher = Prefetcher(servers, Ledger("data"), VirtualPrompts(), settings, clock=lambda: servers.now)
    for _ in range(rng.randrange(4)):
        harm(servers, rng, lambda: step)
    found = []
    while step < 5:
        while not prefetcher.ready():
            pass
        found.append(prefetcher.take().groups)
        servers.sleep(rng.choice([0.0, 1.0, 20.0]))
        while not prefetcher.is_idle:
            prefetcher.wait()
        step += 1
        servers.push(step)
    return found


def test_what_drains_in_order_is_the_same_with_dynamic_sampling_whatever_takes_how_long() -> None:
    """Groups, tokens and versions; the oldest tokens are two pushes old."""
    for seed in range(20):
        first, *others = (groups_of_steps(seed, chance) for chance in range(10))
        assert all(other == first for other in others), f"seed {seed}: time decides what is trained"
        ages = {step - s.versions[0].version for step, groups in enumerate(first) for g in groups for s in g}
        assert max(ages) in (1, 2)
        assert all(len(sample.versions) == 1 for groups in first for group in groups for sample in group)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("order", ["finished", "prompts"])
def test_the_lengths_that_are_trained_are_those_of_the_prompts(order: str, ahead: int) -> None:
    """Weights change every 100 s, the time of a mean completion, or more rarely where the trainer waits."""
    num_prompts, n, steps, longest = 16, 4, 240, 800  # a token takes a second
    law = lognormal_trace(num_prompts * (steps + 40), n, mean=100.0, longest=longest)
    servers = VirtualCollectors(Trace(law), servers=4, max_running=64, whole=False)
    settings = PrefetchSettings(num_prompts, n, SamplingParams(max_new_tokens=longest), ahead, order, num_steps=10**6)
    policy = Prefetcher(servers, Ledger("data"), VirtualPrompts(), settings, clock=lambda: servers.now)
    found = simulate(policy, servers, train_s=100.0, steps=steps, warmup=40)
    assert found.distance(law) < 0.03
    assert set(Counter(found.visits).values()) == {1}
    taken = num_prompts * steps
    assert set(range(taken - num_prompts * 60)) <= set(found.visits), "a long answer is late, but it comes"
    assert max(found.visits) < taken + ahead * num_prompts + num_prompts * 60
    if ahead == 3:
        assert (found.idle_share < 0.2) == (order == "finished"), "it waits less if it takes what is finished"
