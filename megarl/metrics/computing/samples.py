"""Reports of a run for people: the summary, logged samples, a table of answers before and after."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from megarl.io.durable_files import write_text
from megarl.io.terminal import one_line, printable
from megarl.metrics.reading.jsonl import append_lines, plain
from megarl.samples.sample import Prompt, Sample, line_of, text_of

_MARKS = re.compile(r"[\\`|*_\[\]~]")


@dataclass(frozen=True)
class Answer:
    """A prompt with its answers and rewards.  Example: Answer("12+34=", "46", "37", "46", 0.0, 1.0)."""

    prompt: str
    ground_truth: Any
    before: str
    after: str
    reward_before: float | None  # None: nobody asked for an answer before
    reward_after: float


def write_summary(path: Path | str, summary: Mapping[str, Any]) -> None:
    """Write an indented JSON object atomically; a number that is not finite becomes null."""
    write_text(Path(path), json.dumps(plain(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_samples(path: Path | str, step: int, groups: Sequence[Sequence[Sample]], *, num_groups: int = 4) -> None:
    """Append the first groups of a step, one sample per line.  jsonl.drop_after truncates the file on resume.

    {"step", "uid", "prompt", "completion", "ground_truth", "reward", "reward_extra", "finish_reason",
     "versions": [[version, start, end], ...], "num_tokens", "num_turns", "num_rows", "turn_rewards": [...]}

    "num_tokens": those that the policy generated; "versions" are places in them.  An episode has "messages", too: the
    conversation, shortened, [{"role", "text", "reasoning", "calls"}].
    """
    append_lines(Path(path), [_sample_line(step, sample) for group in groups[:num_groups] for sample in group])


def samples_table(answers: Sequence[Answer], *, width: int = 60) -> tuple[Table, str]:
    """The table for a rich console and as markdown, without the columns "before" if no answer has one.

    Texts longer than `width` are shortened in the middle.
    """
    has_before = any(a.reward_before is not None for a in answers)
    title = "answers before and after" if has_before else "answers after"
    table = Table(title=title, title_justify="left", show_lines=any(len(a.after) > width // 2 for a in answers))
    head = ("prompt", "truth", *(("before", "") if has_before else ()), "after", "")
    for name in head:
        table.add_column(name, overflow="fold")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for a in answers:
        truth = "" if a.ground_truth is None else text_of(a.ground_truth)
        cells = [(a.prompt, ""), (truth, "")]
        for text, reward in ([(a.before, a.reward_before)] if has_before else []) + [(a.after, a.reward_after)]:
            mark = ("", "") if reward is None else (_mark(reward), "green" if reward > 0 else "red")
            cells += [(text, ""), mark]
        cells = [(_shorten(printable(text), width), style) for text, style in cells]
        table.add_row(*(Text(one_line(text), style) for text, style in cells))
        lines.append(f"| {' | '.join(_markdown(text) for text, _ in cells)} |")
    return table, "\n".join(lines) + "\n"


def prompt_text(prompt: Prompt) -> str:
    """The prompt of the data file as one string; chat messages as "role: content" lines."""
    if isinstance(prompt.text, str):
        return prompt.text
    return "\n".join(map(line_of, prompt.text))


def _sample_line(step: int, sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    said = {"messages": sample.messages} if sample.messages else {}
    return {
        "step": step,
        "uid": prompt.uid,
        "prompt": prompt_text(prompt),
        "completion": sample.text,
        "ground_truth": None if prompt.ground_truth is None else text_of(prompt.ground_truth),
        "reward": sample.reward,
        "reward_extra": sample.reward_extra,
        "finish_reason": sample.finish_reason,
        "versions": [[span.version, span.start, span.end] for span in sample.versions],
        "num_tokens": sample.num_learnt,
        "num_turns": sample.num_turns,
        "num_rows": len(sample.rows),
        "turn_rewards": [reward for row in sample.rows for reward in row.rewards],
        **said,
    }


def _mark(reward: float) -> str:
    """A tick for 1, a cross for 0 or less, else the number."""
    if reward == 1:
        return "✓"
    return "✗" if reward <= 0 else f"{reward:.2g}"


def _shorten(text: str, width: int) -> str:
    text = text.strip()
    if len(text) <= width:
        return text
    half = (width - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def _markdown(text: str) -> str:
    """A cell that shows the text: nothing in it is a mark of Markdown or a tag of HTML."""
    text = _MARKS.sub(r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
    return text.replace("\n", "<br>")
