"""`megarl plan`: predicts memory and time of a run without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megarl.arch.gpus import GPUS, Gpu, find, of_memory
from megarl.arch.model_types import needs_newer
from megarl.commands.plan.show import as_json, proposal_json, show, show_proposals
from megarl.config import Config, ConfigError, layout_names, layout_word, load_config
from megarl.config.old_log_probs import source_of_old_log_probs, why_own_pass
from megarl.io.terminal import pages, say
from megarl.plan.from_config import job_of
from megarl.plan.job import Job
from megarl.plan.predict import Prediction, predict
from megarl.plan.search import Proposal, search
from megarl.plugins.options import Options, count, positive


class Request(NamedTuple):
    """The options of a command line.  Example: Request(gpu="h200", gpus=128)."""

    gpu: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    nic: float | None = None  # Gbit/s
    link: float | None = None  # GB/s
    host: float | None = None  # GB
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    search: bool = False
    json: bool = False
    settings: Sequence[str] = ()


def parse(words: Sequence[str]) -> Request:
    """The options among these words, and the other words as settings.  Raises ValueError of one sentence."""
    given, settings = OPTIONS.values_and_settings(words)
    return Request(**given, settings=settings)


def main(request: Request) -> int:
    """Returns the exit code: 0 even if the run does not fit, because this is a valid result."""
    plan = plan_of(request)
    job = _job(plan, request)
    check_size(request, job)
    newer = needs_newer(str(job.actor.hf["model_type"]))
    for warning in [*plan.warnings, *([f"training it: {newer}"] if newer else [])]:
        say(f"warning: {warning}")
    prediction = predict(job)
    shared = _prefixes(plan, job, prediction)
    old = source_of_old_log_probs(plan.config, why_own_pass(plan.config))
    assumed = [*plan.assumed, *_lengths(job, request), *_dispatch(plan, job), *shared, old]
    proposals = _proposals(plan, request, job) if request.search else []
    console = pages()
    if request.json:
        document = as_json(job, prediction, assumed)
        if request.search:
            document["proposals"] = [proposal_json(one) for one in proposals]
        print(json.dumps(document))
        return 0
    show(console, job, prediction, assumed)
    if request.search:
        show_proposals(console, prediction, proposals)
    return 0


def _job(plan: PlannedRun, request: Request, more: tuple[str, ...] = ()) -> Job:
    config = load_config([*plan.words, *more], command="config")[0] if more else plan.config
    return job_of(config, plan.gpu, prompt_tokens=request.prompt_tokens, response_tokens=request.response_tokens)


def _proposals(plan: PlannedRun, request: Request, job: Job) -> list[Proposal]:
    def composed(words: list[str]) -> Job | None:
        """None if the configuration is invalid."""
        try:
            return _job(plan, request, tuple(words))
        except ConfigError:
            return None

    return search(job, composed, {word.partition("=")[0] for word in plan.words})


def _dispatch(plan: PlannedRun, job: Job) -> list[str]:
    """That `auto` is planned as alltoall: whether the cluster has the package deep_ep is not known here."""
    key = "actor.megatron.moe_token_dispatcher_type"
    is_open = plan.config.actor.megatron.moe_token_dispatcher_type == "auto" and job.actor.layout.ep > 1
    return [f"tokens reach experts by alltoall; where deep_ep is installed, {key}=flex plans DeepEP"] if is_open else []


def _prefixes(plan: PlannedRun, job: Job, prediction: Prediction) -> list[str]:
    """What becomes of prompts with several completions."""
    asked = plan.config.trainer.share_prefixes
    if job.n == 1 or asked == "off":
        return []
    key, count = f"trainer.share_prefixes={asked}", f"{job.n} completions"
    if not job.actor.shares_prefixes:
        on_gpus = "trainer.share_prefixes=on on GPUs too"
        return [f"a prompt is computed with each of its {count}; {key} shares it on CPUs alone, {on_gpus}"]
    part = f"{prediction.computed_tokens['update_actor']:,.0f} of {job.tokens * job.epochs:,.0f} tokens"
    return [f"a prompt is computed once for its {count} ({key}): update_actor computes {part}"]


def _lengths(job: Job, request: Request) -> list[str]:
    """The mean lengths that were assumed because the user gave none."""
    lines = []
    if request.prompt_tokens is None:
        lines.append(f"--prompt-tokens {job.prompt_tokens:.0f}, a quarter of data.max_prompt_length")
    if request.response_tokens is None:
        lines.append(f"--response-tokens {job.response_tokens:.0f}, half of data.max_response_length")
    return lines


_LAYOUT = re.compile(r"(\d+)x(\d+)")  # GPUs, and the memory of each in GB


@dataclass(frozen=True)
class PlannedRun:
    """A checked configuration, the words that were typed for it, and its GPUs."""

    config: Config
    words: list[str]
    gpu: Gpu
    assumed: list[str]  # values that the user did not give
    warnings: list[str] = field(default_factory=list)  # of the configuration


def plan_of(request: Request) -> PlannedRun:
    """Raises: ValueError of one sentence if the configuration is invalid or the GPU is unknown."""
    words = list(request.settings)
    named = _LAYOUT.fullmatch(layout_word(words) or "")
    assumed = []
    if request.gpu is not None:
        gpu = find(request.gpu)
    elif named:
        gpu = of_memory(int(named[2]))
        assumed.append(f"--gpu {gpu.name}, because the layout is called {named[0]}")
    else:
        on_cpus = "for a run on CPUs trainer.check_only=true of its own command says what memory it takes"
        raise ValueError(f"--gpu is missing, and no layout says it; expected one of {', '.join(GPUS)}; {on_cpus}")
    if request.host:
        gpu = replace(gpu, host_bytes=int(request.host * 1e9))
    if request.nic:
        gpu = replace(gpu, nic_bandwidth=request.nic * 1e9 / 8)
    if request.link:
        gpu = replace(gpu, link_bandwidth=request.link * 1e9)
    config, warnings = load_config(words, command="config")
    more, why = _resized(config, request, words, gpu)
    if more:
        words = [word for word in words if not (word.startswith("layout=") and more[0].startswith("layout="))] + more
        config, warnings = load_config(words, command="config")
        assumed.append(why)
    return PlannedRun(config, words, gpu, assumed, warnings)


def check_size(request: Request, job: Job) -> None:
    """Raises: ValueError if the configuration uses another number of GPUs than --gpus."""
    if request.gpus and job.num_gpus != request.gpus:
        servers = f"{job.num_servers} x {job.server_gpus} of servers, {'shared' if job.shared else 'of their own'}"
        size = f"the configuration comes to {job.num_gpus} GPUs ({servers})"
        raise ValueError(f"--gpus {request.gpus}: {size}; expected as many, or neither machines nor servers beside it")


def _resized(config: Config, request: Request, words: list[str], gpu: Gpu) -> tuple[list[str], str]:
    """Words for another number of GPUs, with an explanation; the preset's layout for that number if there is one."""
    trainer, rollout = config.trainer, config.rollout
    each, servers = request.gpus_per_node or trainer.n_gpus_per_node, _gpus_of_servers(config)
    wanted = request.gpus - servers if request.gpus else trainer.num_ranks
    if (each, wanted) == (trainer.n_gpus_per_node, trainer.num_ranks):
        return [], ""
    if name := _preset_layout(config, request, words, gpu):
        return [f"layout={name}"], f"layout={name}, which the preset has for so many GPUs"
    if wanted < 1:
        raise ValueError(f"--gpus {request.gpus}: servers of their own take {servers}; expected more than that")
    if wanted % each:
        size = f"--gpus {request.gpus}" if request.gpus else f"--gpus-per-node {each}"
        left = f"the trainer's are {wanted}, " if servers or not request.gpus else ""
        raise ValueError(f"{size}: {left}expected a multiple of the {each} GPUs of a machine (--gpus-per-node)")
    words = [f"trainer.nnodes={wanted // each}", f"trainer.n_gpus_per_node={each}"]
    if rollout.placement == "shared":
        words.append(f"rollout.num_servers={max(1, wanted // rollout.tensor_model_parallel_size)}")
    return words, " ".join(words)


