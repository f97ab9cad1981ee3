"""How a server process is started: the plain values of one launch, and the command line of each engine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

TOKEN_VARIABLE = "MEGARL_SERVER_TOKEN"  # the run's token travels here: a command line can be read by every user


@dataclass(frozen=True)
class EngineLaunch:
    """One server.  Example: EngineLaunch("cpu", "/models/tiny", port=30000, max_running_requests=512)."""

    engine: str
    model_path: str
    host: str = "127.0.0.1"
    port: int | None = None  # None: the supervisor picks a free one
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    max_running_requests: int = 512  # completions decoded at once
    max_total_tokens: int | None = None  # tokens held in the KV cache; None: the engine's own choice
    random_seed: int | None = None
    weight_version: int = 0  # stamp of the weights in `model_path`
    num_threads: int = 1  # CPU threads of the cpu engine

    @property
    def url(self) -> str:
        assert self.port is not None, "a launch has a url only once its port is chosen"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def cpu_command(launch: EngineLaunch) -> list[str]:
    """The command line of our CPU server, which ends when this process does."""
    if launch.tensor_parallel_size != 1:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={launch.tensor_parallel_size}: want 1, the cpu engine is one process"
        )
    command = [sys.executable, "-m", "megarl.rollout.cpu", "--die-with-parent", str(os.getpid())]
    options = {
        "--model-path": launch.model_path,
        "--host": launch.host,
        "--port": launch.port,
        "--dtype": launch.dtype,
        "--max-running-requests": launch.max_running_requests,
        "--max-total-tokens": launch.max_total_tokens,
        "--random-seed": launch.random_seed,
        "--weight-version": launch.weight_version,
        "--num-threads": launch.num_threads,
    }
    for flag, value in options.items():
        if value is not None:
            command += [flag, str(value)]
    return command
