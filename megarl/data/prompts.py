"""The prompts of a run: read and checked once, then visited epoch after epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import abspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.data.chat import check_ids, encode_many, has_chat_template
from megarl.data.fields import Question, question_of
from megarl.data.groups import check_writable
from megarl.data.order import Visits, fingerprint_of
from megarl.data.readers import MOST, read_rows
from megarl.samples.sample import Prompt

CUTS = ("left", "right", "middle")  # where a prompt may lose tokens


@dataclass(frozen=True)
class RowSettings:
    """How rows of files become sequences of tokens.  `template`: see encode_many.  `num_ids`: see check_ids."""

    max_length: int  # of a sequence, in tokens
    prompt_key: str = "prompt"
    overlong: str = "error"  # what becomes of a longer sequence: error | filter: it is left out | one of CUTS, see cut
    shuffle: bool = True
    seed: int = 0
    system_prompt: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    max_row_bytes: int = MOST  # see readers
    num_ids: int | None = None

    def __post_init__(self) -> None:
        choices = ("error", "filter", *CUTS)
        assert self.overlong in choices, f"overlong is {self.overlong!r}, expected error, filter or a cut"


class PromptRow(NamedTuple):
    """A prompt and its file:line."""

    where: str
    prompt: Prompt


class Prompts:
    """Rows of JSONL or parquet files or a `datasets` folder (`fields` lists the shapes), as tokenised prompts.

    Example: Prompts("train.jsonl", tokenizer, RowSettings(512, seed=1)).visit(64)
    Raises ValueError, naming file:line, for a bad row, and for a prompt that is too long with overlong="error".
    `num_filtered`, `num_cut`: prompts that were left out, or cut, for their length.
    `max_rows`: only the first so many rows count.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        settings: RowSettings,
        *,
        ground_truth_key: str = "ground_truth",
        max_rows: int | None = None,
    ) -> None:
        limit, overlong = settings.max_length, settings.overlong
        rows = read_rows(files, settings.max_row_bytes)[:max_rows]
        key, templated = settings.prompt_key, has_chat_template(tokenizer)
        questions = [
            question_of(row, prompt_key=key, ground_truth_key=ground_truth_key, has_chat_template=templated)
            for row in rows
        ]
        texts = [question.text for question in questions]
        places, tools = [question.where for question in questions], [question.tools for question in questions]
        encoded = encode_many(
            tokenizer,
            texts,
            system_prompt=settings.system_prompt,
            template=settings.template,
            tools=tools,
            places=places,
            enough=None if overlong in CUTS else limit,
        )
        self.num_cut = 0
        if overlong in CUTS:
            self.num_cut = sum(len(ids) > limit for ids in encoded)
            encoded = [cut(ids, limit, overlong) for ids in encoded]
        fits = [
            _fits(question.where, len(ids), limit, overlong) for question, ids in zip(questions, encoded, strict=True)
        ]
        self._rows = [row for row, fit in enumerate(fits) if fit]
        if not self._rows:
            raise ValueError(f"data.max_prompt_length={limit}: every prompt of {files} is longer")
        self.num_filtered = len(fits) - len(self._rows)
        self._questions: list[Question] = [questions[row] for row in self._rows]
        # int32 arrays: lists of Python integers would take several times the memory.
        self._token_ids = [np.asarray(encoded[row], dtype=np.int32) for row in self._rows]
        kept = ((places[row], ids) for row, ids in zip(self._rows, self._token_ids, strict=True))
        check_ids(kept, tokenizer, settings.num_ids)
        self.fingerprint = fingerprint_of(files, self._rows, shuffle=settings.shuffle, seed=settings.seed)
        self._visits = Visits(len(self._rows), shuffle=settings.shuffle, seed=settings.seed)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._rows)

    @property
    def questions(self) -> Sequence[Question]:
        """All rows that are kept, in the order of the files."""
        return self._questions

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for ids in self._token_ids)

    @property
    def data_sources(self) -> frozenset[str]:
        """Those of all rows; "" for rows without one."""
        return frozenset(question.data_source for question in self._questions)

    @property
    def tools_said(self) -> str:
        """A line on rows whose field `tools` is not in the prompt; "" if there are none."""
        num = sum(bool(question.extra.get("tools")) and not question.tools for question in self._questions)
        what = "rows have a field tools that the reward gets, and the prompt not; expected chat messages"
        return f"{num:,} {what}, and functions in OpenAI's form" if num else ""

    def check_saveable(self) -> None:
        """Raises ValueError, naming file:line and field, for what a checkpoint cannot hold.

        It saves the prompts of the finished groups that wait.
        """
        for question in self._questions:
            for name, value in [("the ground truth", question.ground_truth), *question.extra.items()]:
                try:
                    check_writable(value)
                except TypeError as error:
                    raise ValueError(
                        f"{question.where}: a checkpoint cannot hold the field {name!r}: it is or holds {error}; "
                        "without the field, or with trainer.save_freq=-1, the run can start"
                    ) from None

    def visit(self, number: int) -> Prompt:
        """The prompt of visit 0, 1, 2, ...; after the last row a new epoch begins.  The uid is "epoch-row"."""
        epoch, index = self._visits.at(number)
        return self._prompt(index, str(epoch))

    def all(self, max_samples: int | None = None) -> list[Prompt]:
        """The first `max_samples` prompts (or all) in the order of the files, for evaluation; uid "eval-row"."""
        return [self._prompt(index, "eval") for index in range(len(self))[:max_samples]]

    def some(self, count: int) -> list[PromptRow]:
        """The first `count` rows, taken from all data sources in turn."""
        seen: Counter[str] = Counter()
        turns = []
        for index, question in enumerate(self._questions):
            turns.append((seen[question.data_source], index))
            seen[question.data_source] += 1
        return [PromptRow(self._questions[index].where, self._prompt(index, "0")) for _, index in sorted(turns)[:count]]

    def sets(self, max_samples: int | None = None) -> list[str]:
        """The evaluation set of each prompt of `all`: its data source, or the name of its file if it has none."""
        files = [_file_of(question) for question in self._questions if not question.data_source]
        name_of = distinct_names(list(dict.fromkeys(files)), self.data_sources)
        questions = self._questions[:max_samples]
        return [question.data_source or name_of[_file_of(question)] for question in questions]

    def left_out(self, max_samples: int | None = None) -> int:
        """Rows among the first `max_samples` prompts (or all) that are too long and left out."""
        if max_samples is None or max_samples >= len(self):
            return self.num_filtered
        return self._rows[max_samples - 1] + 1 - max_samples

    def _prompt(self, index: int, epoch: str) -> Prompt:
        question = self._questions[index]
        return Prompt(
            uid=f"{epoch}-{self._rows[index]}",
            token_ids=self._token_ids[index].tolist(),
            text=question.text,
            ground_truth=question.ground_truth,
            data_source=question.data_source,
            extra=question.extra,
        )


