"""Stock SGLang as an engine: its command line and its environment, on a machine with or without GPUs.

SGLang has its own Python environment (`sglang_environment`; launch/sglang_cpu.sh makes one for a machine without GPU)
and is started through `sglang_server`. It loads `weights.push.receiver` as a plug-in and as a custom weight loader.

Without a GPU SGLang runs with its `torch_native` attention backend, but still imports GPU packages: the modules of
the folder `sglang_cpu` replace these.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from megarl.servers.launch import EngineLaunch, ServerCommand, flags
from megarl.servers.sglang_environment import foreign_environment, sglang_python

WEIGHT_LOADER = "megarl.weights.push.receiver.load"  # SGLang accepts this name as a load_format

_PLUGINS = "[sglang.srt.plugins]\nmegarl = megarl.weights.push.receiver:setup\n"
_CPU_PLUGIN = "megarl_cpu = megarl_cpu_plugin:setup\n"
_STAND_INS = Path(__file__).parent / "sglang_cpu"
_CPU_TOKENS = 65536  # SGLang's default takes most of the machine's memory


def sglang_command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """The command of one SGLang server, which ends when this process ends; its temporary files go into `folder`.

    Raises ValueError if there is no Python of SGLang's environment at the expected path.
    """
    python, on_cpu = sglang_python(launch.python), uses_cpu(launch)
    options: dict[str, object] = {
        "--model-path": launch.model_path,
        "--host": launch.host,
        "--port": launch.port,
        "--nccl-port": launch.group_port if launch.num_machines == 1 else None,
        "--dtype": launch.dtype,
        "--tp-size": launch.tensor_parallel_size,
        "--ep-size": launch.expert_parallel_size if launch.expert_parallel_size > 1 else None,
        "--max-running-requests": launch.max_running_requests,
        "--max-total-tokens": launch.max_total_tokens or (_CPU_TOKENS if on_cpu else None),
        "--random-seed": launch.random_seed,
        "--weight-version": launch.weight_version,
        "--custom-weight-loader": WEIGHT_LOADER,
        "--log-level-http": "warning",  # otherwise it logs a line for every request
    }
    argv = [str(python), "-m", "megarl.servers.sglang_server", str(os.getpid()), "--skip-server-warmup"]
    argv += (
        flags(options)
        + _machines(launch)
        + (_cpu_options() if on_cpu else _gpu_options(launch))
        + _lora(launch, on_cpu)
    )
    environment = foreign_environment(
        python,
        folder,
        launch.host,
        path=[_STAND_INS] if on_cpu else [],
        plugins=_PLUGINS + (_CPU_PLUGIN if on_cpu else ""),
    )
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # otherwise a health check generates a token
    environment["SGLANG_REQUEST_STATE_WAIT_TIMEOUT"] = "1"  # s until it notices a client's disconnect; default 4
    for dump in ("PYSPY_DUMP", "CUDA_COREDUMP"):  # otherwise a crashed server hangs for up to a minute
        environment[f"SGLANG_{dump}_BEFORE_CRASH"] = "0"
    if on_cpu:
        environment |= _cpu_environment(launch)
    elif launch.memory_saver:  # otherwise CUDA graphs stay on the GPU when the server releases its memory
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    # SIGKILL: on SIGTERM SGLang sleeps for 5 s and then waits for its requests, and it has nothing to save.
    return ServerCommand([*argv, *launch.args], environment, stop_signal=signal.SIGKILL)


def _machines(launch: EngineLaunch) -> list[str]:
    """The options of a server whose ranks are on several machines."""
    if launch.num_machines == 1:
        return []
    meeting = f"{launch.meeting_host}:{launch.group_port}"
    return flags({"--nnodes": launch.num_machines, "--node-rank": launch.machine, "--dist-init-addr": meeting})


def uses_cpu(launch: EngineLaunch) -> bool:
    return not torch.cuda.is_available() if launch.device is None else launch.device == "cpu"


def _cpu_options() -> list[str]:
    # --sleep-on-idle: an idle scheduler would otherwise poll without pause, and other processes need the core.
    return ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]


def _gpu_options(launch: EngineLaunch) -> list[str]:
    first = launch.index * launch.tensor_parallel_size if launch.first_gpu is None else launch.first_gpu
    # Not by CUDA_VISIBLE_DEVICES: GPU memory shared between two processes needs the same device numbers in both.
    out = flags({"--base-gpu-id": first, "--mem-fraction-static": launch.memory_fraction})
    # With fusion the shared expert becomes one more routed expert, which the weight tables do not know.
    out.append("--disable-shared-experts-fusion")
    if launch.dtype == "float32":  # SGLang's default on Hopper, FlashAttention 3, takes 16-bit types only
        out += ["--attention-backend", "triton"]
    return [*out, "--enable-memory-saver"] if launch.memory_saver else out


def _lora(launch: EngineLaunch, on_cpu: bool) -> list[str]:
    if launch.lora_rank == 0:
        return []
    options = ["--enable-lora", "--max-lora-rank", str(launch.lora_rank)]
    options += ["--lora-target-modules", *launch.lora_targets]
    return [*options, "--lora-backend", "torch_native"] if on_cpu else options


def _cpu_environment(launch: EngineLaunch) -> dict[str, str]:
    """One core for each tensor-parallel rank of each server; with fewer cores, ranks share them round-robin."""
    cores, size = sorted(os.sched_getaffinity(0)), launch.tensor_parallel_size
    mine = [cores[(launch.index * size + rank) % len(cores)] for rank in range(size)]
    out = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    out["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, mine))
    if size > 1:  # otherwise SGLang compiles its collectives, which needs Triton
        out["TORCHDYNAMO_DISABLE"] = "1"
    return out
