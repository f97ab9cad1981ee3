"""Checks of the keys of prompts that need no file."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.config.settings import show

# Arguments of transformers' apply_chat_template that are no variables of the template; the run sets what it needs.
_ARGUMENTS = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"),
    *("tools", "truncation"),
)


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each fault."""
    for name, value in config.data.apply_chat_template_kwargs.items():
        if name in _ARGUMENTS:
            key = f"data.apply_chat_template_kwargs.{name}={show(value)}"
            yield f"{key}: the run decides this; expected variables of the chat template, such as enable_thinking"
