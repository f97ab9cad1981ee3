"""Pairs of answers to one prompt, of which one was chosen: for DPO, and for the training of a reward model.

{"prompt": "2+3=", "chosen": "5", "rejected": "6"}                        texts, or a prompt of chat messages
{"prompt": [...], "chosen": [{"role": "assistant", ...}], "rejected": [...]}
{"chosen": [messages], "rejected": [messages], "margin": 1.5}             the prompt is what they begin alike with; a
                                                                          "prompt" beside it says the same
{"chosen": "\\n\\nHuman: 2+3?\\n\\nAssistant: 5", "rejected": "..."}        the same written as texts, as in hh-rlhf
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
_LARGEST = float(np.finfo(np.float32).max)


class PairExamples(SftExamples):
    """Rows of pairs as ragged batches: a sample is a pair, with the rows of the chosen answer, then of the rejected.

    The arguments are those of SftExamples, whose `response_key` is not read.  A pair is left out if nothing is left of
    one of its answers, or if they are equal, after a cut too.
    Raises ValueError as SftExamples does, and for a row that is no pair.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        self._margins: list[float] = []  # of each row
        self._signs: list[float] = []  # of each sequence
        self._of_sample: list[int] = []  # the row of each pair
        self._references: dict[int, np.ndarray] = {}  # pair -> the log-probs of its tokens by the model at the start
        self._num_texts = 0  # rows of two conversations that are texts
        self._num_equal = 0  # pairs of equal answers
        super().__init__(*given, **more)

    @property
    def said(self) -> str:
        """What became of the rows, as a line."""
        rest = super().said.partition(" rows are ")[2]
        form = "chat messages" if self._has_chat_template else "a prompt and two answers"
        texts = f", {self._num_texts:,} rows are texts with turns of Human and Assistant, read as {form}"
        equal = f", {self._num_equal:,} have two equal answers and are left out" * (self._num_equal > 0)
        return f"{self.num_rows:,} rows are {len(self):,} pairs, {rest}{equal}{texts * (self._num_texts > 0)}"

    @property
    def num_margins(self) -> int:
        """Rows with a margin."""
        return sum(margin != 0 for margin in self._margins)

    def longest(self, more: int) -> tuple[str, int]:
        """file:line of the pair with most tokens, and how many these are with `more` behind each row."""
        sizes = [sum(len(self._sequences[at]) + more for at in sample) for sample in self._samples]
        most = max(range(len(sizes)), key=sizes.__getitem__)
        return self._places[self._samples[most][0]], sizes[most]

    def fill_references(
        self,
        count: int,
        size: int,
        log_probs: Callable[[Batch], torch.Tensor],
        told: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Ask `log_probs` for those of the pairs of the first `count` visits that are still to be taken.

        They are asked for `size` pairs at a time, which are the same ones wherever a run resumes: so are their last
        bits then.  `told` gets how many of these requests are done, and how many there are.
        """
        used = sorted({self._visits.at(number)[1] for number in range(count)})
        wanted = {self._visits.at(number)[1] for number in range(self._next, count)} - self._references.keys()
        blocks = [used[first : first + size] for first in range(0, len(used), size)]
        blocks = [block for block in blocks if not wanted.isdisjoint(block)]
        for done, block in enumerate(blocks):
            told(done, len(blocks))
            batch = super()._batch(block)
            for pair, column in zip(block, batch.split(log_probs(batch)), strict=True):
                self._references[pair] = column.numpy()

    def _answers(self, row: Record) -> list[tuple[Record, str]]:
        self._margins.append(_margin(row))
        both = [row.fields.get(name) for name in (CHOSEN, REJECTED)]
        has_prompt = row.fields.get(self._prompt_key) is not None
        if not all(both) or not (has_prompt or all(map(_is_conversation, both)) or all(map(_is_of_turns, both))):
            has = ", ".join(map(repr, row.fields)) or "no keys"
            raise ValueError(
                f"{row.where}: expected {self._prompt_key!r}, {CHOSEN!r} and {REJECTED!r}, or two conversations as "
                f"{CHOSEN!r} and {REJECTED!r}; the row has {has}, and none may be empty"
            )
        if _is_conversation(both[0]) != _is_conversation(both[1]):
            raise ValueError(f"{row.where}: one of {CHOSEN} and {REJECTED} is a conversation; expected both, or none")
        if all(map(_is_conversation, both)):
            row = _with_prompt(row, self._prompt_key)
        elif not has_prompt:
            self._num_texts += 1
            row = _split_texts(row, self._prompt_key, as_chat=self._has_chat_template)
        return [(row, CHOSEN), (row, REJECTED)]

    def _made_of(self, indices: Sequence[int]) -> list[list[int]]:
        self._signs = [1.0 if example % 2 == 0 else -1.0 for example in indices]
        of_row: dict[int, list[int]] = {}
        for sequence, example in enumerate(indices):
            of_row.setdefault(example // 2, []).append(sequence)
        whole = {row: own for row, own in of_row.items() if len({self._signs[sequence] for sequence in own}) == 2}
        equal = [row for row, own in whole.items() if self._is_equal(own)]
        self._num_equal = len(equal)
        for row in equal:
            del whole[row]
        self._of_sample = list(whole)
        return list(whole.values())

    def _is_equal(self, sequences: Sequence[int]) -> bool:
        """Whether both answers have the same tokens."""
        sides = [[self._sequences[at].tolist() for at in sequences if self._signs[at] == sign] for sign in (1, -1)]
        return sides[0] == sides[1]

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
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError(f"{row.where}: {MARGIN} is {value!r}; expected a finite number of float32")
    return float(value)


def _is_conversation(value: Any) -> bool:
    """Whether it is a list of messages that begins with another one than the assistant's."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") != ASSISTANT


def _is_of_turns(value: Any) -> bool:
    return isinstance(value, str) and _TURN.match(value) is not None


def _with_prompt(row: Record, prompt_key: str) -> Record:
    """The row of two whole conversations as a prompt, what they begin alike with, and the rest of each.

    Raises ValueError where they do not part at an answer to a user's message, and for a prompt that is another one.
    """
    both: list[Messages] = [row.fields[name] for name in (CHOSEN, REJECTED)]
    most = min(map(len, both)) - (both[0] == both[1])  # of equal conversations the last message is the answer
    alike = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*(each[:most] for each in both), strict=True)))
    prompt, *answers = both[0][:alike], *(each[alike:] for each in both)
    roles = [message.get("role") if isinstance(message, dict) else None for message in prompt]
    if "user" not in roles or any(not each or each[0].get("role") != ASSISTANT for each in answers):
        raise ValueError(
            f"{row.where}: {CHOSEN} and {REJECTED} share {alike} messages; expected two answers to the same prompt, "
            "which holds a user's message and ends where the assistant answers"
        )
    asked = row.fields.get(prompt_key)
    questions = [str(message.get("content")).strip() for message in prompt if message.get("role") == "user"]
    if asked is not None and asked != prompt and str(asked).strip() not in questions:
        raise ValueError(f"{row.where}: {prompt_key} is not what {CHOSEN} and {REJECTED} begin with; expected the same")
    return row._replace(fields={**row.fields, prompt_key: prompt, CHOSEN: answers[0], REJECTED: answers[1]})


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
