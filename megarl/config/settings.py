"""One layer of settings: the keys and values of a command line or a file, in our own names, with types checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.config.aliases import PREFIXES, SWITCHES, canonical, converted, without_prefix
from megarl.config.keys import (
    fits,
    general,
    groups,
    is_free,
    is_users,
    mapping_of,
    meaning_of_null,
    nearest,
    type_name,
    type_of,
)
from megarl.config.verl.defaults import unknown_option, with_file
from megarl.config.verl.runs import HF_MODEL, in_sft_places, sft_place
from megarl.config.verl.taken import Command

# Words that name a file, or a part of a file, below all other settings; `model` and `model.preset` are the same.
WORDS = {
    "recipe": "the name of a recipe or the path of a YAML file",
    "model": "the name of a preset or the path of a YAML file",
    "layout": "the name of one of the layouts of the model's preset",
}
PRESET = "model.preset"
LONGEST = 3000  # characters of a sentence; it may quote a value of any length


class ConfigError(ValueError):
    """Invalid settings: for each one sentence with the key, the value and what is expected; a line each as text.

    Example: "actor.clip_ratio=3.0: expected a number between 0 and 1, both excluded".
    """

    def __init__(self, *sentences: str) -> None:
        self.sentences = tuple(_printable(sentence) for sentence in sentences)
        super().__init__(*self.sentences)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def _printable(text: str) -> str:
    """A long text without its middle, and control characters, which could write anything on a terminal, as \\x1b."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class Faults:
    """Collects the sentences of independent checks, so that one error has them all."""

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self.sentences = list(sentences)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A ValueError raised inside is collected, and the code after the block goes on."""
        try:
            yield
        except ValueError as error:
            self.sentences += error.sentences if isinstance(error, ConfigError) else [str(error)]

    def keep_first_of_each_key(self) -> None:
        """Drops further sentences that begin with the same KEY=."""
        first: dict[str, str] = {}
        for sentence in self.sentences:
            first.setdefault(sentence.partition("=")[0], sentence)
        self.sentences = list(first.values())

    def stop_if_any(self) -> None:
        """Raises: ConfigError with every sentence, each once."""
        if self.sentences:
            raise ConfigError(*dict.fromkeys(self.sentences))


@dataclass(frozen=True)
class Setting:
    """Example: Setting("actor.optim.betas", 0.95, "actor_rollout_ref.actor.optim.beta2=0.95", 1)."""

    key: str  # our own name
    value: Any
    text: str  # as the user wrote it, for messages
    place: int | str | None = None  # the entry of a list or mapping that is set; None = the whole value


@dataclass(frozen=True)
class Layer:
    """All settings of one command line or one file."""

    settings: tuple[Setting, ...]
    words: dict[str, str]  # the layers below it: {"recipe": "quickstart"}
    warnings: tuple[str, ...]
    faults: tuple[str, ...] = ()  # one sentence for each setting that could not be taken
    command: Command = Command({})  # all words as they were written


def show(value: object) -> str:
    """A value as YAML spells it: null, true, 0.1, [a, b]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(item)}' for name, item in value.items())}}}"
    return str(value)


def from_command_line(overrides: list[str], *, command: str = "train") -> Layer:
    """`key=value` words, in Hydra's grammar; `+key=value` and `++key=value` are the same as `key=value`."""
    faults, written = Faults(), []
    words, lines = with_file(overrides)
    for word in words:
        with faults.collect():
            if word.startswith("--"):
                raise ConfigError(unknown_option(word))
            written.append((word, *_parse(word)))
    layer = _layer(written, faults, is_sft=command == "sft")
    return replace(layer, warnings=(*lines, *layer.warnings))


def from_file(path: Path) -> Layer:
    """A YAML file.  Its key `recipe` names the layer below it: a shipped recipe or another file."""
    return from_content(str(path), read_yaml(path))


