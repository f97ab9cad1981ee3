"""The forms of tool calls, a row for each, and which of them a chat template writes."""

from __future__ import annotations

import re

from megarl.agents.tool_calls.bodies import in_json, in_tags
from megarl.agents.tool_calls.call import Form, ToolCall, split_tags
from megarl.data.template import CLOSE, MARKERS, OPEN, PROBE_TOOLS, ChatTemplate

AUTO = "auto"
_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(\w+)\s*<\|message\|>"
    r"(.*?)(?:<\|(?:end|return|call)\|>|(?=<\|start\|>assistant)|\Z)",
    re.DOTALL,
)


def _split_channels(text: str, opened: bool) -> tuple[str, str]:
    """Harmony: the channel analysis is the reasoning; messages to tools stay as they are."""
    reasoning: list[str] = []
    said: list[str] = []
    for channel, message in _CHANNEL.findall(text):
        (reasoning if channel == "analysis" else said).append(message)
    rest = _CHANNEL.sub("", text)
    return "\n".join(reasoning).strip(), "\n".join(said + [rest] * bool(rest))


_DEEPSEEK = re.compile("(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>")
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_TAIL = r"\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"

FORMS: dict[str, Form] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen2.5, Qwen3
    "hermes": Form(re.compile("<tool_call>"), in_json(r"\s*", r"\s*</tool_call>"), "</tool_call>"),
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder, Qwen3.5
    "qwen3_coder": Form(
        re.compile("<tool_call>"),
        in_tags(
            r"\s*<function=([^>\s]+)>",
            r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?",
            "</parameter>",
            "</tool_call>",
            inner="</function>",
        ),
        "</tool_call>",
    ),
    # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>: GLM-4.5 and later
    "glm": Form(
        re.compile("<tool_call>"),
        in_tags(
            r"\s*([\w.-]+)\s*",
            r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*)",
            "</arg_value>",
            "</tool_call>",
        ),
        "</tool_call>",
    ),
    # <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...: MiniMax-M2
    "minimax_m2": Form(
        re.compile(r"(?:<minimax:tool_call>|(?<=</invoke>))\s*<invoke name="),
        in_tags(
            r'"([^"]+)">',
            r'\s*<parameter name="(?P<key>[^"]+)">(?P<value>.*)',
            "</parameter>",
            "</invoke>",
            behind=r"\s*</minimax:tool_call>",
        ),
        "</invoke>",
    ),
    # <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}...: Kimi-K2
    "kimi_k2": Form(
        re.compile(r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>"),
        in_json(
            r"\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
            r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        ),
        "<|tool_call_end|>",
        call_id="functions.{name}:{number}",
    ),
    # ...begin>function<sep>NAME\n```json\n{...}\n```<end>: DeepSeek-V3 and R1
    "deepseek_v3": Form(
        _DEEPSEEK,
        in_json("[^<\n]*<｜tool▁sep｜>([^<\n]+)\n```json\\s*", r"\s*```" + _DEEPSEEK_TAIL),
        _DEEPSEEK_END,
    ),
    # ...begin>NAME<sep>{...}<end>: DeepSeek-V3.1
    "deepseek_v31": Form(_DEEPSEEK, in_json("([^<\n]+)<｜tool▁sep｜>\\s*", _DEEPSEEK_TAIL), _DEEPSEEK_END),
    # Tags as MiniMax's, which say whether a value is a text: DeepSeek-V3.2
    "deepseek_v32": Form(
        re.compile(r"(?:<｜DSML｜(?:function|tool)_calls>|(?<=</｜DSML｜invoke>))\s*<｜DSML｜invoke name="),
        in_tags(
            r'"([^"]+)"\s*>',
            r'\s*<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<is_string>true|false)">(?P<value>.*)',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            behind=r"\s*</｜DSML｜(?:function|tool)_calls>",
        ),
        "</｜DSML｜invoke>",
    ),
    # {"name": ..., "parameters": {...}} as the whole answer, or behind a token: Llama 3
    "llama3": Form(
        re.compile(
            r'<\|python_tag\|>|(?:\A|(?<=\})\s*;)(?=\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
            r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)")'  # else it is an answer in JSON
        ),
        in_json(r"\s*"),
    ),
    # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...}: Mistral
    "mistral": Form(
        re.compile(r"\[TOOL_CALLS\]"),
        in_json(r"\s*(?:([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*)?"),
        split=split_tags((OPEN, CLOSE), ("[THINK]", "[/THINK]")),
    ),
    # <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>: gpt-oss
    "harmony": Form(
        re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?to=(?:functions\.|(?=[\w.-]{1,64}+ ?<\|))"),
        in_json(
            r"([\w.-]+)[^<]{0,40}(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>\s*",
            r"\s*(?:<\|(?:call|end|return)\|>|\Z|(?=<\|start\|>))",
        ),
        "<|call|>",
        split=_split_channels,
    ),
    "none": Form(re.compile("(?!)"), in_json()),  # the agent reads the text itself
}


def chosen(name: str, template: ChatTemplate) -> tuple[Form, str]:
    """The form that agent.tool_parser=`name` means, and a sentence where the template writes calls otherwise, or "".

    A call is rendered, and read back: `auto` is the form that finds it, and hermes if none does.
    """
    if name == "none":
        return FORMS[name], ""
    written, text = _written(template)
    if name == AUTO and written is not None:
        return FORMS[written], ""
    if name == written:
        return FORMS[name], ""
    how = f"writes them as {written or repr(text[:200])}" if text else "leaves them out"
    read = "hermes" if name == AUTO else name
    return FORMS[read], f"agent.tool_parser={name}: tool calls are read as {read}, but the chat template {how}"


def _written(template: ChatTemplate) -> tuple[str | None, str]:
    """The name of the form that reads a call as the template writes it, and what it writes; "": no call."""
    wanted = [ToolCall("look", f'{{"at": "{MARKERS[0]}"}}')]
    texts: dict[str, str] = {}
    for name, form in FORMS.items():
        call_id = form.call_id.format(name="look", number=0)
        if call_id not in texts:
            texts[call_id] = template.written_call(call_id)
        _, text = form.split(texts[call_id], False)
        if form.read(text, PROBE_TOOLS)[1] == wanted:
            return name, text
    return None, next(iter(texts.values()))
