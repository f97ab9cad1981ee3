"""Runs in virtual time: random lengths, deaths of servers and collectors, kills and resumes of the driver."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from virtual_rollout import VirtualCollectors, VirtualPrompts

from megarl.data.ledger import FILTERED, LOST, TRAINED, Ledger
from megarl.rollout.prefetch import Filter, Prefetcher
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Prompt

OUTCOMES = (TRAINED, FILTERED, LOST)


def visit_of(prompt: Prompt) -> int:
    number: int = prompt.extra["visit"]
    return number


@dataclass
class Schedule:
    """A run of random settings, and what became of its visits: that of steps which a resume forgets is forgotten."""

    seed: int
    rng: random.Random = field(init=False)
    visits: dict[int, dict[str, list[int]]] = field(default_factory=dict)  # by step, as in visits.jsonl

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.num_prompts, self.num_steps, self.n = rng.randint(1, 4), rng.randint(2, 6), rng.randint(1, 2)
        self.ahead, self.order = rng.randint(0, 3), rng.choice(["prompts", "finished"])
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
        self.version = step
        ledger = Ledger("data")
        ledger.load_state_dict(json.loads(ledger_state), finished=waiting)
        servers = VirtualCollectors(
            self.lengths, servers=2, max_running=3, piece_tokens=self.rng.choice([0, 4]), version=step,
            num_collectors=2, reward=self.reward, is_lost=self.is_lost,
        )  # fmt: skip
        prefetcher = Prefetcher(
            servers, ledger, VirtualPrompts(7), num_prompts=self.num_prompts, n=self.n, ahead=self.ahead,
            params=SamplingParams(max_new_tokens=40, sampling_seed=1), order=self.order, first_step=step,
            num_steps=self.num_steps, waiting=waiting, keep=self.keep if self.n > 1 else None, turn_s=self.turn_s,
            clock=lambda: servers.now,
        )  # fmt: skip
        for _ in range(self.rng.randrange(4)):
            self.harm(servers)
        while step < self.num_steps:
            while not prefetcher.ready():
                bound = self.num_prompts * ((self.ahead if self.turn_s is None else max(self.ahead, 1)) + 1)
                assert len(ledger.open) <= max(bound, len(waiting))
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

    def harm(self, servers: VirtualCollectors) -> None:
        """A server or a collector dies, and comes back."""
        when, url = self.rng.uniform(0, 60), self.rng.choice(servers.urls)
        if self.rng.random() < 0.5:
            servers.at(when, lambda: servers.kill_collector(self.rng.randrange(2)))
            return
        servers.at(when, lambda: servers.die(url))
        servers.at(when + 5, lambda: servers.trust(url, self.version))


def test_a_thousand_runs_settle_every_visit_once_whatever_dies() -> None:
    kills = 0
    for seed in range(1000):
        run = Schedule(seed)
        while not run.live(dies_at=run.rng.choice([10.0, 40.0, float("inf")])):
            kills += 1
        settled = Counter(visit for by in run.visits.values() for outcome in OUTCOMES for visit in by[outcome])
        assert set(settled.values()) == {1}, f"seed {seed}: a visit is settled twice"
        assert sorted(settled) == list(range(len(settled))), f"seed {seed}: a visit is missing"
        trained = sum(len(by[TRAINED]) for by in run.visits.values())
        if run.keep is None or run.n == 1:
            assert len(settled) == run.num_prompts * run.num_steps
        elif run.keep.refill:
            assert trained == run.num_prompts * run.num_steps
    assert kills > 500
