"""The README and the book in docs/ as data: fenced blocks, commands and tables."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FRONT = (ROOT / "README.md").read_text()
BOOK = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGE = "\n".join((FRONT, *BOOK.values()))

_FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Example: Block("python", "my_reward.py", "def ...")."""

    language: str
    file: str | None  # after `file=` behind the language: what a reader saves it as
    text: str


class Command(NamedTuple):
    """Example: Command(["train", "recipe=quickstart"], None)."""

    words: list[str]  # after `megarl`
    error: str | None  # what the page says that it answers, where it is refused


def section(heading: str) -> str:
    """The text between `## heading` and the next one."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, f"neither the README nor a page of docs/ has a section {heading}"
    return rest.partition("\n## ")[0]


def blocks(text: str = PAGE) -> list[Block]:
    return [Block(*match) for match in _FENCE.findall(text)]


def files() -> dict[str, str]:
    """What a reader would save: name -> text."""
    return {block.file: block.text for block in blocks() if block.file}


def commands() -> list[Command]:
    """Every `megarl ...` line of every block."""
    found = []
    for block in blocks():
        lines = block.text.replace("\\\n", " ").splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            typed = block.language == "bash" or (block.language == "console" and line.startswith("$ "))
            words = shlex.split(line.removeprefix("$ "), comments=True) if typed else []
            if words[:1] == ["megarl"]:
                found.append(Command(words[1:], following if following.startswith("error:") else None))
    return found


def code_spans(text: str) -> list[str]:
    """What stands in single backticks, fenced blocks left out."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))


def first_cells(text: str) -> list[str]:
    """The code spans in the first column of a text's tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [span for row in rows for span in code_spans(row)]


# Pages whose tables have names of other frameworks in their first column.
OTHERS = ("coming_from/slime.md", "coming_from/nemo_rl.md", "coming_from/trl.md")


def our_words(*pages: str) -> str:
    """The text of pages, by default all of them, without the first column of tables with names of others in it."""
    texts = {"README": FRONT, **BOOK}
    shown = [re.sub(r"^\|[^|]*\|", "|", texts[name], flags=re.M) if name in OTHERS else texts[name] for name in texts]
    return "\n".join(text for name, text in zip(texts, shown, strict=True) if not pages or name in pages)
