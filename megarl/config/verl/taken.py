"""What becomes of a word of another document: settings of ours, a line for the user, or a refusal.

A rule gets the key without its prefix, the value, and the whole command, because some words mean something only
together with another one: `custom_reward_function.path` and `.name`, or `rollout_rs` and `rollout_rs_threshold`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from megarl.config.tables import rows

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

    def counted(self, key: str, default: int) -> int:
        """The value of a word that is a whole number above 0; else the default: its own rule tells what is wrong."""
        value = self.words.get(key)
        return value if type(value) is int and value > 0 else default

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


def refused(why: str) -> Rule:
    """No value of this key can be taken."""
    return lambda key, value, command: Taken(refusal=why)  # noqa: ARG005


def each(groups: str, names: str, rule: Rule) -> dict[str, Rule]:
    """The rule for each of these names in each of these groups.  Example: each("*.optim", "a b", nothing("c")).

    Without groups the names are whole keys.
    """
    return {f"{group}.{name}".lstrip("."): rule for group in groups.split() or [""] for name in names.split()}


def plain(table: str) -> dict[str, Rule]:
    """The rules of words that set nothing here.

    GROUPS | NAMES | what is so here: dropped with this line, whatever the value is.
    GROUPS | NAMES | VALUES | what is so here: dropped for these values alone, and the first is expected.
    GROUPS | NAMES | VALUES | what is so here | what is expected else
    GROUPS | NAMES | | | what is expected: no value can be taken
    """
    found: dict[str, Rule] = {}
    for groups, names, *cells in rows(table):
        assert 1 <= len(cells) <= 3, f"a row of {names} has {2 + len(cells)} cells"
        found |= each(groups, names, nothing(*cells) if len(cells) == 1 else only(*cells))
    return found


def only(values: str, why: str, otherwise: str = "") -> Rule:
    """Dropped with a line for these values, as YAML has them, refused for any other."""
    otherwise = otherwise or f"{why}: expected {values.partition(',')[0]}"
    return unless(tuple(yaml.safe_load(f"[{values}]")), why, refused(otherwise))


def of_switch(rule: Rule) -> Rule:
    """The rule gets True or False; any other value is refused."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        on = truth(value)
        return Taken(refusal="expected true or false") if on is None else rule(key, on, command)

    return chosen


def of_number(rule: Rule, least: int = 0) -> Rule:
    """The rule gets a finite number of at least `least`, or None for null; any other value is refused."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        fits = value is None or (type(value) in (int, float) and least <= value < inf)
        return rule(key, value, command) if fits else Taken(refusal=f"expected a number of at least {least}")

    return chosen


def of_count(rule: Rule, least: int = 1) -> Rule:
    """The rule gets a whole number of at least `least`; any other value, null too, is refused."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        fits = type(value) is int and value >= least
        return rule(key, value, command) if fits else Taken(refusal=f"expected a whole number of at least {least}")

    return chosen


def switch(on: Rule, off: Rule) -> Rule:
    """One rule for true, one for false and null; any other value is refused."""
    return of_switch(lambda key, value, command: (on if value else off)(key, value, command))


def set_to(*settings: tuple[str, Any], note: str = "") -> Rule:
    """These settings, whatever the value is."""
    return lambda key, value, command: Taken(settings, note)  # noqa: ARG005


def named(ours: str, values: Mapping[Any, Any] = MappingProxyType({})) -> Rule:
    """The value under our key; those of `values` have another name here.  {role} is the first part of the key."""

    def rule(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
        name = values.get(value, value) if isinstance(value, Hashable) else value
        return Taken(((ours.format(role=key.partition(".")[0]), name),))

    return rule


def as_it_is(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """The rule of a key of ours: it keeps its value."""
    return Taken(((key, value),))


def unless(values: tuple[Any, ...], why: str, rule: Rule) -> Rule:
    """Dropped with a line for these values, else the rule."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        return Taken(note=why) if value in values else rule(key, value, command)

    return chosen


def counts_if(holds: Callable[[Command], bool], why: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules of words that are dropped with the line `why` in a command of which this does not hold."""

    def conditional(rule: Rule) -> Rule:
        return lambda key, value, command: rule(key, value, command) if holds(command) else Taken(note=why)

    return {key: conditional(rule) for key, rule in rules.items()}
