"""Spellings of other frameworks that a command line or YAML file may contain, such as verl's.

Tables only: prefixes that are dropped, renamed keys and renamed values; the rules for single words are in `verl`.  All
other keys keep their names, so that an unknown key is still refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from megarl.config.verl import distillation, models, rewards, rollouts, runs, written
from megarl.config.verl.taken import Command, Rule, Taken, asks

# "actor_rollout.ref." is a widely copied misprint of the first prefix.
PREFIXES = ("actor_rollout_ref.", "actor_rollout.ref.")

# other key -> (our key, index in its list or name in its mapping if the key is one entry of it)
RENAMED: dict[str, tuple[str, int | str | None]] = {
    "actor.policy_loss.loss_mode": ("algorithm.policy_loss_fn", None),
    "algorithm.rollout_correction.rollout_is_batch_normalize": ("algorithm.rollout_correction.normalize", None),
    "actor.use_prefix_grouper": ("trainer.share_prefixes", None),
    "data.truncation": ("data.overlong_prompts", None),
    "data.filter_overlong_prompts": ("data.overlong_prompts", None),
    "algorithm.gae_lambda": ("algorithm.lam", None),
    "algorithm.gemma": ("algorithm.gamma", None),  # a misprint, also widely copied
    "actor.optim.type": ("actor.optim.name", None),
    "actor.optim.beta1": ("actor.optim.betas", 0),
    "actor.optim.beta2": ("actor.optim.betas", 1),
    "critic.optim.type": ("critic.optim.name", None),
    "critic.optim.beta1": ("critic.optim.betas", 0),
    "critic.optim.beta2": ("critic.optim.betas", 1),
}
RENAMED |= {
    f"{group}.overlong_buffer.{name}": (f"algorithm.overlong_buffer.{name}", None)
    for group in ("reward", "reward_model")
    for name in ("enable", "len", "penalty_factor")
}

# groups of other documents that hold keys of a role's `megatron` group
_MEGATRON_NAMES = {
    "override_transformer_config": (
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    ),
    "override_ddp_config": ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"),
}
RENAMED |= {
    f"{role}.megatron.{group}.{name}": (f"{role}.megatron.{name}", None)
    for role in ("actor", "critic", "ref")
    for group, names in _MEGATRON_NAMES.items()
    for name in names
}
RENAMED |= {
    f"{place}.{name}": (f"{place.partition('.')[0]}.megatron.{name}", None)
    for place in (
        "actor.fsdp_config",
        "critic.fsdp_config",
        "critic.fsdp",
        "critic.model.fsdp_config",
        "ref.fsdp_config",
    )
    for name in ("param_offload", "optimizer_offload")
}
RENAMED |= {
    "rollout.gpu_memory_utilization": ("rollout.memory_fraction", None),
    "rollout.ep_size": ("rollout.expert_parallel_size", None),
}
RENAMED |= models.RENAMED | rewards.RENAMED | rollouts.RENAMED | runs.RENAMED

# key -> {other name of a value: our name}
RENAMED_VALUES: dict[str, dict[str, str]] = {"rollout.engine": {"cpu": "hf"}}

# A switch of another document -> {its value: the value of our key, and whether that overrules other spellings of it}.
SWITCHES: dict[str, dict[bool, tuple[str, bool]]] = {
    "actor.use_prefix_grouper": {True: ("auto", True), False: ("off", True)},
    # What is filtered out is not cut, and what is not filtered may be.
    "data.filter_overlong_prompts": {True: ("filter", True), False: ("error", False)},
}

_RULES: dict[str, Rule] = (
    written.RULES | models.RULES | distillation.RULES | rewards.RULES | rollouts.RULES | runs.RULES
)
_SFT_RULES: dict[str, Rule] = _RULES | runs.SFT_RULES


class Canonical(NamedTuple):
    """Our own name of a key.  `place` is set if the key names one entry of a list or mapping (beta2 of betas)."""

    key: str
    place: int | str | None = None


def without_prefix(key: str) -> str:
    """`actor_rollout_ref.actor.clip_ratio` -> `actor.clip_ratio`; our own keys are unchanged."""
    for prefix in PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def converted(key: str, value: Any, command: Command) -> Taken | None:
    """What a rule makes of a key without its prefix and its value; None if there is no rule for the key."""
    pattern = _pattern(key, command.is_sft)
    if pattern is None:
        return None
    try:
        taken = (_SFT_RULES if command.is_sft else _RULES)[pattern](key, value, command)
    except (TypeError, ValueError, OverflowError):  # a rule computes with what is no number
        return Taken(refusal="expected a number")
    is_for_a_group = "*" in pattern.rpartition(".")[2]
    if is_for_a_group and taken.note and not taken.settings and asks(value):  # nobody thought of this word
        return Taken(refusal=f"expected it left out: nothing here does what it asks for ({taken.note})")
    return taken


@cache
def _pattern(key: str, is_sft: bool) -> str | None:
    """The key of the rule for `key`: the same, or a pattern."""
    rules = _SFT_RULES if is_sft else _RULES
    if key in rules:
        return key
    if key in RENAMED:  # a pattern of the rules may match it
        return None
    return next((pattern for pattern in rules if fnmatchcase(key, pattern)), None)


def canonical(key: str) -> Canonical:
    """Our name of another document's key."""
    key = without_prefix(key)
    return Canonical(*RENAMED[key]) if key in RENAMED else Canonical(key)
