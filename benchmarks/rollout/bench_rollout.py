"""How fast a run's own client has completions written, beside a bare load generator that asks the same server.

    python benchmarks/rollout/bench_rollout.py --json              the engines that this machine has
    python benchmarks/rollout/bench_rollout.py --engines sglang --model /models/Qwen3-8B --tp 2 --new-tokens 1024

Both clients send the same prompts, ask for the same numbers of tokens (no end of sequence ends one), and have the same
number of requests under way.  They take turns, and the ratio is the median over the turns: what is lost between the
server and the driver's samples.  Of three such measurements the median counts; on a CPU the first waits for a quiet
machine, ten minutes at most, else it says so.  `instant` is a server that writes nothing: it shows how many tokens a
second a client can take at most, and counts for no ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import Result, arguments, in_rounds, on_cpu, run, with_rounds
from benchmarks.rollout.clients import BareClient, Request, RingClient, cpu_seconds, requests
from benchmarks.rollout.instant import serve
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import tiny_tokenizer, write_tiny_model
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.launch import EngineLaunch
from megarl.servers.sglang_environment import sglang_python
from megarl.servers.supervisor import ServerDied, Servers, free_ports

GOAL = 0.97
INSTANT = "instant server"  # its process
ENGINES = ("hf", "sglang", "instant")
MAX_RUNNING = 512
START_S = 600.0  # of the instant server, on a machine that is busy
HF_SHARE = (
    0.5  # of a GPU: by default the hf engine's KV cache has room for one context, and the clients ask for hundreds
)
POSITIONS = {"cpu": 2048, "cuda": 32768}
GPU_MODEL = TinySizes(hidden=2048, layers=24, heads=16, kv_heads=8, head_dim=128, ffn=6144)
QUICK = {"prompts": 4, "n": 2, "new_tokens": 8, "prompt_tokens": 8, "turns": 1}
SIZES = {"cpu": {"prompts": 64, "n": 8, "new_tokens": 128, "prompt_tokens": 64, "turns": 7}}
SIZES["cuda"] = {"prompts": 512, "n": 8, "new_tokens": 512, "prompt_tokens": 512, "turns": 5}
SIZES["hf on cuda"] = {"prompts": 32, "n": 8, "new_tokens": 128, "prompt_tokens": 128, "turns": 3}  # it is no fast one
SIZES["sglang on cpu"] = {"prompts": 8, "n": 8, "new_tokens": 32, "prompt_tokens": 64, "turns": 5}  # much slower there


class Client(Protocol):
    @property
    def pid(self) -> int | None: ...

    def ready(self, work: Sequence[Request]) -> None: ...

    def ask(self, work: Sequence[Request]) -> int: ...


@dataclass
class Timed:
    """One client's turns."""

    tokens: int = 0  # of one turn
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of its process, its children, and the driver
    driver_s: list[float] = field(default_factory=list)  # of this, the driver's

    def row(self, engine: str, name: str) -> dict[str, Any]:
        rates = [self.tokens / s for s in self.seconds]
        return {
            "engine": engine,
            "client": name,
            "tokens": self.tokens,
            "seconds": median(self.seconds),
            "tokens/s": median(rates),
            "slowest": min(rates),
            "fastest": max(rates),
            "client CPU us/token": 1e6 * median(self.cpu_s) / self.tokens,
        }


def take_turns(
    clients: Sequence[Client], work: Sequence[Request], turns: int, before: Any = lambda: None
) -> list[Timed]:
    """A first turn of each that does not count, then so many of each; who begins changes from turn to turn."""
    found = {client: Timed() for client in clients}
    for client in clients:
        client.ready(work)
    for turn in range(turns + 1):
        for client in clients[:: -1 if turn % 2 else 1]:
            before()
            begun_cpu, begun_driver, begun = cpu_seconds(client.pid), time.process_time(), time.perf_counter()
            found[client].tokens = client.ask(work)
            seconds, driver_s = time.perf_counter() - begun, time.process_time() - begun_driver
            if turn:
                found[client].seconds.append(seconds)
                found[client].driver_s.append(driver_s)
                found[client].cpu_s.append(cpu_seconds(client.pid) - begun_cpu + driver_s)
    return list(found.values())


