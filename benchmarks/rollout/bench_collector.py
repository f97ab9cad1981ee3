"""How many requests a second one collector does, beside a bare aiohttp client with the same requests.

    python benchmarks/rollout/bench_collector.py --json

An instant server in a process of its own has every completion ready, so that the client is what takes time.  The bare
client encodes the same bodies, posts them, and parses the answers' JSON, which no client can do without; that is all.
The collector also makes completions of them, decodes these to text, scores them (a reward that costs nothing, in its
own process), and hands samples to the driver.  "tuned" is the bare client with a collector's settings of Python's
search for garbage, which many requests in flight make expensive.  All take turns.

Two ratios, each the median over the rounds: of requests a second, and of the clients' CPU seconds, which other work on
the machine changes less.  The CPU of the driver counts for the collector.  How busy the server was is told: near 1 it
bounds all clients, and the first ratio flatters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import Result, arguments, run
from benchmarks.rollout.bench_rollout import INSTANT, Timed, ratio, serving, take_turns
from benchmarks.rollout.clients import BareClient, Free, RingClient, cpu_seconds, requests
from megarl.data.examples.tiny import tiny_tokenizer, write_tiny_model

GOAL = 0.9
QUICK = {"prompts": 32, "turns": 1}
USUAL = {"prompts": 40_000, "turns": 5}
TITLE = "One collector beside a bare client, requests a second"


def work(options: argparse.Namespace) -> Result:
    sizes = QUICK if options.quick else USUAL
    num, turns = options.prompts or sizes["prompts"], options.turns or sizes["turns"]
    jobs = requests(
        num,
        options.n,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        spread=0.0,
        vocabulary=len(tiny_tokenizer()),
    )
    names = ("n", "prompt_tokens", "new_tokens", "concurrency")
    configuration = {"prompts": num, "rounds": turns, **{name: getattr(options, name) for name in names}}
    with tempfile.TemporaryDirectory(prefix="bench_collector_") as folder:
        model = write_tiny_model(Path(folder) / "model")
        log = Path(folder) / "collector.log"
        with (
            serving("instant", model, "", options, Path(folder)) as url,
            closing(RingClient(url, "", model, options.concurrency, log, Free)) as ring,
            closing(BareClient(url, "", options.concurrency, with_json=True, rare_garbage=False)) as bare,
            closing(BareClient(url, "", options.concurrency, with_json=True)) as tuned,
        ):
            server, begun = server_cpu_s(), perf_counter()
            ours, plain, rare = timed = take_turns([ring, bare, tuned], jobs, turns)
            busy = (server_cpu_s() - server) / (perf_counter() - begun)
            asked, written = num * options.n * options.new_tokens, (ours.tokens, bare.check(), tuned.check())
    if written != (asked,) * 3:
        raise ValueError(f"{asked} tokens were asked for, and {written} came; expected the same")
    rows = []
    for client, name in zip(timed, ("collector", "bare", "tuned"), strict=True):
        row = client.row("instant", name)
        row["requests/s"] = num * options.n / row["seconds"]
        row["client CPU us/request"] = row.pop("client CPU us/token") * options.new_tokens
        row["of it the driver's"] = 1e6 * median(client.driver_s) / (num * options.n)
        rows.append(row)
    notes = [
        f"goal: collector_over_bare at least {GOAL}; the median of {turns} rounds that take turns",
        f"the server was busy for {busy:.0%} of the time",
    ]
    return Result(
        "collector",
        options.device,
        configuration,
        rows,
        {
            "collector_over_bare": ratio(ours, plain),
            "collector_over_bare_cpu": cpu_ratio(ours, plain),
            "collector_over_tuned": ratio(ours, rare),
            "collector_over_tuned_cpu": cpu_ratio(ours, rare),
        },
        notes,
        TITLE,
    )


def server_cpu_s() -> float:
    """Of the instant server, so far."""
    (server,) = [child for child in multiprocessing.active_children() if child.name == INSTANT]
    return cpu_seconds(server.pid)


def cpu_ratio(ours: Timed, theirs: Timed) -> float:
    """The other's CPU seconds for the same requests by ours, the median over the turns."""
    return median(b / r for r, b in zip(ours.cpu_s, theirs.cpu_s, strict=True))


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--prompts", type=int, help=f"default {USUAL['prompts']}")
    found.add_argument("--n", type=int, default=1, help="completions of a prompt, each with its own request")
    found.add_argument("--prompt-tokens", type=int, default=16)
    found.add_argument("--new-tokens", type=int, default=16)
    found.add_argument("--concurrency", type=int, default=10_000, help="requests under way")
    found.add_argument("--turns", type=int, help=f"rounds of each client, default {USUAL['turns']}")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
