"""All keys and their types, and the key that a misspelt key probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from megarl.arch.megatron_fields import OPTIMIZER, OVERRIDES
from megarl.config.schema import Config
from megarl.config.schema.record import ALL, Commands, If, Range, Record, record_of
from megarl.config.tables import places

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "any value",
}
EMPTY: tuple[object, ...] = ("", [], {})
NAME = "NAME"  # stands for any name in a key of a mapping whose entries are groups of keys, such as teachers.NAME.coef
_BOOLEANS = {"true", "false", "yes", "no", "on", "off"}
_SLIP = 2  # characters that a typing error changes at most
_ALIKE = 0.7  # share of matching characters of keys in two groups; where less is alike, a suggestion would confuse
_ROLES = {"policy": "actor", "value": "critic", "reference": "ref"}  # other names of groups
_MIXED = ("data", "model", "actor", "rollout", "algorithm", "trainer")  # other trainers have their keys in one group
_ELSEWHERE = """
data | max_completion_length=max_response_length max_new_tokens=max_response_length max_tokens=max_response_length \
train_dataset=train_files dataset_name=train_files eval_dataset=val_files \
chat_template_kwargs=apply_chat_template_kwargs shuffle_dataset=shuffle generation_batch_size=train_batch_size \
steps_per_generation=train_batch_size
model | model_name_or_path=path processing_class=tokenizer_path bf16=dtype
actor.lora | peft_config=rank
agent | tools=fn environment_factory=fn max_tool_calling_iterations=max_turns
trainer | seed num_train_epochs=total_epochs max_steps=total_training_steps output_dir=default_local_dir \
run_name=experiment_name report_to=logger project=project_name save_steps=save_freq \
save_total_limit=max_checkpoints_to_keep resume_from_checkpoint=resume_mode eval_strategy=test_freq \
eval_steps=test_freq
rollout | top_k num_generations=n use_vllm=engine vllm_mode=placement vllm_server_base_url=urls \
vllm_gpu_memory_utilization=memory_fraction vllm_tensor_parallel_size=tensor_model_parallel_size max_staleness=ahead
actor | gradient_accumulation_steps=ppo_mini_batch_size per_device_train_batch_size=ppo_micro_batch_size_per_gpu \
log_prob_micro_batch_size=ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu=ppo_micro_batch_size_per_gpu \
log_prob_max_token_len_per_gpu=ppo_max_token_len_per_gpu \
num_iterations=ppo_epochs beta=kl_loss_coef use_bias_correction_kl=kl_importance epsilon=clip_ratio_low \
epsilon_high=clip_ratio_high delta=clip_ratio_c entropy_coef=entropy_coeff loss_type=loss_agg_mode
rollout.val_kwargs | num_generations_eval=n
algorithm | loss_mode=policy_loss_fn importance_sampling_level=policy_loss_fn \
multi_objective_aggregation=adv_estimator scale_rewards=norm_adv_by_std_in_grpo \
mask_truncated_completions=overlong_filtering
algorithm.policy_loss_args | sapo_temperature_pos=tau_pos sapo_temperature_neg=tau_neg
reward | reward_funcs=fn
actor.optim | learning_rate=lr adam_beta1=betas adam_beta2=betas lr_scheduler_type=lr_decay_style \
warmup_steps=lr_warmup_steps
actor.megatron | gradient_checkpointing=recompute_granularity
algorithm.rollout_correction | vllm_importance_sampling_mode=level
"""
# The last name of a key that other trainers have, as TRL and verl -> ours.
ELSEWHERE = {theirs: ours for theirs, (ours, _) in places(_ELSEWHERE).items()}


class Key(NamedTuple):
    """What the schema says of a key."""

    kind: Any  # its type
    default: Any
    range: Range | None
    record: Record
    only_if: If  # with the conditions of its groups
    commands: Commands  # that read it
    field: tuple[type, str]  # the dataclass that defines it first, and its name there; one for all roles


@cache
def schema_keys() -> dict[str, Key]:
    """Every key, in the order of the schema; those of entries, as teachers.NAME.coef, come after their mapping."""
    return dict(_walk(Config(), "", If(), ALL))


@cache
def same_keys() -> dict[tuple[type, str], list[str]]:
    """Keys of one meaning, such as those of the layouts of all roles, by the field that defines them."""
    found: dict[tuple[type, str], list[str]] = {}
    for key, known in schema_keys().items():
        found.setdefault(known.field, []).append(key)
    return found


@cache
def group_helps() -> dict[str, str]:
    """What the groups of keys at the top are."""
    return {item.name: record_of(item).help for item in fields(Config)}


@cache
def leaf_types() -> dict[str, Any]:
    """Every key of `Config` with its type.  Example: {"data.seed": int, "actor.clip_ratio": float | None, ...}."""
    return {key: found.kind for key, found in schema_keys().items() if f".{NAME}." not in key}


@cache
def entry_groups() -> dict[str, type]:
    """Mappings whose entries are groups of keys.  Example: {"teachers": Teacher}."""
    return {key: get_args(kind)[1] for key, kind in leaf_types().items() if _is_mapping_of_groups(kind)}


@cache
def entry_types() -> dict[str, Any]:
    """Every key of their entries with its type.  Example: {"teachers.NAME.coef": float, ...}."""
    return {key: found.kind for key, found in schema_keys().items() if f".{NAME}." in key}


def general(key: str) -> str:
    """The key of an entry with NAME for its name: "teachers.math.coef" -> "teachers.NAME.coef"; others as they are."""
    mapping, _, rest = key.partition(".")
    return f"{mapping}.{NAME}{rest[len(rest.partition('.')[0]) :]}" if rest and mapping in entry_groups() else key


def type_of(key: str) -> Any:
    """The type of a key; None if there is no such key."""
    found = schema_keys().get(general(key))
    return found and found.kind


@cache
def groups() -> frozenset[str]:
    """Every key that holds other keys: "actor", "actor.optim", "teachers.NAME", ..."""
    return frozenset(key.rsplit(".", depth)[0] for key in schema_keys() for depth in range(1, key.count(".") + 1))


def meaning_of_null(key: str) -> Any:
    """The value that null sets a key to: what the key follows, or the default of a key that is empty by default.

    Example: "data.seed" -> "${trainer.seed}"; "data.val_files" -> []; "reward.model.path" -> ""; others -> None.
    """
    default = schema_keys()[general(key)].default
    return copy(default) if is_reference(default) or default in EMPTY else None


def mapping_of(key: str) -> str | None:
    """The key of the mapping of values that contains the entry `key`.

    Example: "algorithm.policy_loss_args.beta" -> "algorithm.policy_loss_args".
    """
    above = (key[:at] for at, char in enumerate(key) if char == ".")
    return next((name for name in above if is_mapping(kind := type_of(name)) and not _is_mapping_of_groups(kind)), None)


def is_free(key: str) -> bool:
    """Whether the key is a mapping of any values, other mappings too: arguments, a request, part of a config.json."""
    return type_of(key) == dict[str, Any]


def is_users(key: str) -> bool:
    """Whether the key is such a mapping, or in one, and its names are not Megatron's, of which verl knows some."""
    mapping = mapping_of(key) or key
    return is_free(mapping) and mapping.rpartition(".")[2] not in (OPTIMIZER, *OVERRIDES)


