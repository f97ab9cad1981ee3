"""Rules for words about servers, rollout correction, and training beside generation (`async_training`)."""

from __future__ import annotations

import math
from typing import Any

from megarl.config.verl.learning import CORRECTION, DEFAULT_SIZES, MINI_BATCH
from megarl.config.verl.taken import (
    Command,
    Rule,
    Taken,
    counts_if,
    each,
    named,
    nothing,
    of_count,
    of_number,
    of_switch,
    plain,
    refused,
    switch,
    unless,
)
from megarl.config.verl.written import AGENT, TOOLS

MOST_GPUS = 16  # of any existing machine
_ELSEWHERE = (
    "servers on machines of their own are started there by `megarl serve`, and the run finds them by rollout.urls or "
    "rollout.join; expected these instead"
)
_REJECTIONS = {  # verl's name -> our measure and level
    "token_k1": ("ratio", "token"),
    "token_k2": ("k2", "token"),
    "token_k3": ("k3", "token"),
    "seq_sum_k1": ("ratio", "sequence"),
    "seq_mean_k1": ("k1", "sequence"),
    "seq_mean_k2": ("k2", "sequence"),
    "seq_mean_k3": ("k3", "sequence"),
}
# Words that decide how much an iteration of verl's fully asynchronous trainer generates.
_BATCHES = "async_training.require_batches"
_SYNC = "async_training.trigger_parameter_sync_step"


