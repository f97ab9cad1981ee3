"""Pairs of answers to one prompt, of which one was chosen: for DPO, and for the training of a reward model.

{"prompt": "2+3=", "chosen": "5", "rejected": "6"}                        texts, or a prompt of chat messages
{"prompt": [...], "chosen": [{"role": "assistant", ...}], "rejected": [...]}
{"chosen": [messages], "rejected": [messages], "margin": 1.5}             the prompt is what they begin alike with
{"chosen": "\\n\\nHuman: 2+3?\\n\\nAssistant: 5", "rejected": "..."}        the same written as texts, as in hh-rlhf
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from os.path import commonprefix
from typing import Any

import numpy as np
import torch

from megarl.data.fields import ASSISTANT, Messages
from megarl.data.readers import Record
from megarl.data.sft import SftExamples
from megarl.samples.batch import SIGN, Batch

CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"
_ROLES = {"Human": "user", "Assistant": ASSISTANT}  # of a conversation that is a text
_TURN = re.compile("\n\n(Human|Assistant):")
_ASKS = "\n\nAssistant:"


class PairExamples(SftExamples):
    """Rows of pairs as ragged batches: a sample is a pair, with the rows of the chosen answer, then of the rejected.

    The arguments are those of SftExamples, whose `response_key` is not read.  A pair is left out if nothing is left of
    one of its answers.
    Raises ValueError as SftExamples does, and for a row that is no pair.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        self._margins: list[float] = []  # of each row
        self._signs: list[float] = []  # of each sequence
        self._of_sample: list[int] = []  # the row of each pair
        self._references: dict[int, np.ndarray] = {}  # pair -> the log-probs of its tokens by the model at the start
        self._num_texts = 0  # rows of two conversations that are texts
        super().__init__(*given, **more)

    @property
    def said(self) -> str:
        """What became of the rows, as a line."""
        rest = super().said.partition(" rows are ")[2]
        form = "chat messages" if self._has_chat_template else "a prompt and two answers"
        texts = f", {self._num_texts:,} texts with turns of Human and Assistant are read as {form}"
        return f"{self.num_rows:,} rows are {len(self):,} pairs, {rest}{texts * (self._num_texts > 0)}"

    def longest(self, more: int) -> tuple[str, int]:
        """file:line of the pair with most tokens, and how many these are with `more` behind each row."""
        sizes = [sum(len(self._sequences[at]) + more for at in sample) for sample in self._samples]
        most = max(range(len(sizes)), key=sizes.__getitem__)
        return self._places[self._samples[most][0]], sizes[most]

    def fill_references(self, count: int, size: int, log_probs: Callable[[Batch], torch.Tensor]) -> None:
        """Ask `log_probs` for those of the pairs of the next `count` visits that are not known, `size` at a time."""
        wanted = dict.fromkeys(self._visits.at(number)[1] for number in range(self._next, self._next + count))
        missing = [pair for pair in wanted if pair not in self._references]
        for first in range(0, len(missing), size):
            pairs = missing[first : first + size]
            batch = super()._batch(pairs)
            for pair, column in zip(pairs, batch.split(log_probs(batch)), strict=True):
                self._references[pair] = column.numpy()

    def _answers(self, row: Record) -> list[tuple[Record, str]]:
        self._margins.append(_margin(row))
        if row.fields.get(self._prompt_key) is None:
            is_text = all(_TURN.match(str(row.fields.get(name))) for name in (CHOSEN, REJECTED))
            self._num_texts += is_text
            split = partial(_split_texts, as_chat=self._has_chat_template) if is_text else _with_prompt
            row = split(row, self._prompt_key)
        return [(row, CHOSEN), (row, REJECTED)]

    def _made_of(self, indices: Sequence[int]) -> list[list[int]]:
        self._signs = [1.0 if example % 2 == 0 else -1.0 for example in indices]
        of_row: dict[int, list[int]] = {}
        for sequence, example in enumerate(indices):
            of_row.setdefault(example // 2, []).append(sequence)
        whole = {row: own for row, own in of_row.items() if len({self._signs[sequence] for sequence in own}) == 2}
        self._of_sample = list(whole)
        return list(whole.values())

    def _batch(self, rows: Sequence[int]) -> Batch:
        """Columns response_mask, sign, and ref_log_probs, 0 where they were not filled; per pair its margin."""
        batch = super()._batch(rows)
        signs = [self._signs[sequence] for row in rows for sequence in self._samples[row]]
        sizes = batch.sample_lengths.tolist()
        known = [self._references.get(row, np.zeros(n, np.float32)) for row, n in zip(rows, sizes, strict=True)]
        return batch.with_columns(
            **{SIGN: torch.repeat_interleave(torch.tensor(signs), batch.lengths)},
            ref_log_probs=torch.from_numpy(np.concatenate(known)),
        ).with_per_sequence(
            group=torch.arange(len(rows)),
            margin=torch.tensor([self._margins[self._of_sample[row]] for row in rows], dtype=torch.float32),
        )


def to_be_scored(batch: Batch) -> Batch:
    """The pairs with one token more behind each row, where the column `values` has the score of the row.

    It alone counts, once for each answer: behind the last row of it.  Nothing looks at the token.
    """
    ends = (batch.lengths + 1).cumsum(0) - 1
    num = batch.num_tokens + len(batch.lengths)
    inside = torch.ones(num, dtype=torch.bool)
    inside[ends] = False
    tokens = torch.zeros(num, dtype=torch.int64).masked_scatter(inside, batch.tokens)
    row_sign = batch.columns[SIGN][batch.row_starts]
    last = torch.ones(len(ends), dtype=torch.bool)
    last_rows = batch.rows.cumsum(0) - 1
    last[:-1] = row_sign[1:] != row_sign[:-1]
    last[last_rows] = True
    mask, sign, margin = torch.zeros(num), torch.zeros(num), torch.zeros(num)
    mask[ends[last]] = 1.0
    sign[ends] = row_sign
    margin[ends[last_rows]] = batch.per_sequence[MARGIN]
    columns = {"response_mask": mask, SIGN: sign, MARGIN: margin}
    return Batch(tokens, batch.lengths + 1, columns, batch.per_sequence, batch.rows)


def _margin(row: Record) -> float:
    """How much better the chosen answer is; 0 if the row does not say."""
    value = row.fields.get(MARGIN)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{row.where}: {MARGIN} is {value!r}; expected a finite number")
    return float(value)


def _with_prompt(row: Record, prompt_key: str) -> Record:
    """The row of two whole conversations as a prompt, what they begin alike with, and the rest of each."""
    both: list[Any] = [row.fields.get(name) for name in (CHOSEN, REJECTED)]
    if not all(isinstance(messages, list) and messages for messages in both):
        has = ", ".join(map(repr, row.fields)) or "no keys"
        raise ValueError(
            f"{row.where}: expected {prompt_key!r}, {CHOSEN!r} and {REJECTED!r}, or two conversations as {CHOSEN!r} "
            f"and {REJECTED!r}; the row has {has}"
        )
    alike = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*both, strict=False)))
    if not alike or alike == min(map(len, both)):
        what = "do not begin alike" if not alike else "are the same, or one is the beginning of the other"
        raise ValueError(f"{row.where}: {CHOSEN} and {REJECTED} {what}; expected two answers to the same prompt")
    parts = {name: messages[alike:] for name, messages in zip((CHOSEN, REJECTED), both, strict=True)}
    return row._replace(fields={**row.fields, prompt_key: both[0][:alike], **parts})


def _split_texts(row: Record, prompt_key: str, *, as_chat: bool) -> Record:
    """The row of two texts as a prompt, up to the last "Assistant:" before they part, and the rest of each."""
    both = [str(row.fields[name]) for name in (CHOSEN, REJECTED)]
    head, asks, _ = commonprefix(both).rpartition(_ASKS)
    if not asks:
        raise ValueError(f"{row.where}: {CHOSEN} and {REJECTED} have no {_ASKS!r} before they part; expected one")
    rest = [text[len(head + asks) :] for text in both]
    prompt, *answers = [_turns(head), *(_turns(asks + text) for text in rest)] if as_chat else [head + asks, *rest]
    return row._replace(fields={**row.fields, prompt_key: prompt, CHOSEN: answers[0], REJECTED: answers[1]})


def _turns(text: str) -> Messages:
    """The turns of a text as chat messages."""
    _, *parts = _TURN.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[name], "content": said.strip()} for name, said in turns]
