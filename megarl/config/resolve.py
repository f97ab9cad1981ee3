"""Final values of a configuration: every default that follows another key is replaced by that key's value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.aliases import RENAMED_VALUES
from megarl.config.keys import fits, followed, general, is_free, mapping_of, type_name, type_of
from megarl.config.names import DEFAULT_MOMENTUM
from megarl.config.schema import Config, Megatron
from megarl.config.settings import ConfigError, show
from megarl.layout import KEYS, Layout
from megarl.megatron_fields import OVERRIDES, RECOMPUTED

_PLAIN = re.compile(r"\$\{([\w.]+)\}")
RESTARTS = 3  # of failed ranks, without a new step in between, where there are checkpoints
DEFAULT_MAX_TOKENS = 16384  # per micro-batch and rank, if no key sets the micro-batch size


# how a pipeline is split; critic and reference follow the actor only with the same number of pipeline ranks
PIPELINE_KEYS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


class MicroBatchKeys(NamedTuple):
    """The three keys of a role that define how a step is split into micro-batches; at most one is set."""

    total: str
    per_rank: str
    tokens: str


_PPO_KEYS = MicroBatchKeys("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_REF_KEYS = MicroBatchKeys(
    "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"
)


def micro_batch_keys(role: str) -> MicroBatchKeys:
    """Those of a role: actor, critic, ref or teachers.NAME."""
    return _PPO_KEYS if role in ("actor", "critic") else _REF_KEYS


def sources_of(key: str) -> Iterator[str]:
    """The keys whose value `key` has if it is not set, the next one first.

    Example: "critic.ppo_mini_batch_size" -> "actor.ppo_mini_batch_size", "data.train_batch_size".
    """
    role, _, name = key.rpartition(".")
    names = micro_batch_keys(role)
    if name in names and role != "actor":
        yield f"actor.{micro_batch_keys('actor')[names.index(name)]}"
    while reference := _PLAIN.fullmatch(followed().get(general(key), "")):
        key = reference[1]
        yield key


class Cut(NamedTuple):
    """The values of those three keys."""

    total: int | None
    per_rank: int | None
    tokens: int | None


def resolved(config: Config) -> Config:
    """A new Config in which every null and reference to another key is replaced by that key's value.

    Idempotent.  `ppo_micro_batch_size` becomes `ppo_micro_batch_size_per_gpu`, so afterwards each role has one of two
    limits: sequences per rank, or tokens per rank.
    """
    return settled(followed_by_roles(to_config(OmegaConf.structured(config))))


def to_config(composed: DictConfig) -> Config:
    """Convert OmegaConf's form to dataclasses; resolves references and renames values, also in `composed`."""
    _put_in_references(composed)
    for key, names in RENAMED_VALUES.items():
        if (value := OmegaConf.select(composed, key)) in names:
            OmegaConf.update(composed, key, names[value])
    try:
        config = OmegaConf.to_object(composed)
    except (OmegaConfBaseException, AssertionError) as error:  # the second: a list where a group of keys belongs
        otherwise = f"expected the groups of keys of the schema ({' '.join(str(error).split()) or 'another shape'})"
        raise ConfigError(*(_wrong_references(composed) or [otherwise])) from None
    assert isinstance(config, Config), "the schema makes it a Config"
    return config


def _put_in_references(composed: DictConfig) -> None:
    """Replace each plain "${a.b}" by the value of a.b, because OmegaConf takes a millisecond for each.

    References that are not plain, have no target or have the wrong type are left to OmegaConf and its error messages.
    Raises ConfigError for a value in the place of a list, which OmegaConf would take.
    """
    faults = []
    raw = dict(_leaves(OmegaConf.to_container(composed, resolve=False), ""))
    for key, value in raw.items():
        reference, seen = _PLAIN.fullmatch(str(value)), {key}
        if reference and is_free(mapping_of(key) or ""):  # whose names may have dots
            continue
        while reference and reference[1] in raw and reference[1] not in seen:
            seen.add(reference[1])
            value = raw[reference[1]]
            reference = _PLAIN.fullmatch(str(value))
        if len(seen) > 1 and not (isinstance(value, str) and "${" in value):
            if get_origin(wanted := type_of(key)) is list and not fits(value, wanted):
                faults.append(f"{key}={show(raw[key])}: it is {show(value)}; expected {type_name(wanted)}")
            with suppress(OmegaConfBaseException):
                OmegaConf.update(composed, key, value)
    if faults:
        raise ConfigError(*faults)