def read_yaml(path: Path) -> dict[Any, Any]:
    """The groups of keys in a file."""
    try:
        loaded = OmegaConf.load(path)
    # ValueError: no UTF-8, or no name of a file; RecursionError: nested thousands of times, or in itself
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected groups of keys such as `actor:` at the top of the file, not a list")
    content = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(content, dict), "a DictConfig becomes a dict"
    if "defaults" in content:
        raise ConfigError(f"{path}: expected `recipe: NAME` rather than a `defaults` list, to build on another file")
    return content


def from_content(where: str, content: dict[Any, Any]) -> Layer:
    """The settings of a file or of a part of it; every message about them begins with `where`."""
    return _layer([(f"{where}: {key}={show(value)}", str(key), value) for key, value in flat(content)], Faults())


def parse_override(word: str) -> Override:
    """Parse a word in Hydra's grammar that sets a key to one value or to several.

    Raises: ConfigError for anything else.
    """
    try:
        override = _parser().parse_override(word)
    except HydraException:
        raise ConfigError(
            f"{word}: expected key=value, with quotes around a value that has special characters"
        ) from None
    if override.type == OverrideType.DEL:
        raise ConfigError(f"{word}: expected key=value, no key can be taken away")
    return override


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _parse(word: str) -> tuple[str, Any]:
    override = parse_override(word)
    if override.is_sweep_override():
        raise ConfigError(
            f"{word}: expected one value; a list is written [a,b], and `megarl train -m` makes a run of each value"
        )
    return override.key_or_group, override.value()


