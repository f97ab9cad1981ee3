"""Stock SGLang as an engine: its command line and its environment, on a machine with GPUs or without.

SGLang lives in a Python environment of its own (`foreign`; launch/sglang_cpu.sh makes one for a machine without GPU)
and is started through `sglang_server`. It finds `weights.push.receiver` as a plug-in and as a way to load weights.

Without a GPU SGLang runs on its `torch_native` path. It imports GPU packages all the same: the modules of the folder
`sglang_cpu` stand where those would be.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from megarl.servers.launch import EngineLaunch, ServerCommand, flags
from megarl.servers.sglang_environment import foreign_environment, sglang_python

WEIGHT_LOADER = "megarl.weights.push.receiver.load"  # by this name SGLang offers it as a load_format

_PLUGINS = "[sglang.srt.plugins]\nmegarl = megarl.weights.push.receiver:setup\n"
_CPU_PLUGIN = "megarl_cpu = megarl_cpu_plugin:setup\n"
_STAND_INS = Path(__file__).parent / "sglang_cpu"
_CPU_TOKENS = 65536  # SGLang's own choice is most of the memory of the machine


def sglang_command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """The command of one SGLang server, which ends when this process does; its temporary files go into `folder`.

    Raises ValueError when SGLang's Python is not where it was looked for.
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
        "--log-level-http": "warning",  # else a line for every request
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
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else a health question waits for a written token
    environment["SGLANG_REQUEST_STATE_WAIT_TIMEOUT"] = "1"  # s until it sees that a client has gone; 4 by default
    for dump in ("PYSPY_DUMP", "CUDA_COREDUMP"):  # else a broken server lives on, deaf, for up to a minute
        environment[f"SGLANG_{dump}_BEFORE_CRASH"] = "0"
    if on_cpu:
        environment |= _cpu_environment(launch)
    # Asked to end, SGLang sleeps for 5 s and then waits for its requests; it has nothing to save.
    return ServerCommand([*argv, *launch.args], environment, stop_signal=signal.SIGKILL)


def _machines(launch: EngineLaunch) -> list[str]:
    """Of a server whose ranks lie over several."""
    if launch.num_machines == 1:
        return []
    meeting = f"{launch.meeting_host}:{launch.group_port}"
    return flags({"--nnodes": launch.num_machines, "--node-rank": launch.machine, "--dist-init-addr": meeting})


def uses_cpu(launch: EngineLaunch) -> bool:
    return not torch.cuda.is_available() if launch.device is None else launch.device == "cpu"


def _cpu_options() -> list[str]:
    # Without work its scheduler asks for some without pause, and here others need the core.
    return ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]


def _gpu_options(launch: EngineLaunch) -> list[str]:
    first = launch.index * launch.tensor_parallel_size if launch.first_gpu is None else launch.first_gpu
    # By number and not by CUDA_VISIBLE_DEVICES: shared memory between two processes wants both to count alike.
    out = flags({"--base-gpu-id": first, "--mem-fraction-static": launch.memory_fraction})
    # Fused, a shared expert would be one more of the routed ones, where no table of weights looks for it.
    out.append("--disable-shared-experts-fusion")
    return [*out, "--enable-memory-saver"] if launch.memory_saver else out


def _lora(launch: EngineLaunch, on_cpu: bool) -> list[str]:
    if launch.lora_rank == 0:
        return []
    options = ["--enable-lora", "--max-lora-rank", str(launch.lora_rank)]
    options += ["--lora-target-modules", *launch.lora_targets]
    return [*options, "--lora-backend", "torch_native"] if on_cpu else options


def _cpu_environment(launch: EngineLaunch) -> dict[str, str]:
    """One core for every tensor-parallel rank, server after server; round again when there are fewer."""
    cores, size = sorted(os.sched_getaffinity(0)), launch.tensor_parallel_size
    mine = [cores[(launch.index * size + rank) % len(cores)] for rank in range(size)]
    out = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    out["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, mine))
    if size > 1:  # there SGLang compiles its collectives, for which it would need Triton
        out["TORCHDYNAMO_DISABLE"] = "1"
    return out
