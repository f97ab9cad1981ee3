"""Rules for words about rewards: functions, models that score, sandboxes, in verl's older and newer tree of keys."""

from __future__ import annotations

from typing import Any

from megarl.config.verl.taken import (
    Command,
    Rule,
    Taken,
    each,
    harmless,
    named,
    nothing,
    refused,
    set_to,
    switch,
    unless,
)

_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
_KWARGS = ("reward_model.reward_kwargs", "reward.reward_kwargs")
_MODELS = ("reward_model", "reward.reward_model")
_SANDBOXES = ("reward_model.sandbox_fusion", "reward.sandbox_fusion", "sandbox_fusion")
_MODEL = "the server of the reward model decides"
_OF_A_SANDBOX = "reward.memory_mb is of a process here, and not of a sandbox"
_OWN_SERVER = "expected reward.model.first_gpu, or reward.model.url of a server that runs already"
_OWN_FUNCTION = "expected reward.fn=FILE.py:function"
_DEFAULTS = "expected defaults of the function's own parameters"


def _function(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """One function out of two words: FILE:NAME."""
    group = key.rpartition(".")[0]
    path, name = command.get(f"{group}.path"), command.get(f"{group}.name", "compute_score")
    if path is None:
        return Taken(note="there is none: the row's data_source chooses the reward")
    return Taken((("reward.fn", [f"{path}:{name}"]),))


def _group(key: str) -> str:
    return next(group for group in reversed(_MODELS) if key.startswith(f"{group}."))


def _path(key: str, value: Any, command: Command) -> Taken:
    if any(command.is_on(f"{group}.enable") for group in _MODELS):
        return Taken((("reward.model.path", value),))
    return Taken(note=f"{_group(key)}.enable=false")


def _if_enabled(rule: Rule) -> Rule:
    """Without a model that scores, how it would be served counts for nothing."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        enabled = any(command.is_on(f"{group}.enable") for group in _MODELS)
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


def _workers(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    return Taken((("reward.num_workers", value),)) if value is not None else Taken(note="verl's default")


_BY_DATA_SOURCE = unless(
    (None, "naive", "dapo", "prime", "register"),
    "a row's data_source chooses the reward, and algorithm.overlong_buffer adds DAPO's penalty",
    harmless("batch", why="a function of lists gets each answer as a list of one", otherwise=_OWN_FUNCTION),
)
_ONE_GPU = harmless(
    1, why="the run starts its server on one GPU", otherwise="expected 1, or reward.model.url of a server of your own"
)
# of a group that describes the model that scores
_OF_A_MODEL: dict[str, Rule] = {
    "enable": switch(set_to(("reward.fn", ["model"])), nothing("no model scores")),
    "enable_resource_pool": _if_enabled(harmless(False, why=_MODEL, otherwise=_OWN_SERVER)),
    "n_gpus_per_node": _if_enabled(_pool),
    "nnodes": _if_enabled(_pool),
    "rollout.gpu_memory_utilization": _if_enabled(named("reward.model.memory_fraction", {})),
    "rollout.tensor_model_parallel_size": _if_enabled(_ONE_GPU),
}

RULES: dict[str, Rule] = {
    **{f"{group}.{name}": _function for group in _FUNCTIONS for name in ("path", "name")},
    **{f"{group}.reward_kwargs*": refused(_DEFAULTS) for group in _FUNCTIONS},
    "reward_model.reward_manager": _BY_DATA_SOURCE,
    "reward.reward_manager.name": _BY_DATA_SOURCE,
    "reward.reward_manager.source": _BY_DATA_SOURCE,
    "reward.reward_manager.module.*": unless((None, "custom_reward_manager"), "there is none", refused(_OWN_FUNCTION)),
    **{f"{group}.max_resp_len": _longest for group in _KWARGS},
    **{f"{group}.*": refused(f"{_OWN_FUNCTION}, with defaults of its own parameters") for group in _KWARGS},
    **{f"{group}.url": _sandbox for group in _SANDBOXES},
    **each(" ".join(_SANDBOXES), "memory_limit_mb", nothing(_OF_A_SANDBOX)),
    **each(" ".join(_SANDBOXES), "max_concurrent", nothing("each of reward.num_workers processes asks one at a time")),
    **{f"{group}.{name}": rule for group in _MODELS for name, rule in _OF_A_MODEL.items()},
    "reward_model.model.path": _path,
    "reward.reward_model.model_path": _path,
    "reward_model.model.input_tokenizer": nothing("a reward model on a server reads text, with its own tokenizer"),
    **each("reward_model reward", "num_workers", _workers),
    "reward_model.use_reward_loop": nothing("rewards are always computed while others generate"),
    "reward_model.launch_reward_fn_async": nothing("rewards are always computed while others generate"),
    **each(
        "reward_model",
        "strategy micro_batch_size micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu "
        "ulysses_sequence_parallel_size model.fsdp_config.param_offload model.fsdp_config.fsdp_size "
        "model.fsdp_config.wrap_policy.min_num_params model.use_remove_padding model.use_shm model.use_fused_kernels "
        "model.trust_remote_code model.external_lib",
        nothing(_MODEL),
    ),
    **each("reward_model.megatron reward_model.model", "*", nothing(_MODEL)),
    "reward.reward_model.*": refused("expected a key of reward.model, which says what scores and where it is served"),
}  # fmt: skip

RENAMED: dict[str, tuple[str, int | str | None]] = {
    f"{group}.overlong_buffer_cfg.{name}": (f"algorithm.overlong_buffer.{name}", None)
    for group in _KWARGS
    for name in ("enable", "len", "penalty_factor")
}