def flat(content: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested groups as (key, value): {"actor": {"optim": {"lr": 1}}} is [("actor.optim.lr", 1)]."""
    out: list[tuple[str, Any]] = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        out += flat(value, f"{key}.") if isinstance(value, dict) and value and not _is_whole(key) else [(key, value)]
    return out


def _is_whole(key: str) -> bool:
    """Whether the names in a mapping of this key are the user's, and not parts of a key."""
    key = without_prefix(key)
    return is_users(key) or mapping_of(key) is not None


def _layer(written: list[tuple[str, str, Any]], faults: Faults, *, is_sft: bool = False) -> Layer:
    ranked: list[tuple[int, str, Setting]] = []
    warnings: list[str] = []
    words: dict[str, str] = {}
    leaves = [(text, *leaf) for text, name, value in written for leaf in flat({name: value})]
    command = _command(leaves, is_sft=is_sft)
    for text, typed, leaf in leaves:
        word = without_prefix(typed)
        if is_users(word):
            with faults.collect():
                ranked.append((0, word, _checked(Setting(word, leaf, text))))
            continue
        key = sft_place(word, command) if command.is_sft else word
        taken = converted(key, leaf, command)
        if taken is not None:
            warnings += [f"{word}={show(leaf)}: {taken.note}"] if taken.note else []
            faults.sentences += [f"{text}: {taken.refusal}"] if taken.refusal else []
            for ours, value in taken.settings:
                with faults.collect():
                    ranked.append((0, word, _checked(Setting(ours, value, text))))
            continue
        found = canonical(key)
        with faults.collect():
            if found.key in (*WORDS, PRESET):
                _add_word(words, text, found.key, leaf)
            else:
                value, rank = _switched(key, leaf)
                if isinstance(value, str) and type_of(found.key) == list[str] and found.key.endswith("_files"):
                    shown = value if value.isprintable() else repr(value)
                    warnings.append(f"{found.key}={shown}: taken for one file; several are written [a,b]")
                ranked.append((rank, word, _checked(Setting(found.key, value, text, found.place))))
    faults.sentences += _contradictions(ranked)
    # An entry of a list follows the list; else in the order written.
    settings = tuple(one for *_, one in sorted(ranked, key=lambda each: (each[0], isinstance(each[2].place, int))))
    return Layer(settings, words, tuple(warnings), tuple(faults.sentences), command)


def _contradictions(ranked: Iterable[tuple[int, str, Setting]]) -> Iterator[str]:
    """A sentence for each word that sets a key to another value than an earlier one does under another name."""
    last = {(rank, one.key, one.place, word): one for rank, word, one in ranked if not is_free(one.key)}
    first: dict[tuple[int, str, int | str | None], Setting] = {}
    for (rank, key, place, _), one in last.items():
        earlier = first.setdefault((rank, key, place), one)
        if one is not earlier and one.value != earlier.value:
            yield f"{one.text}: expected one value of {key}, and {earlier.text} sets {show(earlier.value)}"


def _command(leaves: list[tuple[str, str, Any]], *, is_sft: bool) -> Command:
    """All words; they are a whole run of verl if they name its model as verl does and build on nothing of ours."""
    words = {without_prefix(key): value for _, key, value in leaves}
    typed = {key for _, key, _ in leaves}
    is_verls_sft = is_sft and not any(key.startswith("sft.") for key in typed)
    is_verls = (
        "data.train_files" in typed if is_verls_sft else any(f"{prefix}model.path" in typed for prefix in PREFIXES)
    )
    builds = {key for key in WORDS if key in words and words[key] != HF_MODEL}
    command = Command(words, is_verls and not builds, is_verls_sft)
    return command._replace(words=in_sft_places(command)) if is_verls_sft else command


def _switched(key: str, value: Any) -> tuple[Any, int]:
    """Our value for that of another document's switch, and its place among other spellings: 1 overrules, -1 yields."""
    switch = SWITCHES.get(without_prefix(key), {})
    if not isinstance(value, bool) or value not in switch:
        return value, 0
    ours, overrules = switch[value]
    return ours, 1 if overrules else -1


def _add_word(words: dict[str, str], text: str, key: str, value: object) -> None:
    if key == PRESET:
        key = "model"
        if value in ("", None):  # "" is the default, in every saved configuration without a preset
            return
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{text}: expected {WORDS[key]}")
    if key in words:
        raise ConfigError(f"{key}={value}: expected one {key}, and {key}={words[key]} is already given")
    words[key] = value


def _checked(setting: Setting) -> Setting:
    """The same setting converted to the type of its key.  Raises: ConfigError."""
    key, value = setting.key, setting.value
    if (mapping := mapping_of(key)) is not None:
        name = key.removeprefix(f"{mapping}.")
        if not is_free(mapping):
            return _checked(Setting(mapping, value, setting.text, name))
        for each in reversed(name.split(".")):  # a path of names
            value = {each: value}
        return _checked(Setting(mapping, value, setting.text))
    wanted = type_of(key)
    if wanted is None:
        raise ConfigError(f"{setting.text}: {_unknown(key)}")
    if setting.place is not None:
        kind = get_args(wanted)[-1]  # of a list's elements, of a mapping's values
        if not fits(value, kind):
            raise ConfigError(f"{setting.text}: expected {type_name(kind)}")
        return setting
    if value is None:
        value = meaning_of_null(key)
    elif wanted == list[str] and isinstance(value, str):
        value = [value]
    elif key in ("actor.clip_ratio_c", "actor.router_replay") and value is False:
        value = "off"  # YAML reads a bare off as false
    if not fits(value, wanted):
        raise ConfigError(f"{setting.text}: expected {type_name(wanted)}")
    if is_free(key) and isinstance(value, dict):
        value = {str(name): item for name, item in value.items()}
    if isinstance(value, int) and float in get_args(wanted):
        value = float(value)  # OmegaConf does not convert 3 to 3.0 if text is allowed too
    return Setting(key, value, setting.text)


def _unknown(key: str) -> str:
    if general(key) in groups():
        return f"{key} is a group of keys; expected {key}.NAME=VALUE"
    guess = nearest(key)
    hint = f"; did you mean {guess}?" if guess else "; `megarl config` prints them all"
    return f"there is no key {key}{hint}"
