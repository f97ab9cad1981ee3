"""From what was set to final numbers: every default that follows another key is put in."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.errors import ConfigError
from megarl.config.schema import Config

DEFAULT_MAX_TOKENS = 16384  # per micro-batch and rank, where nothing says how to cut


class MicroBatchKeys(NamedTuple):
    """The three keys of a role that say how a step is cut into micro-batches; at most one is set."""

    total: str
    per_rank: str
    tokens: str


_PPO_KEYS = MicroBatchKeys("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_REF_KEYS = MicroBatchKeys(
    "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"
)
MICRO_BATCH_KEYS = {"actor": _PPO_KEYS, "critic": _PPO_KEYS, "ref": _REF_KEYS}


class Cut(NamedTuple):
    """The values of those three keys."""

    total: int | None
    per_rank: int | None
    tokens: int | None


def resolved(config: Config) -> Config:
    """A new Config with every null and reference that follows another key replaced by the value it follows.

    Doing it twice changes nothing.  `ppo_micro_batch_size` becomes `ppo_micro_batch_size_per_gpu`, so afterwards one of
    two limits is set per role: sequences on one rank, or tokens on one rank.
    """
    return settled(to_config(OmegaConf.structured(config)))


def to_config(composed: DictConfig) -> Config:
    """OmegaConf's form of a Config as dataclasses, references followed."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        lines = str(error).splitlines()
        key = next((line.split()[-1] for line in lines if "full_key" in line), "the configuration")
        raise ConfigError(f"{key}: {lines[0]}; want ${{another.key}} that exists and fits") from None
    assert isinstance(config, Config), "the schema makes it a Config"
    return config


def settled(config: Config) -> Config:
    """`config` itself, with each role's way of cutting micro-batches made final."""
    own = {role: _cut(config, role) for role in MICRO_BATCH_KEYS}
    if not any(own["actor"]):
        longest = config.data.max_prompt_length + config.data.max_response_length
        own["actor"] = Cut(None, None, max(DEFAULT_MAX_TOKENS, longest))
    for role, keys in MICRO_BATCH_KEYS.items():
        cut = _per_rank(config, role, own[role] if any(own[role]) else own["actor"])
        for key, value in zip(keys, cut, strict=True):
            setattr(getattr(config, role), key, value)
    return config


def data_parallel_size(config: Config, role: str) -> int:
    """Copies of the role's model over all ranks; a layout that does not divide the ranks is an error."""
    layout, ranks = getattr(config, role).megatron, config.trainer.num_ranks
    sizes = (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.context_parallel_size)
    if min(sizes) < 1 or ranks < 1 or ranks % layout.model_parallel_size:
        raise ConfigError(
            f"{role}.megatron: tensor x pipeline x context parallel size {sizes[0]} x {sizes[1]} x {sizes[2]} = "
            f"{layout.model_parallel_size}; want a divisor of the {ranks} ranks of trainer.nnodes x "
            "trainer.n_gpus_per_node"
        )
    experts = (layout.expert_model_parallel_size or 1, layout.expert_tensor_parallel_size or sizes[0], sizes[1])
    if ranks % prod(experts):
        raise ConfigError(
            f"{role}.megatron: expert model x expert tensor x pipeline parallel size {experts[0]} x {experts[1]} x "
            f"{experts[2]} = {prod(experts)}; want a divisor of the {ranks} ranks of trainer.nnodes x "
            "trainer.n_gpus_per_node"
        )
    return ranks // layout.model_parallel_size


def _cut(config: Config, role: str) -> Cut:
    keys = MICRO_BATCH_KEYS[role]
    cut = Cut(*(getattr(getattr(config, role), key) for key in keys))
    given = [f"{role}.{key}={value}" for key, value in zip(keys, cut, strict=True) if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: want only one of them, the others null")
    for text, value in zip(given, (value for value in cut if value is not None), strict=True):
        if value < 1:
            raise ConfigError(f"{text}: want at least 1")
    return cut


def _per_rank(config: Config, role: str, cut: Cut) -> Cut:
    """Turn a number over all ranks into a number on one."""
    if cut.total is None:
        return cut
    copies = data_parallel_size(config, role)
    if cut.total % copies:
        key = f"{role}.{MICRO_BATCH_KEYS[role].total}"
        raise ConfigError(f"{key}={cut.total}: want a multiple of the {copies} data-parallel ranks")
    return Cut(None, cut.total // copies, None)
