"""What the answers of a conversation teach: for each the prompt that a model gets, and the tokens to generate.

Both are read off the chat template: an answer is what the conversation that ends with it has behind the prompt that
asks for it.  Templates do not only append, so an answer whose prompt does not begin with the prompt and the answer
before it is a sequence of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megarl.data.chat import encode_responses, encode_strings
from megarl.data.fields import ASSISTANT, Example, is_learnt
from megarl.data.template import CLOSE, MARKERS, OPEN, ChatTemplate, Message, Tools

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning
_TAG = re.compile(f"({OPEN}|{CLOSE})")
_QUESTION: Message = {"role": "user", "content": "x"}


class PromptedAnswer(NamedTuple):
    """An answer behind its prompt, as texts."""

    prompt: str
    written: str  # the answer, and all that the template writes behind it
    answer: Message


class TrainingSequence(NamedTuple):
    """A sequence: token ids, and for each whether it is learnt."""

    ids: list[int]
    mask: list[bool]


class Answers:
    """Example: Answers(tokenizer, ChatTemplate(tokenizer)).sequences(examples).

    `refused`: a sentence, with file:line, for each conversation that the template refuses or does not render whole.
    `num_other_headers`: answers in front of which it writes another header than it asks with.
    `ends`: tokens that end answers of the template, and no completion of a server.
    `to_its_end`: an answer has all that the template writes behind it, which a model that scores it reads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, *, to_its_end: bool = False) -> None:
        self._tokenizer, self._template, self._to_its_end = tokenizer, template, to_its_end
        self.refused: list[str] = []
        self.num_other_headers = 0
        self.ends: set[int] = set()
        special = [str(tokenizer.convert_ids_to_tokens(token)) for token in template.special_ids if token is not None]
        self._special = re.compile("|".join(map(re.escape, special)))
        self._opens = self._text([_QUESTION], answer_follows=True).rstrip().endswith(OPEN)
        marked = {"role": ASSISTANT, "content": MARKERS[0]}
        self._field = next(  # the reasoning that the template reads
            (name for name in _REASONING if MARKERS[1] in self._text([_QUESTION, {**marked, name: MARKERS[1]}])), None
        )
        # What stands behind an answer, of templates that always write a header too.
        self._tail = template.ids(self._text([_QUESTION, marked]).rpartition(MARKERS[0])[2])

    def sequences(self, examples: Sequence[Example]) -> list[list[TrainingSequence]]:
        """The sequences of each conversation; a refused one has none."""
        turns = [self._turns(example) for example in examples]
        texts = [[turn.prompt + end for turn in of_row for end in ("", turn.written)] for of_row in turns]
        encoded = iter(self._encoded(texts) if any(texts) else ())
        all_sequences = []
        for example, of_row in zip(examples, turns, strict=True):
            of_example: list[TrainingSequence] = []
            for turn in of_row:
                ids, answer = self._split(turn, next(encoded), next(encoded), example.tools)
                goes_on = of_example and ids[: len(of_example[-1].ids)] == of_example[-1].ids
                known = of_example.pop().mask if goes_on else []
                mask = [*known, *[False] * (len(ids) - len(known)), *[True] * len(answer)]
                of_example.append(TrainingSequence(ids + answer, mask))
            all_sequences.append(of_example)
        return all_sequences

    # ---- texts

    def _turns(self, example: Example) -> list[PromptedAnswer]:
        assert isinstance(example.text, list), "a conversation is made of messages"
        try:
            messages = [self._read(message) for message in (*example.text, *example.behind)]
            self._template.check_written(messages, example.tools)
            return [
                self._turn(messages[:at], messages[at], example.tools)
                for at in range(len(example.text), len(messages))
                if is_learnt(messages[at])
            ]
        except ValueError as error:
            self.refused.append(f"{example.where}: {error}")
            return []

    def _text(self, messages: Sequence[Message], *, answer_follows: bool = False) -> str:
        """The messages as the template writes them; "" if it refuses them."""
        try:
            return self._template.text(messages, answer_follows=answer_follows)
        except ValueError:
            return ""

    def _read(self, message: Message) -> Message:
        """The message with its reasoning in the field that the template reads.

        To a template without reasoning tags are text.  Raises ValueError for reasoning of which it would lose a part.
        """
        if message["role"] != ASSISTANT or not (self._field or self._opens):
            return message
        given = {str(message[name]) for name in _REASONING if message.get(name)}
        front, *parts = _TAG.split(message["content"] or "")
        has_form = not parts or parts[::2] == [OPEN, CLOSE] or (self._opens and parts[::2] == [CLOSE])
        if not has_form or (parts[:1] == [OPEN] and front.strip()) or len(given) + bool(parts) > 1:
            raise ValueError(
                f"an answer has reasoning in several places, or {OPEN} and {CLOSE} not once around what it begins "
                "with; expected its reasoning in one place, and the text behind it"
            )
        if self._field is None or not (parts or given):
            return message
        if parts:
            reasoning, text = (parts[1] if parts[0] == OPEN else front).strip("\n"), parts[-1].lstrip("\n")
        else:
            (reasoning,), text = given, message["content"]
        rest = {name: part for name, part in message.items() if name not in _REASONING}
        return {**rest, self._field: reasoning, "content": text}

    def _turn(self, before: Sequence[Message], answer: Message, tools: Tools) -> PromptedAnswer:
        """Raises ValueError if the template leaves out the text or the reasoning of the answer."""
        prompt = self._template.text(before, tools, answer_follows=True)
        lost = self._lost(before, answer, tools)
        opens = prompt.rstrip().endswith(OPEN)
        if lost == "reasoning" and opens and (written := self._with_reasoning(before, answer, tools)):
            return PromptedAnswer(prompt, _opened(prompt, written), answer)
        if lost:
            raise ValueError(
                f"the chat template leaves out the {lost} of an answer{' with calls' * ('tool_calls' in answer)}; "
                "expected a template that writes it, or answers without"
            )
        whole = self._template.text([*before, answer], tools, answer_follows=False)
        if not whole.startswith(prompt):
            prompt = self._header(before, answer, tools, whole)
            self.num_other_headers += 1
        written = whole[len(prompt) :]
        num_opened = (answer["content"] or "").count(OPEN)
        if num_opened and written.count(OPEN) > num_opened:
            raise ValueError(
                f"the chat template writes {OPEN} in front of an answer that has it; expected answers without"
            )
        return PromptedAnswer(prompt, _opened(prompt, written) if opens else written, answer)

    def _lost(self, before: Sequence[Message], answer: Message, tools: Tools) -> str:
        """What the template leaves out of an answer: "reasoning", "text", or nothing."""
        marked = _marked(answer, MARKERS[0])
        if marked.keys().isdisjoint({*_REASONING, "tool_calls"}) and not _TAG.search(marked["content"]):
            return ""  # text alone
        text = self._template.text([*before, marked], tools, answer_follows=False)
        given = "".join(str(marked.get(name)) for name in ("content", *_REASONING))
        names = {"reasoning": _of_reasoning(MARKERS[0]), "text": MARKERS[0] + "c"}
        return next((name for name, marker in names.items() if text.count(marker) < given.count(marker)), "")

    def _header(self, before: Sequence[Message], answer: Message, tools: Tools, whole: str) -> str:
        """What the template writes in front of the answer, where it is not what it asks with."""
        both = [_marked({**answer, "content": answer["content"] or "x"}, marker) for marker in MARKERS]
        texts = [self._template.text([*before, marked], tools, answer_follows=False) for marked in both]
        if not all(marker in text for marker, text in zip(MARKERS, texts, strict=True)):
            raise ValueError("the chat template writes another header in front of an answer than it asks with")
        return commonprefix([whole, *texts])

    def _with_reasoning(self, before: Sequence[Message], answer: Message, tools: Tools) -> str:
        """An answer of text with the reasoning that the template leaves out, and the end of its turn; "" for others."""
        marked = self._template.text([*before, _marked(answer, MARKERS[0])], tools, answer_follows=False)
        _, has_text, end = marked.rpartition(MARKERS[0] + "c")
        if not has_text or "tool_calls" in answer:
            return ""
        reasoning = next((answer[name] for name in _REASONING if answer.get(name)), "")
        return (f"{reasoning}\n{CLOSE}\n\n" if reasoning else "") + answer["content"] + end

    # ---- ids

    def _encoded(self, rows: Sequence[Sequence[str]]) -> list[list[int]]:
        """Ids of the texts of all rows.  The texts of a row begin alike, so each piece of them is encoded once.

        Behind a special token most tokenizers go on as at the beginning; the longest text of each row is the proof.
        """
        pieces = [list(self._pieces(texts)) for texts in rows]
        longest = [max(texts, key=len) for texts in rows if texts]
        wanted = list(dict.fromkeys([*longest, *(piece for row in pieces for text in row for piece in text)]))
        ids = dict(zip(wanted, encode_strings(self._tokenizer, wanted, add_special_tokens=False), strict=True))
        all_ids: list[list[int]] = []
        for texts, of_row in zip(rows, pieces, strict=True):
            joined = [[token for piece in text for token in ids[piece]] for text in of_row]
            if texts and joined[max(range(len(texts)), key=lambda at: len(texts[at]))] != ids[max(texts, key=len)]:
                joined = encode_strings(self._tokenizer, list(texts), add_special_tokens=False)
            all_ids += joined
        return all_ids

    def _pieces(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """Each text cut in front of its special tokens; what it shares with the text before it is not cut again."""
        known, pieces = "", [""]
        for text in texts:
            if not text.startswith(known):
                known, pieces = "", [""]
            rest = text[len(known) - len(pieces[-1]) :]
            cuts = [0, *(match.start() for match in self._special.finditer(rest) if match.start()), len(rest)]
            pieces = [*pieces[:-1], *(rest[a:b] for a, b in pairwise(cuts))]
            known = text
            yield pieces

    def _split(
        self, turn: PromptedAnswer, prompt: list[int], whole: list[int], tools: Tools
    ) -> tuple[list[int], list[int]]:
        """Ids of prompt and answer.  No token holds a part of both, as the model gets the prompt alone."""
        if whole[: len(prompt)] == prompt:
            return prompt, self._ended(whole[len(prompt) :], turn.answer, tools)
        (written,) = encode_strings(self._tokenizer, [turn.written], add_special_tokens=False)
        return prompt, self._ended(written, turn.answer, tools)

    def _ended(self, ids: list[int], answer: Message, tools: Tools) -> list[int]:
        """The answer up to the token that ends it: a stop token, else the one with which the template ends it."""
        if self._to_its_end:
            return ids
        stops, special = self._template.stop_ids, self._template.special_ids
        at = len(ids) - len(self._tail) * (ids[-len(self._tail) :] == self._tail)
        while at and (ids[at - 1] in special or not str(self._tokenizer.decode([ids[at - 1]])).strip()):
            at -= 1
        stop = next((i for i in range(at, len(ids)) if ids[i] in stops), None)
        if stop is not None:
            return ids[: stop + 1]
        calls = answer.get("tool_calls") or ()
        replies: list[Message] = [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": "x"} for call in calls
        ]
        bridge = self._template.bridge(answer, replies or [_QUESTION], tools)
        if bridge and bridge.end_is_header and bridge.end_id in stops:
            return [*ids, bridge.end_id]
        if bridge and bridge.end_id in ids[at:]:
            self.ends.add(bridge.end_id)
            return ids[: len(ids) - ids[::-1].index(bridge.end_id)]
        return ids + encode_responses(self._tokenizer, [""])[0]


def _opened(prompt: str, written: str) -> str:
    """An answer without the tag that opens its reasoning, which stands in the prompt."""
    if not written.lstrip().startswith(OPEN):
        return written
    return written.lstrip().removeprefix(OPEN).removeprefix(prompt[len(prompt.rstrip()) :])


def _of_reasoning(marker: str) -> str:
    return marker + "r"


def _marked(answer: Message, marker: str) -> dict[str, Any]:
    """The answer with markers in the place of its text and its reasoning."""
    marked = {name: _of_reasoning(marker) if name in _REASONING and part else part for name, part in answer.items()}
    pieces = _TAG.split(answer["content"] or "")
    for at in range(0, len(pieces), 2):
        if pieces[at].strip():
            pieces[at] = _of_reasoning(marker) if CLOSE in pieces[at + 1 : at + 2] else f"{marker}c"
    marked["content"] = "".join(pieces)
    return marked
