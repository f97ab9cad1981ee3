"""Makes the parts of a run from the configuration: each function reads the keys of one part."""

from __future__ import annotations

import ipaddress
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config, layout_of, used_roles
from megarl.config.placement import joins_servers, placements, servers_map_memory, serves_beside_actor
from megarl.config.schema.roles import Lora
from megarl.config.validate.models import MINI_PLACE, config_of_folder, missing_folder, model_numbers, more_than_text
from megarl.config.validate.servers import misplaced
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import Prompts
from megarl.group import Group
from megarl.layout import Layout
from megarl.machines import Nodes
from megarl.megatron_fields import OVERRIDES
from megarl.metrics.tokens import TokenLog
from megarl.metrics.trackers.console import warn
from megarl.metrics.trackers.trackers import Trackers, make_trackers
from megarl.processes.presence import wait_for
from megarl.projections import chosen, projections_of
from megarl.rollout.engine_routes import EngineRoutes
from megarl.rollout.engine_support import EngineSupport
from megarl.rollout.wire_columns import EngineColumn
from megarl.routed_experts import RoutedExperts
from megarl.servers import supervisor
from megarl.servers.launch import EngineLaunch
from megarl.servers.nccl import VARIABLES
from megarl.servers.server_process import HERE, Machines
from megarl.weights.hf.named import check_for_sglang
from megarl.weights.mapping.server_map import is_enlarged
from megarl.weights.push.channel import own_address

MINI_SIZE = 512  # hidden size and vocabulary of a model that is made on the spot, at most


def model_folder(path: str, key: str = "model.path") -> str:
    """A folder as it is; for a hub name the folder of its snapshot, which is downloaded if it is not cached.

    Raises ValueError, with `key`, for anything else.
    """
    if Path(path).is_dir():
        return path
    if sentence := missing_folder(path, key):
        raise ValueError(sentence)
    try:
        return _downloaded(path)
    except Exception as error:  # no network, unknown name, no access: the hub raises a different exception for each
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{key}={path}: neither a folder nor a name that the hub gives ({reason})") from error


def cached_folder(path: str) -> str | None:
    """A folder as it is, for a hub name that of a snapshot that was downloaded before; None for anything else."""
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):  # never downloaded, or no name of a hub
        return None


def make_mini_model(config: Config) -> None:
    """Write the folder of a very small preset, such as model=qwen3_mini, if it is not there: nobody published one."""
    path, numbers = config.model.path, dict(config.model.config)
    sizes = [numbers.get(name, MINI_SIZE + 1) for name in ("hidden_size", "vocab_size")]
    if Path(path).exists() or max(sizes) > MINI_SIZE or not path.startswith(MINI_PLACE):
        return
    from megarl.data.examples.tiny import write_random_model  # with transformers' modelling code, which only this needs

    write_random_model(path, numbers, seed=config.trainer.seed)
    warn(f"model.path={path}: this model of random weights was made now; `megarl sft` teaches it a task's form")


def _downloaded(name: str) -> str:
    """In a thread: a large model takes longer than the driver may be silent.  An interrupt does not wait for it."""
    from huggingface_hub import snapshot_download  # pulls in a network stack that a local run does not need

    found: Future[str] = Future()

    def download() -> None:
        try:
            patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
            found.set_result(snapshot_download(name, allow_patterns=patterns))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=download, daemon=True, name="download").start()
    wait_for([found])
    return found.result()


def engine_settings(role: Any) -> dict[str, Any]:
    """How a role's layout is computed: fields of mcore.training.execution.ExecutionOptions."""
    names = [
        "transformer_impl",
        "moe_token_dispatcher_type",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
    ]
    names += ["overlap_grad_reduce", "overlap_param_gather", "param_offload", "optimizer_offload", *OVERRIDES]
    chosen = {name: getattr(role.megatron, name) for name in names if hasattr(role.megatron, name)}
    return {"strategy": role.strategy, **chosen}


