"""Rules for words about data, the length and the records of a run, and supervised training."""

from __future__ import annotations

from typing import Any

from megarl.config.tables import places
from megarl.config.verl.models import by_megatron
from megarl.config.verl.rewards import learns_from_teachers_alone
from megarl.config.verl.taken import Command, Rule, Taken, named, plain, unless

HF_MODEL = "hf_model"  # verl's word `model`, where ours is the name of a preset
ALL_OF_THEM = 10**6  # verl's null or 0: no limit


def _limit(ours: str, unlimited: tuple[Any, ...]) -> Rule:
    """A number of which verl has a name for "all"."""

    def rule(key: str, value: Any, command: Command) -> Taken:
        if value in unlimited and (command.is_whole or key != ours):
            return Taken(((ours, ALL_OF_THEM),), f"{ours}={ALL_OF_THEM}: no limit")
        return Taken(((ours, value),))

    return rule


def _estimator(key: str, value: Any, command: Command) -> Taken:
    if value == "ppo":
        return Taken(refusal="PPO's estimator is called gae: expected gae")
    if learns_from_teachers_alone(command):
        return Taken(((key, "none"),), f"{key}=none: use_task_rewards=false, and only teachers teach")
    return Taken(((key, value.removesuffix("_vectorized") if isinstance(value, str) else value),))


def _engine(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value in ("fsdp", "megatron"):
        fsdp = command.is_on("actor.megatron.use_megatron_fsdp")
        return Taken((("actor.strategy", "fsdp" if fsdp else value),))
    return Taken(refusal="expected fsdp or megatron")


def _metric(key: str, value: Any, command: Command) -> Taken:
    """`acc` is a number of some rewards only; built-in ones with it give equal scores to answers of equal `acc`."""
    if value is None:
        return Taken(note="groups are compared by their score")
    own = command.has("custom_reward_function.path") or command.has("reward.custom_reward_function.path")
    if value == "acc" and command.is_whole and not own:
        return Taken(((key, "score"),), f"{key}=score, before anything is added to it: it differs where acc does")
    return Taken(((key, value),))


def _resume(key: str, value: Any, command: Command) -> Taken:
    path = command.get("trainer.resume_from_path")
    if value != "resume_path":
        return Taken(((key, value),))
    return Taken(((key, path),)) if path else Taken(refusal="expected trainer.resume_mode=FOLDER")


def _resume_path(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if command.get("trainer.resume_mode") != "resume_path":
        return Taken(note="trainer.resume_mode names the folder, where one is to be resumed")
    return Taken((("trainer.resume_mode", value),))


def _profiler(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """Without steps nothing is profiled, whatever the tool is."""
    if not command.get("global_profiler.steps"):
        return Taken(note="nothing is profiled")
    if value == "torch_memory":
        return Taken((("trainer.profile.memory", True),))
    return Taken((("trainer.profile.tool", "nvtx" if value == "nsys" else value),))


def _train_rows(key: str, value: Any, command: Command) -> Taken:
    """verl draws the rows that it keeps where it shuffles, and takes the first ones where it does not."""
    draws = value not in (-1, None) and command.is_whole and not command.is_off("data.shuffle")
    note = f"the first {value} rows, and not a random choice" if draws else ""
    return Taken(((key, None if value == -1 else value),), note)


RULES: dict[str, Rule] = {
    "data.train_max_samples": _train_rows,
    "data.val_max_samples": named("data.val_max_samples", {-1: None}),
    "algorithm.adv_estimator": _estimator,
    "algorithm.filter_groups.max_num_gen_batches": _limit("algorithm.filter_groups.max_num_gen_batches", (0, None)),
    "algorithm.filter_groups.metric": _metric,
    "trainer.max_actor_ckpt_to_keep": _limit("trainer.max_checkpoints_to_keep", (None,)),
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume_path,
    "global_profiler.tool": _profiler,
    "global_profiler.steps": unless((None, []), "nothing is profiled", named("trainer.profile.steps")),
}

# `megarl sft`: words of verl's supervised trainers, in the places where those of its other trainers are.
_SFT_PLACES = """
sft | data | train_files val_files train_batch_size=batch_size max_length truncation=overlong_rows prompt_key \
response_key
sft | trainer | total_epochs=epochs
actor | data | micro_batch_size_per_gpu=ppo_micro_batch_size_per_gpu micro_batch_size=ppo_micro_batch_size \
max_token_len_per_gpu=ppo_max_token_len_per_gpu use_dynamic_bsz
actor | model engine | strategy
actor | ulysses_sequence_parallel_size
actor.optim | optim | lr_scheduler=lr_scheduler_type warmup_steps_ratio=lr_warmup_steps_ratio
model | model | partial_pretrain=path
model | use_remove_padding
trainer | trainer | max_ckpt_to_keep=max_actor_ckpt_to_keep
"""
SFT_PLACES = {theirs: ours for theirs, (ours, _) in places(_SFT_PLACES).items()}
_SFT_GROUPS = {
    "optim.": "actor.optim.",
    "checkpoint.": "actor.checkpoint.",
    "profiler.": "actor.profiler.",
    "model.fsdp_config.": "actor.fsdp_config.",
}


def sft_place(key: str, command: Command) -> str:
    """A word of the supervised trainer as one of the actor: "engine.dtype" -> "actor.megatron.dtype"."""
    if key in SFT_PLACES:
        return SFT_PLACES[key]
    layout = any(name.startswith("engine.") and "_model_parallel_size" in name for name in command.words)
    engine = "megatron" if layout or by_megatron(command) else "fsdp_config"
    for group, place in {**_SFT_GROUPS, "engine.": f"actor.{engine}."}.items():
        if key.startswith(group):
            return place + key.removeprefix(group)
    return key


def in_sft_places(command: Command) -> dict[str, Any]:
    """All words of the supervised trainer in these places.  By default micro-batches are cut by tokens."""
    words = {sft_place(key, command): value for key, value in command.words.items()}
    return words if "model.partial_pretrain" in command.words else {"actor.use_dynamic_bsz": True} | words


SFT_RULES: dict[str, Rule] = {
    "engine": _engine,
    "model": unless((HF_MODEL,), "there is one kind of model", named("model")),
    **plain("""
 | optim | the optimizer is Megatron's
data | balance_dp_token | ranks always get equal shares of tokens
data | multiturn.enable | a row with messages is a conversation
data data.multiturn | messages_key | messages | the field of a row | expected messages, the field of a row
data data.multiturn | tools_key | tools | the field of a row | expected tools, the field of a row
data data.multiturn | enable_thinking_key | enable_thinking | the field of a row | \
expected enable_thinking, the field of a row
data | enable_thinking_default | none, null | the template's own | expected data.apply_chat_template_kwargs
data | pad_mode | sequences are always packed and never padded
data | num_workers | rows are encoded once, at the start
data | ignore_input_ids_mismatch | what is learnt is found in the rendered text
data | prompt_dict_keys | null, [] | sft.prompt_key names the field | \
sft.prompt_key names a field whose value is the text itself: expected rows with such a field
data | response_dict_keys | null, [] | sft.response_key names the field | \
sft.response_key names a field whose value is the text itself: expected rows with such a field
data | train_max_samples val_max_samples | -1, null | all rows | \
all rows of a file are read: expected a file of fewer rows
trainer | profile_interval | [-1, -1], null | nothing is profiled | expected trainer.profile.steps
"""),
}
