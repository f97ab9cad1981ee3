"""Spellings of other frameworks that a command line or YAML file may contain, such as verl's.

Tables only: prefixes that are dropped, renamed keys and renamed values; the rules for single words are in `verl`.  All
other keys keep their names, so that an unknown key is still refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from megarl.config.tables import places
from megarl.config.verl import models, rewards, rollouts, runs, written
from megarl.config.verl.taken import Command, Rule, Taken, asks

# "actor_rollout.ref." is a widely copied misprint of the first prefix.
PREFIXES = ("actor_rollout_ref.", "actor_rollout.ref.")

# "gemma" is a widely copied misprint of gamma, too.
_NAMES = """
algorithm | algorithm | gae_lambda=lam gemma=gamma
algorithm | actor actor.policy_loss | tau_pos=policy_loss_args@tau_pos tau_neg=policy_loss_args@tau_neg
algorithm | actor.policy_loss | loss_mode=policy_loss_fn clip_cov_ratio=policy_loss_args@clip_cov_ratio \
clip_cov_lb=policy_loss_args@clip_cov_lb clip_cov_ub=policy_loss_args@clip_cov_ub \
kl_cov_ratio=policy_loss_args@kl_cov_ratio ppo_kl_coef=policy_loss_args@ppo_kl_coef dro_beta=policy_loss_args@beta
algorithm.overlong_buffer | reward.overlong_buffer reward_model.overlong_buffer \
reward_model.reward_kwargs.overlong_buffer_cfg reward.reward_kwargs.overlong_buffer_cfg | enable len penalty_factor
algorithm.rollout_correction | algorithm.rollout_correction | rollout_is_batch_normalize=normalize
trainer | actor | use_prefix_grouper=share_prefixes
model | data | tokenizer=tokenizer_path
data | data | truncation=overlong_prompts filter_overlong_prompts=overlong_prompts
rollout | rollout | gpu_memory_utilization=memory_fraction ep_size=expert_parallel_size \
max_num_seqs=max_running_requests
agent | rollout.multi_turn | max_assistant_turns=max_turns format=tool_parser
actor.lora | model | lora_rank=rank lora.rank=rank lora_alpha=alpha lora.alpha=alpha target_modules=targets
actor | actor | optim.type=optim.name grad_clip=max_grad_norm optim.clip_grad=max_grad_norm
critic | critic | optim.type=optim.name grad_clip=max_grad_norm optim.clip_grad=max_grad_norm
actor.optim | actor.optim | beta1=betas@0 beta2=betas@1
critic.optim | critic.optim | beta1=betas@0 beta2=betas@1
critic.megatron | critic.fsdp critic.model.fsdp_config | param_offload optimizer_offload
"""
_OF_ROLES = """
ROLE.megatron | ROLE.megatron.override_transformer_config | recompute_granularity recompute_method \
recompute_num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage moe_token_dispatcher_type
ROLE.megatron | ROLE.megatron.override_ddp_config | overlap_grad_reduce overlap_param_gather use_distributed_optimizer
ROLE.megatron | ROLE ROLE.fsdp_config ROLE.fsdp | ulysses_sequence_parallel_size=context_parallel_size
ROLE.megatron | ROLE.fsdp_config | param_offload optimizer_offload
"""


# other key -> (our key, entry of it), as `places` has them
RENAMED = places("".join(_OF_ROLES.replace("ROLE", role) for role in ("actor", "critic", "ref")) + _NAMES)

# key -> {other name of a value: our name}
RENAMED_VALUES: dict[str, dict[str, str]] = {"rollout.engine": {"cpu": "hf"}}

# A switch of another document -> {its value: the value of our key, and whether that overrules other spellings of it}.
SWITCHES: dict[str, dict[bool, tuple[str, bool]]] = {
    "actor.use_prefix_grouper": {True: ("auto", True), False: ("off", True)},
    # What is filtered out is not cut, and what is not filtered may be.
    "data.filter_overlong_prompts": {True: ("filter", True), False: ("error", False)},
}

_RULES: dict[str, Rule] = written.RULES | models.RULES | rewards.RULES | rollouts.RULES | runs.RULES
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
    except (TypeError, ValueError, ArithmeticError):  # a rule computes with what is no number
        return Taken(refusal="expected a number")
    if not _names_a_word(pattern) and taken.note and not taken.settings and asks(value):  # nobody thought of this word
        return Taken(refusal=f"expected it left out: nothing here does what it asks for ({taken.note})")
    return taken


@cache
def _pattern(key: str, is_sft: bool) -> str | None:
    """The key of the rule for `key`: the same, or the longest pattern that names the word, or its group."""
    rules = _SFT_RULES if is_sft else _RULES
    if key in rules:
        return key
    if key in RENAMED:  # a pattern of the rules may match it
        return None
    matching = (pattern for pattern in rules if fnmatchcase(key, pattern))
    return max(matching, key=lambda pattern: (_names_a_word(pattern), len(pattern)), default=None)


def _names_a_word(pattern: str) -> bool:
    """Whether a rule is for one word, and not for all of a group."""
    return "*" not in pattern.rpartition(".")[2]


def canonical(key: str) -> Canonical:
    """Our name of another document's key."""
    key = without_prefix(key)
    return Canonical(*RENAMED[key]) if key in RENAMED else Canonical(key)
