"""Checks whether the servers' sizes fit the policy, and whether there are enough GPUs for the servers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import log2
from urllib.parse import urlsplit

from megarl.arch import sglang_options as tried
from megarl.arch.layout import ModelNumbers
from megarl.arch.model_types import SPARSE_LATENT
from megarl.arch.mtp import TRAINED_MTP, trained_mtp
from megarl.arch.sglang_config import misread, wants_gpus
from megarl.config.placement import placements
from megarl.config.schema import Config
from megarl.config.validate import models
from megarl.config.validate.layouts import divisors, nearest_numbers
from megarl.io.sockets import is_loopback

MOST_GPUS = 16  # of any existing machine; this machine's number is checked when servers start
MOST_BESIDE = 0.5  # of a GPU's memory, for a server that runs at the same time as the trainer on the same GPU
TP, EP = "rollout.tensor_model_parallel_size", "rollout.expert_parallel_size"
ADP = "rollout.attention_dp"
FP8 = "rollout.quantization=fp8"
# The families whose loaders in SGLang can quantize again after the first load (supports_quantized_rl_reload).
FAMILIES_WITH_FP8 = ("qwen2", "qwen3")
# Their classes in SGLang have a group of ranks for attention; those of other families cut attention over all ranks.
FAMILIES_WITH_ADP = (*("qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss"), *SPARSE_LATENT)


def contradictions(config: Config, command: str) -> Iterator[str]:
    """One sentence for each invalid combination.

    rollout.engine=auto is checked as sglang, which it is on machines with GPUs: a command that starts servers has
    replaced it by then (`load_config`).
    """
    rollout = config.rollout
    if command not in ("train", "config", "evaluate", "serve"):
        return
    misfits: list[str] = []
    if rollout.engine == "hf":
        sizes = {TP: rollout.tensor_model_parallel_size, EP: rollout.expert_parallel_size, ADP: rollout.attention_dp}
        for key, size in sizes.items():
            if size != 1:
                yield f"{key}={size}: expected 1, because rollout.engine=hf is one process"
    else:
        yield from (misfits := list(_sizes(config)))
    if rollout.router and rollout.engine == "hf":
        yield "rollout.router=true: rollout.engine=hf has no router; expected false"
    if rollout.router and config.adapters_kept:
        why = "it may send a request to a server that does not hold the adapter (actor.lora.push=adapter)"
        yield f"rollout.router=true: {why}; expected false, or push=merged"
    if rollout.quantization == "fp8":
        yield from _fp8(config)
    yield from _model(config, command)
    yield from tried.refused(rollout.sglang.args, pushes=command != "evaluate")
    if rollout.engine != "hf" and tried.asks_to_draft(rollout.sglang.args):
        yield from _drafting(config, command)
    if given := next((word for word in rollout.sglang.args if word.split("=")[0] == "--quantization"), None):
        once = "without another load format SGLang quantizes the first weights only"
        yield f"rollout.sglang.args={given}: {once}; expected {FP8}"
    if given := next((word for word in rollout.sglang.args if word.startswith("--ssl-")), None):
        yield f"rollout.sglang.args={given}: servers that a run starts get its certificate; expected rollout.tls"
    if rollout.turn_s is not None and rollout.placement != "shared":
        turns = "servers and trainer take turns only with rollout.placement=shared"
        yield f"rollout.turn_s={rollout.turn_s}: {turns}; expected null, and rollout.ahead for more at a time"
    if config.trainer.eval_beside and rollout.placement == "shared":
        why = "with rollout.placement=shared servers sleep while the trainer works"
        yield f"trainer.eval_beside=true: {why}; expected false"
    if rollout.join is not None:
        yield from _join(config)
    if rollout.urls:
        yield from _urls(config)
    elif rollout.placement == "shared" and command != "evaluate":
        if not misfits:  # else the sizes that fit are told, with as many servers as there is room for
            yield from _shared(config)
    # With trainer.device=auto the hf engine takes GPUs only where a machine has some, which is seen at the start.
    elif config.trainer.device == "cuda" or (config.trainer.device == "auto" and rollout.engine != "hf"):
        yield from misplaced(config, trains=command != "evaluate")


def _fp8(config: Config) -> Iterator[str]:
    rollout, family = config.rollout, models.model_config(config, "actor").get("model_type")
    if rollout.engine != "sglang":
        yield f"{FP8}: rollout.engine={rollout.engine} does not quantize; expected none, or rollout.engine=sglang"
    if config.trainer.device == "cpu":
        yield f"{FP8}: SGLang quantizes on GPUs only, and trainer.device=cpu; expected none"
    if family is not None and family not in FAMILIES_WITH_FP8:
        known = " and ".join(FAMILIES_WITH_FP8)
        yield f"{FP8}: SGLang quantizes pushed weights again for {known} only, not for {family}; expected none"
    if rollout.dtype != "bfloat16":
        yield f"rollout.dtype={rollout.dtype}: {FP8} quantizes 16-bit weights; expected bfloat16"
    if rollout.push == "sharded":
        yield f"rollout.push=sharded: {FP8} quantizes whole tensors; expected auto, shared or gathered"
    if config.adapters_kept:
        yield f"{FP8}: servers of adapters (actor.lora.push=adapter) are not quantized; expected none, or push=merged"


def _drafting(config: Config, command: str) -> Iterator[str]:
    """What servers that draft with the policy's MTP layers do not go together with, or were not tried with."""
    actor, rollout, drafts = config.actor, config.rollout, "with servers that draft (--speculative-algorithm)"
    if config.trainer.device == "cpu":
        yield f"trainer.device=cpu: {tried.DRAFTS_ON_GPUS}"
    if config.narrows_sampling:
        given = f"rollout.top_p={rollout.top_p} and rollout.top_k={rollout.top_k}"
        yield f"{given}: SGLang does not report the tokens that could be drawn {drafts}; expected 1.0 and -1"
    if command == "evaluate":
        return
    if actor.mtp == "off":
        yield "actor.mtp=off: no push brings MTP layers to servers that draft; expected detached or joint"
    if (count := trained_mtp({**models.model_config(config, "actor"), TRAINED_MTP: actor.mtp})) > 1:
        yield f"model.path={config.model.path}: SGLang drafts with one MTP layer, and config.json says {count}"
    if rollout.attention_dp > 1:
        yield f"rollout.attention_dp={rollout.attention_dp}: it was not tried {drafts}; expected 1"
    if rollout.placement == "shared":
        why = "a server that sleeps loses what its draft model computed from its weights"
        yield f"rollout.placement=shared: {why}; expected separate"
    if rollout.push == "sharded":
        yield "rollout.push=sharded: slices do not reach a draft model; expected auto, shared or gathered"