def make_nodes(config: Config, token: str) -> Nodes:
    """The nodes of a run; the other nodes connect to this one at trainer.master_addr."""
    trainer = config.trainer
    return Nodes(
        trainer.nnodes,
        trainer.n_gpus_per_node,
        trainer.master_addr,
        trainer.master_port,
        token,
        spares=trainer.spare_nodes,
        silence_s=trainer.silence_s,
    )


def make_group(
    config: Config,
    role: Any,
    name: str,
    *,
    nodes: Nodes | None = None,
    address: str = "127.0.0.1",
    serves: bool = False,
) -> Group:
    """The process group of a role's layout on the role's ranks; on one machine the ranks listen at `address`.

    `serves`: the run has servers.  Ranks that may join groups with them need their variables of NCCL, those on their
    GPUs leave them memory, and the actor's have none that a server there could not map.
    """
    trainer, layout = config.trainer, layout_of(role.megatron)
    is_actors = world_of(role) == world_of(config.actor)
    # Communication of TP and CP overlaps with computation only if one hardware queue keeps their order; Megatron-FSDP
    # wants several.
    needs_order = (layout.tp > 1 or layout.cp > 1) and role.strategy != "fsdp"
    return Group(
        name,
        role.num_ranks,
        layout,
        log_dir=trainer.run_dir / "logs" / name,
        nodes=nodes,
        first_rank=role.first_rank,
        address=address,
        device=trainer.device,
        seed=trainer.seed,
        call_timeout_s=trainer.call_timeout_s,
        call_factor=trainer.call_factor,
        call_floor_s=trainer.call_floor_s,
        outside=("push", "save", "profile"),  # they wait for servers and for disks
        silence_s=trainer.silence_s,
        start_timeout_s=trainer.start_timeout_s,
        environment=({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if needs_order else {})
        | (VARIABLES if serves and joins_servers(config) else {}),
        setup={
            "has_neighbours": serves and serves_beside_actor(config),
            "is_mapped": serves and is_actors and servers_map_memory(config),
        },
    )


def world_of(role: Any) -> tuple[Layout, int, int]:
    """What roles have in common that share a group: the layout, the first rank and the number of ranks."""
    return layout_of(role.megatron), role.first_rank, role.num_ranks


def ranks_address(config: Config) -> str:
    """Where the ranks of a single-machine run listen: on loopback, unless servers elsewhere join groups with them.

    Servers that join the run later (rollout.join) reach them where they reach the driver.

    Raises ValueError for a server whose host name cannot be resolved.
    """
    rollout = config.rollout
    urls = rollout.urls or [EngineLaunch("", "", host=rollout.host, port=80).url]
    try:
        found = [own_address(url) for url in (*urls, *([f"http://{rollout.join}"] if rollout.join else []))]
    except OSError as error:
        key = f"rollout.urls={rollout.urls}" if rollout.urls else f"rollout.host={rollout.host}"
        key += f" rollout.join={rollout.join}" if rollout.join else ""
        raise ValueError(f"{key}: {error.strerror}; expected addresses that this machine can reach") from error
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), "127.0.0.1")


def start_trackers(config: Config, num_steps: int, resume_step: int | None) -> Trackers:
    trainer = config.trainer
    return make_trackers(
        trainer.logger, trainer.run_dir, trainer.project_name, trainer.experiment_name, asdict(config), num_steps,
        resume_step=resume_step,
    )  # fmt: skip


def make_token_log(config: Config) -> TokenLog | None:
    """None with trainer.token_samples=0."""
    num_samples = config.trainer.token_samples
    if not num_samples:
        return None
    tokenizer = load_tokenizer(model_folder(config.model.tokenizer_path))
    return TokenLog(
        config.trainer.run_dir, lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), num_samples
    )