def is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def _is_mapping_of_groups(kind: Any) -> bool:
    return is_mapping(kind) and is_dataclass(get_args(kind)[1])


def is_reference(value: object) -> bool:
    """Is it "${another.key}"?"""
    return isinstance(value, str) and "${" in value


def fits(value: object, wanted: Any) -> bool:
    """Can `value`, from a command line or a YAML file, be of type `wanted`?"""
    if is_reference(value):
        return not _is_mapping_of_groups(wanted)  # no other key has such entries
    if isinstance(wanted, UnionType):
        return any(fits(value, part) for part in get_args(wanted))
    if get_origin(wanted) is list:
        return isinstance(value, list) and all(fits(item, get_args(wanted)[0]) for item in value)
    if is_mapping(wanted):
        of = get_args(wanted)[1]
        return isinstance(value, dict) and all(name is not None and fits(item, of) for name, item in value.items())
    if wanted is Any:
        return not isinstance(value, dict) or fits(value, dict[str, Any])
    if wanted is bool:
        return isinstance(value, bool) or (isinstance(value, str) and value.lower() in _BOOLEANS)
    if isinstance(value, bool):
        return False
    if wanted is str:
        return isinstance(value, str | int | float)
    if wanted in (int, float):
        return isinstance(value, int | wanted | str) and _parses(value, wanted)
    return isinstance(value, wanted)


def type_name(wanted: Any) -> str:
    """Example: `int | None` -> "an integer or null"."""
    if isinstance(wanted, UnionType):
        *first, last = (type_name(part) for part in get_args(wanted))
        return f"{', '.join(first)} or {last}"
    if get_origin(wanted) is list:
        return "a list of texts" if get_args(wanted)[0] is str else "a list of numbers"
    if _is_mapping_of_groups(wanted):
        return "names with a group of keys each"
    if is_mapping(wanted):
        of = get_args(wanted)[1]
        return f"names with {_TYPE_NAMES[of]} each, as {{name:{'text' if of is str else '0.1'}}}"
    return _TYPE_NAMES[wanted]