def ratio(ring: Timed, bare: Timed) -> float:
    """Our tokens a second by the other's, the median over the turns."""
    return median(b / r for r, b in zip(ring.seconds, bare.seconds, strict=True))


def measure(engine: str, url: str, token: str, model: Path, work: Sequence[Request], options: Any, logs: Path) -> Any:
    """Both clients against the server at `url`; checks that both were given what they asked for."""

    def flush() -> None:
        """What the other client had written helps nobody."""
        _flush(server)

    with (
        closing(ServerClient(url, token)) as server,
        closing(RingClient(url, token, model, options.concurrency, logs / f"collector_{engine}.log")) as ring,
        closing(BareClient(url, token, options.concurrency)) as bare,
    ):
        ours, theirs = take_turns([ring, bare], work, options.turns, flush)
        asked, written = sum(r.n * r.new_tokens for r in work), (ours.tokens, bare.check())
    if written != (asked, asked):
        raise ValueError(f"{engine}: {asked} tokens were asked for, and {written} written; expected the same")
    return ours, theirs


@contextmanager
def serving(engine: str, model: Path, token: str, options: Any, logs: Path) -> Iterator[str]:
    """The url of a server that runs for so long."""
    if engine == "instant":
        vocabulary, port = len(tiny_tokenizer()), free_ports(["127.0.0.1"])[0]
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=serve, args=(port, vocabulary, os.getpid()), name=INSTANT)
        process.start()
        try:
            with closing(ServerClient(url := f"http://127.0.0.1:{port}", "")) as server:
                _flush(server, START_S, process)
            yield url
        finally:
            process.kill()
            process.join()
        return
    with Servers([launch_of(engine, model, options)], token, logs) as servers:
        servers.start()
        yield servers.urls[0]


def launch_of(engine: str, model: Path, options: argparse.Namespace) -> EngineLaunch:
    """How the server of an engine is started."""
    on_gpu = options.device == "cuda"
    return EngineLaunch(
        engine,
        str(model),
        dtype="bfloat16" if on_gpu else "float32",
        tensor_parallel_size=options.tp,
        max_running_requests=MAX_RUNNING,
        device=options.device,
        memory_fraction=HF_SHARE if on_gpu and engine == "hf" else None,
        random_seed=0,
    )