def num_iterations(config: Config, num_prompts: int, critic_warmup: int) -> int:
    """Iterations of a run on `num_prompts` prompts, of which the first `critic_warmup` train the critic alone.

    Raises ValueError for none, or none of the actor.
    """
    data, trainer = config.data, config.trainer
    steps = trainer.total_training_steps or trainer.total_epochs * num_prompts // data.train_batch_size
    if steps < 1:
        raise ValueError(
            f"data.train_batch_size={data.train_batch_size}: one epoch has {num_prompts} prompts; use a smaller batch, "
            "more epochs, or trainer.total_training_steps"
        )
    if critic_warmup >= steps:
        raise ValueError(f"trainer.critic_warmup={critic_warmup}: expected fewer than the {steps} steps of the run")
    return steps


def optimizer_steps(config: Config, role: Any, num_iterations: int) -> int:
    """Optimizer steps of a role in `num_iterations` iterations."""
    return max(1, num_iterations * role.ppo_epochs * -(-config.data.train_batch_size // role.ppo_mini_batch_size))


def optim_settings(role: Any, total_steps: int) -> dict[str, Any]:
    """The `optim` group of a role as fields of mcore.training.optimizer.OptimSettings."""
    optim = role.optim
    return {
        "name": optim.name,
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "momentum": optim.momentum,
        "max_grad_norm": role.max_grad_norm,
        "warmup_steps": optim.lr_warmup_steps,
        "decay_style": optim.lr_decay_style,
        "decay_steps": optim.lr_decay_steps or total_steps,
        "min_lr": optim.min_lr,
        "override": dict(optim.override_optimizer_config),
    }


def lora_settings(config: Config) -> dict[str, Any] | None:
    """The `lora` argument of the actor's `load`; None trains all weights."""
    lora = config.actor.lora
    if lora.rank == 0:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets), "seed": config.trainer.seed}


