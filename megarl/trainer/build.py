"""Makes the parts of a run from the configuration: each function reads the keys of one part."""

from __future__ import annotations

import ipaddress
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.arch.hf_config import text_part
from megarl.arch.layout import Layout
from megarl.arch.megatron_fields import OVERRIDES
from megarl.arch.routed_experts import IndexedKeys, RoutedExperts
from megarl.config import Config, layout_of, used_roles
from megarl.config.placement import joins_servers, servers_map_memory, serves_beside_actor
from megarl.config.validate.models import MINI_PLACE, config_of_folder, missing_folder, model_numbers, more_than_text
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import Prompts, RowSettings
from megarl.group import Group, GroupSettings
from megarl.machines.nodes import Nodes
from megarl.metrics.trackers.console import warn
from megarl.processes import watchdog
from megarl.rollout.engine_columns import EngineKeys, EngineRoutes, EngineSupport
from megarl.rollout.wire_columns import EngineColumn
from megarl.servers.launch import EngineLaunch
from megarl.servers.nccl import VARIABLES
from megarl.weights.push.channel import own_address

CALL_FLOOR_S = 120.0  # a call to the ranks may take so long, unless trainer.call_timeout_s is less
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
    """Write the folder of a very small preset, such as model=qwen3_mini, if it is missing: the hub has none."""
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
    watchdog.wait_for([found])
    return found.result()


def engine_settings(role: Any) -> dict[str, Any]:
    """How a role's layout is computed: fields of mcore.models.execution.ExecutionOptions."""
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
    settings = GroupSettings(
        device=trainer.device,
        seed=trainer.seed,
        call_timeout_s=trainer.call_timeout_s,
        call_factor=trainer.call_factor,
        call_floor_s=CALL_FLOOR_S,
        outside=("push", "save", "profile"),  # they wait for servers and for disks
        silence_s=trainer.silence_s,
        start_timeout_s=trainer.call_timeout_s,
        environment=({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if needs_order else {})
        | (VARIABLES if serves and joins_servers(config) else {}),
        has_neighbours=serves and serves_beside_actor(config),
        is_mapped=serves and is_actors and servers_map_memory(config),
    )
    logs, first = trainer.run_dir / "logs" / name, role.first_rank
    return Group(name, role.num_ranks, layout, settings, log_dir=logs, nodes=nodes, first_rank=first, address=address)


def world_of(role: Any) -> tuple[Layout, int, int]:
    """What roles have in common that share a group: the layout, the first rank and the number of ranks."""
    return layout_of(role.megatron), role.first_rank, role.num_ranks


def ranks_address(config: Config) -> str:
    """Where the ranks of a single-machine run listen: on loopback, unless servers elsewhere join groups with them.

    Servers that join later (rollout.join) count too.  Raises ValueError for a host name that cannot be resolved.
    """
    rollout = config.rollout
    urls = rollout.urls or [EngineLaunch("", "", host=rollout.host, port=80).url]
    try:
        own = [own_address(url) for url in (*urls, *([f"http://{rollout.join}"] if rollout.join else []))]
    except OSError as error:
        key = f"rollout.urls={rollout.urls}" if rollout.urls else f"rollout.host={rollout.host}"
        key += f" rollout.join={rollout.join}" if rollout.join else ""
        raise ValueError(f"{key}: {error.strerror}; expected addresses that this machine can reach") from error
    return next((address for address in own if not ipaddress.ip_address(address).is_loopback), "127.0.0.1")


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
    whole = {"lr_decay_steps": role.optim.lr_decay_steps or total_steps, "max_grad_norm": role.max_grad_norm}
    return asdict(role.optim) | whole


def lora_settings(config: Config) -> dict[str, Any] | None:
    """The `lora` of the actor's LoadSettings; None trains all weights."""
    lora = config.actor.lora
    if lora.rank == 0:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets), "seed": config.trainer.seed}


def engine_columns(config: Config) -> tuple[EngineColumn, ...]:
    """What a training run reads of its completions beside tokens.  Raises ValueError for a model without experts."""
    replays, rollout = config.actor.router_replay == "rollout", config.rollout
    if not replays and not config.narrows_sampling:
        return ()
    columns: list[EngineColumn] = []
    folder = model_folder(config.model.path)
    hf = config_of_folder(folder)
    if config.narrows_sampling:
        columns.append(EngineSupport(rollout.top_p, rollout.top_k, num_ids=hf["vocab_size"]))
    if replays:
        of = RoutedExperts.of(hf)
        if of is None:
            raise ValueError(f"actor.router_replay=rollout: the model in {folder} has no experts; expected off")
        sampling = (rollout.temperature, rollout.top_p, rollout.top_k)
        columns.append(EngineRoutes(of, sampling))
        if keys := IndexedKeys.of(hf):
            columns.append(EngineKeys(keys, sampling))
    return tuple(columns)


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


def shortened(key: str, config: Config, found: Prompts, max_samples: int | None = None) -> str:
    """A line on prompts of these files that are too long, so left out or cut, and on tools that they lack; or ""."""
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
    if sentence := more_than_text(config_of_folder(model_folder(config.model.path))):  # a hub name has a folder now
        raise ValueError(f"model.path={config.model.path}: {sentence}")
    settings = RowSettings(
        data.max_prompt_length,
        prompt_key=data.prompt_key,
        shuffle=data.shuffle,
        seed=data.seed,
        overlong=data.overlong_prompts,
        system_prompt=data.system_prompt,
        template=data.apply_chat_template_kwargs,
        max_row_bytes=data.max_row_bytes,
        num_ids=num_token_ids(config),
    )
    return Prompts(files, tokenizer, settings, ground_truth_key=data.ground_truth_key, max_rows=max_rows)


def stop_ids(folder: str) -> list[int]:
    """The tokens at which servers end a completion of a folder's model, besides the tokenizer's."""
    files = [Path(folder) / name for name in ("config.json", "generation_config.json")]
    given = [text_part(json.loads(file.read_text())).get("eos_token_id") for file in files if file.exists()]
    return [token for ids in given if ids is not None for token in (ids if isinstance(ids, list) else [ids])]


def num_token_ids(config: Config) -> int | None:
    """Size of the policy's vocabulary, with the padding of its embedding; None if its config.json does not say."""
    size = config_of_folder(model_folder(config.model.path)).get("vocab_size")
    return None if size is None else int(size)
