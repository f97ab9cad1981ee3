"""Examples for supervised fine-tuning: prompt and response in one sequence, the prompt masked out of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch import Batch
from megarl.data import FILE_KINDS
from megarl.data.chat import (
    as_messages,
    chat_template,
    check_ids,
    encode_many,
    encode_responses,
    has_chat_template,
    raise_first,
)
from megarl.data.fields import Example, example_of
from megarl.data.order import Visits, check_same_data, fingerprint_of
from megarl.data.prompts import CUTS, cut
from megarl.data.readers import read_rows
from megarl.data.sft_spans import Answers, Learnt

_BLOCK = 32  # conversations that are encoded together: all texts of their answers are held at once


class SftExamples:
    """Rows of prompt and response (or messages, or GSM8K's question and answer) as ragged batches of sequences.

    A string prompt is followed by the response and the end-of-sequence token.  Of messages see data/sft_spans.py; a
    row becomes several sequences where the template does not only append.
    Raises ValueError, naming file:line, for a bad row, and for a sequence longer than `max_length` tokens unless
    overlong="filter", which leaves it out and counts it in `num_filtered`, or one of prompts.CUTS, which shortens it,
    counts it in `num_cut`, and leaves it out if nothing learnt is left.  `template`: see encode_many.
    `answers`: see example_of.  `stop_ids`: tokens that end a completion, besides the tokenizer's end.
    `num_ids`: see check_ids.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
        max_length: int,
        shuffle: bool = True,
        seed: int = 0,
        overlong: str = "error",
        answers: str = "all",
        system_prompt: str | None = None,
        template: Mapping[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
        num_ids: int | None = None,
    ) -> None:
        assert overlong in ("error", "filter", *CUTS), f"overlong is {overlong!r}, expected error, filter or a cut"
        fields = {"prompt_key": prompt_key, "response_key": response_key, "answers": answers}
        templated = has_chat_template(tokenizer)
        examples = [example_of(row, **fields, has_chat_template=templated) for row in read_rows(files, FILE_KINDS)]
        if system_prompt is not None:
            examples = [replace(example, text=as_messages(example.text, system_prompt)) for example in examples]
        reader = _Reader(tokenizer, template or {}, stop_ids, examples)
        self.num_rows, self.num_filtered, self.num_cut = len(examples), 0, 0
        self._sequences: list[np.ndarray] = []  # int32
        self._masks: list[np.ndarray] = []  # bool: what is learnt
        rows: list[int] = []  # of each sequence
        for row, (example, of_row) in enumerate(zip(examples, reader, strict=True)):
            for learnt in of_row:
                if len(learnt.ids) > max_length and overlong == "error":
                    reader.refused.append(_too_long(example.where, len(learnt.ids), max_length))
                kept = _kept(len(learnt.ids), max_length, overlong)
                ids, mask = np.asarray(learnt.ids, dtype=np.int32)[kept], np.asarray(learnt.mask)[kept]
                mask[:1] = False  # nothing predicts the first token
                if mask.any():
                    self.num_cut += len(ids) < len(learnt.ids)
                    self._sequences.append(ids)
                    self._masks.append(mask)
                    rows.append(row)
                else:
                    self.num_filtered += 1
        raise_first(reader.refused)
        if not self._sequences:
            raise ValueError(f"sft.max_length={max_length}: every example of {files} is longer")
        places = (examples[row].where for row in rows)
        check_ids(zip(places, self._sequences, strict=True), tokenizer, num_ids)
        self.num_other_headers, self.strange_ends = reader.num_other_headers, reader.strange_ends
        self.fingerprint = fingerprint_of(files, rows, shuffle=shuffle, seed=seed)
        self._visits, self._next = Visits(len(self._sequences), shuffle=shuffle, seed=seed), 0

    def __len__(self) -> int:
        """Examples of one epoch."""
        return len(self._sequences)

    @property
    def said(self) -> str:
        """What became of the rows, as a line."""
        learnt = sum(int(mask.sum()) for mask in self._masks)
        parts = [
            f"{self.num_rows:,} rows are {len(self):,} sequences with {learnt:,} learnt tokens",
            f"{self.num_filtered:,} are too long and left out" * (self.num_filtered > 0),
            f"{self.num_cut:,} are too long and cut" * (self.num_cut > 0),
            f"{self.num_other_headers:,} answers follow another header than the chat template asks with"
            * (self.num_other_headers > 0),
        ]
        return ", ".join(filter(None, parts))

    def take(self, count: int) -> Batch:
        """The next `count` examples, without end; column response_mask is 1 on the response and its last token."""
        rows = [self._visits.at(number)[1] for number in range(self._next, self._next + count)]
        self._next += count
        return self._batch(rows)

    def batches(self, size: int) -> Iterator[Batch]:
        """Each example once, in the order of the files, at most `size` at a time."""
        for first in range(0, len(self), size):
            yield self._batch(range(first, min(first + size, len(self))))

    def _batch(self, rows: Sequence[int]) -> Batch:
        tokens = np.concatenate([self._sequences[row] for row in rows]).astype(np.int64)
        mask = np.concatenate([self._masks[row] for row in rows]).astype(np.float32)
        lengths = torch.tensor([len(self._sequences[row]) for row in rows])
        return Batch(torch.from_numpy(tokens), lengths, {"response_mask": torch.from_numpy(mask)})

    def state_dict(self) -> dict[str, Any]:
        """Where the next `take` begins: {next, fingerprint}, JSON values."""
        return {"next": self._next, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.  Raises ValueError if it was saved with other data."""
        check_same_data(state["fingerprint"], self.fingerprint)
        self._next = int(state["next"])


class _Reader:
    """The sequences of each example; `refused` then has a sentence for each that is none."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, Any],
        stop_ids: Iterable[int],
        examples: Sequence[Example],
    ) -> None:
        self._tokenizer, self._examples = tokenizer, examples
        self.refused: list[str] = []
        self._answers: Answers | None = None
        if any(isinstance(example.text, list) for example in examples):
            self._answers = Answers(tokenizer, chat_template(tokenizer, template, stop_ids))
            self.refused = self._answers.refused

    @property
    def num_other_headers(self) -> int:
        return self._answers.num_other_headers if self._answers else 0

    @property
    def strange_ends(self) -> list[str]:
        return [str(self._tokenizer.decode([token])) for token in sorted(self._answers.ends)] if self._answers else []

    def __iter__(self) -> Iterator[list[Learnt]]:
        for first in range(0, len(self._examples), _BLOCK):
            block = self._examples[first : first + _BLOCK]
            strings = self._plain([example for example in block if isinstance(example.text, str)])
            chats = [example for example in block if isinstance(example.text, list)]
            of_chats = iter(self._answers.sequences(chats) if self._answers else ())
            yield from (next(strings if isinstance(example.text, str) else of_chats) for example in block)

    def _plain(self, examples: Sequence[Example]) -> Iterator[list[Learnt]]:
        """Of strings the prompt as the rollout would send it, the response, and the end-of-sequence token."""
        prompts = encode_many(self._tokenizer, [example.text for example in examples])
        responses = encode_responses(self._tokenizer, [str(example.behind[0]["content"]) for example in examples])
        for example, prompt, response in zip(examples, prompts, responses, strict=True):
            if not prompt:
                self.refused.append(f"{example.where}: the prompt is empty; expected at least one token")
            yield [Learnt(prompt + response, [False] * len(prompt) + [True] * len(response))]


def _kept(length: int, limit: int, overlong: str) -> np.ndarray:
    """[kept] the places of a sequence that are kept: all, none, or what a cut leaves."""
    if length <= limit:
        return np.arange(length)
    return np.asarray(cut(list(range(length)), limit, overlong) if overlong in CUTS else [], dtype=np.int64)


def _too_long(where: str, length: int, limit: int) -> str:
    return (
        f"{where}: prompt and response have {length} tokens, sft.max_length is {limit}; "
        "use a shorter example, a higher limit, or sft.overlong_rows=filter, left, right or middle"
    )
