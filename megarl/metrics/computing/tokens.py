"""`tokens.jsonl` in a run's folder: some samples of every step, token by token, with what the training made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.metrics.reading.jsonl import TOKENS, append_lines
from megarl.samples.batch import Batch
from megarl.samples.sample import Sample

MAX_TOKENS = 1024  # that the policy generated, of a sample
MAX_CONTEXT = 512  # tokens of a prompt or of a tool's answer; the middle is left out
_UNFINISHED = "\ufffd"  # ends the text of tokens that hold only a part of a character
_LONGEST = 8  # tokens of a character; what is longer is no character
_COLUMNS = {"rollout_log_probs": "rollout_log_probs", "old_log_probs": "log_probs", "advantages": "advantages"}


class TokenLog:
    """Appends `num_samples` samples of a step: the best and the worst answer of its first groups.

    {"step", "uid", "reward", "rows": [[part, ...], ...]}, a row for each sequence that is learnt; a part is a stretch
    of context, {"text": "..."}, or of tokens that the policy generated with one version of its weights:
    {"version": 3, "pieces": ["1", "5"], "rollout_log_probs": [...], "log_probs": [...], "advantages": [...]}
    `rollout_log_probs`: of the server that generated them; `log_probs`: of the policy before the step's first update.
    """

    def __init__(self, folder: Path, decode: Callable[[list[int]], str], num_samples: int) -> None:
        self._path = folder / TOKENS
        self._decode = decode
        self._num_samples = num_samples

    def write(self, step: int, groups: Sequence[Sequence[Sample]], batch: Batch | None) -> None:
        """`batch`: of all samples of the groups, in their order; None, of a step that trained nothing: nothing."""
        if batch is None:
            return
        samples = [sample for group in groups for sample in group]
        assert batch.num_sequences == len(samples), f"{batch.num_sequences} sequences of {len(samples)} samples"
        rows = []
        for at in _extremes(groups)[: self._num_samples]:
            sample = samples[at]
            rows.append({"step": step, "uid": sample.prompt.uid, "reward": sample.reward})
            rows[-1]["rows"] = self._rows(batch.select([at]))
        append_lines(self._path, rows)

    def _rows(self, batch: Batch) -> list[list[dict[str, Any]]]:
        """Of one sample."""
        room, out = MAX_TOKENS, []
        for start, length in zip(batch.row_starts.tolist(), batch.lengths.tolist(), strict=True):
            ids = batch.tokens[start : start + length].tolist()
            versions = batch.columns["versions"][start : start + length].tolist()
            parts = []
            for begin, end in _stretches(versions):
                if versions[begin] < 0:
                    parts.append({"text": self._context(ids[begin:end])})
                    continue
                shown = min(end, begin + room)
                room -= shown - begin
                part: dict[str, Any] = {"version": versions[begin], "pieces": pieces(self._decode, ids[:shown], begin)}
                for column, name in _COLUMNS.items():
                    values = batch.columns[column][start + begin : start + shown].tolist()
                    part[name] = [round(value, 4) if math.isfinite(value) else None for value in values]
                parts.append(part)
                if shown < end:
                    parts.append({"text": f"[... {end - shown} tokens ...]"})
            out.append(parts)
        return out

    def _context(self, ids: list[int]) -> str:
        if len(ids) <= MAX_CONTEXT:
            return self._decode(ids)
        half = MAX_CONTEXT // 2
        return f"{self._decode(ids[:half])}\n[... {len(ids) - MAX_CONTEXT} tokens ...]\n{self._decode(ids[-half:])}"


def _extremes(groups: Sequence[Sequence[Sample]]) -> list[int]:
    """Places among all samples: of each group the best and, if it is another one, the worst."""
    places, begin = [], 0
    for group in groups:
        order = sorted(range(len(group)), key=lambda at: -group[at].reward)
        places += [begin + at for at in dict.fromkeys((order[0], order[-1]))]
        begin += len(group)
    return places


def _stretches(versions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of equal neighbours.  Example: -1 -1 3 3 4 -> (0, 2), (2, 4), (4, 5)"""
    begin = 0
    for at in range(1, len(versions) + 1):
        if at == len(versions) or versions[at] != versions[begin]:
            yield begin, at
            begin = at


def pieces(decode: Callable[[list[int]], str], token_ids: Sequence[int], start: int = 0) -> list[str]:
    """The texts of token_ids[start:], which join to their text; a character of several tokens is its last token's.

    Every token is decoded after the one before it, because some tokenizers drop the space before a text's first word.

    Example: decode of a byte-level tokenizer, the ids of "é!" are 195 169 33: ["", "é", "!"]
    """
    out: list[str] = []
    ids = list(token_ids)
    before, done = max(start - 1, 0), start
    for end in range(start + 1, len(ids) + 1):
        known, text = decode(ids[before:done]), decode(ids[before:end])
        if text.endswith(_UNFINISHED) and end - done < _LONGEST and end < len(ids):
            out.append("")
            continue
        out.append(text[len(known) :])
        before, done = done, end
    return out
