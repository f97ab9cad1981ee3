"""Checks each value alone: what is needed, which choices and which range a key has.

Combinations of values are in combinations.py, roles and ranks in layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from math import isfinite
from typing import Any

from megarl.config import names
from megarl.config.keys import NAME
from megarl.config.resolve import invalid_cuts
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate import models, overrides
from megarl.config.validate.layouts import LEARNERS, ROLES, used_roles
from megarl.projections import ALL
from megarl.sandbox import layers

Test = Callable[[Any], bool]

_AT_LEAST_0: tuple[Test, str] = (lambda v: v >= 0, "a number of at least 0")
_AT_LEAST_1: tuple[Test, str] = (lambda v: v >= 1, "at least 1")
_ABOVE_0: tuple[Test, str] = (lambda v: 0 < v < float("inf"), "a number above 0")
_UNIT: tuple[Test, str] = (lambda v: 0 <= v <= 1, "a number from 0 to 1")
_INSIDE_UNIT: tuple[Test, str] = (lambda v: 0 < v < 1, "a number between 0 and 1, both excluded")
_PERIOD: tuple[Test, str] = (lambda v: v == -1 or v >= 1, "-1 (never) or at least 1")
_SHARE: tuple[Test, str] = (lambda v: 0 < v <= 1, "a number above 0 and at most 1")
_SEED: tuple[Test, str] = (lambda v: 0 <= v < 2**31, "an integer from 0 to 2147483647")
_FINITE: tuple[Test, str] = (isfinite, "a finite number")
_FINITE_EACH: tuple[Test, str] = (lambda v: all(isfinite(x) for x in v.values()), "finite numbers")

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.kl_ctrl.type": names.KL_CONTROLLERS,
    "algorithm.rollout_correction.level": names.CORRECTION_LEVELS,
    "algorithm.rollout_correction.reject_by": names.REJECT_BY,
    "algorithm.rollout_correction.reject_level": names.REJECT_LEVELS,
    "data.overlong_prompts": names.OVERLONG,
    "sft.answers": names.SFT_ANSWERS,
    "sft.overlong_rows": names.OVERLONG,
    "distill.form": names.DISTILL_FORMS,
    "distill.divergence": names.DIVERGENCES,
    "distill.decay_style": names.LR_DECAY_STYLES,
    "teachers.NAME.engine": names.TEACHER_ENGINES,
    "model.dtype": names.DTYPES,
    "reward.model.engine": names.REWARD_MODEL_ENGINES,
    "reward.on_error": names.REWARD_ERRORS,
    "agent.on_error": names.AGENT_ERRORS,
    "agent.history": names.AGENT_HISTORIES,
    "agent.tool_parser": names.TOOL_PARSERS,
    "rollout.dtype": names.DTYPES,
    "rollout.engine": (names.AUTO, *names.ENGINES),
    "rollout.placement": names.PLACEMENTS,
    "rollout.push": names.PUSHES,
    "rollout.order": names.ORDERS,
    "rollout.update": names.UPDATES,
    "rollout.tls": names.TLS,
    "rollout.quantization": names.QUANTIZATIONS,
    "actor.lora.push": names.LORA_PUSHES,
    "actor.router_replay": names.ROUTER_REPLAYS,
    "trainer.device": names.DEVICES,
    "trainer.share_prefixes": names.SHARES,
    "trainer.profile.tool": names.PROFILERS,
    "trainer.on_nonfinite": names.ON_NONFINITE,
} | {
    f"{role}.{key}": choices
    for role in LEARNERS
    for key, choices in (
        ("loss_agg_mode", names.AGG_MODES),
        ("optim.name", names.OPTIMIZERS),
        ("optim.lr_decay_style", names.LR_DECAY_STYLES),
    )
}
CHOICES |= {
    f"{role}.{key}": choices
    for role in (*ROLES, f"teachers.{NAME}")
    for key, choices in (
        ("strategy", names.STRATEGIES),
        ("megatron.transformer_impl", names.TRANSFORMERS),
        ("megatron.moe_token_dispatcher_type", names.DISPATCHERS),
        ("megatron.recompute_granularity", names.RECOMPUTE_GRANULARITIES),
        ("megatron.recompute_method", names.RECOMPUTE_METHODS),
    )
}

# Choices that a plug-in may extend.
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.policy_loss_fn": names.POLICY_LOSSES,
    "algorithm.adv_estimator": names.ADV_ESTIMATORS,
    "algorithm.kl_penalty": names.KL_PENALTIES,
    "actor.kl_loss_type": names.KL_ESTIMATORS,
}

# null is always accepted: for these keys it has its own meaning.
RANGES: dict[str, tuple[Test, str]] = {
    "data.train_batch_size": _AT_LEAST_1,
    "data.seed": _SEED,
    "rollout.seed": _SEED,
    "trainer.seed": _SEED,
    "data.max_prompt_length": _AT_LEAST_1,
    "data.max_response_length": _AT_LEAST_1,
    "data.train_max_samples": _AT_LEAST_1,
    "data.val_max_samples": _AT_LEAST_1,
    "actor.clip_ratio": _INSIDE_UNIT,
    "actor.clip_ratio_low": _SHARE,  # 1: no lower bound
    "actor.clip_ratio_high": _ABOVE_0,
    "actor.clip_ratio_c": (lambda v: v == "off" or (not isinstance(v, str) and v > 1), "a number above 1, null or off"),
    "actor.entropy_coeff": _AT_LEAST_0,
    "actor.old_log_prob_freq": _AT_LEAST_0,
    "actor.kl_loss_coef": _AT_LEAST_0,
    "critic.cliprange_value": _ABOVE_0,
    "rollout.n": _AT_LEAST_1,
    "rollout.temperature": (_ABOVE_0[0], "a number above 0, because greedy completions give a policy nothing to learn"),
    "rollout.top_p": _SHARE,
    "rollout.top_k": (lambda v: v == -1 or v >= 1, "-1 (all tokens) or at least 1"),
    "rollout.tensor_model_parallel_size": _AT_LEAST_1,
    "rollout.expert_parallel_size": _AT_LEAST_1,
    "rollout.attention_dp": _AT_LEAST_1,
    "rollout.num_servers": _AT_LEAST_1,
    "rollout.first_gpu": _AT_LEAST_0,
    "rollout.memory_fraction": _INSIDE_UNIT,
    "rollout.ahead": _AT_LEAST_0,
    "rollout.max_age": _AT_LEAST_0,
    "rollout.piece_tokens": _AT_LEAST_0,
    "rollout.turn_s": _ABOVE_0,
    "rollout.num_collectors": _AT_LEAST_1,
    "rollout.max_in_flight": _AT_LEAST_1,
    "rollout.max_running_requests": _AT_LEAST_1,
    "rollout.request_timeout_s": _ABOVE_0,
    "rollout.slow_factor": _AT_LEAST_1,
    "rollout.start_timeout_s": _ABOVE_0,
    "rollout.val_kwargs.temperature": _AT_LEAST_0,
    "rollout.val_kwargs.top_p": _SHARE,
    "rollout.val_kwargs.n": _AT_LEAST_1,
    "rollout.val_kwargs.max_response_length": _AT_LEAST_1,
    "rollout.bucket_bytes": _AT_LEAST_1,
    "rollout.check_every": _AT_LEAST_0,
    "rollout.max_restarts": _AT_LEAST_0,
    "actor.lora.rank": _AT_LEAST_0,
    "actor.lora.alpha": _ABOVE_0,
    "actor.lora.targets": (
        lambda v: v == [ALL] or (v and set(v) <= set(names.LORA_TARGETS)),
        f"[{ALL}], or some of {', '.join(names.LORA_TARGETS)}",
    ),
    "algorithm.gamma": _UNIT,
    "algorithm.lam": _UNIT,
    "algorithm.advantage_clip": _ABOVE_0,
    "algorithm.policy_loss_args": _FINITE_EACH,
    "algorithm.reward_weights": (
        lambda v: not v or (_FINITE_EACH[0](v) and any(v.values())),
        "finite numbers that are not all 0",
    ),
    "algorithm.rollout_correction.truncate": (lambda v: 1 <= v < float("inf"), "null or a number of at least 1"),
    "algorithm.rollout_correction.mask_low": _UNIT,
    "algorithm.rollout_correction.mask_high": (lambda v: v >= 1, "a number of at least 1"),
    "algorithm.rollout_correction.reject_low": _FINITE,
    "algorithm.rollout_correction.reject_high": _FINITE,
    "algorithm.filter_groups.max_num_gen_batches": _AT_LEAST_1,
    "algorithm.overlong_buffer.len": _AT_LEAST_1,
    "algorithm.overlong_buffer.penalty_factor": _ABOVE_0,
    "algorithm.kl_ctrl.kl_coef": _AT_LEAST_0,
    "algorithm.kl_ctrl.horizon": _AT_LEAST_1,
    "algorithm.kl_ctrl.target_kl": _ABOVE_0,
    "distill.beta": _INSIDE_UNIT,
    "distill.top_k": _AT_LEAST_1,
    "distill.coef": _AT_LEAST_0,
    "distill.end_coef": _AT_LEAST_0,
    "distill.decay_steps": _AT_LEAST_1,
    "teachers.NAME.coef": _AT_LEAST_0,
    "teachers.NAME.server.first_gpu": _AT_LEAST_0,
    "teachers.NAME.server.num_gpus": _AT_LEAST_1,
    "teachers.NAME.server.memory_fraction": _INSIDE_UNIT,
    "teachers.NAME.server.concurrency": _AT_LEAST_1,
    "reward.num_workers": _AT_LEAST_1,
    "reward.try_rows": _AT_LEAST_0,
    "reward.timeout_s": _ABOVE_0,
    "reward.fn": (lambda v: v, "at least one reward"),
    "reward.weights": _FINITE_EACH,
    "reward.judge.votes": _AT_LEAST_1,
    "reward.model.first_gpu": _AT_LEAST_0,
    "reward.model.memory_fraction": _INSIDE_UNIT,
    "reward.concurrency": _AT_LEAST_1,
    "reward.per_minute": _ABOVE_0,
    "reward.retries": _AT_LEAST_0,
    "reward.request_timeout_s": _ABOVE_0,
    "reward.start_timeout_s": _ABOVE_0,
    "reward.memory_mb": _AT_LEAST_1,
    "reward.file_mb": _AT_LEAST_1,
    "reward.sandbox": (layers.is_known, layers.WANTED),
    "agent.max_turns": _AT_LEAST_1,
    "agent.max_tokens": _AT_LEAST_1,
    "agent.timeout_s": _ABOVE_0,
    "agent.num_processes": _AT_LEAST_1,
    "agent.over_limit_reward": _FINITE,
    "agent.memory_mb": _AT_LEAST_1,
    "agent.file_mb": _AT_LEAST_1,
    "trainer.total_training_steps": _AT_LEAST_1,
    "trainer.total_epochs": _AT_LEAST_1,
    "trainer.nnodes": _AT_LEAST_1,
    "trainer.node_rank": _AT_LEAST_0,
    "trainer.n_gpus_per_node": _AT_LEAST_1,
    "trainer.master_port": (lambda v: 1 <= v <= 65535, "1 to 65535"),
    "trainer.max_restarts": _AT_LEAST_0,
    "trainer.token_samples": _AT_LEAST_0,
    "trainer.prometheus_port": (lambda v: 1 <= v <= 65535, "1 to 65535"),
    "trainer.profile.steps": (lambda v: all(step >= 1 for step in v), "steps, counted from 1"),
    "trainer.profile.ranks": (lambda v: v and all(rank >= 0 for rank in v), "ranks, counted from 0"),
    "trainer.save_freq": _PERIOD,
    "trainer.save_every_s": _ABOVE_0,
    "trainer.term_grace_s": _ABOVE_0,
    "trainer.test_freq": _PERIOD,
    "trainer.spike_sigma": _ABOVE_0,
    "trainer.critic_warmup": _AT_LEAST_0,
    "trainer.max_checkpoints_to_keep": _AT_LEAST_1,
    "trainer.keep_every_steps": _PERIOD,
    "trainer.keep_best": _AT_LEAST_0,
    "trainer.call_timeout_s": _ABOVE_0,
    "trainer.call_factor": _AT_LEAST_1,
    "trainer.call_floor_s": _ABOVE_0,
    "trainer.silence_s": (lambda v: v >= 10, "at least 10"),
    "trainer.driver_silence_s": (lambda v: v >= 60, "at least 60"),
    "trainer.spare_nodes": _AT_LEAST_0,
    "trainer.start_timeout_s": _ABOVE_0,
    "sft.epochs": _AT_LEAST_1,
    "sft.batch_size": _AT_LEAST_1,
    "sft.max_length": (lambda v: v >= 2, "at least 2"),
}
RANGES |= {
    f"{role}.{key}": rule
    for role in LEARNERS
    for key, rule in (
        ("ppo_mini_batch_size", _AT_LEAST_1),
        ("ppo_epochs", _AT_LEAST_1),
        ("loss_scale_factor", _ABOVE_0),
        ("max_grad_norm", _ABOVE_0),
        ("optim.lr", _ABOVE_0),
        ("optim.betas", (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers from 0 to below 1")),
        ("optim.eps", _ABOVE_0),
        ("optim.weight_decay", _AT_LEAST_0),
        ("optim.momentum", (lambda v: 0 <= v < 1, "a number from 0 to below 1")),
        ("optim.lr_warmup_steps", _AT_LEAST_0),
        ("optim.lr_decay_steps", _AT_LEAST_1),
        ("optim.min_lr", _AT_LEAST_0),
    )
}
RANGES |= {
    f"{role}.{key}": rule
    for role in (*ROLES, f"teachers.{NAME}")
    for key, rule in (
        ("num_ranks", _AT_LEAST_1),
        ("first_rank", _AT_LEAST_0),
        ("megatron.tensor_model_parallel_size", _AT_LEAST_1),
        ("megatron.pipeline_model_parallel_size", _AT_LEAST_1),
        ("megatron.context_parallel_size", _AT_LEAST_1),
        ("megatron.virtual_pipeline_model_parallel_size", _AT_LEAST_1),
        ("megatron.num_layers_in_first_pipeline_stage", _AT_LEAST_1),
        ("megatron.num_layers_in_last_pipeline_stage", _AT_LEAST_1),
        ("megatron.expert_model_parallel_size", _AT_LEAST_1),
        ("megatron.expert_tensor_parallel_size", _AT_LEAST_1),
        ("megatron.recompute_num_layers", _AT_LEAST_1),
    )
}

SERVED = "rollout.urls"  # of `megarl serve`, which starts these, or such as join a run
NEEDED: dict[str, tuple[str, ...]] = {
    "train": ("model.path", "data.train_files"),
    "sft": ("model.path", "sft.train_files"),
    "evaluate": ("model.path", "data.val_files"),
    "doctor": (),
    "config": (),
    "node": (),
    "serve": ("model.path", SERVED),
}
WANTED = {"model.path": "a Hugging Face folder or hub name"}
WANTED[SERVED] = "at least one http://host:port, or rollout.join with HOST:PORT of a run"


def value_of(config: Config, key: str) -> Any:
    """value_of(config, "actor.optim.lr") -> 1e-6."""
    return reduce(lambda at, name: at[name] if isinstance(at, dict) else getattr(at, name), key.split("."), config)


def _of_entries(config: Config, key: str) -> Iterator[str]:
    """The keys that a general one stands for: teachers.NAME.coef for that of each teacher."""
    mapping, found, rest = key.partition(f".{NAME}.")
    yield from (f"{mapping}.{name}.{rest}" for name in value_of(config, mapping)) if found else (key,)


def missing_values(config: Config, command: str) -> Iterator[str]:
    """One sentence for each key that the command needs and nobody set."""
    for key in NEEDED[command]:
        if not value_of(config, key) and not (key == SERVED and config.rollout.join):
            yield f"{key} is not set: `megarl {command}` needs {WANTED.get(key, 'at least one file')}"


def invalid_values(config: Config, command: str) -> Iterator[str]:
    """One sentence for each value that is invalid on its own."""
    for general, choices in CHOICES.items():
        for key in _of_entries(config, general):
            value = value_of(config, key)
            if value is not None and value not in choices:
                yield f"{key}={value}: expected one of {', '.join(choices)}"
    for key, choices in OPEN_CHOICES.items():
        value = value_of(config, key)
        if value not in choices and not config.algorithm.plugins:
            wanted = f"expected one of {', '.join(choices)}, or a name that a file in algorithm.plugins registers"
            yield f"{key}={value}: {wanted}"
    for general, (test, wanted) in RANGES.items():
        for key in _of_entries(config, general):
            value = value_of(config, key)
            if value is not None and not test(value):
                yield f"{key}={show(value)}: expected {wanted}"
    for role in ("actor", "critic", "ref", *config.teacher_roles):
        yield from invalid_cuts(config, role)
        yield from overrides.invalid_overrides(config, role)
    yield from models.invalid_numbers(config, ("actor", *used_roles(config, command)))
