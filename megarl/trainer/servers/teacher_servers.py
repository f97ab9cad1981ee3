"""The servers of teachers that the run starts itself."""

from __future__ import annotations

import torch

from megarl.config import Config
from megarl.config.names import MEGATRON
from megarl.rewards.services.service import api_key
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers
from megarl.trainer.build import model_folder, supervision


def make_teacher_servers(config: Config, token: str) -> dict[str, Servers]:
    """For each teacher that needs one of its own, by name, a server that is not yet started.  Nothing is pushed to it.

    Raises ValueError if the machine has GPUs and none is chosen for it.
    """
    gpus = 0 if config.trainer.device == "cpu" else torch.cuda.device_count()
    found = {}
    for name, keys in config.teachers.items():
        server, rollout, device = keys.server, config.rollout, config.trainer.device
        if keys.engine == MEGATRON or server.urls:
            continue
        if gpus and (server.first_gpu is None or server.first_gpu + server.num_gpus > gpus):
            raise ValueError(
                f"teachers.{name}.server.first_gpu={server.first_gpu}: expected the first of {server.num_gpus} GPUs of "
                f"the teacher's server, 0 to {gpus - server.num_gpus}"
            )
        launch = EngineLaunch(
            rollout.engine,
            model_folder(keys.model.path, f"teachers.{name}.model.path"),
            dtype=rollout.dtype,
            tensor_parallel_size=server.num_gpus,
            max_running_requests=server.concurrency,
            python=rollout.sglang.python,
            device=None if device == "auto" else device,
            first_gpu=server.first_gpu,
            memory_fraction=server.memory_fraction,
        )
        found[name] = Servers([launch], token, config.trainer.run_dir / "logs" / f"teacher_{name}", supervision(config))
    return found


def key_of_servers(config: Config, name: str) -> str:
    """The key of a teacher's servers that run already.  Raises ValueError for a variable that is not set."""
    return api_key(f"teachers.{name}.server.api_key_env", config.teachers[name].server.api_key_env)
