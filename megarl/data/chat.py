"""Loads tokenizers, and turns text or chat messages into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

Text = str | list[dict[str, str]]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder (or hub name).  Raises ValueError of one sentence if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers and tokenizers raise whatever the files lead to
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"model.tokenizer_path={path}: no tokenizer can be loaded from there ({reason[0]})") from error
    # Without files of a tokenizer transformers makes an empty one of the class that config.json suggests.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise ValueError(
            f"model.tokenizer_path={path}: its tokenizer has no tokens; expected its files, such as tokenizer.json"
        )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: Text) -> list[int]:
    """Token ids of a string as it is, or of chat messages followed by the header of the assistant's answer."""
    return encode_many(tokenizer, [text])[0]


def encode_many(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    *,
    system_prompt: str | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """The same for many texts, which fast tokenizers encode in parallel.

    With a system prompt, strings become a user's message, and messages without a system message get one.
    `template`: variables of the chat template.  Example: {"enable_thinking": False}.
    Raises ValueError for messages if the tokenizer has no chat template.
    """
    if system_prompt is not None:
        texts = [as_messages(text, system_prompt) for text in texts]
    rendered = [text if isinstance(text, str) else _render(tokenizer, text, template or {}) for text in texts]
    # A chat template adds its own special tokens; for plain text the tokenizer adds them.
    ids: list[list[int]] = [[] for _ in texts]
    for is_chat in (False, True):
        where = [i for i, text in enumerate(texts) if isinstance(text, list) == is_chat]
        if where:
            encoded = _encode_strings(tokenizer, [rendered[i] for i in where], add_special_tokens=not is_chat)
            for i, token_ids in zip(where, encoded, strict=True):
                ids[i] = token_ids
    return ids


def encode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[list[int]]:
    """Answers as a model would generate them: without special tokens except the end-of-sequence token at the end."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.tokenizer_path={tokenizer.name_or_path}: expected a tokenizer with an end-of-text token"
        )
    encoded = _encode_strings(tokenizer, list(responses), add_special_tokens=False)
    return [token_ids + [tokenizer.eos_token_id] for token_ids in encoded]


def as_messages(text: Text, system_prompt: str | None = None) -> list[dict[str, str]]:
    """Chat messages, of which a string is the user's; with a system prompt if they have none of their own."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template)


def _encode_strings(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool) -> Any:
    # verbose=False: no warning of the tokenizer about long texts; the limit is data.max_prompt_length.
    return tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], template: Mapping[str, Any]) -> str:
    if not has_chat_template(tokenizer):
        raise ValueError(
            f"model.tokenizer_path={tokenizer.name_or_path}: the tokenizer has no chat template, which chat messages "
            "and data.system_prompt need; expected string prompts, or a tokenizer with one"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template))
