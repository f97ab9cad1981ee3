"""Rules for words about what teaches: rewards, models that score, sandboxes, and verl's teachers."""

from __future__ import annotations

from typing import Any

from megarl.config.verl.taken import (
    Command,
    Rule,
    Taken,
    counts_if,
    each,
    named,
    nothing,
    of_switch,
    only,
    plain,
    set_to,
    switch,
    unless,
)
from megarl.config.verl.written import RANKS

_PLACES = "reward_model reward.reward_model"  # of the model that scores, in verl's older and newer tree
_OWN_SERVER = "expected reward.model.first_gpu, or reward.model.url of a server that runs already"


def _function(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """One function out of two words: FILE:NAME."""
    group = key.rpartition(".")[0]
    path, name = command.get(f"{group}.path"), command.get(f"{group}.name", "compute_score")
    if path is None:
        return Taken(note="there is none: the row's data_source chooses the reward")
    return Taken((("reward.fn", [f"{path}:{name}"]),))


def _group(key: str) -> str:
    return next(group for group in reversed(_PLACES.split()) if key.startswith(f"{group}."))


def _if_enabled(rule: Rule) -> Rule:
    """Without a model that scores, how it would be served counts for nothing."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        enabled = any(command.is_on(f"{group}.enable") for group in _PLACES.split())
        return rule(key, value, command) if enabled else Taken(note=f"{_group(key)}.enable=false")

    return chosen


def _pool(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """GPUs that only the reward model has, which verl reads with enable_resource_pool."""
    own = command.is_on(f"{_group(key)}.enable_resource_pool")
    return Taken(refusal=_OWN_SERVER) if own else Taken(note=f"{_group(key)}.enable_resource_pool=false")


def _longest(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """From here the penalty counts back; ours counts from the longest completion."""
    if value in (None, command.get("data.max_response_length", value)):
        return Taken(note="data.max_response_length counts")
    return Taken(refusal="the penalty is highest at data.max_response_length: expected the same number")


def _sandbox(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value is None:
        return Taken(note="code runs in the sandbox of this machine")
    return Taken((("reward.sandbox", f"url:{str(value).removesuffix('/run_code')}"),))


_BY_DATA_SOURCE = unless(
    (None, "naive", "dapo", "prime", "register"),
    "a row's data_source chooses the reward, and algorithm.overlong_buffer adds DAPO's penalty",
    only("batch", "a function of lists gets each answer as a list of one", "expected reward.fn=FILE.py:function"),
)
_NO_POOL = only("false", "the server of the reward model decides", _OWN_SERVER)
_ONE_GPU = only("1", "the run starts its server on one GPU", "expected 1, or reward.model.url of a server of your own")

RULES: dict[str, Rule] = {
    **each("custom_reward_function reward.custom_reward_function", "path name", _function),
    "reward_model.reward_manager": _BY_DATA_SOURCE,
    **each("reward.reward_manager", "name source", _BY_DATA_SOURCE),
    **each("reward_model.reward_kwargs reward.reward_kwargs", "max_resp_len", _longest),
    **each("reward_model.sandbox_fusion reward.sandbox_fusion sandbox_fusion", "url", _sandbox),
    **each(_PLACES, "enable", switch(set_to(("reward.fn", ["model"])), nothing("no model scores"))),
    **each(_PLACES, "enable_resource_pool", _if_enabled(_NO_POOL)),
    **each(_PLACES, "n_gpus_per_node nnodes", _if_enabled(_pool)),
    **each(_PLACES, "rollout.gpu_memory_utilization", _if_enabled(named("reward.model.memory_fraction"))),
    **each(_PLACES, "rollout.tensor_model_parallel_size", _if_enabled(_ONE_GPU)),
    "reward_model.model.path": _if_enabled(named("reward.model.path")),
    "reward.reward_model.model_path": _if_enabled(named("reward.model.path")),
    **each("reward_model reward", "num_workers", unless((None,), "verl's default", named("reward.num_workers"))),
}


_ON, _LOSS, _TEACHERS = "distillation.enabled", "distillation.distillation_loss", "distillation.teacher_models"
_MODE, _GRADIENT, _TASK = f"{_LOSS}.loss_mode", f"{_LOSS}.use_policy_gradient", f"{_LOSS}.use_task_rewards"
_FORMS = "forward_kl_topk without use_policy_gradient, or k1 with it; else distill.form and distill.divergence"


def learns_from_teachers_alone(command: Command) -> bool:
    """Does the command distil, without rewards?"""
    return command.is_on(_ON) and command.is_off(_TASK)


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


def _task_rewards(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value or command.get("algorithm.adv_estimator") is not None:  # whose rule looks here
        return Taken(note="rewards count beside the teachers" if value else "only teachers teach")
    return Taken((("algorithm.adv_estimator", "none"),))


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


_IF_ON: dict[str, Rule] = {
    _MODE: _mode,
    _GRADIENT: of_switch(nothing("loss_mode says which form that is")),
    _TASK: of_switch(_task_rewards),
    **counts_if(
        lambda command: command.get(_MODE) == "forward_kl_topk",
        "the sampled token alone is compared",
        {f"{_LOSS}.topk": named("distill.top_k")},
    ),
    **counts_if(
        lambda command: not command.is_off(_TASK),
        "without task rewards verl's weight is 1",
        {f"{_LOSS}.distillation_loss_coef": named("distill.coef")},
    ),
    f"{_TEACHERS}.*.model_path": _path,
    f"{_TEACHERS}.*.key": _key,
    **plain(f"""
{_LOSS} | loss_max_clamp log_prob_min_clamp | null | no clamp | the divergence is not clamped: expected null
{_LOSS} | policy_loss_mode | vanilla | the policy loss | expected vanilla
{_LOSS} | clip_ratio clip_ratio_low clip_ratio_high | 0.2 | actor.clip_ratio_* bound the ratio | \
expected it in actor.clip_ratio_*
distillation | n_gpus_per_node nnodes | {RANKS}
{_TEACHERS}.* | num_replicas | {RANKS}
"""),
}

RULES |= {
    _ON: of_switch(_enabled),
    **counts_if(lambda command: command.is_on(_ON), f"{_ON}=false: there are no teachers", _IF_ON),
}
