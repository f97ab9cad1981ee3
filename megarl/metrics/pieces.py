"""The text of each token of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # ends the text of tokens that hold only a part of a character
_LONGEST = 8  # tokens of a character; what is longer is no character


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
