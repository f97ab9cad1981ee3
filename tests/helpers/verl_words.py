"""Words of scripts as verl's users have them, what becomes of each, and the count of all."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megarl.config import Config, ConfigError, load_config
from megarl.config.aliases import without_prefix
from megarl.config.settings import Setting, from_command_line
from megarl.trainer.algorithm import make_algorithm

PROPERTY = "verl_words"
FOLDER = Path(__file__).parents[1] / "fixtures/verl_words"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.txt"))


class Pasted(NamedTuple):
    """A script: its configuration without the words that are refused, and what became of each word."""

    config: Config
    accepted: dict[str, list[Setting]]  # word -> the settings of ours that it is
    noted: dict[str, str]  # word -> its line
    refused: dict[str, str]  # word -> its sentence


# Keys of which the line says that something else happens; the other lines say that it is so in any case, that the rest
# of the command leaves the key without an effect, or that only the time changes.
INSTEAD = (
    *("rollout.name", "rollout.log_prob_*", "async_training.staleness_threshold"),
    *("data.gen_batch_size", "algorithm.filter_groups.metric", "reward_model.micro_batch_size_per_gpu"),
    *("rollout.agent.num_workers", "trainer.log_val_generations", "model.enable_activation_offload"),
    *("critic.forward_*", "model.override_config*.max_position_embeddings"),
)


def words_of(script: str) -> list[str]:
    return (FOLDER / f"{script}.txt").read_text().split("\n")[:-1]


def paste(script: str, *more: str) -> Pasted:
    """Try a script as `megarl train` and `megarl sft` do, then without the words that its errors name.

    `more`: words for what it leaves out.
    """
    words, command = words_of(script), "sft" if script.startswith("sft") else "train"
    refused: dict[str, str] = {}
    try:
        config, lines = load_config([*words, *more], command=command)
    except ConfigError as error:
        for sentence in error.sentences:
            named = [word for word in words if sentence.startswith(f"{word}: ")]
            assert named, f"{script}: no word of it is named by: {sentence}"
            refused |= dict.fromkeys(named, sentence)
        config, lines = load_config([*(word for word in words if word not in refused), *more], command=command)
    if command == "train":
        make_algorithm(config)  # refuses what the loss does not take, as the check and the run do
    settings: dict[str, list[Setting]] = {}
    for setting in from_command_line(words, command=command).settings:
        settings.setdefault(setting.text, []).append(setting)
    noted = {word: line for word in words for line in lines if word not in refused and _is_of(line, word)}
    accepted = {word: settings.get(word, []) for word in words if word not in refused and word not in noted}
    return Pasted(config, accepted, noted, refused)


def says_what_happens_instead(word: str) -> bool:
    """Of a word with a line: is it not what the word asks for?"""
    return any(fnmatchcase(_key(word), pattern) for pattern in INSTEAD)


def _key(word: str) -> str:
    return without_prefix(word.lstrip("+").partition("=")[0])


def _is_of(line: str, word: str) -> bool:
    """Is this line about that word?"""
    key = _key(word)
    return line.startswith((f"{key}=", f"{key} has", f"{word}: "))


def summary(reports: Iterable[Any]) -> str:
    """The line with the count over all scripts and of each; "" if none was tried."""
    counts: dict[str, tuple[int, ...]] = {}
    for report in reports:
        for name, value in report.user_properties if isinstance(report, pytest.TestReport) else ():
            if name == PROPERTY and report.when == "teardown":
                script, *numbers = value
                counts[script] = tuple(numbers)
    if not counts:
        return ""
    set_, so_anyway, instead, refused = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    total = set_ + so_anyway + instead + refused
    each = ", ".join(f"{script} {'+'.join(map(str, numbers))}" for script, numbers in sorted(counts.items()))
    return (
        f"verl: {total} words of {len(counts)} scripts: {set_} set what they say, {so_anyway} with a line that it is "
        f"so anyway, {instead} with a line of what happens instead, {refused} refused with what to write: {each}"
    )
