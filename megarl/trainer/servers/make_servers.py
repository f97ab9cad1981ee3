"""Makes the servers of a run: those of the rollout, of a reward model and of teachers; and chooses their engine."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from megarl.arch.layout import has_states, numbers_of
from megarl.arch.projections import chosen, projections_of
from megarl.arch.sglang_config import overrides, wants_gpus
from megarl.arch.sglang_options import DRAFTS_ON_GPUS, asks_to_draft
from megarl.config import Config, read_yaml
from megarl.config.names import AUTO, MEGATRON
from megarl.config.placement import placements
from megarl.config.schema.roles import Lora
from megarl.config.validate.models import config_of_folder
from megarl.config.validate.rewards import starts_reward_server
from megarl.config.validate.servers import misplaced
from megarl.machines.nodes import Nodes
from megarl.rewards.services.service import api_key
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import HERE, Machines
from megarl.servers.sglang_environment import sglang_gpu_python
from megarl.servers.supervisor import ServerDied, Servers, State, Supervision
from megarl.trainer.build import model_folder
from megarl.trainer.checkpoint import checkpoint
from megarl.weights.hf.named import check_for_sglang
from megarl.weights.mapping.server_map import is_enlarged

REQUESTS_OF_TEACHERS = 64  # at a time, to all servers of a teacher


def server_launch(config: Config) -> EngineLaunch:
    """How a rollout server of the run is started, with the weights of model.path; machine and GPU are not yet set."""
    rollout = config.rollout
    lora = config.actor.lora
    folder = model_folder(config.model.path)
    launch = EngineLaunch(
        rollout.engine,
        folder,
        host=rollout.host,
        tls="never" if config.trainer.private_network and rollout.tls == "auto" else rollout.tls,
        dtype=rollout.dtype,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        expert_parallel_size=rollout.expert_parallel_size,
        attention_dp=rollout.attention_dp,
        quantization=rollout.quantization,
        max_running_requests=rollout.max_running_requests,
        max_total_tokens=rollout.max_total_tokens,
        longest_pause_s=config.trainer.call_timeout_s,
        random_seed=rollout.seed,
        python=rollout.sglang.python,
        args=tuple(rollout.sglang.args),
        device=None if config.trainer.device == "auto" else config.trainer.device,
        memory_fraction=rollout.memory_fraction,
        memory_saver=rollout.placement == "shared",
        lora_rank=lora.rank if config.adapters_kept else 0,
        lora_targets=_served_targets(lora, folder),
        lora_slots=config.adapters_kept + 1,
        returns_routes=config.actor.router_replay == "rollout",
    )
    return knowing_its_model(launch)


def knowing_its_model(launch: EngineLaunch) -> EngineLaunch:
    """With what a server is told of its model beside its config.json.  ValueError if SGLang lacks a GPU for it."""
    hf = config_of_folder(launch.model_path)
    if launch.engine == "sglang" and launch.uses_cpu:
        for why in (*wants_gpus(hf), *([DRAFTS_ON_GPUS] if asks_to_draft(launch.args) else ())):
            raise ValueError(f"rollout.engine=sglang: {why}")
    indexers = numbers_of(hf).has_indexers
    return replace(launch, has_states=has_states(hf) and not indexers, has_indexers=indexers, overrides=overrides(hf))


def _served_targets(lora: Lora, folder: str) -> tuple[str, ...]:
    """The projections for which a server holds adapters; none if it gets merged weights."""
    if not lora.rank or lora.push != "adapter":
        return ()
    return chosen(lora.targets, projections_of(config_of_folder(folder)))


def supervision(config: Config) -> Supervision:
    """Timeouts and maximum restarts of the servers.

    A server does not answer while it carries out an order of a push, which may take as long as a call to the ranks.
    """
    rollout, shortest = config.rollout, Supervision.answer_within_s
    return Supervision(
        start_timeout_s=rollout.start_timeout_s,
        answer_within_s=max(shortest, config.trainer.call_timeout_s),
        max_restarts=rollout.max_restarts,
    )


def make_servers(config: Config, token: str, nodes: Nodes | None = None, *, trains: bool = True) -> Servers:
    """The rollout servers of a run, not yet started, or those of rollout.urls.  `trains`: a trainer uses GPUs too."""
    rollout = config.rollout
    if rollout.urls:
        return Servers.at(rollout.urls, token, supervision(config))
    launches, machines = [], []
    launch = server_launch(config)
    reads_weights = not (trains and config.first_push_is_whole) or _is_padded(launch)
    if reads_weights and launch.engine == "sglang":
        check_for_sglang(launch.model_path)
    launch = replace(launch, reads_weights=reads_weights, returns_routes=trains and launch.returns_routes)
    launch = replace(launch, num_threads=server_threads(config, trains=trains))
    for places, gpu in placements(config, trains=trains):
        parts = tuple((nodes.machine(k), nodes.address(k)) if nodes else (HERE, rollout.host) for k in places)
        machine, address = parts[0]
        launches.append(replace(launch, host=address, first_gpu=gpu))
        machines.append(machine if len(parts) == 1 else Machines(parts))
    return Servers(launches, token, config.trainer.run_dir / "logs", supervision(config), machines)


def server_threads(config: Config, *, trains: bool) -> int:
    """CPU threads of each hf server: all cores, unless the trainer works at the same time."""
    beside_trainer = trains and (config.rollout.ahead > 0 or config.trainer.eval_beside)
    return 1 if beside_trainer else max(1, len(os.sched_getaffinity(0)) // config.rollout.num_servers)


def _is_padded(launch: EngineLaunch) -> bool:
    """Whether the server pads the model, whose padding no push brings."""
    if not launch.uses_cpu or launch.engine != "sglang":
        return False
    return is_enlarged("sglang", config_of_folder(launch.model_path), launch.tensor_parallel_size)


def check_gpus(config: Config, *, trains: bool) -> None:
    """Refuse servers for which this machine has too few GPUs; the other machines are assumed to be equal."""
    gpus, size = torch.cuda.device_count(), config.rollout.tensor_model_parallel_size
    if config.rollout.urls or config.trainer.device == "cpu" or not gpus:
        return
    if config.rollout.placement == "separate":
        for sentence in misplaced(config, trains=trains):
            raise ValueError(sentence)
    for index, (machines, first) in enumerate(placements(config, trains=trains)):
        if (last := first + size // len(machines) - 1) >= gpus:
            raise ValueError(
                f"rollout.placement={config.rollout.placement}: server {index} would take GPUs {first} to {last} of a "
                f"machine that has {gpus}; use fewer or smaller servers, another rollout.first_gpu, or rollout.urls"
            )


def make_reward_server(config: Config, token: str) -> Servers | None:
    """The server of the reward model, not yet started; None if the run needs none of its own.

    It is our own server, whose scores are those of transformers: SGLang 0.5.23 gave other ones for a Qwen3 model with a
    `score` head.  Nothing is ever pushed to it.
    Raises ValueError if the machine has GPUs and none is chosen for it.
    """
    if not starts_reward_server(config):
        return None
    model = config.reward.model
    _check_gpu(config, "reward.model", model.first_gpu, 1, "the GPU of the reward model's server")
    launch = EngineLaunch(
        "hf",
        model_folder(model.path, "reward.model.path"),
        scores=True,
        max_running_requests=config.reward.concurrency,
        first_gpu=model.first_gpu,
        memory_fraction=model.memory_fraction,
    )
    return _servers(config, launch, token, "reward_model")


def make_teacher_servers(config: Config, token: str) -> dict[str, Servers]:
    """For each teacher that needs one of its own, by name, a server that is not yet started.  Nothing is pushed to it.

    Raises ValueError if the machine has GPUs and none is chosen for it.
    """
    found = {}
    for name, keys in config.teachers.items():
        server, rollout = keys.server, config.rollout
        if keys.engine == MEGATRON or server.urls:
            continue
        what = f"the first of {server.num_gpus} GPUs of the teacher's server"
        _check_gpu(config, f"teachers.{name}.server", server.first_gpu, server.num_gpus, what)
        launch = EngineLaunch(
            rollout.engine,
            model_folder(keys.model.path, f"teachers.{name}.model.path"),
            tensor_parallel_size=server.num_gpus,
            max_running_requests=REQUESTS_OF_TEACHERS,
            python=rollout.sglang.python,
            first_gpu=server.first_gpu,
            memory_fraction=server.memory_fraction,
        )
        found[name] = _servers(config, launch, token, f"teacher_{name}")
    return found


def _check_gpu(config: Config, key: str, first_gpu: int | None, num_gpus: int, what: str) -> None:
    """`what` is expected of the key's `first_gpu`."""
    gpus = 0 if config.trainer.device == "cpu" else torch.cuda.device_count()
    if gpus and (first_gpu is None or first_gpu + num_gpus > gpus):
        raise ValueError(f"{key}.first_gpu={first_gpu}: expected {what}, 0 to {gpus - num_gpus}")


