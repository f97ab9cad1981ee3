"""Chat templates in the styles of well-known models, each with a tiny tokenizer that has its tokens."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.data.template import ChatTemplate

FOLDER = Path(__file__).parents[1] / "agents" / "templates"
# Tags that models write and parsers read are single tokens, but not special ones.
TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
SPECIAL = re.compile(
    r"<\|(?:\w|/)+\|>|\[(?:/?INST|/?AVAILABLE_TOOLS|TOOL_CALLS|/?TOOL_RESULTS|gMASK)\]|<sop>|<(?:start|end)_of_turn>|<｜(?:\w|▁)+｜>|\]~!?b\[?\]?|\[e~\["
)

# Words, single digits, signs with the line breaks behind them, spaces: the usual pattern of byte-level tokenizers.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Style(NamedTuple):
    """What a test has to know of a template."""

    eos: str
    stops: tuple[str, ...] = ()  # further tokens that end an answer
    tools: bool = True
    parallel: bool = True  # several tool calls in an answer
    # Whether a question, or a tool's response, behind an answer without reasoning only appends to what was rendered.
    appends: bool = True
    appends_tools: bool = True


STYLES = {
    "chatml": Style("<|im_end|>", tools=False),
    "qwen2_5": Style("<|im_end|>"),
    "qwen3": Style("<|im_end|>", appends=False, appends_tools=False),
    "qwen3_thinking": Style("<|im_end|>", appends=False, appends_tools=False),
    "llama3": Style("<|eot_id|>", parallel=False),
    "llama2": Style("</s>", tools=False),
    "mistral": Style("</s>"),
    "deepseek_v3": Style("<|end_of_sentence|>"),
    "deepseek_r1": Style("<|end_of_sentence|>", tools=False, appends=False),
    "glm4": Style("<|endoftext|>", stops=("<|user|>", "<|observation|>")),
    "gpt_oss": Style("<|return|>", stops=("<|call|>",), parallel=False, appends=False),
    "gemma": Style("<end_of_turn>", tools=False),
    "phi": Style("<|endoftext|>", stops=("<|end|>",)),
    "command_r": Style("<|END_OF_TURN_TOKEN|>"),
    "kimi": Style("<|im_end|>"),
}
# Further forms of tool calls, for tests that read them.
FORMS = {
    "qwen3_coder": Style("<|im_end|>"),
    "minimax_m2": Style("[e~["),
    "deepseek_v31": Style("<｜end▁of▁sentence｜>"),
    "deepseek_v32": Style("<｜end▁of▁sentence｜>"),
}
WITH_TOOLS = [name for name, style in STYLES.items() if style.tools]


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def byte_tokenizer(template: str, eos: str = "<|im_end|>", *, special_tags: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and the template's own tokens.  A text has many tokenizations, of which it makes one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: i for i, letter in enumerate(letters)}, []
    words = ("user", "assistant", "hello", "answer", "\u010a\u010a", "\u0120the", "12")
    for word in (*words, ">\u010a", "}\u010a", ",\u0120"):
        for i in range(1, len(word)):
            if (pair := (word[:i], word[i])) not in merges:
                merges.append(pair)
                vocabulary.setdefault(word[: i + 1], len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")] if "'<|' + " in template else []
    special = sorted({*SPECIAL.findall(template), *roles, eos, "<bos>", "<pad>"})
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tags = sorted({*TAGS.findall(template), "<think>", "</think>", "<tool_call>", "</tool_call>"})
    tokenizer.add_tokens([AddedToken(tag, special=special_tags, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=eos,
        pad_token="<pad>",
        extra_special_tokens=[token for token in special + tags * special_tags if token not in ("<bos>", "<pad>", eos)],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def with_bos(tokenizer: PreTrainedTokenizerFast) -> processors.TemplateProcessing:
    """The post-processor that begins every text with <bos>, as Llama's and Gemma's do."""
    return processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return byte_tokenizer(source(name), (STYLES | FORMS)[name].eos)


@cache
def template_of(name: str) -> ChatTemplate:
    style, tokenizer = (STYLES | FORMS)[name], tokenizer_of(name)
    return ChatTemplate(tokenizer, stop_ids=tokenizer.convert_tokens_to_ids(list(style.stops)))
