"""Loads tokenizers, and turns text or chat messages into token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.data.template import ChatTemplate, Tools, front

Text = str | list[dict[str, Any]]
BLOCK = 256  # texts that are encoded together: what a tokenizer needs meanwhile is a hundred times as large


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder (or hub name).  Raises ValueError of one sentence if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers and tokenizers raise whatever the files lead to
        reason = str(error).strip().splitlines() or [type(error).__name__]
        is_bare = Path(path).is_dir() and not (Path(path) / "tokenizer.json").exists()  # transformers does not say so
        why = reason[0].rstrip(": ") + "; the folder has no tokenizer.json" * is_bare
        raise ValueError(f"model.tokenizer_path={path}: no tokenizer can be loaded from there ({why})") from error
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
    tools: Sequence[Tools] | None = None,
    places: Sequence[str] | None = None,
    enough: int | None = None,
) -> list[list[int]]:
    """The same for many texts, which fast tokenizers encode in parallel.

    With a system prompt, strings become a user's message, and messages without a system message get one.
    `template`: variables of the chat template.  Example: {"enable_thinking": False}.  `tools`: of each text.
    `places`: the file:line of each, which an error names.  `enough`: of a text that has many more tokens only the
    first ones are returned, which are more than these, and the rest is not read.
    Raises ValueError for messages if the tokenizer has no chat template, or if it refuses them or leaves out calls.
    """
    if system_prompt is not None:
        texts = [as_messages(text, system_prompt) for text in texts]
    rendered = _rendered(tokenizer, texts, template or {}, tools or [()] * len(texts), places)
    # A chat template adds its own special tokens; for plain text the tokenizer adds them.
    if enough is not None:
        unsure = max(map(len, tokenizer.get_vocab()))
        rendered = [front(tokenizer, text, enough, unsure) for text in rendered]
    ids: list[list[int]] = [[] for _ in texts]
    for is_chat in (False, True):
        where = [i for i, text in enumerate(texts) if isinstance(text, list) == is_chat]
        if where:
            encoded = encode_strings(tokenizer, [rendered[i] for i in where], add_special_tokens=not is_chat)
            for i, token_ids in zip(where, encoded, strict=True):
                ids[i] = token_ids
    return ids


def encode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[list[int]]:
    """Answers as a model would generate them: without special tokens except one end-of-sequence token at the end."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.tokenizer_path={tokenizer.name_or_path}: expected a tokenizer with an end-of-text token"
        )
    encoded = encode_strings(tokenizer, list(responses), add_special_tokens=False)
    end = [tokenizer.eos_token_id]
    return [token_ids if token_ids[-1:] == end else token_ids + end for token_ids in encoded]


def as_messages(text: Text, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """Chat messages, of which a string is the user's; with a system prompt if they have none of their own."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template)


def encode_strings(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of texts.  Special tokens that a text begins with, as one that was rendered before, are not added."""
    # verbose=False: no warning of the tokenizer about long texts; the limit is data.max_prompt_length.
    how = {"return_attention_mask": False, "verbose": False}
    encoded: list[list[int]] = []
    for first in range(0, len(texts), BLOCK):
        block = texts[first : first + BLOCK]
        encoded += tokenizer(block, add_special_tokens=add_special_tokens, **how)["input_ids"]
    if not add_special_tokens:
        return encoded
    longest = max(range(len(texts)), key=lambda at: len(texts[at]))
    ids, bare = encoded[longest], tokenizer(texts[longest], add_special_tokens=False, **how)["input_ids"]
    starts = range(len(ids) - len(bare), -1, -1)
    num = next((at for at in starts if ids[at : at + len(bare)] == bare), 0)  # special tokens at the front
    doubled = ids[:num] * 2
    return [ids[num:] if num and ids[: 2 * num] == doubled else ids for ids in encoded]


def check_ids(texts: Iterable[tuple[str, np.ndarray]], tokenizer: PreTrainedTokenizerBase, num_ids: int | None) -> None:
    """Raises ValueError for a text (file:line, ids) with a token of which the model has no embedding.

    `num_ids`: of the model's vocabulary, which may be larger than the tokenizer's; None: not known.
    """
    if num_ids is None:
        return
    highest = ((place, int(ids.max())) for place, ids in texts)
    raise_first(
        f"{place}: it holds the token {tokenizer.convert_ids_to_tokens(token)!r}, whose id is {token}, and the model "
        f"has {num_ids} (vocab_size of its config.json); expected the model's own tokenizer, or text without this token"
        for place, token in highest
        if token >= num_ids
    )


def raise_first(sentences: Iterable[str]) -> None:
    """Raises ValueError for sentences on rows, with the first of them and their number."""
    refused = list(sentences)
    if refused:
        raise ValueError(refused[0] + f" (the first of {len(refused):,} refused rows)" * (len(refused) > 1))


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    settings: Mapping[str, Any],
    tools: Sequence[Tools],
    places: Sequence[str] | None,
) -> list[str]:
    """Strings as they are, messages as the template writes them with the header of the answer."""
    if all(isinstance(text, str) for text in texts):
        return [str(text) for text in texts]
    template = chat_template(tokenizer, settings)
    rendered, refused = [], []
    for at, (text, of_text) in enumerate(zip(texts, tools, strict=True)):
        try:
            if not isinstance(text, str):
                template.check_written(text, of_text)
            rendered.append(text if isinstance(text, str) else template.text(text, of_text, answer_follows=True))
        except ValueError as error:
            refused.append(f"{places[at]}: {error}" if places else str(error))
    raise_first(refused)
    return rendered


def chat_template(
    tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any], stop_ids: Iterable[int] = ()
) -> ChatTemplate:
    """That of a tokenizer.  Raises ValueError if it has none."""
    if not has_chat_template(tokenizer):
        raise ValueError(
            f"model.tokenizer_path={tokenizer.name_or_path}: the tokenizer has no chat template, which chat messages "
            "and data.system_prompt need; expected string prompts, or a tokenizer with one"
        )
    return ChatTemplate(tokenizer, stop_ids=stop_ids, settings=settings)