def server_launch(config: Config) -> EngineLaunch:
    """How a rollout server of the run is started, with the weights of model.path; machine and GPU are not yet set."""
    rollout, lora, folder = config.rollout, config.actor.lora, model_folder(config.model.path)
    return EngineLaunch(
        rollout.engine,
        folder,
        host=rollout.host,
        tls=rollout.tls,
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


def _served_targets(lora: Lora, folder: str) -> tuple[str, ...]:
    """The projections for which a server holds adapters; none if it gets merged weights."""
    if not lora.rank or lora.push != "adapter":
        return ()
    return chosen(lora.targets, projections_of(config_of_folder(folder)))


def engine_columns(config: Config) -> tuple[EngineColumn, ...]:
    """What a training run wants to travel with the tokens of its completions.

    Raises ValueError for a model without experts.
    """
    replays, rollout = config.actor.router_replay == "rollout", config.rollout
    if not replays and not config.narrows_sampling:
        return ()
    found: list[EngineColumn] = []
    folder = model_folder(config.model.path)
    hf = config_of_folder(folder)
    if config.narrows_sampling:
        found.append(EngineSupport(rollout.top_p, rollout.top_k, num_ids=hf["vocab_size"]))
    if replays:
        of = RoutedExperts.of(hf)
        if of is None:
            raise ValueError(f"actor.router_replay=rollout: the model in {folder} has no experts; expected off")
        found.append(EngineRoutes(of, (rollout.temperature, rollout.top_p, rollout.top_k)))
    return tuple(found)


def supervision(config: Config) -> supervisor.Supervision:
    """Timeouts and maximum restarts of the servers.

    A server does not answer while it carries out an order of a push, which may take as long as a call to the ranks.
    """
    rollout, shortest = config.rollout, supervisor.Supervision.answer_within_s
    return supervisor.Supervision(
        start_timeout_s=rollout.start_timeout_s,
        answer_within_s=max(shortest, config.trainer.call_timeout_s),
        max_restarts=rollout.max_restarts,
    )


def make_servers(config: Config, token: str, nodes: Nodes | None = None, *, trains: bool = True) -> supervisor.Servers:
    """The rollout servers of a run, not yet started, or those of rollout.urls.  `trains`: a trainer uses GPUs too."""
    rollout = config.rollout
    if rollout.urls:
        return supervisor.Servers.at(rollout.urls, token, supervision(config))
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
    return supervisor.Servers(launches, token, config.trainer.run_dir / "logs", supervision(config), machines)


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


def plugins(config: Config) -> list[str]:
    """The user's modules, and files as absolute paths, which are valid in every process."""
    specs = config.algorithm.plugins
    return [str(Path(spec).expanduser().resolve()) if spec.endswith(".py") else spec for spec in specs]


def check_ids(config: Config, highest: int) -> None:
    """All models must know all ids of the tokenizer; the vocabulary of a critic or reference may else be smaller.

    Token ids above `highest` are padding.  Raises ValueError for a smaller one.
    """
    ours = model_numbers(config, "actor").vocab_size
    if ours is not None and ours <= highest:
        raise ValueError(
            f"model.path={config.model.path}: its vocabulary has {ours} tokens, and the tokenizer of "
            f"{config.model.tokenizer_path} has ids up to {highest}; expected a tokenizer of this model"
        )
    for role in set(used_roles(config, "train")) - {"actor"}:
        theirs = model_numbers(config, role).vocab_size
        if ours is not None and theirs is not None and theirs <= highest and theirs < ours:
            raise ValueError(
                f"{role}.model.path={config.role(role).model.path}: its vocabulary has {theirs} tokens, and the "
                f"tokenizer of {config.model.tokenizer_path} has ids up to {highest}; expected a model that knows "
                "them all"
            )


def check_reads_text(config: Config) -> None:
    """Raises ValueError for a policy of more than text; the folder of a hub name is there only now."""
    if sentence := more_than_text(config_of_folder(model_folder(config.model.path))):
        raise ValueError(f"model.path={config.model.path}: {sentence}")


def shortened(key: str, config: Config, found: Prompts, max_samples: int | None = None) -> str:
    """A line on the prompts of these files that are too long, and so left out or cut, and on tools that they lack.

    "" if there are none.
    """
    left_out, how = found.left_out(max_samples), f"data.overlong_prompts={config.data.overlong_prompts}"
    longer = f"prompts are longer than data.max_prompt_length={config.data.max_prompt_length}"
    what = "left out" if left_out else "cut"
    lines = [f"{left_out or found.num_cut:,} {longer} and {what} ({how})" if left_out or found.num_cut else ""]
    said = "; ".join(filter(None, [*lines, found.tools_said]))
    return f"{key}: {said}" if said else ""


def read_prompts(config: Config, files: Sequence[str], *, max_rows: int | None = None) -> Prompts:
    """The prompts of these files, or of their first `max_rows` rows, tokenised as the run needs them."""
    data = config.data
    tokenizer = load_tokenizer(model_folder(config.model.tokenizer_path))
    check_ids(config, max(tokenizer.get_vocab().values()))
    check_reads_text(config)
    return Prompts(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        ground_truth_key=data.ground_truth_key,
        max_prompt_length=data.max_prompt_length,
        shuffle=data.shuffle,
        seed=data.seed,
        overlong=data.overlong_prompts,
        system_prompt=data.system_prompt,
        template=data.apply_chat_template_kwargs,
        max_rows=max_rows,
        num_ids=num_token_ids(config),
    )


def stop_ids(folder: str) -> list[int]:
    """The tokens at which servers end a completion of a folder's model, besides the tokenizer's."""
    files = [Path(folder) / name for name in ("config.json", "generation_config.json")]
    given = [json.loads(file.read_text()).get("eos_token_id") for file in files if file.exists()]
    return [token for ids in given if ids is not None for token in (ids if isinstance(ids, list) else [ids])]


def num_token_ids(config: Config) -> int | None:
    """Of the policy's vocabulary, the padding of its embedding included; None if its config.json does not say."""
    size = config_of_folder(model_folder(config.model.path)).get("vocab_size")
    return None if size is None else int(size)
