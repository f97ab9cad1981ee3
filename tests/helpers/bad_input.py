"""How a refusal of bad input must read, and the count of the cases that tests tried."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from megarl.config import ConfigError

PROPERTY = "bad_input"
LONGEST = 4000  # characters of a sentence: it may quote a value or a path


def examples(count: int) -> settings:
    """So many of hypothesis', not made shorter, which takes minutes here: an example is short anyway."""
    phases = (Phase.explicit, Phase.generate)
    return settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture], phases=phases)


def read_refusal(error: ValueError, *named: str) -> list[str]:
    """The sentences of an error: a line each, without traceback; one of them has one of the names."""
    sentences = list(error.sentences) if isinstance(error, ConfigError) else [str(error)]
    assert sentences
    for sentence in sentences:
        assert sentence.strip()
        assert len(sentence) < LONGEST, sentence[:LONGEST]
        assert "\n" not in sentence, sentence
        assert sentence.isprintable() or not isinstance(error, ConfigError), repr(sentence)
        assert "Traceback" not in sentence
    assert not named or any(name in sentence for sentence in sentences for name in named), (sentences, named)
    return sentences


def nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        *groups, name = key.split(".")
        at = content
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                break
        else:
            at[name] = value
    return content


class Cases:
    """Counts the cases of one test.  Example: cases.add(), once for each input that was tried."""

    def __init__(self, kind: str) -> None:
        self.kind, self.number = kind, 0

    def add(self) -> None:
        self.number += 1


def summary(reports: Iterable[Any]) -> str:
    """The line with all cases of a session: those of each kind, in the order of the tests; "" if there were none."""
    counts: Counter[str] = Counter()
    for report in reports:
        for name, value in report.user_properties if isinstance(report, pytest.TestReport) else ():
            if name == PROPERTY and report.when == "teardown":
                assert isinstance(value, tuple | list), "the fixture `cases` records a kind and a number"
                kind, number = value
                counts[kind] += number
    if not counts:
        return ""
    kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(counts.items()))
    return f"bad_input: {counts.total():,} cases: {kinds}"