def _file_of(question: Question) -> str:
    return question.where.rpartition(":")[0]


def distinct_names(files: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """A name for each file: the shortest end of its path that no other file has and that is not `taken`.

    >>> distinct_names(["easy/test.jsonl", "hard/test.jsonl", "train.jsonl"])
    {'easy/test.jsonl': 'easy/test', 'hard/test.jsonl': 'hard/test', 'train.jsonl': 'train'}
    """
    ends = {file: list(_ends(Path(abspath(file)))) for file in files}
    seen = Counter(end for each in ends.values() for end in set(each))
    free = {file: [end for end in each if seen[end] == 1 and end not in taken] for file, each in ends.items()}
    return {file: (each or [file])[0] for file, each in free.items()}


def _ends(path: Path) -> Iterator[str]:
    """The ends of a path, the shortest first, each without and with the file's suffix."""
    for depth in range(1, len(path.parts)):
        for parts in (path.with_suffix("").parts, path.parts):
            yield "/".join(parts[-depth:])


def cut(ids: list[int], limit: int, side: str) -> list[int]:
    """The ids without those above the limit: the first ones (left), the last ones, or the ones in the middle.

    >>> [cut([1, 2, 3, 4, 5], 3, side) for side in CUTS]
    [[3, 4, 5], [1, 2, 3], [1, 4, 5]]
    """
    kept_first = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return ids if len(ids) <= limit else ids[:kept_first] + ids[len(ids) - limit + kept_first :]


def _fits(where: str, num_tokens: int, limit: int, overlong: str) -> bool:
    """Whether a prompt is kept.  Raises ValueError for an empty one, and for a long one if overlong="error"."""
    if num_tokens == 0:
        raise ValueError(f"{where}: the prompt is empty; expected at least one token")
    if num_tokens > limit and overlong == "error":
        raise ValueError(
            f"{where}: the prompt has at least {num_tokens} tokens, data.max_prompt_length is {limit}; "
            "use a shorter prompt, a higher limit, or data.overlong_prompts=filter, left, right or middle"
        )
    return num_tokens <= limit
