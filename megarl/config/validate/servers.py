"""Checks whether the servers' sizes fit the policy, and whether there are enough GPUs for the servers."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from urllib.parse import urlsplit

from megarl.config.placement import placements
from megarl.config.schema import Config
from megarl.config.suggest import divisors, nearest_numbers
from megarl.config.validate import models
from megarl.layout import ModelNumbers

MOST_GPUS = 16  # of any existing machine; this machine's number is checked when servers start
MOST_BESIDE = 0.5  # of a GPU's memory, for a server that runs at the same time as the trainer on the same GPU
TP, EP = "rollout.tensor_model_parallel_size", "rollout.expert_parallel_size"


def contradictions(config: Config, command: str) -> Iterator[str]:
    """One sentence for each invalid combination."""
    rollout = config.rollout
    if command not in ("train", "config", "evaluate", "serve"):
        return
    if rollout.engine == "hf":
        for key, size in ((TP, rollout.tensor_model_parallel_size), (EP, rollout.expert_parallel_size)):
            if size != 1:
                yield f"{key}={size}: expected 1, because rollout.engine=hf is one process"
    else:
        yield from _sizes(config)
    if rollout.router and rollout.engine != "sglang":
        yield f"rollout.router=true: rollout.engine={rollout.engine} has no router; expected false"
    counts = {"rollout.n": 1 if command == "evaluate" else rollout.n, "rollout.val_kwargs.n": rollout.val_kwargs.n}
    several = next((f"{key}={n}" for key, n in counts.items() if n > 1), None)
    if several and (flag := "--enable-deterministic-inference") in rollout.sglang.args:
        # SGLang draws by seed and position alone (sampler.py), and a request has one seed for all its completions.
        yield f"rollout.sglang.args={flag}: all {several} completions of a prompt would be equal; expected 1"
    if rollout.urls:
        yield from _urls(config)
    elif rollout.placement == "shared" and command != "evaluate":
        yield from _shared(config)
    elif rollout.engine == "sglang" and config.trainer.device != "cpu":
        yield from _apart(config, trains=command != "evaluate")


def server_misfits(numbers: ModelNumbers, tp: int, ep: int) -> Iterator[tuple[str, str]]:
    """What SGLang would refuse after minutes of loading: the key, and a sentence that begins with its value."""
    heads, kv = numbers.num_attention_heads, numbers.num_key_value_heads
    latent = numbers.kv_latent_size is not None  # all heads share the latent, and every rank has a copy
    if heads is not None and heads % tp:
        yield TP, f"{tp} does not divide the model's num_attention_heads={heads}"
    if kv is not None and not latent and kv % tp and tp % kv:
        yield TP, f"{tp} neither divides the model's num_key_value_heads={kv} nor is a multiple of it"
    if numbers.intermediate_size is not None and numbers.intermediate_size % tp:
        yield TP, f"{tp} does not divide the model's intermediate_size={numbers.intermediate_size}"
    if tp % ep:
        yield EP, f"{ep} does not divide {TP}={tp}"
    elif ep > 1 and numbers.num_hidden_layers is not None and not numbers.num_experts:
        yield EP, f"{ep}: the model has no experts; expected 1"
    elif numbers.num_experts and numbers.num_experts % ep:
        yield EP, f"{ep} does not divide the model's number of experts={numbers.num_experts}"
    elif numbers.expert_intermediate_size is not None and numbers.expert_intermediate_size % (tp // ep):
        size = numbers.expert_intermediate_size
        yield TP, f"{tp} leaves {tp // ep} ranks to an expert, which do not divide its intermediate size={size}"


def _sizes(config: Config) -> Iterator[str]:
    rollout, numbers = config.rollout, models.model_numbers(config, "actor")
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    for key, sentence in server_misfits(numbers, tp, ep):
        near = ", or ".join(" ".join(words) for words in _nearest(config, numbers))
        yield f"{key}={sentence}{'; nearest: ' if near else ''}{near}"


def _nearest(config: Config, numbers: ModelNumbers) -> list[list[str]]:
    """Words to type for valid servers, the nearest first; with fewer servers if the shared GPUs are not enough."""
    rollout = config.rollout
    tp, ep, count = rollout.tensor_model_parallel_size, rollout.expert_parallel_size, rollout.num_servers
    shared = rollout.placement == "shared" and not rollout.urls
    sizes = [(width, part) for width in range(1, max(16, 2 * tp)) for part in divisors(width)]
    found = []
    for n, m in sizes:
        room = _room(config, n) if shared else count
        if next(server_misfits(numbers, n, m), None) or room < 1:
            continue
        words = [f"{key}={new}" for key, new, old in ((TP, n, tp), (EP, m, ep)) if new != old]
        fewer = [f"rollout.num_servers={room}"] if room < count else []
        found.append((len(words), abs(log2(n / tp)) + abs(log2(m / ep)), n, words + fewer))
    fewest = min((number for number, *_ in found), default=0)
    return [words for number, *_, words in sorted(found) if number == fewest][:3]


def _shared(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.ahead:
        turns = "the servers sleep while the trainer works"
        yield f"rollout.ahead={rollout.ahead}: with rollout.placement=shared {turns}; expected 0, or placement=separate"
    tp, each, nodes = rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node, config.trainer.nnodes
    if not _fills(tp, each):
        sizes = [n for n in range(1, config.trainer.num_ranks + 1) if _fills(n, each)]
        near = " or ".join(str(n) for n in nearest_numbers(tp, sizes, 3))
        yield f"{TP}={tp}: such servers do not fill machines of trainer.n_gpus_per_node={each} evenly; expected {near}"
    elif rollout.num_servers > (room := _room(config, tp)):
        first = rollout.first_gpu or 0
        most = max(1, (each if tp <= each else nodes * each) - first)
        where = f"rollout.placement=shared leaves servers of {tp} GPUs, from GPU {first} of {nodes} x {each} on, "
        wanted = f"expected at most {room}" if room else f"expected {TP} of at most {most}"
        yield f"rollout.num_servers={rollout.num_servers}: {where}room for {room}; {wanted}"


def _apart(config: Config, *, trains: bool) -> Iterator[str]:
    """Servers on their own GPUs: not on the trainer's, and only on GPUs that a machine can have."""
    rollout, trainer = config.rollout, config.trainer
    tp, each, first = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node, rollout.first_gpu
    # Trainer and server may share a GPU at the same time only if the user sets the server's share of memory.
    beside = rollout.memory_fraction is not None and rollout.memory_fraction <= MOST_BESIDE
    if trains and first is not None and first < each and not beside:
        these = f"GPUs 0 to {each - 1} of each machine are" if each > 1 else "GPU 0 of each machine is"
        wanted = (
            f"expected null or at least {each}, rollout.placement=shared, or rollout.memory_fraction up to "
            f"{MOST_BESIDE}"
        )
        yield f"rollout.first_gpu={first}: {these} the trainer's, and rollout.placement=separate; {wanted}"
    places = placements(config, trains=trains)
    if (machines := max(there.stop for there, _ in places)) > trainer.nnodes:
        there = f"trainer.nnodes={trainer.nnodes} machines of {each} GPUs have no room"
        yield f"{TP}={tp}: for rollout.num_servers={rollout.num_servers} of them {there}, expected {machines} machines"
    if tp % (width := len(places[0][0])):
        yield f"{TP}={tp}: such servers do not lie evenly over {width} machines; expected a multiple of {width}"
    most = max(at + tp // len(there) for there, at in places)
    if most > MOST_GPUS:
        key = f"{TP}={tp}" if places[0][1] + tp > MOST_GPUS else f"rollout.num_servers={rollout.num_servers}"
        behind = "rollout.placement=separate puts servers behind the trainer's GPUs, and " if trains else ""
        ways = "rollout.placement=shared, " if trains else ""
        yield f"{key}: {behind}GPU {most - 1} is on no machine; expected {ways}fewer or smaller ones, or rollout.urls"


def _fills(tp: int, each: int) -> bool:
    """Do such servers divide a machine evenly, or use whole machines?"""
    return max(tp, each) % min(tp, each) == 0


def _room(config: Config, tp: int) -> int:
    """How many servers of `tp` GPUs fit on the trainer's machines."""
    each, nodes, first = config.trainer.n_gpus_per_node, config.trainer.nnodes, config.rollout.first_gpu or 0
    if not _fills(tp, each):
        return 0
    return max(0, (each - first) // tp * nodes if tp <= each else (nodes * each - first) // tp)


def _urls(config: Config) -> Iterator[str]:
    rollout = config.rollout
    for url in rollout.urls:
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
        except ValueError:  # the port is not a number
            whole = False
        if not whole or parts.path not in ("", "/"):
            yield f"rollout.urls=[{', '.join(rollout.urls)}]: {url} is no server; expected http://host:port"
            return
    if len(set(rollout.urls)) < len(rollout.urls):
        yield f"rollout.urls=[{', '.join(rollout.urls)}]: expected each server once"
    if rollout.placement == "shared":
        yield "rollout.placement=shared: rollout.urls names servers that run elsewhere; expected separate"
