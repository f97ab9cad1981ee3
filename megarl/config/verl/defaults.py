"""Defaults of verl where ours differ, for a command line that starts a run as verl's scripts do.

They are laid under everything else, so that a pasted script trains what it trains in verl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from megarl.config import names
from megarl.config.verl.learning import BATCH, BY_SEQUENCE, CAP, CLAMPED, DEFAULT_SIZES, SEQUENCES, policy_loss
from megarl.config.verl.models import ADAPTERS, by_megatron, has_adapters
from megarl.config.verl.rollouts import nodes_of_servers, prompts_of_a_sync, servers_apart
from megarl.config.verl.runs import ALL_OF_THEM
from megarl.config.verl.taken import Command

_SIZES = {
    **DEFAULT_SIZES,
    "data.max_prompt_length": 512,
    "rollout.tensor_model_parallel_size": 2,
    "rollout.max_running_requests": 256,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.max_checkpoints_to_keep": ALL_OF_THEM,
}
_SIZES_OF_SFT = {
    "sft.batch_size": 256,
    "sft.max_length": 1024,
    "sft.epochs": 4,
    "actor.optim.lr": 1e-3,
    "trainer.max_checkpoints_to_keep": ALL_OF_THEM,
}
_CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_LOCAL = "megatron.tensor_model_parallel_size"


def defaults(command: Command, known: Set[str]) -> dict[str, Any]:
    """Our key -> verl's default, without those that are `known`, set by the command; {} for a command of our own."""
    if not command.is_whole:
        return {}
    sizes = _SIZES_OF_SFT if command.is_sft else _SIZES
    found = {key: value for key, value in (*sizes.items(), *_computation(command)) if key not in known}
    if command.is_sft:
        return found
    found |= {key: value for key, value in _learning(command) if key not in known}
    if command.has("async_training.") and BATCH in found:
        found[BATCH] = prompts_of_a_sync(command) or found[BATCH]
    if (mini := found.get("actor.ppo_mini_batch_size")) is not None:
        found["actor.ppo_mini_batch_size"] = min(mini, command.counted(BATCH, mini))
    apart = nodes_of_servers(command)
    if not known & {"rollout.num_servers", "rollout.urls"} and command.get("rollout.placement") != "separate":
        found["rollout.num_servers"] = servers_apart(command) or 1 if apart else _servers_on_all(command)
    return found


def differing(command: Command, known: Set[str]) -> Iterator[str]:
    """A line for a default of verl that cannot be ours."""
    found = dict(_computation(command)) if command.is_whole else {}
    if found and "actor.strategy" not in (*found, *known):
        yield f"actor.strategy=megatron, where verl's default is fsdp: {ADAPTERS}"