def _servers(config: Config, launch: EngineLaunch, token: str, name: str) -> Servers:
    device = None if config.trainer.device == "auto" else config.trainer.device
    launch = knowing_its_model(replace(launch, dtype=config.rollout.dtype, device=device))
    return Servers([launch], token, config.trainer.run_dir / "logs" / name, supervision(config))


def look_after(server: Servers, whose: str) -> None:
    """Restart a server that died.  Raises ServerDied if it may not be restarted any more."""
    events = server.poll()
    if State.OUT in server.states:
        raise ServerDied(f"the server of {whose} is gone; {events[-1].reason if events else 'see its log'}")


def key_of_servers(config: Config, name: str) -> str:
    """The key of a teacher's servers that run already.  Raises ValueError for a variable that is not set."""
    return api_key(f"teachers.{name}.server.api_key_env", config.teachers[name].server.api_key_env)


def chosen_engine(config: Config, command: str) -> tuple[str, str]:
    """The engine that rollout.engine=auto is here, and the reason in words: SGLang if it can use a GPU, else hf.

    A run that resumes keeps the engine of its config.yaml.  Raises ValueError if trainer.resume_mode names no
    checkpoint.
    """
    trainer = config.trainer
    root = trainer.run_dir / "checkpoints"
    # Skipped saves are reported when the run resumes.
    saved = checkpoint.find(trainer.resume_mode, root, lambda _: None, verify=False) if command == "train" else None
    if saved is not None:
        begun = saved.folder.parents[1] / "config.yaml"
        if begun.exists() and (engine := read_yaml(begun).rollout.engine) != AUTO:
            return engine, f"the run that resumes has it in {begun}"
    if trainer.device == "cpu":
        return "hf", "trainer.device=cpu uses no GPU"
    if not torch.cuda.is_available():
        return "hf", "torch finds no GPU here"
    try:
        python = sglang_gpu_python(config.rollout.sglang.python)
    except ValueError as error:
        return "hf", f"there is a GPU, but no SGLang ({error})"
    return "sglang", f"there is a GPU, and SGLang at {python}"
