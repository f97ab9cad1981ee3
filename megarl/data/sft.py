"""Examples for supervised fine-tuning: prompt and response in one sequence, the prompt masked out of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch import Batch
from megarl.data import FILE_KINDS
from megarl.data.chat import encode_many, encode_responses, has_chat_template
from megarl.data.fields import example_of
from megarl.data.order import Visits, check_same_data, fingerprint_of
from megarl.data.readers import read_rows


class SftExamples:
    """Rows of prompt and response (or messages, or GSM8K's question and answer) as ragged batches.

    A sequence is the prompt as the rollout would send it, the response, and the end-of-sequence token.
    Raises ValueError, naming file:line, for a bad row, and for a sequence longer than `max_length` tokens unless
    overlong="filter", which leaves it out and counts it in `num_filtered`.  `template`: see encode_many.
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
        system_prompt: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        assert overlong in ("error", "filter"), f"overlong is {overlong!r}, expected error or filter"
        templated = has_chat_template(tokenizer)
        examples = [
            example_of(row, prompt_key=prompt_key, response_key=response_key, has_chat_template=templated)
            for row in read_rows(files, FILE_KINDS)
        ]
        texts = [example.text for example in examples]
        prompts = encode_many(tokenizer, texts, system_prompt=system_prompt, template=template)
        responses = encode_responses(tokenizer, [example.response for example in examples])
        self._sequences: list[np.ndarray] = []  # [prompt + response] int32
        self._prompt_lengths: list[int] = []
        rows: list[int] = []  # that fit
        for row, (example, prompt, response) in enumerate(zip(examples, prompts, responses, strict=True)):
            if _fits(example.where, len(prompt), len(response), max_length, overlong):
                self._sequences.append(np.asarray(prompt + response, dtype=np.int32))
                self._prompt_lengths.append(len(prompt))
                rows.append(row)
        if not self._sequences:
            raise ValueError(f"sft.max_length={max_length}: every example of {files} is longer")
        self.num_filtered = len(examples) - len(self._sequences)
        self.fingerprint = fingerprint_of(files, rows, shuffle=shuffle, seed=seed)
        self._visits, self._next = Visits(len(self._sequences), shuffle=shuffle, seed=seed), 0

    def __len__(self) -> int:
        """Examples of one epoch."""
        return len(self._sequences)

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
        count = len(rows)
        lengths = np.array([len(self._sequences[row]) for row in rows])
        prompt_lengths = np.array([self._prompt_lengths[row] for row in rows])
        parts = np.stack([prompt_lengths, lengths - prompt_lengths], axis=1)  # [B, 2]
        mask = np.repeat(np.tile(np.array([0, 1], dtype=np.float32), count), parts.ravel())
        tokens = np.concatenate([self._sequences[row] for row in rows]).astype(np.int64)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(lengths), {"response_mask": torch.from_numpy(mask)})

    def state_dict(self) -> dict[str, Any]:
        """Where the next `take` begins: {next, fingerprint}, JSON values."""
        return {"next": self._next, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.  Raises ValueError if it was saved with other data."""
        check_same_data(state["fingerprint"], self.fingerprint)
        self._next = int(state["next"])


def _fits(where: str, num_prompt: int, num_response: int, limit: int, overlong: str) -> bool:
    """Whether an example is kept.  Raises ValueError for an empty prompt: nothing predicts the response's first token.

    Raises ValueError for a long example unless overlong="filter".
    """
    if num_prompt == 0:
        raise ValueError(f"{where}: the prompt is empty; expected at least one token")
    if num_prompt + num_response > limit and overlong == "error":
        raise ValueError(
            f"{where}: prompt and response have {num_prompt + num_response} tokens, sft.max_length is {limit}; "
            "use a shorter example or a higher limit"
        )
    return num_prompt + num_response <= limit
