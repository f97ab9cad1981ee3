"""Rules for words about data, the length and the records of a run, and supervised training."""

from __future__ import annotations

from typing import Any

from megarl.config.verl import dtypes
from megarl.config.verl.models import load_contents
from megarl.config.verl.taken import Command, Rule, Taken, harmless, named, nothing, refused, unless

_TEXT = "only text is read"
_NO_RAY = "there is no Ray"
_FIELD = "expected rows whose field has verl's own name"
_WARMUP = "expected actor.optim.lr_warmup_steps=STEPS"


def _metric(key: str, value: Any, command: Command) -> Taken:
    """`acc` is a number of some rewards only; built-in ones with it give equal scores to answers of equal `acc`."""
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
    draws = value not in (-1, None) and command.is_whole and command.get("data.shuffle") is not False
    return _all(key, value, command)._replace(note=f"the first {value} rows, and not a random choice" if draws else "")


RULES: dict[str, Rule] = {
    # data
    "data.return_raw_chat": nothing("rows keep their messages"),
    "data.return_raw_input_ids": nothing("rows keep their messages"),
    "data.return_full_prompt": nothing("samples.jsonl has the whole prompt"),
    "data.return_multi_modal_inputs": nothing(_TEXT),
    "data.image_*": nothing(_TEXT),
    "data.video_key": nothing(_TEXT),
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
    "data.trust_remote_code": harmless(False, why="no code of a folder is run", otherwise="expected false"),
    "data.custom_cls.*": unless((None,), "the reader of rows is ours", refused("expected rows in JSONL or parquet")),
    "data.sampler.*": unless((None,), "prompts are shuffled by data.seed", refused("expected data.shuffle alone")),
    "data.datagen.*": unless((None,), "prompts come from files", refused("expected data.train_files")),
    "data.tool_config_path": unless((None,), "there are no tools", refused("expected agent.fn")),
    # algorithm
    "algorithm.adv_estimator": named(
        "algorithm.adv_estimator", {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
    ),
    "algorithm.filter_groups.metric": _metric,
    "algorithm.rollout_correction.rollout_token_veto_threshold": unless(
        (None,), "no token vetoes its sequence", refused("no token vetoes its sequence: expected null")
    ),
    "algorithm.use_pf_ppo": harmless(False, why="samples count alike", otherwise="expected false"),
    "algorithm.pf_ppo.*": nothing("samples are never drawn again"),
    # the run
    "trainer.log_val_generations": nothing("answers of evaluations are kept in samples.jsonl"),
    "trainer.rollout_data_dir": nothing("answers of every step are kept in samples.jsonl"),
    "trainer.validation_data_dir": nothing("answers of evaluations are kept in samples.jsonl"),
    "trainer.balance_batch": nothing("ranks always get equal shares of tokens"),
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
    "transfer_queue.*": nothing("changes no result: rows travel from the driver to the ranks"),
    "ray_init.*": nothing(_NO_RAY),
    "ray_kwargs.*": nothing(_NO_RAY),
    "global_profiler.tool": _profiler,
    "global_profiler.steps": unless((None, []), "nothing is profiled", named("trainer.profile.steps", {})),
    "global_profiler.*": nothing("trainer.profile.* says what is profiled"),
    "model_engine": nothing("actor.strategy chooses it"),
}  # fmt: skip

RENAMED: dict[str, tuple[str, int | str | None]] = {
    "data.tokenizer": ("model.tokenizer_path", None),
    "trainer.max_actor_ckpt_to_keep": ("trainer.max_checkpoints_to_keep", None),
}

# `megarl sft`: words of verl's supervised trainers.  Here these keys are the prompts' of RL, which it does not read.
SFT_RENAMED: dict[str, str] = {
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
    "model.partial_pretrain": "model.path",
    "model.strategy": "actor.strategy",
    "trainer.total_epochs": "sft.epochs",
    "ulysses_sequence_parallel_size": "actor.megatron.context_parallel_size",
    "engine.tensor_model_parallel_size": "actor.megatron.tensor_model_parallel_size",
    "engine.pipeline_model_parallel_size": "actor.megatron.pipeline_model_parallel_size",
    "engine.context_parallel_size": "actor.megatron.context_parallel_size",
}
SFT_RULES: dict[str, Rule] = {
    "data.balance_dp_token": nothing("ranks always get equal shares of tokens"),
    "data.use_dynamic_bsz": nothing("rows are always packed"),
    "data.multiturn.enable": nothing("a row has messages, or a prompt and a response"),
    "data.*messages_key": harmless("messages", why="the field is called so", otherwise=_FIELD),
    "data.*tools_key": harmless("tools", why="the field is called so", otherwise=_FIELD),
    "data.*_dict_keys": nothing("sft.prompt_key and sft.response_key name the fields"),
    "use_remove_padding": nothing("sequences are always packed and never padded"),
    "optim.lr": named("actor.optim.lr", {}),
    "optim.weight_decay": named("actor.optim.weight_decay", {}),
    "optim.betas": named("actor.optim.betas", {}),
    "optim.clip_grad": named("actor.max_grad_norm", {}),
    "optim.lr_scheduler": named("actor.optim.lr_decay_style", {}),
    "optim.lr_scheduler_type": named("actor.optim.lr_decay_style", {}),
    "optim.lr_warmup_steps": named("actor.optim.lr_warmup_steps", {-1: 0}),
    "optim.warmup_steps_ratio": harmless(0, 0.0, why="there is no warm-up", otherwise=_WARMUP),
    "optim.lr_warmup_steps_ratio": harmless(0, 0.0, why="there is no warm-up", otherwise=_WARMUP),
    **dtypes.rules("model.fsdp_config", "engine"),
    "model.fsdp_config.*": nothing("strategy=fsdp shards everything over all data-parallel ranks"),
    "checkpoint.load_contents": load_contents,
    "checkpoint.*": nothing("a save has weights, optimizer and all that an exact resume needs"),
    "engine.*": nothing("actor.strategy and actor.megatron lay the model out"),
}  # fmt: skip
