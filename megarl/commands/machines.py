"""What machines a run wants, from its settings: what every door to a cluster asks for."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from megarl.arch.gpus import GPUS, Gpu, of_memory
from megarl.config import Config
from megarl.config.placement import placements
from megarl.plan.from_config import job_of
from megarl.plan.host import host_budget
from megarl.plan.predictions import memory_on_cpu

CPUS_PER_GPU = 8  # for the driver, collectors, rewards, and the servers' schedulers and tokenizers
GB = 10**9


class Machines(NamedTuple):
    """Example: Machines(nodes=8, spares=1, servers=0, gpus=8, gpu="h100", cpus=64, memory_gb=1100)."""

    nodes: int  # with ranks: trainer.nnodes
    spares: int  # that wait: trainer.spare_nodes
    servers: int  # with servers alone: the hosts of rollout.urls
    gpus: int  # of a machine; 0: the run uses CPUs
    gpu: str | None  # of megarl/arch/gpus.py, by the layout's name; null: unknown
    cpus: int  # of a machine: one for each rank, or 8 for each GPU
    memory_gb: int | None  # of a machine, as `megarl plan` predicts it, without Python's processes; null: unknown


def machines_of(config: Config, layout: str | None = None) -> Machines:
    """`layout`: the word layout=NAME of the command line (`layout_word`), such as 64x80, which names the GPU."""
    trainer, urls = config.trainer, config.rollout.urls
    gpus = 0 if trainer.device == "cpu" else _gpus(config)
    gpu = of_memory(int(layout.partition("x")[2])) if gpus and layout and layout.partition("x")[2].isdecimal() else None
    memory = _memory(config, gpu) if gpus else memory_on_cpu(config, "train").get("total")
    return Machines(
        nodes=trainer.nnodes,
        spares=trainer.spare_nodes,
        servers=len({urlsplit(url).hostname for url in urls}),
        gpus=gpus,
        gpu=gpu.name if gpu else None,
        cpus=gpus * CPUS_PER_GPU or trainer.n_gpus_per_node,
        memory_gb=-(-memory // GB) if memory else None,
    )


def _gpus(config: Config) -> int:
    """GPUs of the fullest machine: ranks', and those of servers that the run starts beside them."""
    each, size = config.trainer.n_gpus_per_node, config.rollout.tensor_model_parallel_size
    if config.rollout.urls:
        return each
    return max([each, *(first + size // len(on) for on, first in placements(config, trains=True))])


def _memory(config: Config, gpu: Gpu | None) -> int | None:
    """Bytes of a machine with GPUs; None for a model whose numbers are not known."""
    try:
        return host_budget(job_of(config, gpu or GPUS["h100"]))["total"]
    except ValueError:  # `megarl plan` explains it
        return None
