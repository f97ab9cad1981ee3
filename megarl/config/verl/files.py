"""The configuration files that verl's scripts name by --config-name, as the words by which they differ."""

from __future__ import annotations

from collections.abc import Sequence

_MEGATRON = ("model_engine=megatron",)
_APART = ("hybrid_engine=False", "algorithm.rollout_correction.bypass_mode=True")  # servers have GPUs of their own
_ASYNC = (
    *_APART,
    "rollout.total_rollout_steps=100",
    "async_training.staleness_threshold=0.1",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=1",
    "async_training.partial_rollout=True",
)
_DAPO = ("reward.reward_manager.name=dapo",)
FILES: dict[str, tuple[str, ...]] = {
    "ppo_trainer": (),
    "ppo_megatron_trainer": _MEGATRON,
    "dapo_trainer": _DAPO,
    "dapo_megatron_trainer": (*_MEGATRON, *_DAPO),
    "sft_trainer": (),
    "sft_trainer_engine": (),
    "fully_async_ppo_trainer": _ASYNC,
    "fully_async_ppo_megatron_trainer": (*_MEGATRON, *_ASYNC),
    "one_step_off_ppo_trainer": _APART,
    "one_step_off_ppo_megatron_trainer": (*_MEGATRON, *_APART),
}
NAME, FOLDER = "--config-name", "--config-path"
_ASYNC_FILE = "fully_async_ppo_trainer"  # which its trainer reads where the command names none
_MODEL = "actor_rollout_ref.model.path="


def with_file(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words, after those of the file of verl's that no word sets; and lines about the file.

    The name of an unknown file stays among the words, to be refused with the others.
    """
    options = dict(word.split("=", 1) for word in words if word.startswith((f"{NAME}=", f"{FOLDER}=")))
    typed = {_key(word) for word in words}
    named, why = options.get(NAME, ""), f"{NAME}={options.get(NAME)}"
    if not named and _is_asynchronous(words, typed):
        named, why = _ASYNC_FILE, "async_training.*"
    name = named.removesuffix(".yaml")
    if name not in FILES:
        return [word for word in words if NAME not in options or not word.startswith(f"{FOLDER}=")], []
    of_the_file = [word for word in FILES[name] if _key(word) not in typed]
    lines = [f"{why}: verl's file {name} sets {', '.join(of_the_file) or 'nothing else here'}"]
    if FOLDER in options:
        lines.append(f"{FOLDER}={options[FOLDER]}: no file of this folder is read")
    return of_the_file + [word for word in words if not word.startswith((f"{NAME}=", f"{FOLDER}="))], lines


def _is_asynchronous(words: Sequence[str], typed: set[str]) -> bool:
    """Is it a whole command for verl's fully asynchronous trainer?"""
    own = typed & {"recipe", "model"}
    return not own and any(_MODEL in word for word in words) and any(key.startswith("async_training.") for key in typed)


def unknown_option(word: str) -> str:
    """The sentence for an option that no command has."""
    option = word.partition("=")[0]
    if option in (NAME, FOLDER):
        return (
            f"{word}: expected one of verl's files ({', '.join(FILES)}) in {NAME}, or a file of ours in --config FILE"
        )
    return f"there is no option {option}; expected --config FILE, -m, --debug, --help or key=value"


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0].removeprefix("actor_rollout_ref.")
