"""How a server process is started: the plain values of one launch, and the command line of the HF server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.io.auth import SERVER_VARIABLE, without_tokens
from megarl.io.sockets import interface_variables, is_loopback
from megarl.servers.nccl import VARIABLES

# The custom weight loader, which receives tensors directly into the model: also a load_format of updates.
WEIGHT_LOADER = "megarl.weights.push.receiver.load"
RETURNS_ROUTES = "--enable-return-routed-experts"  # of both engines
RETURNS_KEYS = "--enable-return-indexer-topk"  # of SGLang; our own server reports keys with the experts
TOKEN_VARIABLE = SERVER_VARIABLE  # passes the servers' key: every user can read a command line
REFUSED = 2  # exit code of a server that serves no such model, or not so; the last line of its log is the reason
REFUSAL = "error: "  # begins that line


@dataclass(frozen=True)
class EngineLaunch:
    """One server.  Example: EngineLaunch("hf", "/models/tiny", port=30000, max_running_requests=512)."""

    engine: str
    model_path: str
    host: str = "127.0.0.1"
    port: int | None = None  # None: the supervisor picks a free one
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    scores: bool = False  # a reward model, which answers /classify instead of /generate
    max_running_requests: int = 512  # completions decoded at once
    max_total_tokens: int | None = None  # tokens held in the KV cache; None: the engine's default
    random_seed: int | None = None
    weight_version: int = 0  # version of the weights of its start
    num_threads: int = 1  # CPU threads of the hf engine
    index: int = 0  # number of the server, set by the supervisor; determines cores, GPUs and the seed
    device: str | None = None  # "cpu" or "cuda"; None: cuda if this machine has a device
    first_gpu: int | None = None  # None: each server takes the next tensor_parallel_size GPUs
    memory_fraction: float | None = None  # of a GPU's memory, for weights and KV cache; None: the engine's default
    returns_routes: bool = False  # it can report the experts of tokens
    tls: str = "never"  # always | never: it serves https or http; auto: https unless only this machine reaches its host
    name: str | None = None  # its host in its clients' urls, if they use another one than `host`
    # The rest is for sglang only.
    reads_weights: bool = True  # from model_path; False: random ones until the first push
    has_states: bool = False  # some layers carry a state along a sequence in place of keys and values
    has_indexers: bool = False  # layers choose the keys to which a token attends, and it reports them with the experts
    overrides: str = ""  # what SGLang is told of the model in place of config.json, as JSON
    longest_pause_s: float = 600.0  # for which the trainer may pause it, or keep it busy with one order
    python: str | None = None  # of SGLang's environment; None: MEGARL_SGLANG_PYTHON, else .venv-sglang/bin/python
    args: tuple[str, ...] = ()  # passed on to SGLang as they are, after ours
    group_port: int | None = None  # for the rendezvous of its ranks; None: the supervisor picks a free one
    expert_parallel_size: int = 1  # number of its tensor_parallel_size ranks over which experts are distributed
    quantization: str = "none"  # of its linear layers: none | fp8
    attention_dp: int = 1  # groups of its ranks that compute attention for requests of their own
    num_machines: int = 1  # over which its ranks are distributed
    machine: int = 0  # number of this machine among them; the first one serves HTTP
    meeting_host: str | None = None  # address of the first machine; the rendezvous is at its group_port
    memory_saver: bool = False  # needed for release_memory to free GPU memory
    lora_rank: int = 0  # maximum rank of loaded adapters; 0: no adapters
    lora_targets: tuple[str, ...] = ()  # Hugging Face module names, such as "q_proj"
    lora_slots: int = 8  # adapters that running completions use, those without one counted too

    @property
    def uses_cpu(self) -> bool:
        return not torch.cuda.is_available() if self.device is None else self.device == "cpu"

    @property
    def gpu(self) -> int:
        """The first GPU of a server that does not use the CPU.

        Not chosen by CUDA_VISIBLE_DEVICES: GPU memory shared between two processes needs the same device numbers in
        both.
        """
        return self.index * self.tensor_parallel_size if self.first_gpu is None else self.first_gpu

    @property
    def has_tls(self) -> bool:
        return self.tls == "always" or (self.tls == "auto" and not is_loopback(self.host))

    @property
    def url(self) -> str:
        assert self.port is not None, "a launch has a url only once its port is chosen"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.has_tls else 'http'}://{host}:{self.port}"


@dataclass(frozen=True)
class ServerCommand:
    """A command and its whole environment, except the token, which the supervisor adds."""

    argv: list[str]
    environment: dict[str, str]


# An engine: may put files into the folder, which belongs to the server and is deleted when the server ends.
MakeCommand = Callable[[EngineLaunch, Path], ServerCommand]


def hf_command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """The command of the HF server, on the CPU or one GPU; it ends when this process ends."""
    if launch.tensor_parallel_size != 1:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={launch.tensor_parallel_size}: expected 1, because the hf engine is "
            "one process"
        )
    command = [sys.executable, "-m", "megarl.hf_server.main", "--die-with-parent", str(os.getpid())]
    options = {
        "--model-path": launch.model_path,
        "--host": launch.host,
        "--port": launch.port,
        "--dtype": launch.dtype,
        "--device": "cpu" if launch.uses_cpu else f"cuda:{launch.gpu}",
        "--memory-fraction": None if launch.uses_cpu else launch.memory_fraction,
        "--max-running-requests": launch.max_running_requests,
        "--max-total-tokens": launch.max_total_tokens,
        "--random-seed": launch.random_seed,
        "--weight-version": launch.weight_version,
        "--num-threads": launch.num_threads,
    }
    command += ["--is-embedding"] * launch.scores + [RETURNS_ROUTES] * launch.returns_routes
    environment = {**interface_variables(launch.host), **VARIABLES, **without_tokens(os.environ)}
    environment["OMP_NUM_THREADS"] = str(launch.num_threads)
    return ServerCommand([*command, *flags(options)], environment)


def flags(options: Mapping[str, object]) -> list[str]:
    """The command line of these options; options with the value None are left out."""
    return [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
