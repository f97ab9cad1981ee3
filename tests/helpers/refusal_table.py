"""Tables of words that are refused, each with what its sentence must say.

    with rollout.n=2 algorithm.filter_groups.enable=true
    algorithm.filter_groups.metric=seq_reward | expected score
    algorithm.overlong_buffer.enable=true | algorithm.overlong_buffer.len=null | expected 1 to .. =512

A row is `WORDS | EXPECTED`: the sentence begins with the first word, key and value, and goes on with EXPECTED, of which
` .. ` leaves out a part.  `WORDS | KEY=VALUE | EXPECTED` is for a sentence that is about another key.  A command line
tells all faults of one stage, so a block of rows, up to an empty line, is composed once for each stage, with the words
of its lines `with ...` and those of the rows that are not told yet.  It must have one sentence for each row, and no
other.  @dense, @experts and @judge are SHORT.
"""

from contextlib import suppress
from dataclasses import dataclass

import yaml
from config_helpers import DENSE, EXPERTS, refusals

from megarl.config.settings import show

JUDGE = "reward.fn=judge reward.judge.url=http://a/v1 reward.judge.model=m reward.judge.prompt='{answer}'"
SHORT = {"@dense": DENSE, "@experts": EXPERTS, "@judge": JUDGE}


@dataclass(frozen=True)
class Row:
    """Example: Row("actor.clip_ratio=1.5 | expected a number between 0 and 1")."""

    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split(" | ")[0].split()

    def is_told_by(self, sentence: str) -> bool:
        *told, expected = self.text.split(" | ")[1:]
        for subject in told or spellings(self.words[0]):
            rest = sentence.removeprefix(subject)
            if rest != sentence and rest[:1] in (":", " "):
                return holds_in_order(rest, expected.split(" .. "))
        return False


def spellings(word: str) -> list[str]:
    """A word as it is typed, and as a sentence may show its value."""
    key, _, text = word.partition("=")
    shown = [text]
    with suppress(yaml.YAMLError):
        shown.append(show(yaml.safe_load(text)))
    with suppress(ValueError):
        shown.append(show(float(text)))
    return [word, *(f"{key}={value}" for value in shown)]


def holds_in_order(text: str, parts: list[str]) -> bool:
    for part in parts:
        before, found, text = text.partition(part)
        if not found:
            return False
    return True


@dataclass(frozen=True)
class Block:
    """Rows that are composed together."""

    words: tuple[str, ...]  # beside those of the rows
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return self.rows[0].words[0]

    def check(self) -> None:
        rows = list(self.rows)
        while rows:
            typed = list(dict.fromkeys([*self.words, *(word for row in rows for word in row.words)]))
            for name, words in SHORT.items():
                typed = [part for word in typed for part in word.replace(name, words).split()]
            sentences = refusals(*typed)
            untold = [row for row in rows if sum(map(row.is_told_by, sentences)) != 1]
            others = [sentence for sentence in sentences if not any(row.is_told_by(sentence) for row in rows)]
            assert len(untold) < len(rows) and not others, ([row.text for row in untold], others)
            rows = untold


def blocks(table: str) -> list[Block]:
    found = []
    for text in table.strip().split("\n\n"):
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        shared = [word for line in lines if line.startswith("with ") for word in line.split()[1:]]
        found.append(Block(tuple(shared), tuple(Row(line) for line in lines if not line.startswith("with "))))
    return found