def _engine(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value == "vllm":
        return Taken((("rollout.engine", "auto"),), "there is no vLLM here: SGLang generates, where it and a GPU are")
    return Taken((("rollout.engine", value),))


def _do_sample(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """verl 0.9.1 does not read it."""
    temperature = command.get("rollout.val_kwargs.temperature")
    if not value and temperature not in (None, 0):
        return Taken(note=f"not read, as in verl: evaluation draws at temperature={temperature}, and 0 would be greedy")
    return Taken(note="rollout.val_kwargs.temperature says how, and 0 is greedy")


def nodes_of_servers(command: Command) -> int:
    """Machines that verl's servers have for themselves; 0 = they share the trainer's GPUs."""
    apart = command.is_off("hybrid_engine") or command.has("async_training.")
    return command.get("rollout.nnodes") or int(apart)


def servers_apart(command: Command) -> int:
    """As many as there is room for on GPUs of this machine after the trainer's; 0 = they are on other machines."""
    gpus, ours = command.counted("rollout.n_gpus_per_node", 8), command.counted("trainer.n_gpus_per_node", 8)
    on_one = nodes_of_servers(command) == command.get("trainer.nnodes", 1) == 1
    size = command.counted("rollout.tensor_model_parallel_size", 2)
    return max(1, gpus // size) if on_one and gpus + ours <= MOST_GPUS else 0


def _own_gpus(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """GPUs that only servers have."""
    if not nodes_of_servers(command):
        return Taken(note="servers are on the trainer's machines")
    if not value and key.endswith("n_gpus_per_node"):
        return Taken(refusal="expected at least 1 for servers on GPUs of their own")
    if not command.is_whole or not (servers := servers_apart(command)):
        return Taken(refusal=_ELSEWHERE)
    where = "on the GPUs of this machine after the trainer's; one that has fewer needs `megarl serve` on another"
    return Taken((("rollout.num_servers", servers),), f"rollout.num_servers={servers}, {where}")


def _sglang(key: str, value: Any, command: Command) -> Taken:
    """An option of SGLang's command line; each of these words sets the whole list of them."""
    if value is None or value is False:
        return Taken(note="an option that is off is left out")
    group = f"{key.partition('.sglang.')[0]}.sglang."
    if command.get("rollout.sglang.args") is not None or "." in key.removeprefix(group):
        return Taken(refusal="expected it in rollout.sglang.args")
    options = ((name.removeprefix(group), word) for name, word in command.words.items() if name.startswith(group))
    return Taken((("rollout.sglang.args", [part for name, word in options for part in _option(name, word)]),))


def _option(name: str, value: Any) -> list[str]:
    """("attention_backend", "fa3") -> ["--attention-backend", "fa3"]."""
    if value is None or value is False:
        return []
    values = [] if value is True else value if isinstance(value, list) else [value]
    return [f"--{name.replace('_', '-')}", *map(str, values)]


def _length(key: str, value: Any, command: Command) -> Taken:
    """verl's default is the limit of the data; another one would be the servers' own."""
    limit = f"data.max_{key.partition('.')[2]}"
    if value in (None, command.get(limit, 512 if command.is_whole else value)):
        return Taken(note=f"{limit} counts")
    return Taken(refusal=f"servers and data have one limit: expected it in {limit}")


def _bucket(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    return Taken((("rollout.bucket_bytes", value * 2**20),), f"rollout.bucket_bytes={value * 2**20}")


def _may_have_turns(command: Command) -> bool:
    return command.is_on("rollout.multi_turn.enable") or command.has("agent.") or command.has("recipe")


def _bounds(value: Any) -> tuple[float | None, float]:
    """ "0.5_2.0" -> (0.5, 2.0); 2.0 -> (None, 2.0)."""
    low, _, high = str(value).rpartition("_")
    return (float(low) if low else None), float(high)


def _threshold(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """Of the weight: one number truncates it, two leave only what lies between them."""
    if value is None:
        return Taken(((f"{CORRECTION}.truncate", None),))
    try:
        low, high = _bounds(value)
    except ValueError:
        return Taken(refusal="expected a number, or two as LOW_HIGH")
    if low is None:
        return Taken(((f"{CORRECTION}.truncate", high),))
    return Taken((
        (f"{CORRECTION}.truncate", None), (f"{CORRECTION}.mask_low", low), (f"{CORRECTION}.mask_high", high)
    ))  # fmt: skip


def _rejection(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value is None:
        return Taken(((f"{CORRECTION}.reject_by", None),))
    if str(value) not in _REJECTIONS:
        return Taken(refusal=f"expected one of {', '.join(_REJECTIONS)}, or {CORRECTION}.reject_by and its bounds")
    by, level = _REJECTIONS[value]
    return Taken(((f"{CORRECTION}.reject_by", by), (f"{CORRECTION}.reject_level", level)))


def _rejection_bounds(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """verl's k1 is -log of our ratio, and its bounds are those of 1 / ratio; one number stands for 1/x and x."""
    by, _ = _REJECTIONS.get(str(command.get(f"{CORRECTION}.rollout_rs")), (None, None))
    if value is None or by is None:
        return Taken(((f"{CORRECTION}.reject_low", None), (f"{CORRECTION}.reject_high", None)))
    try:
        low, high = _bounds(value)
    except ValueError:
        return Taken(refusal="expected a number, or two as LOW_HIGH")
    if by in ("ratio", "k1"):
        low = 1 / high if low is None else low
        low, high = (1 / high, 1 / low) if by == "ratio" else (math.log(low), math.log(high))
    return Taken(((f"{CORRECTION}.reject_low", low), (f"{CORRECTION}.reject_high", high)))


def _bypass(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value and command.get(f"{CORRECTION}.loss_type") == "reinforce":
        return Taken(note="algorithm.policy_loss_fn=reinforce has no ratio that could be changed")
    return Taken(((f"{CORRECTION}.bypass", value),))


def _level(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    clips = command.get(f"{CORRECTION}.loss_type", "ppo_clip") == "ppo_clip"
    if value is not None and command.is_on(f"{CORRECTION}.bypass_mode") and clips and command.is_whole:
        return Taken(note="bypass_mode=true: the ratio of the loss corrects already, there is no further weight")
    return Taken(((f"{CORRECTION}.level", value),))


def _loss_type(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if not command.is_on(f"{CORRECTION}.bypass_mode"):
        return Taken(note="without bypass_mode the loss is that of algorithm.policy_loss_fn")
    names = {"reinforce": "reinforce", "ppo_clip": "ppo"}
    if str(value) not in names:
        return Taken(refusal=f"expected one of {', '.join(names)}")
    return Taken((("algorithm.policy_loss_fn", names[value]),))


def prompts_of_a_sync(command: Command) -> int:
    """Prompts between two pushes of the weights; 0 where the command does not say."""
    mini = command.counted(MINI_BATCH, DEFAULT_SIZES[MINI_BATCH] if command.is_whole else 0)
    return mini * command.counted(_BATCHES, 1) * command.counted(_SYNC, 1)


def _train_batch(key: str, value: Any, command: Command) -> Taken:
    size = prompts_of_a_sync(command) if command.has("async_training.") else 0
    return Taken(((key, size),)) if value == 0 and size else Taken(((key, value),))


def _total_steps(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    size = prompts_of_a_sync(command)
    if not size:
        return Taken(refusal=f"expected {MINI_BATCH} as well, or trainer.total_training_steps=ITERATIONS")
    return Taken((("trainer.total_training_steps", max(1, value // size)),))


def _staleness(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    ahead = math.ceil(value)
    exact = "" if ahead == value else f"rollout.ahead={ahead}: whole iterations, each of the prompts of one push"
    return Taken((("rollout.ahead", ahead),), exact)


_OF_TURNS: dict[str, Rule] = {  # words that count only where a model answers several times
    "rollout.multi_turn.use_inference_chat_template": of_switch(
        named("agent.history", {True: "rendered", False: "generated"})
    ),
    **plain(f"""
rollout.multi_turn | max_user_turns | null | agent.max_turns ends an episode | expected agent.max_turns=ANSWERS
rollout.multi_turn | max_parallel_calls | | | a tool is called as often as an answer asks; for a limit {AGENT}
rollout.multi_turn | max_tool_response_length tool_response_truncate_side | | | \
what a tool returns is read whole: expected a tool that returns less
"""),
}

RULES: dict[str, Rule] = {
    "rollout.name": _engine,
    **each("rollout", "prompt_length response_length", _length),
    "rollout.engine_kwargs.sglang.*": _sglang,
    "rollout.prometheus.enable": switch(
        refused("expected prometheus in trainer.logger, and its trainer.prometheus_port"),
        nothing("servers' metrics are not collected"),
    ),
    "rollout.quantization": named("rollout.quantization", {None: "none"}),
    **each("rollout rollout.checkpoint_engine", "update_weights_bucket_megabytes", of_number(_bucket)),
    "rollout.val_kwargs.do_sample": of_switch(_do_sample),
    "rollout.multi_turn.enable": switch(refused(TOOLS), nothing("completions are plain")),
    "rollout.multi_turn.max_assistant_turns": unless(
        (None,), "agent.max_turns ends an episode", named("agent.max_turns")
    ),
    **counts_if(_may_have_turns, "completions are plain", _OF_TURNS),
    "rollout.nnodes": of_count(_own_gpus, least=0),
    "rollout.n_gpus_per_node": of_count(_own_gpus, least=0),
    "rollout.total_epochs": named("trainer.total_epochs"),
    "rollout.test_freq": named("trainer.test_freq"),
    "rollout.total_rollout_steps": of_number(_total_steps),
    "data.train_batch_size": _train_batch,
    _SYNC: of_count(nothing("so many optimizer steps are an iteration, after which weights are pushed")),
    _BATCHES: of_count(nothing("it multiplies data.train_batch_size, the prompts between two pushes")),
    "async_training.staleness_threshold": of_number(_staleness),
    "async_training.partial_rollout": of_switch(named("rollout.update", {True: "in_place", False: "drain"})),
    **each("async_training actor", "use_rollout_log_probs", of_switch(named(f"{CORRECTION}.bypass"))),
    "rollout.standalone_gpu_memory_utilization": unless((None,), "unset", named("rollout.memory_fraction")),
    f"{CORRECTION}.rollout_is": _level,
    f"{CORRECTION}.rollout_is_threshold": _threshold,
    f"{CORRECTION}.rollout_rs": _rejection,
    f"{CORRECTION}.rollout_rs_threshold": _rejection_bounds,
    f"{CORRECTION}.bypass_mode": of_switch(_bypass),
    f"{CORRECTION}.loss_type": _loss_type,
}
