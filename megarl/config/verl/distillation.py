"""Rules for words about distillation: verl's teachers, and what the policy learns from them."""

from __future__ import annotations

from typing import Any

from megarl.config.verl.taken import Command, Rule, Taken, each, harmless, nothing, of_switch
from megarl.config.verl.written import SERVED

_ON, _LOSS, _TEACHERS = "distillation.enabled", "distillation.distillation_loss", "distillation.teacher_models"
_MODE, _GRADIENT, _TASK = f"{_LOSS}.loss_mode", f"{_LOSS}.use_policy_gradient", f"{_LOSS}.use_task_rewards"
_FORMS = "forward_kl_topk without use_policy_gradient, or k1 with it; else distill.form and distill.divergence"
_ITS_SERVERS = "gpu_memory_utilization tensor_model_parallel_size engine_kwargs"
_RANKS = "teachers compute on the trainer's ranks; teachers.NAME.engine=server gives them servers"
_NO_CLAMP = "the divergence is not clamped: expected null"


def learns_from_teachers_alone(command: Command) -> bool:
    """Does the command distil, without rewards?"""
    return command.is_on(_ON) and command.is_off(_TASK)


def _if_on(rule: Rule) -> Rule:
    """Words that count for nothing without distillation."""
    return lambda key, value, command: (
        rule(key, value, command) if command.is_on(_ON) else Taken(note=f"{_ON}=false: there are no teachers")
    )


def _enabled(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value and command.get(_MODE) is None:  # verl's own default, k3, is none that can be had
        return Taken(refusal=f"expected {_MODE} as well: {_FORMS}")
    return Taken(note="its other words say from whom and how" if value else "there are no teachers")


def _mode(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    gradient = command.is_on(_GRADIENT)
    if gradient and value in ("k1", "kl"):
        return Taken((("distill.form", "reward"),), "one policy loss has both advantages, where verl has two losses")
    if not gradient and value == "forward_kl_topk":
        settings = (("distill.form", "loss"), ("distill.divergence", "forward_kl"))
        top_k = () if command.get(f"{_LOSS}.topk") else (("distill.top_k", 32),)
        return Taken((*settings, *top_k), "all tokens but the likeliest count together, and in verl not at all")
    return Taken(refusal=f"expected {_FORMS}")


def _top_k(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if command.get(_MODE) != "forward_kl_topk":
        return Taken(note="the sampled token alone is compared")
    return Taken((("distill.top_k", value),))


def _task_rewards(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value or command.get("algorithm.adv_estimator") is not None:  # whose rule looks here
        return Taken(note="rewards count beside the teachers" if value else "only teachers teach")
    return Taken((("algorithm.adv_estimator", "none"),))


def _coef(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if command.is_off(_TASK):
        return Taken(note="without task rewards verl's weight is 1")
    return Taken((("distill.coef", value),))


def _path(key: str, value: Any, command: Command) -> Taken:
    name = _name(key)
    if value is None:
        return Taken(note="there is no such teacher")
    if name == "teacher_model" and len(_names(command)) > 1:
        return Taken(note="verl drops the entry teacher_model beside others")
    return Taken(((f"teachers.{name}.model.path", value),))


def _key(key: str, value: Any, command: Command) -> Taken:
    name, others = _name(key), _names(command)
    if value is None or others == {name}:
        return Taken(note="one teacher teaches all prompts")
    return Taken(((f"teachers.{name}.data_sources", [value]),))


def _name(key: str) -> str:
    return key.removeprefix(f"{_TEACHERS}.").partition(".")[0]


def _names(command: Command) -> set[str]:
    return {_name(key) for key in command.words if key.startswith(f"{_TEACHERS}.") and key.endswith(".model_path")}


RULES: dict[str, Rule] = {
    _ON: of_switch(_enabled),
    _MODE: _if_on(_mode),
    _GRADIENT: _if_on(of_switch(nothing("loss_mode says which form that is"))),
    _TASK: _if_on(of_switch(_task_rewards)),
    f"{_LOSS}.topk": _if_on(_top_k),
    f"{_LOSS}.distillation_loss_coef": _if_on(_coef),
    **each(_LOSS, "use_chunked_topk chunked_topk_chunk_size", nothing("changes time and memory only")),
    **each(_LOSS, "loss_max_clamp log_prob_min_clamp", _if_on(harmless(None, why="no clamp", otherwise=_NO_CLAMP))),
    f"{_LOSS}.policy_loss_mode": _if_on(harmless("vanilla", why="the policy loss", otherwise="expected vanilla")),
    **each(
        _LOSS,
        "clip_ratio clip_ratio_low clip_ratio_high",
        _if_on(harmless(0.2, why="actor.clip_ratio_* bound the ratio", otherwise="expected it in actor.clip_ratio_*")),
    ),
    **each("distillation", "n_gpus_per_node nnodes", _if_on(nothing(_RANKS))),
    "distillation.teacher_key": harmless(
        "data_source", why="a row's data_source chooses its teacher", otherwise="expected data_source, or distill.route"
    ),
    f"{_TEACHERS}.*.model_path": _if_on(_path),
    f"{_TEACHERS}.*.key": _if_on(_key),
    f"{_TEACHERS}.*.num_replicas": _if_on(nothing(_RANKS)),
    **each(f"{_TEACHERS}.*.inference", f"{SERVED} {_ITS_SERVERS}", nothing(_RANKS)),
    f"{_TEACHERS}.*.inference.temperature": nothing("rollout.temperature counts"),
}
