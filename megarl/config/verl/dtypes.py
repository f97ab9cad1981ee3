"""Rules for words about the number format of weights, of which verl has one for each role, and a run here has one."""

from __future__ import annotations

from typing import Any

from megarl.config.verl.taken import Command, Rule, Taken, harmless, nothing

_OURS = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_COMPUTED = ("dtype", "mixed_precision.param_dtype")  # names in a group of verl's FSDP
_FOLLOWERS = ("critic", "ref")
_FLOAT32 = ("fp32", "float32", None)


def _computed(key: str, value: Any, command: Command) -> Taken:
    """The format in which a role computes: model.dtype, which all roles share."""
    ours = _OURS.get(str(value))
    if ours is None:
        return Taken(note="model.dtype counts") if value is None else Taken(refusal="expected float32 or bfloat16")
    if key.partition(".")[0] not in _FOLLOWERS:
        return Taken((("model.dtype", ours),))
    if ours == _of_the_actor(command):
        return Taken(note="all roles compute in model.dtype, which is the same")
    return Taken(refusal="all roles compute in one dtype: expected model.dtype")


def _of_the_actor(command: Command) -> str | None:
    """The format of the run; None where the command does not say, since a recipe may."""
    words = ("model.dtype", "actor.megatron.dtype", *(f"actor.fsdp_config.{name}" for name in _COMPUTED))
    typed = next((command.get(word) for word in words if command.get(word) is not None), None)
    return _OURS.get(str(typed), "bfloat16" if command.is_whole else None)


def _stored(key: str, value: Any, command: Command) -> Taken:
    """The format that verl's FSDP shards; where it is float32, verl computes in another one."""
    if value in _FLOAT32:
        return Taken(note="the optimizer keeps weights in float32, and model.dtype computes")
    return _computed(key, value, command)


def rules(*groups: str) -> dict[str, Rule]:
    """The rules for the dtypes in these groups of keys, which describe how verl computes a role."""
    of_a_group: dict[str, Rule] = {
        **dict.fromkeys(_COMPUTED, _computed),
        "model_dtype": _stored,
        "mixed_precision.reduce_dtype": harmless(
            *_FLOAT32, why="gradients are summed in float32", otherwise="gradients are summed in float32: expected fp32"
        ),
        "mixed_precision.buffer_dtype": harmless(
            *_FLOAT32, why="rotary tables are float32", otherwise="rotary tables are float32: expected fp32"
        ),
        "mixed_precision": harmless(*(None, {}), why="model.dtype counts", otherwise="expected its param_dtype"),
    }
    return {f"{group}.{name}": rule for group in groups for name, rule in of_a_group.items()}


RULES: dict[str, Rule] = {
    **rules("actor.fsdp_config", "critic.fsdp_config", "critic.model.fsdp_config", "ref.fsdp_config"),
    "actor.megatron.dtype": _computed,
    **{f"{role}.megatron.dtype": _computed for role in _FOLLOWERS},
    "*.megatron.dtype": nothing("as the actor's"),
}