def nearest(key: str, candidates: list[str] | None = None) -> str | None:
    """The candidate (by default a key of `Config`) that was probably meant, or None.

    Example: "actor.clip_ration" -> "actor.clip_ratio"; "trainer.kl_coef" -> "algorithm.kl_ctrl.kl_coef".
    """
    if candidates is None and (top := key.partition(".")[0]) in _ROLES and "." in key:
        ours = f"{_ROLES[top]}{key.removeprefix(top)}"
        return ours if ours in leaf_types() else nearest(ours)
    own = [] if general(key) == key else [entry.replace(NAME, key.split(".")[1], 1) for entry in entry_types()]
    known = [*leaf_types(), *own] if candidates is None else candidates
    leaf = key.rpartition(".")[2]
    slips = [other for other in known if _is_slip(key, other)]
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    if not slips and candidates is None and leaf in ELSEWHERE:
        group = key.removesuffix(leaf)  # one that is alike comes first: distillation.top_k is distill.top_k
        near = get_close_matches(group, [other.removesuffix(leaf) for other in same_leaf], 1, _ALIKE)
        return near[0] + leaf if near else _elsewhere(key, known)
    if "." in key and (len(same_leaf) > 1 or (key.count(".") > 1 and "_" not in leaf)):  # path, type: no one group's
        same_leaf = [other for other in same_leaf if other.partition(".")[0] == key.partition(".")[0]]
    shorter = [other for other in known if "." in key and _words(key) < _words(other)]
    alike = [
        other for other in known if other.count(".") == key.count(".") and _is_slip(leaf, other.rpartition(".")[2])
    ]
    guesses = get_close_matches(key, slips, 1, 0) or same_leaf or get_close_matches(key, shorter or alike, 1, _ALIKE)
    return guesses[0] if guesses else None


def _elsewhere(key: str, known: list[str]) -> str | None:
    """Our key for another trainer's: the one of the typed group or role; None if that has none of this meaning."""
    group, _, leaf = key.rpartition(".")
    top, ours = key.partition(".")[0], ELSEWHERE[leaf]
    last = ours.rpartition(".")[2]
    if (same := f"{top}.{ours.partition('.')[2]}") in known:  # critic.optim.lr for actor.optim.lr
        return same
    names = (last, last.partition("_")[2])  # sft.epochs for trainer.total_epochs
    own = [other for other in known if other in [f"{group}.{name}" for name in names]]
    if group and own:
        return own[0]
    nearest_group = group if general(group) in groups() else top
    return ours if nearest_group in _MIXED or general(nearest_group) not in groups() else None


def _words(key: str) -> set[str]:
    return set(re.split(r"[._]", key))


def _is_slip(typed: str, key: str) -> bool:
    """Is it the key with a typing error?  Letters that are alike by chance are none."""
    if abs(len(key) - len(typed)) > _SLIP:
        return False
    blocks = SequenceMatcher(None, typed, key, autojunk=False).get_opcodes()
    edits, leaf = sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal"), typed.rpartition(".")[2]
    return edits <= _SLIP and (edits < len(leaf) or not leaf)


def _parses(value: float | str, number: type) -> bool:
    """Is it this kind of number, an integer of at most 64 bits?"""
    try:
        parsed = number(value)
    except (ValueError, OverflowError):
        return False
    return number is float or -(2**63) <= parsed < 2**63


def _walk(node: Any, prefix: str, conditions: If, commands: Commands) -> Iterator[tuple[str, Key]]:
    """`conditions` and `commands`: of the group."""
    kinds, hints = get_type_hints(type(node)), get_type_hints(type(node), include_extras=True)
    for item in fields(node):
        key = f"{prefix}{item.name}"
        value = getattr(node, item.name)
        kind = kinds[item.name]
        record = record_of(item)
        own = (re.sub(r"(?:^|(?<= or ))\.", prefix, condition) for condition in record.only_if)
        only_if, read_by = If(*conditions, *own), record.commands or commands
        if is_dataclass(value):
            yield from _walk(value, f"{key}.", only_if, read_by)
            continue
        if get_origin(kind) is Union:  # as `Annotated[int, ...] | None` is
            kind = reduce(or_, get_args(kind))
        marks = (mark for part in (hints[item.name], *get_args(hints[item.name])) for mark in get_args(part))
        first = next(cls for cls in reversed(type(node).__mro__) if item.name in getattr(cls, "__annotations__", {}))
        allowed = next((mark for mark in marks if isinstance(mark, Range)), None)
        yield key, Key(kind, value, allowed, record, only_if, read_by, (first, item.name))
        if _is_mapping_of_groups(kind):
            yield from _walk(get_args(kind)[1](), f"{key}.{NAME}.", only_if, read_by)
