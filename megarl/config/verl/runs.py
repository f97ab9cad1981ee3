"""Rules for words about data, the length and the records of a run, and supervised training."""

from __future__ import annotations

from typing import Any

from megarl.config.verl.distillation import learns_from_teachers_alone
from megarl.config.verl.models import NO_CODE, by_megatron
from megarl.config.verl.taken import Command, Rule, Taken, each, harmless, named, nothing, refused, unless

HF_MODEL = "hf_model"  # verl's word `model`, where ours is the name of a preset
_MODEL_ENGINE = harmless("dp", "fsdp", "megatron", why="actor.strategy says so", otherwise="expected dp or megatron")
_NO_RAY = "there is no Ray"
_TOOLS = "expected agent.fn=tools:FILE.py:Class (docs/agents.md)"
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


def _field(name: str) -> Rule:
    """The name of a field of a row, which cannot be chosen."""
    return harmless(name, why="the field of a row", otherwise=f"expected {name}, the field of a row")


def _path_in_a_field(ours: str) -> Rule:
    """Names of verl's older trainer by which it goes into a field that holds a mapping."""
    wanted = f"{ours} names a field whose value is the text itself: expected rows with such a field"
    return unless((None, []), f"{ours} names the field", refused(wanted))


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


def _all(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    return Taken(((key, None if value == -1 else value),))


def _train_rows(key: str, value: Any, command: Command) -> Taken:
    """verl draws the rows that it keeps where it shuffles, and takes the first ones where it does not."""
    draws = value not in (-1, None) and command.is_whole and not command.is_off("data.shuffle")
    return _all(key, value, command)._replace(note=f"the first {value} rows, and not a random choice" if draws else "")


RULES: dict[str, Rule] = {
    # data
    "data.return_raw_chat": nothing("rows keep their messages"),
    "data.return_raw_input_ids": nothing("rows keep their messages"),
    "data.return_full_prompt": nothing("samples.jsonl has the whole prompt"),
    "data.use_shm": nothing("files are read where they are"),
    "data.gen_batch_size": nothing("filter_groups asks for as many further prompts as groups were dropped"),
    "data.val_batch_size": nothing("the evaluation asks for all its prompts at once"),
    "data.dataloader_num_workers": nothing("prompts are encoded once, at the start"),
    "data.validation_shuffle": nothing("the order of an evaluation changes no score"),
    "data.reward_fn_key": harmless(
        "data_source", why="reward.fn=auto reads data_source", otherwise="expected data_source, the field of a row"
    ),
    "data.train_max_samples": _train_rows,
    "data.val_max_samples": _all,
    "data.trust_remote_code": nothing(NO_CODE),
    "data.custom_cls.*": unless((None,), "the reader of rows is ours", refused("expected rows in JSONL or parquet")),
    "data.sampler.*": unless((None,), "prompts are shuffled by data.seed", refused("expected data.shuffle alone")),
    "data.datagen.*": unless((None,), "prompts come from files", refused("expected data.train_files")),
    **each("data", "tool_config_path function_tool_path", unless((None,), "there are no tools", refused(_TOOLS))),
    # algorithm
    "algorithm.adv_estimator": _estimator,
    "algorithm.filter_groups.max_num_gen_batches": _limit("algorithm.filter_groups.max_num_gen_batches", (0, None)),
    "algorithm.filter_groups.metric": _metric,
    "algorithm.rollout_correction.rollout_token_veto_threshold": unless(
        (None,), "no token vetoes its sequence", refused("no token vetoes its sequence: expected null")
    ),
    "algorithm.use_pf_ppo": harmless(False, why="samples count alike", otherwise="expected false"),
    # the run
    "trainer.log_val_generations": nothing("answers of evaluations are kept in samples.jsonl"),
    "trainer.rollout_data_dir": nothing("answers of every step are kept in samples.jsonl"),
    "trainer.validation_data_dir": nothing("answers of evaluations are kept in samples.jsonl"),
    "trainer.balance_batch": nothing("ranks always get equal shares of tokens"),
    "trainer.max_actor_ckpt_to_keep": _limit("trainer.max_checkpoints_to_keep", (None,)),
    "trainer.max_critic_ckpt_to_keep": nothing("a save holds actor and critic"),
    "trainer.remove_previous_ckpt_in_save": harmless(
        False, why="earlier saves stay", otherwise="expected trainer.max_checkpoints_to_keep=1"
    ),
    "trainer.default_hdfs_dir": unless((None,), "saves stay in the run's folder", refused("expected null")),
    "trainer.del_local_ckpt_after_load": harmless(False, why="saves stay", otherwise="expected false"),
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume_path,
    "trainer.esi_redundant_time": nothing("SIGTERM saves, within trainer.term_grace_s"),
    "trainer.ray_wait_register_center_timeout": nothing(_NO_RAY),
    "trainer.use_legacy_worker_impl": nothing("there is one implementation"),
    "trainer.use_v1": nothing("there is one trainer"),
    "trainer.val_only": harmless(False, why="it trains", otherwise="expected `megarl evaluate` with these words"),
    "ray_*.env_vars.*": refused("expected it in the environment of the command"),
    "transfer_queue.*": nothing("there is no transfer queue"),
    "ray_*": nothing(_NO_RAY),
    "global_profiler.tool": _profiler,
    "global_profiler.steps": unless((None, []), "nothing is profiled", named("trainer.profile.steps", {})),
    "global_profiler.*": nothing("trainer.profile.* says what is profiled"),
    **dict.fromkeys(("model_engine", "actor.model_engine"), _MODEL_ENGINE),
}  # fmt: skip

RENAMED: dict[str, tuple[str, int | str | None]] = {
    "data.tokenizer": ("model.tokenizer_path", None),
}

# `megarl sft`: words of verl's supervised trainers, in the places where those of its other trainers are.
SFT_PLACES: dict[str, str] = {
    "data.train_files": "sft.train_files",
    "data.val_files": "sft.val_files",
    "data.train_batch_size": "sft.batch_size",
    "data.max_length": "sft.max_length",
    "data.truncation": "sft.overlong_rows",
    "data.prompt_key": "sft.prompt_key",
    "data.response_key": "sft.response_key",
    "data.micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    "data.micro_batch_size": "actor.ppo_micro_batch_size",
    "data.max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": "actor.use_dynamic_bsz",
    "model.partial_pretrain": "model.path",
    "model.strategy": "actor.strategy",
    "engine.strategy": "actor.strategy",
    "optim.lr_scheduler": "actor.optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "actor.optim.lr_warmup_steps_ratio",
    "trainer.total_epochs": "sft.epochs",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "use_remove_padding": "model.use_remove_padding",
    "ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
}
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
    """All words of the supervised trainer in these places.  It cuts micro-batches by tokens unless told otherwise."""
    words = {sft_place(key, command): value for key, value in command.words.items()}
    return words if "model.partial_pretrain" in command.words else {"actor.use_dynamic_bsz": True} | words


SFT_RULES: dict[str, Rule] = {
    "engine": _engine,
    "optim": nothing("the optimizer is Megatron's"),
    "model": unless((HF_MODEL,), "there is one kind of model", named("model", {})),
    "data.balance_dp_token": nothing("ranks always get equal shares of tokens"),
    "data.multiturn.enable": nothing("a row with messages is a conversation"),
    **each("data data.multiturn", "messages_key", _field("messages")),
    **each("data data.multiturn", "tools_key", _field("tools")),
    **each("data data.multiturn", "enable_thinking_key", _field("enable_thinking")),
    "data.enable_thinking_default": harmless(
        *("none", None), why="the template's own", otherwise="expected data.apply_chat_template_kwargs"
    ),
    "data.pad_mode": nothing("sequences are always packed and never padded"),
    "data.num_workers": nothing("rows are encoded once, at the start"),
    "data.ignore_input_ids_mismatch": nothing("what is learnt is found in the rendered text"),
    "data.prompt_dict_keys": _path_in_a_field("sft.prompt_key"),
    "data.response_dict_keys": _path_in_a_field("sft.response_key"),
    **each(
        "data",
        "train_max_samples val_max_samples",
        harmless(-1, None, why="all rows", otherwise="all rows of a file are read: expected a file of fewer rows"),
    ),
    "trainer.profile_interval": harmless(
        *([-1, -1], None), why="nothing is profiled", otherwise="expected trainer.profile.steps"
    ),
}
