"""The texts of tokens join to the text, also where a character is several tokens, or a space depends on a place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.metrics.pieces import pieces


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def of_words(ids: list[int]) -> str:
    """As SentencePiece: a word begins with a space, but for a text's first."""
    return "".join(f" {'abc'[token]}" for token in ids).removeprefix(" ")


def test_a_character_of_several_tokens_is_its_last_tokens() -> None:
    assert pieces(of_bytes, list("é!".encode())) == ["", "é", "!"]


def test_a_space_before_a_word_is_kept() -> None:
    assert pieces(of_words, [0, 1, 2]) == ["a", " b", " c"]
    assert pieces(of_words, [0, 1, 2], start=1) == [" b", " c"]


def test_bytes_that_are_no_character_end() -> None:
    found = pieces(of_bytes, [0xFF] * 9 + [33])
    assert "".join(found) == "\ufffd" * 9 + "!"


@given(st.text(max_size=20))
def test_the_texts_of_tokens_join_to_the_text(text: str) -> None:
    assert "".join(pieces(of_bytes, list(text.encode()))) == text