def _model(config: Config, command: str) -> Iterator[str]:
    """What servers need of the policy: weights of the type that is pushed, and for gpt-oss attention with sinks."""
    found = models.model_config(config, "actor")
    path = config.model.path
    rollout = config.rollout
    if found.get("quantization_config") and not rollout.urls and (command != "evaluate" or rollout.engine == "hf"):
        method, what = found["quantization_config"].get("quant_method"), "servers get and hold unquantized weights"
        wanted = f"expected a folder that `megarl convert from={path} to=FOLDER format=hf` wrote"
        yield f"model.path={path}: its config.json says that its weights are in {method}, and {what}; {wanted}"
    if rollout.engine == "sglang":
        yield from (f"rollout.engine=sglang: {sentence}; expected hf" for sentence in misread(found))
        if models.folder_has_vision(path):
            yield "rollout.engine=sglang: SGLang holds a vision part too, which no push brings; expected hf"
        if config.trainer.device == "cpu":
            yield from (f"rollout.engine=sglang: {sentence}; expected hf" for sentence in wants_gpus(found))


def server_misfits(numbers: ModelNumbers, tp: int, ep: int, attention_dp: int = 1) -> Iterator[tuple[str, str]]:
    """What SGLang would refuse after minutes of loading: the key, and a sentence that begins with its value."""
    heads, kv = numbers.num_attention_heads, numbers.num_key_value_heads
    latent = numbers.kv_latent_size is not None  # all heads share the latent, and every rank has a copy
    if tp % attention_dp:
        yield ADP, f"{attention_dp} does not divide {TP}={tp}"
        return
    group = tp // attention_dp  # ranks over which attention is cut
    ranks = f"{tp}" if attention_dp == 1 else f"{tp} / {ADP}={attention_dp}, which is {group},"
    if heads is not None and heads % group:
        yield TP, f"{ranks} does not divide the model's num_attention_heads={heads}"
    if kv is not None and not latent and kv % group and group % kv:
        yield TP, f"{ranks} neither divides the model's num_key_value_heads={kv} nor is a multiple of it"
    if (linear := numbers.linear_num_key_heads) is not None and linear % group:
        yield TP, f"{ranks} does not divide the model's linear_num_key_heads={linear}"
    if numbers.intermediate_size is not None and numbers.intermediate_size % tp:
        yield TP, f"{tp} does not divide the model's intermediate_size={numbers.intermediate_size}"
    if (shared := numbers.shared_intermediate_size) is not None and shared % tp:
        yield TP, f"{tp} does not divide the intermediate size of the model's shared experts, which is {shared}"
    if tp % ep:
        yield EP, f"{ep} does not divide {TP}={tp}"
    elif ep > 1 and numbers.num_hidden_layers is not None and not numbers.num_experts:
        yield EP, f"{ep}: the model has no experts; expected 1"
    elif ep > 1 and numbers.has_biased_experts:  # weight_loader_fused, sgl-project/sglang#22784
        yield EP, f"{ep}: SGLang 0.5.23 does not distribute unquantized experts with biases; expected 1"
    elif numbers.num_experts and numbers.num_experts % ep:
        yield EP, f"{ep} does not divide the model's number of experts={numbers.num_experts}"
    elif numbers.expert_intermediate_size is not None and numbers.expert_intermediate_size % (tp // ep):
        size = numbers.expert_intermediate_size
        yield TP, f"{tp} leaves {tp // ep} ranks to an expert, which do not divide its intermediate size={size}"


def _sizes(config: Config) -> Iterator[str]:
    rollout, numbers = config.rollout, models.model_numbers(config, "actor")
    tp, ep, attention_dp = rollout.tensor_model_parallel_size, rollout.expert_parallel_size, rollout.attention_dp
    yield from _attention_groups(config)
    for key, sentence in islice(server_misfits(numbers, tp, ep, attention_dp), 1):  # the nearest sizes mend the others
        near = ", or ".join(" ".join(words) for words in _nearest(config, numbers))
        yield f"{key}={sentence}{'; nearest: ' if near else ''}{near}"


def _attention_groups(config: Config) -> Iterator[str]:
    size, family = config.rollout.attention_dp, models.model_config(config, "actor").get("model_type")
    if size > 1 and family is not None and family not in FAMILIES_WITH_ADP:
        known = ", ".join(FAMILIES_WITH_ADP)
        yield f"{ADP}={size}: SGLang has it for {known}, and the model is of {family}; expected 1"
    if size > 1 and config.adapters_kept:
        yield f"{ADP}={size}: servers of adapters (actor.lora.push=adapter) run without it; expected 1, or push=merged"


def _nearest(config: Config, numbers: ModelNumbers) -> list[list[str]]:
    """Words to type for valid servers, the nearest first; with fewer servers if the shared GPUs are not enough."""
    rollout = config.rollout
    now = (rollout.tensor_model_parallel_size, rollout.expert_parallel_size, rollout.attention_dp)
    tp, count = now[0], rollout.num_servers
    shared = rollout.placement == "shared" and not rollout.urls
    widths = range(1, max(16, 2 * tp))
    groups = {width: divisors(width) if now[2] > 1 else [1] for width in widths}
    found = []
    for sizes in ((width, part, group) for width in widths for part in divisors(width) for group in groups[width]):
        room = _room(config, sizes[0]) if shared else count
        if next(server_misfits(numbers, *sizes), None) or room < 1:
            continue
        words = [f"{key}={new}" for key, new, old in zip((TP, EP, ADP), sizes, now, strict=True) if new != old]
        fewer = [f"rollout.num_servers={room}"] if room < count else []
        far = sum(abs(log2(new / old)) for new, old in zip(sizes, now, strict=True))
        found.append((len(words), far, sizes[0], words + fewer))
    fewest = min((number for number, *_ in found), default=0)
    return [words for number, *_, words in sorted(found) if number == fewest][:3]


def _shared(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.ahead:
        turns = "the servers sleep while the trainer works"
        wanted = "expected 0 (and rollout.turn_s for completions that last several turns), or placement=separate"
        yield f"rollout.ahead={rollout.ahead}: with rollout.placement=shared {turns}; {wanted}"
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


def misplaced(config: Config, *, trains: bool) -> Iterator[str]:
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
    each = config.trainer.n_gpus_per_node
    nodes = config.trainer.nnodes
    first = config.rollout.first_gpu or 0
    if not _fills(tp, each):
        return 0
    return max(0, (each - first) // tp * nodes if tp <= each else (nodes * each - first) // tp)


def _join(config: Config) -> Iterator[str]:
    join, given = str(config.rollout.join), f"rollout.join={config.rollout.join}"
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        yield f"{given}: expected HOST:PORT, an address of the machine that runs `megarl train`"
    if config.rollout.router:
        yield f"{given}: a router knows only the servers of the start; expected rollout.router=false, or null"
    if config.rollout.placement == "shared":
        yield f"{given}: rollout.placement=shared puts all servers on the trainer's GPUs; expected separate, or null"
    if config.adapters_kept:
        yield f"{given}: adapters are pushed to the servers of the start only; expected actor.lora.push=merged, or null"


def advice(config: Config) -> Iterator[str]:
    """One sentence for each key with servers that are called in clear over a network."""
    keys = {"rollout.urls": config.rollout.urls}
    keys |= {f"teachers.{name}.server.urls": teacher.server.urls for name, teacher in config.teachers.items()}
    for key, urls in keys.items():
        places = {url: urlsplit(url) for url in urls}
        clear = [url for url, at in places.items() if at.scheme == "http" and not is_loopback(at.hostname or "")]
        if clear:
            yield (
                f"{key}: http sends the servers' key, prompts and completions over the network in clear: "
                f"{', '.join(clear)}; expected https:// of servers with a certificate, as `megarl serve` starts them"
            )


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