def _flush(server: ServerClient, limit_s: float = 10.0, process: BaseProcess | None = None) -> None:
    """A server that has answered may still be putting its last completion away, and one that starts does not listen.

    Raises ServerDied where its process has ended.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return server.flush_cache()
        except ServerError:
            if process is not None and process.exitcode is not None:
                raise ServerDied(f"the server has ended with exit code {process.exitcode}") from None
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def obstacle(engine: str) -> str:
    """Why this engine cannot be measured here; "" where it can."""
    if engine == "sglang":
        try:
            sglang_python(None)
        except ValueError as error:
            return f"sglang: not measured, there is no environment for it ({error})"
    return ""


def work(options: argparse.Namespace) -> Result:
    """Every engine that there is."""
    if options.model is not None and not (options.model / "config.json").is_file():
        raise ValueError(f"--model {options.model}: expected a folder with a Hugging Face config.json")
    notes = [reason for engine in options.engines if (reason := obstacle(engine))]
    engines = [engine for engine in options.engines if not obstacle(engine)]
    if not set(engines) - {"instant"}:
        raise ValueError(f"--engines {' '.join(options.engines)}: expected one that is here; {'; '.join(notes)}")
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    jobs = {engine: sized(options, engine) for engine in engines}
    asked = {engine: _requests(job) for engine, job in jobs.items()}
    result = Result("rollout", options.device, _configuration(options, jobs), rows, ratios, notes, TITLE)
    with tempfile.TemporaryDirectory(prefix="bench_rollout_") as folder:
        model = options.model or _model(Path(folder) / "model", options)
        for engine, job in jobs.items():
            try:
                with serving(engine, model, token := secrets.token_hex(16), job, Path(folder)) as url:
                    ring, bare = measure(engine, url, token, model, asked[engine], job, Path(folder))
            except ServerDied as error:
                notes.append(f"{engine}: not measured, {str(error).splitlines()[0]}")
                continue
            rows += [ring.row(engine, "ring"), bare.row(engine, "bare")]
            if engine == "instant":
                notes.append(f"one collector takes at most {ring.tokens / min(ring.seconds):,.0f} tokens a second here")
            else:
                ratios[f"ring_over_bare_{engine}"] = ratio(ring, bare)
    if not ratios:
        raise ValueError("; ".join(notes))
    ratios["ring_over_bare"] = min(ratios.values())
    notes.append(f"goal: ring_over_bare at least {GOAL}; ring is the collector, its reward process and the driver")
    return result


TITLE = "A run's own client beside a bare load generator"


def sized(options: argparse.Namespace, engine: str) -> argparse.Namespace:
    """The options, with sizes that this engine can do where none were given."""
    usual = QUICK if options.quick else SIZES.get(f"{engine} on {options.device}", SIZES[options.device])
    given = {name: value for name in usual if (value := getattr(options, name)) is not None}
    return argparse.Namespace(**{**vars(options), **usual, **given})


def _configuration(options: argparse.Namespace, jobs: dict[str, argparse.Namespace]) -> dict[str, Any]:
    model = {"model": options.model.name if options.model else "random weights"}
    names = ("spread", "concurrency", "tp")
    sizes = {engine: {name: getattr(job, name) for name in QUICK} for engine, job in jobs.items()}
    return model | {name: getattr(options, name) for name in names} | sizes


def _model(folder: Path, options: argparse.Namespace) -> Path:
    """The quickstart's, or on a GPU one of a billion parameters."""
    on_cpu = options.device == "cpu"
    sizes = replace(TinySizes() if on_cpu else GPU_MODEL, max_positions=POSITIONS[options.device])
    return write_tiny_model(folder, sizes, dtype="float32" if on_cpu else "bfloat16")


def _requests(options: argparse.Namespace) -> list[Request]:
    """Prompts of ids that every vocabulary has."""
    found = requests(
        options.prompts,
        options.n,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        spread=options.spread,
        vocabulary=len(tiny_tokenizer()),
    )
    longest = options.prompt_tokens + max(request.new_tokens for request in found)
    if options.model is None and longest > (limit := POSITIONS[options.device]):
        raise ValueError(
            f"--new-tokens {options.new_tokens}: the longest completion has {longest} tokens with its prompt; expected "
            f"at most {limit}, or a --model that has room for more"
        )
    return found


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    found.add_argument("--model", type=Path, help="a Hugging Face folder (default: random weights)")
    found.add_argument("--tp", type=int, default=1, help="GPUs of the SGLang server")
    found.add_argument("--prompts", type=int)
    found.add_argument("--n", type=int, help="completions of a prompt")
    found.add_argument("--prompt-tokens", type=int)
    found.add_argument("--new-tokens", type=int, help="of a completion, the mean")
    found.add_argument("--spread", type=float, default=0.5, help="of their logarithm; 0: all as long (default 0.5)")
    found.add_argument("--concurrency", type=int, default=512, help="requests under way (default 512, as in a run)")
    found.add_argument("--turns", type=int, help="of each client")
    return with_rounds(found)


if __name__ == "__main__":
    raise SystemExit(run(in_rounds(work), parser(), needs_quiet=on_cpu))
