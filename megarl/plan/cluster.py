"""The GPUs of a plan, and the settings that adapt the configuration to their number."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from megarl.config import Config, layout_names, layout_word, load_config
from megarl.plan import gpus
from megarl.plan.command.request import Request
from megarl.plan.gpus import Gpu
from megarl.plan.job import Job

_LAYOUT = re.compile(r"(\d+)x(\d+)")  # GPUs, and the memory of each in GB


@dataclass(frozen=True)
class Plan:
    """A checked configuration, its words, and its GPUs."""

    config: Config
    words: list[str]
    gpu: Gpu
    said: list[str]  # assumptions
    warnings: list[str] = field(default_factory=list)  # of the configuration


def plan_of(request: Request, words: list[str]) -> Plan:
    """Raises: ValueError of one sentence if the configuration is invalid or the GPU is unknown."""
    named = _LAYOUT.fullmatch(layout_word(words) or "")
    said = []
    if request.gpu is not None:
        gpu = gpus.find(request.gpu)
    elif named:
        gpu = gpus.of_memory(int(named[2]))
        said.append(f"--gpu {gpu.name}, because the layout is called {named[0]}")
    else:
        raise ValueError(f"--gpu is missing, and no layout says it; expected one of {', '.join(gpus.GPUS)}")
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
        said.append(why)
    return Plan(config, words, gpu, said, warnings)


def check_size(request: Request, job: Job) -> None:
    """Raises: ValueError if the configuration uses another number of GPUs than --gpus."""
    if request.gpus and job.num_gpus != request.gpus:
        servers = f"{job.num_servers} x {job.server_gpus} of servers, {'shared' if job.shared else 'of their own'}"
        found = f"the configuration comes to {job.num_gpus} GPUs ({servers})"
        raise ValueError(f"--gpus {request.gpus}: {found}; expected as many, or neither machines nor servers beside it")


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
    is_said = any(word.startswith("rollout.placement=") for word in words)
    if not config.model.preset or not request.gpus or request.gpus_per_node or is_said:
        return None
    sizes = [named for name in layout_names(config.model.preset) if (named := _LAYOUT.fullmatch(name))]
    fitting = [int(m[2]) for m in sizes if int(m[1]) == request.gpus and int(m[2]) * 10**9 <= gpu.memory_bytes]
    return f"{request.gpus}x{max(fitting)}" if fitting else None


def _gpus_of_servers(config: Config) -> int:
    """GPUs of the servers in addition to the trainer's: 0 with colocation."""
    rollout = config.rollout
    count = len(rollout.urls) or rollout.num_servers
    return 0 if rollout.placement == "shared" else count * rollout.tensor_model_parallel_size
