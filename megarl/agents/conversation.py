"""The conversation of an agent and the model as token ids: a tree of turns, whose leaves become rows.

The history that the model sees is what it generated, never its text tokenized again: a request that goes on from an
answer gets the ids of that turn and a `Bridge` to the next answer (data/template.py).  Edited histories, other tools,
and sub-agents begin new branches.  The tree is made of ids alone: a turn's parent is the longest earlier turn whose
tokens begin its prompt, so a row is always a sequence that the server saw.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megarl.data.template import ChatTemplate, Message, Tools
from megarl.samples.sample import Completion, Row, TurnSpan, VersionSpan

# generated: the model sees its earlier answers as it generated them, reasoning included.
# rendered: the template decides on every turn what of them is shown; where it changes them, a new row begins.
HISTORIES = ("generated", "rendered")

Key = tuple[bytes, ...]  # a digest of the tools, and of all up to each message, in the form that recognises them


class RenderedPrompt(NamedTuple):
    """A request as the server gets it; `key` is empty if it consists of ids, and not of messages."""

    prompt_ids: list[int]
    key: Key = ()


@dataclass(frozen=True)
class Turn:
    """One prompt and its answer."""

    parent: int | None
    context_ids: list[int]  # the prompt, without the tokens of the parent and its ancestors
    completion: Completion
    start: int  # tokens of the prompt: where the answer begins
    answer: Message | None  # as the agent got it; None: it got ids

    @property
    def end(self) -> int:
        return self.start + len(self.completion.token_ids)


class Conversation:
    """Example: asked = c.prompt(messages); turn = c.add(asked, completion, answer={"role": "assistant", ...}).

    `enough`: tokens; of a prompt that has many more, only the first are there, more than these.
    `counts`: appended, rendered: prompts of messages that went on from an answer, or were rendered as a whole.
    """

    def __init__(self, template: ChatTemplate, *, history: str = "generated", enough: int | None = None) -> None:
        assert history in HISTORIES, f"history is one of {HISTORIES}, not {history!r}"
        self._template, self._history, self._enough = template, history, enough
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter({"appended": 0, "rendered": 0})
        self._by_key: dict[bytes, int] = {}  # the latest turn that ended so
        self._children: dict[int | None, list[int]] = {None: []}

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedPrompt:
        """What the server has to be asked for the answer to these messages.

        Raises ValueError if the template refuses the messages.
        """
        key = tuple(_digests([json.dumps(list(tools), sort_keys=True), *map(_canonical, messages)]))
        if self._history == "generated" and (ids := self._appended(messages, tools, key)) is not None:
            self.counts["appended"] += 1
            return RenderedPrompt(ids, key)
        ids = self._template.whole(self._with_reasoning(messages, key), tools, self._enough)
        self.counts["rendered"] += 1
        return RenderedPrompt(ids, key)

    def add(self, asked: RenderedPrompt, completion: Completion, answer: Message | None = None) -> int:
        """Record the answer to `asked`; returns the number of the turn.  `answer`: as a message, if `asked` was."""
        parent = self._longest_prefix(asked.prompt_ids)
        held = 0 if parent is None else self.turns[parent].end
        number = len(self.turns)
        self.turns.append(Turn(parent, asked.prompt_ids[held:], completion, len(asked.prompt_ids), answer))
        self._children[parent].append(number)
        self._children[number] = []
        if asked.key and answer is not None:
            (ends,) = _digests([_canonical(answer)], asked.key[-1])
            self._by_key[ends] = number
        return number

    def rows(self) -> tuple[Row, ...]:
        """One row for each leaf of the tree, in the order of the first turn that each learns.

        An answer is learnt in the row of the first leaf that follows from it.
        """
        learnt: set[int] = set()
        rows = []
        for leaf in range(len(self.turns)):
            if not self._children[leaf]:
                path = self._path(leaf)
                rows.append(self._row(path, [number for number in path if number not in learnt]))
                learnt.update(path)
        return tuple(sorted(rows, key=lambda row: row.learnt[0].turn))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together: what they share counts in each."""
        return sum(turn.end for number, turn in enumerate(self.turns) if not self._children[number])

    def num_known(self, ids: list[int]) -> int:
        """How many leading tokens of a prompt have known columns: those of an earlier turn."""
        parent = self._longest_prefix(ids)
        return 0 if parent is None else self.turns[parent].end

    def extended(self, ids: list[int]) -> int | None:
        """The turn whose row a prompt of these ids would extend; None if it would begin a new row."""
        parent = self._longest_prefix(ids)
        return parent if parent is not None and self.is_leaf(parent) else None

    def is_leaf(self, number: int) -> bool:
        """Whether a row ends with this turn."""
        return not self._children[number]

    def token_ids(self, number: int) -> list[int]:
        """The prompt and the answer of a turn."""
        path = [self.turns[i] for i in self._path(number)]
        return [token for turn in path for token in (*turn.context_ids, *turn.completion.token_ids)]

    # ---- prompts

    def _appended(self, messages: Sequence[Message], tools: Tools, key: Key) -> list[int] | None:
        """The deepest turn that these messages begin with, and what follows it; None if there is none."""
        ends = (end for end in range(len(key) - 1, 1, -1) if key[end - 1] in self._by_key)
        if (end := next(ends, None)) is None:
            return None
        number, tail = self._by_key[key[end - 1]], messages[end - 1 :]  # key[0] is the tools
        turn = self.turns[number]
        if any(message["role"] == "assistant" for message in tail):  # an answer of which no ids are known
            return None
        bridge = self._template.bridge(messages[end - 2], tail, tools, self._enough)
        if bridge is None:
            return None
        completion = turn.completion
        behind = bridge.after(completion.token_ids[-1], ended=completion.finish_reason == "stop")
        return self.token_ids(number) + behind

    def _with_reasoning(self, messages: Sequence[Message], key: Key) -> list[Message]:
        """The messages with the reasoning of recognised answers, which clients do not send back."""
        out = list(messages)
        for at, message in enumerate(messages):
            number = self._by_key.get(key[at + 1]) if message["role"] == "assistant" else None
            answer = None if number is None else self.turns[number].answer
            if answer is not None and "reasoning_content" in answer:
                out[at] = {**message, "reasoning_content": answer["reasoning_content"]}
        return out

    # ---- the tree

    def _longest_prefix(self, ids: list[int]) -> int | None:
        """The turn with the most tokens of those whose prompt and answer begin `ids`."""
        longest, open_turns = None, [*self._children[None]]
        while open_turns:
            number = open_turns.pop()
            turn = self.turns[number]
            begin = turn.start - len(turn.context_ids)
            if ids[begin : turn.start] == turn.context_ids and ids[turn.start : turn.end] == turn.completion.token_ids:
                if longest is None or turn.end > self.turns[longest].end:
                    longest = number
                open_turns += self._children[number]
        return longest

    def _path(self, number: int) -> list[int]:
        """The turns from the root to this one."""
        path = [number]
        while (parent := self.turns[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def _row(self, path: Sequence[int], learnt: Sequence[int]) -> Row:
        turns = [self.turns[number] for number in path]
        log_probs: list[float] = []
        versions: list[VersionSpan] = []
        for number in learnt:
            completion, at = self.turns[number].completion, len(log_probs)
            log_probs += completion.log_probs
            versions += [VersionSpan(span.version, at + span.start, at + span.end) for span in completion.versions]
        return Row(
            token_ids=self.token_ids(path[-1]),
            learnt=tuple(TurnSpan(number, self.turns[number].start, self.turns[number].end) for number in learnt),
            log_probs=log_probs,
            versions=tuple(versions),
            finish_reason=turns[-1].completion.finish_reason,
            columns=_joined_columns(turns),
        )


def _joined_columns(turns: Sequence[Turn]) -> dict[str, np.ndarray]:
    """The columns of a row: each turn brings the entries of its own tokens."""
    names = set(turns[0].completion.columns)
    assert all(set(turn.completion.columns) == names for turn in turns), "the turns of a row have different columns"
    return {
        name: np.concatenate([turn.completion.columns[name][turn.start - len(turn.context_ids) :] for turn in turns])
        for name in names
    }


def _canonical(message: Message) -> str:
    """What identifies a message: role, text, and tool calls by name and arguments.

    Ids, reasoning, surrounding spaces and the spelling of JSON do not count: clients change them.
    """
    calls = [
        (call["function"]["name"], _parsed(call["function"]["arguments"])) for call in message.get("tool_calls") or []
    ]
    return json.dumps([message["role"], (message.get("content") or "").strip(), calls], sort_keys=True)


def _digests(parts: Iterable[str], digest: bytes = b"") -> Iterator[bytes]:
    """Of each part and all before it; `digest`: of what comes before the first."""
    for part in parts:
        digest = hashlib.sha256(digest + part.encode()).digest()
        yield digest


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
