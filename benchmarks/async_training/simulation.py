"""bench_async.py, in virtual time: megarl's two orders and rules that throw away, on up to 1,000 servers.

Each size has its own number of prompts an iteration, so that (ahead + 1) iterations fill the servers' places.  A
completion's length is that of the trace; a mean completion takes one unit of time, and so does nothing else but the
training, `TRAIN_S` units.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.async_training.lengths import Trace
from benchmarks.async_training.policies import DROP, FINISHED, FIRST, PROMPTS, REQUEUE, Outcome, Policy, Rule, simulate
from benchmarks.async_training.virtual_rollout import VirtualCollectors, VirtualPrompts
from megarl.data.ledger import Ledger
from megarl.rollout.prefetch import Prefetcher, PrefetchSettings
from megarl.rollout.protocol import SamplingParams

TRACE = Path(__file__).parent / "trace.json"
TRAIN_S = 0.5
AHEAD = 2
PIECE = 0.5  # of a mean completion
GATHER_S = 0.01  # messages of collectors come together
RULES = (PROMPTS, FINISHED, DROP, REQUEUE, FIRST)
DYING = "finished, a server dies in each step"


@dataclass(frozen=True)
class Size:
    """Example: Size(8, 64, steps=60): eight servers that run 64 completions each."""

    servers: int
    places: int  # of a server
    steps: int

    def prompts(self, n: int, ahead: int) -> int:
        """Of an iteration."""
        return max(1, self.servers * self.places // (n * (ahead + 1)))


SIZES = (Size(8, 64, 80), Size(64, 64, 60), Size(1000, 64, 40))
QUICK = (Size(2, 24, 12),)


def read_trace() -> np.ndarray:
    """Lengths [prompts, n] in tokens."""
    return np.asarray(json.loads(TRACE.read_text())["lengths"], dtype=np.int32)


def rows(sizes: tuple[Size, ...], say: Callable[[str], object] = lambda line: None) -> list[dict[str, Any]]:
    """One for each size and rule."""
    law, out = read_trace(), []
    for size, rule in itertools.product(sizes, (*RULES, DYING)):
        found, lost = outcome(size, rule, law)
        out.append(row(size, rule, law, found, lost))
        say(f"{size.servers} servers, {rule}: {found.step_s:.2f} a step")
    return out


def outcome(size: Size, rule: str, law: np.ndarray) -> tuple[Outcome, int]:
    """A simulated run, and how many visits its rule has thrown away."""
    rate, n, ahead = float(law.mean()), law.shape[1], 0 if rule == FIRST else AHEAD
    servers = VirtualCollectors(
        Trace(law),
        servers=size.servers,
        max_running=size.places,
        tokens_per_s=rate,
        piece_tokens=int(PIECE * rate),
        gather_s=GATHER_S,
        whole=False,
    )
    params = SamplingParams(max_new_tokens=int(law.max()) + 1)
    num_prompts, prompts = size.prompts(n, AHEAD), VirtualPrompts()
    policy: Policy
    if rule in (DROP, REQUEUE, FIRST):
        policy = Rule(rule, servers, prompts, num_prompts=num_prompts, n=n, params=params, ahead=ahead)
    else:
        order = PROMPTS if rule == PROMPTS else FINISHED
        settings = PrefetchSettings(num_prompts, n, params, ahead, order, num_steps=10**9)
        policy = Prefetcher(servers, Ledger("trace"), prompts, settings, clock=lambda: servers.now)

    def on_step(step: int) -> None:
        """The server that died in the last step is back, and the next one will die while completions run."""
        if rule == DYING:
            servers.trust(servers.urls[(step - 1) % size.servers], step + 1)
            servers.at(servers.now + TRAIN_S / 4, lambda: servers.die(servers.urls[step % size.servers]))

    found = simulate(policy, servers, train_s=TRAIN_S, steps=size.steps, warmup=size.steps // 4, on_step=on_step)
    return found, getattr(policy, "lost", 0)


def row(size: Size, rule: str, law: np.ndarray, found: Outcome, lost: int) -> dict[str, Any]:
    """What a page says of it."""
    trained = len(found.visits)
    return {
        "kind": "simulation",
        "rule": rule,
        "servers": size.servers,
        "completions": trained * law.shape[1],
        "step": found.step_s,
        "trainer idle": found.idle_share,
        "servers idle": found.servers_idle_share,
        "token age mean": found.age_mean,
        "p99": found.age(0.99),
        "max": max(found.ages, default=0),
        "KS distance": found.distance(law),
        "mean length": found.mean_length(law),
        "longest 5 %": found.longest(law),
        "tokens wasted": found.wasted_share,
        "prompts lost": lost / (trained + lost),
        "doubled": trained - len(set(found.visits)),
    }
