"""bench_async.py, over loopback: the run's own collectors and prefetcher, servers and a trainer that only sleep.

So two cores stand for many machines: what is measured is the schedule, and all that the driver does for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.async_training.sleeping_servers import SleepingServers, prompt_of, sleeping_servers
from benchmarks.rollout.clients import Free
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.ledger import Ledger
from megarl.data.prompts import Prompts
from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.prefetch import FINISHED, PROMPTS, Prefetcher, PrefetchSettings
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.server_states import Phase, ServerState
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Prompt

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Setting:
    """`mean_s`: seconds of a completion of mean length; the training takes `train` of these."""

    steps: int
    mean_s: float
    warmup: int
    prompts: int = 32
    n: int = 4
    ahead: int = 2
    train: float = 0.5
    servers: int = 8
    places: int = 256  # of a server
    piece_tokens: int = 64


USUAL = Setting(steps=40, mean_s=2.0, warmup=8)
QUICK = Setting(steps=5, mean_s=0.3, warmup=1, prompts=8, servers=2)


class Visits(Prompts):
    """Visit by visit, without end."""

    def __init__(self) -> None: ...

    def visit(self, number: int) -> Prompt:
        return prompt_of(number)


def rows(
    setting: Setting, law: np.ndarray, folder: Path, say: Callable[[str], object] = lambda line: None
) -> list[dict[str, Any]]:
    """A run in either order."""
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    out = []
    for order in (PROMPTS, FINISHED):
        with sleeping_servers(
            setting.servers, law, token_s=setting.mean_s / float(law.mean()), max_running=setting.places
        ) as servers:
            out.append(drive(order, setting, servers, int(law.max()) + 1, folder))
        say(f"order={order}: {out[-1]['step']:.2f} s a step")
    return out


def drive(order: str, setting: Setting, servers: SleepingServers, longest: int, folder: Path) -> dict[str, Any]:
    """A run: wait, take, train, push."""
    train_s, ledger = setting.train * setting.mean_s, Ledger("trace")
    trained: list[int] = []
    lengths: list[int] = []
    ages: list[float] = []
    waited, begun = 0.0, 0.0
    with closing(_collectors(servers, setting, order, folder)) as collectors:
        params = SamplingParams(max_new_tokens=longest, sampling_seed=0)
        settings = PrefetchSettings(setting.prompts, setting.n, params, setting.ahead, order, num_steps=10**9)
        prefetcher = Prefetcher(collectors, ledger, Visits(), settings)
        _push(collectors, servers, 0)
        for step in range(setting.steps):
            if step == setting.warmup:
                begun = time.perf_counter()
            waits = time.perf_counter()
            while not prefetcher.ready():
                pass
            batch = prefetcher.take()
            trained += batch.visits["trained"]
            if step >= setting.warmup:
                waited += time.perf_counter() - waits
                samples = [sample for group in batch.groups for sample in group]
                lengths += [sample.num_learnt for sample in samples]
                ages += [_age(sample.versions, step) for sample in samples]
            time.sleep(train_s)
            _push(collectors, servers, step + 1)
        seconds = time.perf_counter() - begun
    steps = setting.steps - setting.warmup
    settled = ledger.state_dict()
    missing = int(settled["next"]) - len(ledger.open) - len(set(trained))
    return {
        "kind": "trace",
        "rule": order,
        "servers": setting.servers,
        "completions": len(trained) * setting.n,
        "seconds": seconds,
        "step": seconds / steps / setting.mean_s,
        "trainer idle": waited / seconds,
        "token age mean": float(np.average(ages, weights=lengths)),
        "mean length": fmean(lengths),
        "lost": missing,
        "doubled": sum(count - 1 for count in Counter(trained).values()),
    }


def _collectors(servers: SleepingServers, setting: Setting, order: str, folder: Path) -> Collectors:
    return Collectors(
        CollectorSettings(
            tuple(servers.urls),
            "",
            str(folder / "tokenizer"),
            GenerationSettings(
                timeout_s=TIMEOUT_S,
                max_in_flight=setting.servers * setting.places,
                piece_tokens=setting.piece_tokens,
                fenced=True,
            ),
            Free,
            folder / f"collector_{order}.log",
        )
    )


def _push(collectors: Collectors, servers: SleepingServers, version: int) -> None:
    servers.push(version)
    for url in servers.urls:
        collectors.update(ServerState(url, Phase.GENERATING, version))


def _age(spans: Any, version: int) -> float:
    """Mean age of a completion's tokens."""
    return sum((version - span.version) * (span.end - span.start) for span in spans) / spans[-1].end