def _preset_layout(config: Config, request: Request, words: list[str], gpu: Gpu) -> str | None:
    """The preset's layout for these GPUs; None if rollout.placement was typed, since presets share the GPUs."""
    is_typed = any(word.startswith("rollout.placement=") for word in words)
    if not config.model.preset or not request.gpus or request.gpus_per_node or is_typed:
        return None
    sizes = [named for name in layout_names(config.model.preset) if (named := _LAYOUT.fullmatch(name))]
    fitting = [int(m[2]) for m in sizes if int(m[1]) == request.gpus and int(m[2]) * 10**9 <= gpu.memory_bytes]
    return f"{request.gpus}x{max(fitting)}" if fitting else None


def _gpus_of_servers(config: Config) -> int:
    """GPUs of the servers in addition to the trainer's: 0 with colocation."""
    rollout = config.rollout
    count = len(rollout.urls) or rollout.num_servers
    return 0 if rollout.placement == "shared" else count * rollout.tensor_model_parallel_size


OPTIONS = Options(
    "plan",
    """All of it is predicted, from the model's numbers, data sheets of GPUs, and constants fitted on published
measurements (benchmarks/results has the table of errors). Nothing is started, and no GPU is asked.""",
    [
        "megarl plan recipe=grpo_qwen2_5_72b_8x8h100",
        "megarl plan recipe=grpo_qwen2_5_72b_8x8h100 --gpu h200 --gpus 128 --search",
        "megarl plan model=qwen3_8b layout=8x80 --response-tokens 3000 --json",
    ],
    usage="megarl plan recipe=NAME | model=NAME layout=NAME [key=value ...] [--option ...]",
)
KINDS: dict[str, Callable[[str], object]] = {"--gpu": str, "--gpus": count, "--gpus-per-node": count}
for option, about in {
    "--gpu": "a100 h100 h800 h200 h20 b200 gb200; unset = what the layout's name means (64x80: h100)",
    "--gpus": "of the whole run, servers' own among them; unset = as configured",
    "--gpus-per-node": "of a machine; unset = as configured",
    "--nic": "Gbit/s of one GPU to other machines; unset = as the data sheet has it",
    "--link": "GB/s of one GPU to others of its machine, one direction; unset = the same",
    "--host": "GB of host memory of a machine; unset = predicted, but not compared",
    "--prompt-tokens": "mean length of a prompt; unset = a quarter of data.max_prompt_length",
    "--response-tokens": "mean length of a completion; unset = half of data.max_response_length",
}.items():
    kind = KINDS.get(option, positive)
    OPTIONS.add_argument(option, type=kind, metavar="NAME" if kind is str else "N", help=about)
OPTIONS.add_argument("--search", action="store_true", help="look for better layouts, and say why they are better")
OPTIONS.add_argument("--json", action="store_true", help="one JSON object in place of tables")