def _servers_on_all(command: Command) -> int:
    """As many servers as the GPUs of the run have room for."""
    gpus = command.counted("trainer.nnodes", 1) * command.counted("trainer.n_gpus_per_node", 8)
    return max(1, gpus // command.counted("rollout.tensor_model_parallel_size", 2))


def _learning(command: Command) -> Iterator[tuple[str, Any]]:
    """Of the loss and of adapters.  verl has one default of a clip for all losses, and it covers clip_ratio."""
    loss = policy_loss(command)
    for name, default in names.CLIPS_OF_LOSS.get(loss, {}).items():
        if default != _CLIPS[name] or command.get("actor.clip_ratio") is not None:
            yield f"actor.{name}", _CLIPS[name]
    if CAP in names.POLICY_LOSS_ARGS.get(loss, ()):
        yield "algorithm.policy_loss_args", {CAP: _CLIPS["clip_ratio_c"]}
    if loss in BY_SEQUENCE:
        yield "actor.loss_agg_mode", SEQUENCES
        yield "critic.loss_agg_mode", command.get("actor.loss_agg_mode", "token-mean")
    yield "actor.kl_loss_type", CLAMPED
    if command.get("model.lora_rank"):
        yield "actor.lora.alpha", 16.0
    if command.is_on("algorithm.filter_groups.enable"):
        yield "algorithm.filter_groups.max_num_gen_batches", ALL_OF_THEM


def _computation(command: Command) -> Iterator[tuple[str, Any]]:
    """How models are computed: by FSDP unless the command lays them out for Megatron; in bfloat16, in turns."""
    megatron = by_megatron(command)
    if megatron or not has_adapters(command):  # else megatron, our own default: see `differing`
        yield "actor.strategy", "megatron" if megatron else "fsdp"
    yield "model.dtype", "bfloat16"
    if not command.is_sft:
        yield "rollout.memory_fraction", 0.5
        yield "rollout.placement", "separate" if nodes_of_servers(command) else "shared"
    if megatron:
        yield "actor.megatron.use_distributed_optimizer", True
        for role in ("actor",) if command.is_sft else ("actor", "critic", "ref"):
            size = command.get(f"{role}.{_LOCAL}", command.get(f"actor.{_LOCAL}", 1))
            yield f"{role}.megatron.sequence_parallel", size != 1
    else:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield from ((f"actor.megatron.{key}", value) for key, value in full.items())


_MEGATRON = ("model_engine=megatron",)
_APART = ("hybrid_engine=False", "algorithm.rollout_correction.bypass_mode=True")  # servers have GPUs of their own
_ASYNC = (
    *_APART,
    "rollout.total_rollout_steps=100",
    "async_training.staleness_threshold=0.1",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=1",
    "async_training.partial_rollout=True",
)
_DAPO = ("reward.reward_manager.name=dapo",)
FILES: dict[str, tuple[str, ...]] = {
    "ppo_trainer": (),
    "ppo_megatron_trainer": _MEGATRON,
    "dapo_trainer": _DAPO,
    "dapo_megatron_trainer": (*_MEGATRON, *_DAPO),
    "sft_trainer": (),
    "sft_trainer_engine": (),
    "fully_async_ppo_trainer": _ASYNC,
    "fully_async_ppo_megatron_trainer": (*_MEGATRON, *_ASYNC),
    "one_step_off_ppo_trainer": _APART,
    "one_step_off_ppo_megatron_trainer": (*_MEGATRON, *_APART),
}
NAME, FOLDER = "--config-name", "--config-path"
_ASYNC_FILE = "fully_async_ppo_trainer"  # which its trainer reads where the command names none
_MODEL = "actor_rollout_ref.model.path="


def with_file(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words, after those of the file of verl's that no word sets; and lines about the file.

    The name of an unknown file stays among the words, to be refused with the others.
    """
    options = dict(word.split("=", 1) for word in words if word.startswith((f"{NAME}=", f"{FOLDER}=")))
    typed = {_key(word) for word in words}
    named, why = options.get(NAME, ""), f"{NAME}={options.get(NAME)}"
    if not named and _is_asynchronous(words, typed):
        named, why = _ASYNC_FILE, "async_training.*"
    name = named.removesuffix(".yaml")
    if name not in FILES:
        return [word for word in words if NAME not in options or not word.startswith(f"{FOLDER}=")], []
    of_the_file = [word for word in FILES[name] if _key(word) not in typed]
    lines = [f"{why}: verl's file {name} sets {', '.join(of_the_file) or 'nothing else here'}"]
    if FOLDER in options:
        lines.append(f"{FOLDER}={options[FOLDER]}: no file of this folder is read")
    return of_the_file + [word for word in words if not word.startswith((f"{NAME}=", f"{FOLDER}="))], lines


def _is_asynchronous(words: Sequence[str], typed: set[str]) -> bool:
    """Is it a whole command for verl's fully asynchronous trainer?"""
    own = typed & {"recipe", "model"}
    return not own and any(_MODEL in word for word in words) and any(key.startswith("async_training.") for key in typed)


def unknown_option(word: str) -> str:
    """The sentence for an option that no command has."""
    option = word.partition("=")[0]
    if option in (NAME, FOLDER):
        return (
            f"{word}: expected one of verl's files ({', '.join(FILES)}) in {NAME}, or a file of ours in --config FILE"
        )
    return f"there is no option {option}; expected --config FILE, -m, --debug, --help or key=value"


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0].removeprefix("actor_rollout_ref.")
