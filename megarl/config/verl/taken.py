"""What becomes of a word of another document: settings of ours, a line for the user, or a refusal.

A rule gets the key without its prefix, the value, and the whole command, because some words mean something only
together with another one: `custom_reward_function.path` and `.name`, or `rollout_rs` and `rollout_rs_threshold`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

_TRUTHS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def truth(value: Any) -> bool | None:
    """What a switch says, in any spelling; null is false.  None: it is no switch's value."""
    return False if value is None else _TRUTHS.get(str(value).lower())


class Command(NamedTuple):
    """All words of a command line: key without prefix -> value."""

    words: Mapping[str, Any]
    is_whole: bool = False  # of a run as verl's scripts start it: defaults that nobody typed are verl's
    is_sft: bool = False  # of verl's supervised trainer, with its words in the places of the actor's (`in_place`)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a word; the default if it is not there."""
        return self.words.get(key, default)

    def is_on(self, key: str) -> bool:
        """Is this switch there, and true?"""
        return truth(self.words.get(key)) is True

    def is_off(self, key: str) -> bool:
        """Is this switch there, and false or null?"""
        return key in self.words and truth(self.words[key]) is False

    def has(self, prefix: str) -> bool:
        """Does any key begin so?"""
        return any(key.startswith(prefix) for key in self.words)


def asks(value: Any) -> bool:
    """Is it true, a number above 1, or a path: what switches something on, or gives it a size?"""
    if isinstance(value, list):
        return any(map(asks, value))
    if isinstance(value, str):
        return truth(value) is True or "/" in value
    return value is True or (isinstance(value, int | float) and value > 1)


class Taken(NamedTuple):
    """Settings (our key, value); a line about them, or about why there are none; or why the word is refused."""

    settings: tuple[tuple[str, Any], ...] = ()
    note: str = ""
    refusal: str = ""


Rule = Callable[[str, Any, Command], Taken]


def nothing(why: str) -> Rule:
    """The word is dropped with a line: what it asks for is always so here, or changes no result."""
    return lambda key, value, command: Taken(note=why)  # noqa: ARG005


def harmless(*values: Any, why: str, otherwise: str) -> Rule:
    """Dropped with a line for these values, refused for any other."""
    return lambda key, value, command: Taken(note=why) if value in values else Taken(refusal=otherwise)  # noqa: ARG005


def refused(why: str) -> Rule:
    """No value of this key can be taken."""
    return lambda key, value, command: Taken(refusal=why)  # noqa: ARG005


def each(groups: str, names: str, rule: Rule) -> dict[str, Rule]:
    """The rule for each of these names in each of these groups.  Example: each("*.optim", "a b", nothing("c"))."""
    return {f"{group}.{name}": rule for group in groups.split() for name in names.split()}


def of_switch(rule: Rule) -> Rule:
    """The rule gets True or False; any other value is refused."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        on = truth(value)
        return Taken(refusal="expected true or false") if on is None else rule(key, on, command)

    return chosen


def switch(on: Rule, off: Rule) -> Rule:
    """One rule for true, one for false and null; any other value is refused."""
    return of_switch(lambda key, value, command: (on if value else off)(key, value, command))


def set_to(*settings: tuple[str, Any], note: str = "") -> Rule:
    """These settings, whatever the value is."""
    return lambda key, value, command: Taken(settings, note)  # noqa: ARG005


def named(ours: str, values: Mapping[Any, Any], note: str = "") -> Rule:
    """The value under our key; those of `values` have another name here.  {role} is the first part of the key."""

    def rule(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
        name = values.get(value, value) if isinstance(value, Hashable) else value
        return Taken(((ours.format(role=key.partition(".")[0]), name),), note)

    return rule


def unless(values: tuple[Any, ...], why: str, rule: Rule) -> Rule:
    """Dropped with a line for these values, else the rule."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        return Taken(note=why) if value in values else rule(key, value, command)

    return chosen
