"""What the answers of a conversation teach: for each the prompt that a model gets, and the tokens that it is to write.

Both are read off the chat template: an answer is what the conversation that ends with it has behind the prompt that
asks for it.  Templates do not only append, so an answer whose prompt does not begin with the prompt and the answer
before it is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megarl.data.chat import encode_responses, encode_strings
from megarl.data.fields import Example, is_learnt
from megarl.data.template import CLOSE, MARKERS, OPEN, ChatTemplate, Message, Tools

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning
_QUESTION: Message = {"role": "user", "content": "x"}


class Turn(NamedTuple):
    """An answer behind its prompt, as texts."""

    prompt: str
    written: str  # the answer, and all that the template writes behind it
    answer: Message


class Learnt(NamedTuple):
    """A sequence: token ids, and for each whether it is learnt."""

    ids: list[int]
    mask: list[bool]


class Answers:
    """Example: Answers(tokenizer, ChatTemplate(tokenizer)).sequences(examples).

    `refused`: a sentence, with file:line, for each conversation that the template refuses or does not write whole.
    `num_other_headers`: answers in front of which it writes another header than it asks with.
    `ends`: tokens that end answers of the template, and no completion of a server.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.refused: list[str] = []
        self.num_other_headers = 0
        self.ends: set[int] = set()

    def sequences(self, examples: Sequence[Example]) -> list[list[Learnt]]:
        """Of each conversation its sequences; of one that is refused none."""
        turns = [self._turns(example) for example in examples]
        texts = [text for of_row in turns for turn in of_row for text in (turn.prompt, turn.prompt + turn.written)]
        encoded = iter(encode_strings(self._tokenizer, texts, add_special_tokens=False) if texts else ())
        found = []
        for example, of_row in zip(examples, turns, strict=True):
            of_example: list[Learnt] = []
            for turn in of_row:
                ids, answer = self._split(turn, next(encoded), next(encoded), example.tools)
                goes_on = of_example and ids[: len(of_example[-1].ids)] == of_example[-1].ids
                known = of_example.pop().mask if goes_on else []
                mask = [*known, *[False] * (len(ids) - len(known)), *[True] * len(answer)]
                of_example.append(Learnt(ids + answer, mask))
            found.append(of_example)
        return found

    # ---- texts

    def _turns(self, example: Example) -> list[Turn]:
        assert isinstance(example.text, list), "a conversation is made of messages"
        messages = [*example.text, *example.behind]
        try:
            self._template.check_written(messages, example.tools)
            return [
                self._turn(messages[:at], messages[at], example.tools)
                for at in range(len(example.text), len(messages))
                if is_learnt(messages[at])
            ]
        except ValueError as error:
            self.refused.append(f"{example.where}: {error}")
            return []

    def _turn(self, before: Sequence[Message], answer: Message, tools: Tools) -> Turn:
        """Raises ValueError if the template leaves out the text or the reasoning of the answer."""
        prompt = self._template.text(before, tools, answer_follows=True)
        lost = self._lost(before, answer, tools)
        if lost and (apart := _apart(answer)) and not self._lost(before, apart, tools):
            answer, lost = apart, ""
        opens = prompt.rstrip().endswith(OPEN)
        if lost == "reasoning" and opens and (written := self._with_reasoning(before, answer, tools)):
            return Turn(prompt, _opened(prompt, written), answer)
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
        return Turn(prompt, _opened(prompt, written) if opens else written, answer)

    def _lost(self, before: Sequence[Message], answer: Message, tools: Tools) -> str:
        """What the template leaves out of an answer: "reasoning", "text", or nothing."""
        marked = _marked(answer, MARKERS[0])
        if marked.keys().isdisjoint({*_REASONING, "tool_calls"}) and OPEN not in marked["content"]:
            return ""  # text alone
        text = self._template.text([*before, marked], tools, answer_follows=False)
        given = "".join(str(marked.get(name)) for name in ("content", *_REASONING))
        names = {"reasoning": _of_reasoning(MARKERS[0]), "text": MARKERS[0] + "c"}
        return next((name for name, marker in names.items() if marker in given and marker not in text), "")

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

    def _split(self, turn: Turn, prompt: list[int], whole: list[int], tools: Tools) -> tuple[list[int], list[int]]:
        """Ids of prompt and answer.  No token holds a part of both, as the model gets the prompt alone."""
        if whole[: len(prompt)] == prompt:
            return prompt, self._ended(whole[len(prompt) :], turn.answer, tools)
        (written,) = encode_strings(self._tokenizer, [turn.written], add_special_tokens=False)
        return prompt, self._ended(written, turn.answer, tools)

    def _ended(self, ids: list[int], answer: Message, tools: Tools) -> list[int]:
        """The answer up to the token that ends it: a stop token, else the one with which the template ends it."""
        stops, special = self._template.stop_ids, self._template.special_ids
        at = len(ids)
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
    marked["content"] = ""
    if content := answer["content"]:
        reasoning = f"{OPEN}{_of_reasoning(marker)}{CLOSE}" if CLOSE in content else ""
        text = content.rpartition(CLOSE)[2].strip()
        marked["content"] = reasoning + f"{marker}c" * bool(text)
    return marked


def _apart(answer: Message) -> Message | None:
    """The answer with the reasoning out of its text, in a field of its own; None without any there."""
    if CLOSE not in (answer["content"] or ""):
        return None
    reasoning, _, text = answer["content"].partition(CLOSE)
    return {**answer, _REASONING[0]: reasoning.replace(OPEN, "", 1).strip("\n"), "content": text.lstrip("\n")}
