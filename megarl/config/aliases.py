"""Spellings of other documents: what a PPO user may have in an old command line or YAML file.

Tables only: a prefix that is dropped, names that are renamed, and keys that mean nothing here, each with what replaces
it.  Everything else keeps its name, so that an unknown key is still refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

# "actor_rollout.ref." is a misprint of the first that is widely copied.
PREFIXES = ("actor_rollout_ref.", "actor_rollout.ref.")

# our key, and the place in its list or the name in its mapping where the key is one entry of it
RENAMED: dict[str, tuple[str, int | str | None]] = {
    "actor.policy_loss.loss_mode": ("algorithm.policy_loss_fn", None),
    "algorithm.rollout_correction.bypass_mode": ("algorithm.rollout_correction.bypass", None),
    "algorithm.rollout_correction.rollout_is": ("algorithm.rollout_correction.level", None),
    "algorithm.rollout_correction.rollout_is_batch_normalize": ("algorithm.rollout_correction.normalize", None),
    "algorithm.rollout_correction.rollout_is_threshold": ("algorithm.rollout_correction.truncate", None),
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
    f"actor.policy_loss.{name}": ("algorithm.policy_loss_args", name)
    for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
}
RENAMED |= {f"actor.{name}": ("algorithm.policy_loss_args", name) for name in ("tau_pos", "tau_neg")}
RENAMED |= {
    f"{group}.overlong_buffer.{name}": (f"algorithm.overlong_buffer.{name}", None)
    for group in ("reward", "reward_model")
    for name in ("enable", "len", "penalty_factor")
}

WITHOUT_MEANING = {
    "*.fsdp_config.*": "Megatron shards the optimizer itself with actor.megatron.use_distributed_optimizer",
    "*.overlong_buffer.log": "the penalty is always logged, as reward/overlong_penalty",
    "*.use_dynamic_bsz": "sequences are always packed, by ppo_max_token_len_per_gpu or ppo_micro_batch_size[_per_gpu]",
    "model.use_remove_padding": "sequences are always packed and never padded",
    "rollout.gpu_memory_utilization": "rollout.max_total_tokens is the size of a server's KV cache",
    "rollout.name": "rollout.engine names the program that writes the completions",
}

FSDP = "fsdp"
FSDP_WARNING = "is trained as strategy=megatron, whose distributed optimizer does the sharding"


class Canonical(NamedTuple):
    """Our own name of a key.  `place` is set where the key names one entry of a list or mapping (beta2 of betas)."""

    key: str
    place: int | str | None = None


def without_prefix(key: str) -> str:
    """`actor_rollout_ref.actor.clip_ratio` -> `actor.clip_ratio`; our own keys stay as they are."""
    for prefix in PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def canonical(key: str) -> Canonical | str:
    """Our name of a key of any document, or, for a key without a meaning here, the sentence that says why."""
    key = without_prefix(key)
    for pattern, instead in WITHOUT_MEANING.items():
        if fnmatchcase(key, pattern):
            return f"{key} has no meaning here: {instead}"
    return Canonical(*RENAMED.get(key, (key, None)))
