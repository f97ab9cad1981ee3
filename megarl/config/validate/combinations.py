"""Checks which values go together, once each is valid alone and before any process starts.

What needs one subject is in its own file: servers in servers.py, losses in algorithms.py, and so on.  Checks that need
the data run where the data is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isdir
from pathlib import Path
from typing import Any

from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate import (
    algorithms,
    generation,
    lora,
    models,
    rewards,
    servers,
    strategies,
    teachers,
)
from megarl.config.validate.layouts import LEARNERS, divisors, nearest_numbers, used_roles
from megarl.config.validate.values import value_of

# Arguments of transformers' apply_chat_template that are no variables of the template; the run sets what it needs.
_TEMPLATE_ARGUMENTS = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"),
    *("tools", "truncation"),
)
_OF_SHELLS = frozenset(";&|<>$`\"'\\*?!")  # sentences have the name in commands to copy


def contradictions(config: Config, command: str) -> Iterator[str]:
    """One sentence for each invalid combination in a resolved `config`, whose values are valid one by one."""
    yield from _places(config)
    if command == "node":  # machine 0 decides what it starts
        return
    roles = used_roles(config, command)
    yield from strategies.contradictions(config, command)
    yield from models.of_mtp(config, roles)
    if command in names.SUPERVISED[1:] and config.actor.mtp != "off":
        yield f"actor.mtp={config.actor.mtp}: `megarl {command}` trains no MTP layers; expected off"
    if command == "rm" and config.actor.lora.rank:
        yield f"actor.lora.rank={config.actor.lora.rank}: `megarl rm` trains all weights and a new head; expected 0"
    if command == "rm" and config.sft.overlong_rows in ("right", "middle"):
        cut = config.sft.overlong_rows
        yield f"sft.overlong_rows={cut}: a score is read at the end of a whole answer; expected error, filter or left"
    yield from _template(config)
    yield from models.unfit(config, roles)
    yield from models.vocabularies(config, roles)
    yield from models.lengths(config, ("actor",) if command == "evaluate" else roles, command)
    yield from _batches(config, command)
    yield from _schedules(config)
    if command in ("train", "config"):
        yield from algorithms.contradictions(config)
        yield from teachers.contradictions(config)
        yield from generation.contradictions(config)
    if command in ("train", "evaluate", "config"):
        yield from rewards.contradictions(config, command)
        yield from rewards.of_agents(config)
    yield from servers.contradictions(config, command)
    yield from lora.contradictions(config)
    yield from _bad_numbers(config, command)
    yield from _profiles(config)
    yield from _prefixes(config, roles)
    yield from _names(config)


def _template(config: Config) -> Iterator[str]:
    for name, value in config.data.apply_chat_template_kwargs.items():
        if name in _TEMPLATE_ARGUMENTS:
            key = f"data.apply_chat_template_kwargs.{name}={show(value)}"
            yield f"{key}: the run decides this; expected variables of the chat template, such as enable_thinking"


def _batches(config: Config, command: str) -> Iterator[str]:
    prompts = config.data.train_batch_size
    for role in LEARNERS if config.uses_critic else ("actor",):
        mini = value_of(config, f"{role}.ppo_mini_batch_size")
        if prompts % mini:
            near = " or ".join(str(size) for size in nearest_numbers(mini, divisors(prompts)))
            yield f"{role}.ppo_mini_batch_size={mini}: expected a divisor of data.train_batch_size={prompts}, as {near}"
    roles = ("actor", "critic", "ref", *config.teacher_roles)
    for key in (*(f"{role}.ppo_max_token_len_per_gpu" for role in roles), "rollout.max_total_tokens"):
        limit = value_of(config, key)
        name, longest = models.longest_sequence(config, command, is_served=key.startswith("rollout."))
        if limit is not None and limit < longest:
            yield f"{key}={limit}: expected room for one sequence, at least {name} = {longest}"


def _schedules(config: Config) -> Iterator[str]:
    for role in LEARNERS if config.uses_critic else ("actor",):
        optim = value_of(config, f"{role}.optim")
        if optim.min_lr > optim.lr:
            yield f"{role}.optim.min_lr={optim.min_lr}: expected at most {role}.optim.lr={optim.lr}"
        if optim.lr_decay_steps is not None and optim.lr_decay_steps <= optim.lr_warmup_steps:
            warmup = f"{role}.optim.lr_warmup_steps={optim.lr_warmup_steps}"
            yield f"{role}.optim.lr_decay_steps={optim.lr_decay_steps}: expected more than {warmup}"
    steps, alone = config.trainer.total_training_steps, config.trainer.critic_warmup
    if config.uses_critic and steps is not None and alone >= steps:
        yield f"trainer.critic_warmup={alone}: expected fewer than trainer.total_training_steps={steps}"


def _places(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if (trainer.node_rank or 0) >= trainer.num_machines:
        more = f" + trainer.spare_nodes={trainer.spare_nodes}" if trainer.spare_nodes else ""
        yield f"trainer.node_rank={trainer.node_rank}: expected less than trainer.nnodes={trainer.nnodes}{more}"
    if trainer.nnodes > 1 and not trainer.master_addr:
        yield "trainer.master_addr=: expected the address of machine 0, where the others find the run"


def _bad_numbers(config: Config, command: str) -> Iterator[str]:
    trainer, key = config.trainer, "trainer.on_nonfinite=rollback"
    if trainer.on_nonfinite != names.ROLLBACK or command not in ("train", "config", *names.SUPERVISED):
        return
    if command in names.SUPERVISED:
        yield f"{key}: megarl {command} does not go back to a checkpoint; expected stop or skip"
    elif not trainer.saves:
        yield f"{key}: the run saves nothing to go back to; expected trainer.save_freq=STEPS, or stop or skip"


def _profiles(config: Config) -> Iterator[str]:
    trainer, profile = config.trainer, config.trainer.profile
    if not profile.steps:
        return
    if absent := [rank for rank in profile.ranks if rank >= trainer.num_ranks]:
        ranks = f"ranks 0 to {trainer.num_ranks - 1}"
        yield f"trainer.profile.ranks={show(profile.ranks)}: the run has {ranks}, so there is no rank {absent[0]}"
    for key, is_asked in (("tool=nvtx", profile.tool == "nvtx"), ("memory=true", profile.memory)):
        if is_asked and trainer.device == "cpu":
            yield f"trainer.profile.{key}: trainer.device=cpu has no GPU; expected trainer.profile.tool=torch alone"


def _prefixes(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    if config.trainer.share_prefixes != "on":
        return
    found: dict[str, tuple[Any, bool]] = {
        "actor.router_replay": (config.actor.router_replay, config.actor.router_replay != "off"),
        "actor.mtp": (config.actor.mtp, config.actor.mtp != "off"),
    }
    for role in roles:
        megatron, group = config.role(role).megatron, f"{role}.megatron"
        impl, cp = megatron.transformer_impl, megatron.context_parallel_size
        found[f"{group}.transformer_impl"] = (impl, impl == "transformer_engine")
        found[f"{group}.context_parallel_size"] = (cp, cp > 1)
    if missing := [f"{key}={value}" for key, (value, refused) in found.items() if refused]:
        yield f"trainer.share_prefixes=on: it is not built for {', '.join(missing)}; expected auto or off"


def _names(config: Config) -> Iterator[str]:
    trainer = config.trainer
    unknown = [name for name in trainer.logger if name not in names.LOGGERS]
    if unknown:
        yield f"trainer.logger={show(trainer.logger)}: {unknown[0]} is none of {', '.join(names.LOGGERS)}"
    name = trainer.experiment_name
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable() or set(name) & _OF_SHELLS:
        marks = " ".join(sorted(_OF_SHELLS))
        yield f"trainer.experiment_name={name}: expected the plain name of a folder, printable and without {marks}"
    if trainer.resume_mode not in names.RESUME_MODES and not isdir(trainer.resume_mode):
        yield f"trainer.resume_mode={trainer.resume_mode}: expected auto, disable or the folder of a checkpoint"
