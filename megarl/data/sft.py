"""Examples for supervised fine-tuning: prompt and response in one sequence, the prompt masked out of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

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
from megarl.data.prompts import CUTS, RowSettings, cut
from megarl.data.readers import Record, read_rows
from megarl.data.sft_spans import Answers, TrainingSequence
from megarl.samples.batch import Batch

_BLOCK = 32  # conversations that are encoded together: all texts of their answers are held at once


class SftExamples:
    """Rows of prompt and response (or messages, or GSM8K's question and answer) as ragged batches of sequences.

    A string prompt is followed by the response and the end-of-sequence token.  Of messages see data/sft_spans.py; a
    row becomes several sequences where the template does not only append.
    Raises ValueError, naming file:line, for a bad row, and for a sequence that is too long with overlong="error".
    `num_filtered`, `num_cut`: sequences that were left out for their length, as nothing learnt is left of them, or cut.
    `answers`: see example_of.  `stop_ids`: tokens that end a completion, besides the tokenizer's end.  `to_its_end`:
    as a reward model on a server reads them: see Answers; with a chat template a string prompt is a user's message.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        settings: RowSettings,
        *,
        response_key: str = "response",
        answers: str = "all",
        stop_ids: Iterable[int] = (),
        to_its_end: bool = False,
    ) -> None:
        max_length, overlong = settings.max_length, settings.overlong
        self._prompt_key, self._response_key = settings.prompt_key, response_key
        self._has_chat_template = templated = has_chat_template(tokenizer)
        read = partial(example_of, prompt_key=settings.prompt_key, answers=answers, has_chat_template=templated)
        rows = read_rows(files, settings.max_row_bytes)
        examples = [read(each, response_key=key) for row in rows for each, key in self._answers(row)]
        if settings.system_prompt is not None or (to_its_end and templated):
            examples = [replace(each, text=as_messages(each.text, settings.system_prompt)) for each in examples]
        conversations: Answers | None = None
        if any(isinstance(example.text, list) for example in examples):
            template = chat_template(tokenizer, settings.template, stop_ids)
            conversations = Answers(tokenizer, template, to_its_end=to_its_end)
        refused = conversations.refused if conversations else []  # a sentence for each example that is none
        self.num_rows = len(rows)
        self.num_filtered = 0
        self.num_cut = 0
        self._sequences: list[np.ndarray] = []  # int32
        self._masks: list[np.ndarray] = []  # bool: what is learnt
        self._places = places = list[str]()  # file:line of each sequence
        indices: list[int] = []  # the example of each sequence
        if to_its_end:
            refused += [
                f"{each.where}: it has tools, and the server of a reward model reads the messages alone; expected none"
                for each in examples
                if each.tools
            ]
        sequences = _sequences(tokenizer, examples, conversations, refused, as_one=to_its_end)
        for index, (example, of_example) in enumerate(zip(examples, sequences, strict=True)):
            for sequence in of_example:
                length = len(sequence.ids)
                if length > max_length and overlong == "error":
                    refused.append(_too_long(example.where, length, max_length))
                kept = _kept(length, max_length, overlong)
                ids, mask = np.asarray(sequence.ids, dtype=np.int32)[kept], np.asarray(sequence.mask)[kept]
                mask[:1] = False  # nothing predicts the first token
                if mask.any():
                    self.num_cut += len(ids) < length
                    self._sequences.append(ids)
                    self._masks.append(mask)
                    places.append(example.where)
                    indices.append(index)
                else:
                    self.num_filtered += 1
        raise_first(refused)
        check_ids(zip(places, self._sequences, strict=True), tokenizer, settings.num_ids)
        self.num_other_headers = conversations.num_other_headers if conversations else 0
        ends = sorted(conversations.ends) if conversations else []
        self.strange_ends = [str(tokenizer.decode([token])) for token in ends]
        self._samples = self._made_of(indices)
        if not self._samples:
            raise ValueError(f"sft.max_length={max_length}: every example of {files} is longer")
        used = [indices[sample[0]] for sample in self._samples]
        self.fingerprint = fingerprint_of(files, used, shuffle=settings.shuffle, seed=settings.seed)
        self._visits, self._next = Visits(len(self), shuffle=settings.shuffle, seed=settings.seed), 0

    def __len__(self) -> int:
        """Examples of one epoch."""
        return len(self._samples)

    def _answers(self, row: Record) -> list[tuple[Record, str]]:
        """The examples of a row, each with the field of its answer."""
        return [(row, self._response_key)]

    def _made_of(self, indices: Sequence[int]) -> list[list[int]]:
        """The sequences of each sample that is taken; `indices`: the example of each sequence."""
        return [[sequence] for sequence in range(len(indices))]

    @property
    def said(self) -> str:
        """What became of the rows, as a line."""
        learnt = sum(int(mask.sum()) for mask in self._masks)
        parts = [
            f"{self.num_rows:,} rows are {len(self._sequences):,} sequences with {learnt:,} learnt tokens",
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
        used = [sequence for row in rows for sequence in self._samples[row]]
        tokens = np.concatenate([self._sequences[sequence] for sequence in used]).astype(np.int64)
        mask = np.concatenate([self._masks[sequence] for sequence in used]).astype(np.float32)
        lengths = torch.tensor([len(self._sequences[sequence]) for sequence in used])
        sizes = torch.tensor([len(self._samples[row]) for row in rows])
        return Batch(torch.from_numpy(tokens), lengths, {"response_mask": torch.from_numpy(mask)}, rows=sizes)

    def state_dict(self) -> dict[str, Any]:
        """Where the next `take` begins: {next, fingerprint}, JSON values."""
        return {"next": self._next, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.  Raises ValueError if it was saved with other data."""
        check_same_data(state["fingerprint"], self.fingerprint)
        self._next = int(state["next"])


def _sequences(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    conversations: Answers | None,
    refused: list[str],
    *,
    as_one: bool,
) -> Iterator[list[TrainingSequence]]:
    """The sequences of each example; `refused` gets a sentence for each that is none.

    `as_one`: a string prompt and its answer are one text, as a reward model on a server gets them.
    """
    for first in range(0, len(examples), _BLOCK):
        block = examples[first : first + _BLOCK]
        texts = [example for example in block if isinstance(example.text, str)]
        strings = _of_whole_texts(tokenizer, texts) if as_one else _of_strings(tokenizer, texts, refused)
        chats = [example for example in block if isinstance(example.text, list)]
        of_chats = iter(conversations.sequences(chats) if conversations else ())
        yield from (next(strings if isinstance(example.text, str) else of_chats) for example in block)


def _of_strings(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], refused: list[str]
) -> Iterator[list[TrainingSequence]]:
    """Prompts as the rollout would send them, each with its response and the end-of-sequence token."""
    prompts = encode_many(tokenizer, [example.text for example in examples])
    responses = encode_responses(tokenizer, [str(example.behind[0]["content"]) for example in examples])
    for example, prompt, response in zip(examples, prompts, responses, strict=True):
        if not prompt:
            refused.append(f"{example.where}: the prompt is empty; expected at least one token")
        yield [TrainingSequence(prompt + response, [False] * len(prompt) + [True] * len(response))]


def _of_whole_texts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> Iterator[list[TrainingSequence]]:
    """Prompt and answer encoded as one text, and the end-of-sequence token; all of it counts as learnt."""
    end = tokenizer.eos_token_id
    for ids in encode_many(tokenizer, [f"{example.text}{example.behind[0]['content']}" for example in examples]):
        ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
        yield [TrainingSequence(ids, [True] * len(ids))]


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