def _wrong_references(composed: DictConfig) -> list[str]:
    """One sentence for each key whose "${...}" has no value, or one that does not fit."""
    faults = []
    for key, value in _leaves(OmegaConf.to_container(composed, resolve=False), ""):
        if "${" in str(value):
            try:
                if OmegaConf.is_config(node := OmegaConf.select(composed, key)):
                    OmegaConf.to_container(node, resolve=True)
            except OmegaConfBaseException as error:
                what = str(error).splitlines()[0]
                faults.append(f"{key}={show(value)}: {what}; expected ${{another.key}} that exists and fits")
    return faults


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def followed_by_roles(config: Config) -> Config:
    """Fill in, in `config` itself, the nulls that follow another key only under a condition."""
    actor = config.actor
    followers: tuple[Any, ...] = (config.critic, config.ref, *config.teachers.values())
    for role in followers:
        if role.megatron.pipeline_model_parallel_size == actor.megatron.pipeline_model_parallel_size:
            for key in PIPELINE_KEYS:
                if getattr(role.megatron, key) is None:
                    setattr(role.megatron, key, getattr(actor.megatron, key))
        for group in OVERRIDES:
            if not getattr(role.megatron, group):
                setattr(role.megatron, group, dict(getattr(actor.megatron, group)))
                if role.megatron.recompute_granularity != actor.megatron.recompute_granularity:
                    getattr(role.megatron, group).pop(RECOMPUTED, None)  # they are the actor's way of selective
        if not role.model.config and role.model.path == config.model.path:
            role.model.config = dict(config.model.config)
    for node in (actor, *followers):
        if node.num_ranks is None:
            node.num_ranks = max(1, config.trainer.num_ranks - node.first_rank)
    if config.agent.max_tokens is None:
        config.agent.max_tokens = config.data.max_prompt_length + config.data.max_response_length
    if config.trainer.max_restarts is None:
        config.trainer.max_restarts = RESTARTS if config.trainer.saves else 0
    for optim in (actor.optim, config.critic.optim):
        if optim.momentum is None:
            optim.momentum = DEFAULT_MOMENTUM.get(optim.name, 0.0)
    return config


def settled(config: Config) -> Config:
    """Set, in `config` itself, each role's final micro-batch limits."""
    own = {role: cut_of(config, role) for role in ("actor", "critic", "ref", *config.teacher_roles)}
    if not any(own["actor"]):
        own["actor"] = Cut(None, None, max(DEFAULT_MAX_TOKENS, config.longest[1]))
    for role, given in own.items():
        cut = _per_rank(config, role, given if any(given) else own["actor"])
        for key, value in zip(micro_batch_keys(role), cut, strict=True):
            setattr(config.role(role), key, value)
    return config


def layout_of(megatron: Megatron) -> Layout:
    """The keys of a role's `megatron` group as a Layout, the form that all other packages use."""
    values: dict[str, Any] = {field: getattr(megatron, key) for field, key in KEYS.items()}
    return Layout(**values | {field: values[field] or 1 for field in ("ep", "vpp")})


def data_parallel_size(config: Config, role: str) -> int:
    """Copies of the role's model over its ranks.  Raises: ConfigError if the layout does not divide them."""
    node = config.role(role)
    try:
        return layout_of(node.megatron).data_parallel_size(node.num_ranks)
    except ValueError as error:
        raise ConfigError(f"{role}.megatron: {error}") from None


def cut_of(config: Config, role: str) -> Cut:
    """The micro-batch keys of a role.  Raises: ConfigError if more than one is set or one is below 1."""
    for sentence in invalid_cuts(config, role):
        raise ConfigError(sentence)
    return _cut(config, role)


def invalid_cuts(config: Config, role: str) -> Iterator[str]:
    """One sentence if more than one of a role's micro-batch keys is set, and for each below 1."""
    given = {
        f"{role}.{key}={value}": value
        for key, value in zip(micro_batch_keys(role), _cut(config, role), strict=True)
        if value is not None
    }
    if len(given) > 1:
        yield f"{' and '.join(given)}: expected only one of them, the others null"
    yield from (f"{text}: expected at least 1" for text, value in given.items() if value < 1)


def _cut(config: Config, role: str) -> Cut:
    return Cut(*(getattr(config.role(role), key) for key in micro_batch_keys(role)))


def _per_rank(config: Config, role: str, cut: Cut) -> Cut:
    """Convert a number over all data-parallel ranks into a number per rank."""
    if cut.total is None:
        return cut
    copies = data_parallel_size(config, role)
    if cut.total % copies:
        key = f"{role}.{micro_batch_keys(role).total}"
        raise ConfigError(f"{key}={cut.total}: expected a multiple of the {copies} data-parallel ranks")
    return Cut(None, cut.total // copies, None)
