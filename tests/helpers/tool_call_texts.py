"""Twenty answers or more in each form of tool calls, with what an agent gets: calls, text, number of malformed ones."""

import json
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [
    function("add", a={"type": "integer"}, b={"type": "integer"}),
    function("say", text={"type": "string"}),
    function(
        "find",
        where={"type": "object"},
        limit={"anyOf": [{"type": "number"}, {"type": "null"}]},
        every={"type": "boolean"},
        words={"type": "array", "items": {"type": "string"}},
    ),
    function("stop"),
]


class Case(NamedTuple):
    text: str
    calls: list[Call]
    content: str = ""  # its words
    malformed: int = 0


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """A value as templates with tags write it: a text as it is."""
    return value if isinstance(value, str) else dumped(value)


def hermes(*calls: Call) -> str:
    return "\n".join(
        f"<tool_call>\n{dumped({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )


def qwen3_coder(*calls: Call) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        pairs = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(*calls: Call) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in given.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def minimax_m2(*calls: Call) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        pairs = "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in given.items())
        return f'<invoke name="{name}">\n{pairs}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def kimi_k2(*calls: Call) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{dumped(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def deepseek_v3(*calls: Call) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: Call) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(given)}<｜tool▁call▁end｜>" for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_v32(*calls: Call) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        pairs = "".join(
            f'<｜DSML｜parameter name="{key}" string="{dumped(isinstance(value, str))}">{plain(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in given.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{pairs}</｜DSML｜invoke>\n'

    return f"<｜DSML｜function_calls>\n{''.join(one(*call) for call in calls)}</｜DSML｜function_calls>"


def llama3(*calls: Call) -> str:
    return "; ".join(dumped({"name": name, "parameters": given}) for name, given in calls)


def mistral(*calls: Call) -> str:
    return "[TOOL_CALLS] " + dumped([{"name": name, "arguments": given} for name, given in calls])


def harmony(*calls: Call) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(given)}<|call|>"
        for name, given in calls
    )


def in_front(form: str, text: str) -> str:
    if form == "harmony":
        return f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
    return text + ("<|python_tag|>" if form == "llama3" else "\n")


def behind(form: str, text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>" if form == "harmony" else f"\n{text}"


WRITE = {
    each.__name__: each
    for each in (
        *(hermes, qwen3_coder, glm, minimax_m2, kimi_k2, deepseek_v3),
        *(deepseek_v31, deepseek_v32, llama3, mistral, harmony),
    )
}
# The end of a call, as a text inside its argument.
END = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "glm": "</tool_call>",
    "minimax_m2": "</invoke>",
    "kimi_k2": "<|tool_call_end|>",
    "deepseek_v3": "<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜>",
    "deepseek_v32": "</｜DSML｜invoke>",
    "llama3": "; {",
    "mistral": "]",
    "harmony": "<|call|>",
}
IN_TAGS = ("qwen3_coder", "glm", "minimax_m2", "deepseek_v32")  # a mark inside their arguments ends them

ADD: Call = ("add", {"a": 1, "b": 2})
SAY: Call = ("say", {"text": "hello"})
GIVEN: dict[str, list[Call]] = {
    "a call": [ADD],
    "two calls": [ADD, SAY],
    "three calls of a tool": [SAY, SAY, SAY],
    "nested": [("find", {"where": {"x": [1, {"y": "z"}], "e": {}}, "every": True, "words": ["a", "b c"]})],
    "unicode": [("say", {"text": "\u00e9 \u4f60\u597d \U0001f389"})],
    "no arguments": [("stop", {})],
    "quotes and lines": [("say", {"text": 'a "b"\n\n  \\c'})],
    "json as text": [("say", {"text": '{"name": "add", "arguments": {"a": 1}}'})],
    "a number as text": [("say", {"text": "12"})],
    "numbers": [("add", {"a": -3, "b": 0}), ("find", {"limit": 2.5, "every": False})],
    "null": [("find", {"limit": None, "words": []})],
    "an empty text": [("say", {"text": ""})],
    "html": [("say", {"text": "<b>1 < 2 & 3</b>"})],
}
LONG: Call = ("say", {"text": "half of it CUT the rest"})


def cases(form: str) -> dict[str, Case]:
    """By name.  What depends on the form is written out below."""
    write, add = WRITE[form], WRITE[form](ADD)
    out = {name: Case(write(*calls), calls) for name, calls in GIVEN.items()}
    out["text in front"] = Case(in_front(form, "I add.") + add, [ADD], "I add.")
    out["text behind"] = Case(add + behind(form, "Done."), [ADD], "Done.")
    both = in_front(form, "I add.") + write(ADD, SAY) + behind(form, "Done.")
    out["text around two"] = Case(both, [ADD, SAY], "I add. Done.")
    cut = write(LONG).split("CUT")[0]
    out["cut off"] = Case(cut, [], " ".join(cut.split()), 1)
    out["no call"] = Case("It is 15.", [], "It is 15.")
    return out | SPECIAL[form]


def broken(text: str) -> Case:
    return Case(text, [], " ".join(text.split()), 1)


def marked(form: str) -> Case:
    call: Call = ("say", {"text": f"it ends with {END[form]} here"})
    return Case(WRITE[form](call), [call])


SPECIAL: dict[str, dict[str, Case]] = {
    "hermes": {
        "malformed": broken('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'),
        "malformed and a call": Case(
            "<tool_call>add</tool_call>\n" + hermes(ADD), [ADD], "<tool_call>add</tool_call>", 1
        ),
        "a mark inside": marked("hermes"),
    },
    "qwen3_coder": {
        "malformed": broken("<tool_call>\n<function=add\n<parameter=a>1</parameter></function>\n</tool_call>"),
        "malformed and a call": Case(
            '<tool_call>{"name": "add"}</tool_call>' + qwen3_coder(ADD),
            [ADD],
            '<tool_call>{"name": "add"}</tool_call>',
            1,
        ),
        "a mark inside": broken("<tool_call>\n<function=say>\n<parameter=text>\n</tool_call>\n</parameter></function>"),
        "no line breaks": Case(
            "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>",
            [ADD],
        ),
        "python's words": Case(
            qwen3_coder(("find", {"every": "True", "limit": "None"})), [("find", {"every": True, "limit": None})]
        ),
    },
    "glm": {
        "malformed": broken("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>"),
        "malformed and a call": Case(
            '<tool_call>{"name": "add"}</tool_call>' + glm(ADD), [ADD], '<tool_call>{"name": "add"}</tool_call>', 1
        ),
        "a mark inside": broken("<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>a </tool_call> b</arg_value>"),
        "no line breaks": Case(
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
            "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
            [ADD],
        ),
    },
    "minimax_m2": {
        "malformed": broken('<minimax:tool_call>\n<invoke name="add">\n<parameter>1</parameter>\n</invoke>'),
        "malformed and a call": Case(
            '<minimax:tool_call>\n<invoke name=add></invoke>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
            [("stop", {})],
            "<minimax:tool_call> <invoke name=add></invoke>",
            1,
        ),
        "a mark inside": broken('<minimax:tool_call>\n<invoke name="say">\n<parameter name="text">a </invoke>'),
        "two blocks": Case(minimax_m2(ADD) + "\n" + minimax_m2(SAY), [ADD, SAY]),
        "only mentioned": Case('Write <invoke name="add"></invoke>.', [], 'Write <invoke name="add"></invoke>.'),
    },
    "kimi_k2": {
        "malformed": broken(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": }<|tool_call_end|>'
        ),
        "malformed and a call": Case(
            "<|tool_calls_section_begin|><|tool_call_begin|>?<|tool_call_end|><|tool_call_begin|>functions.add:3"
            '<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
            [ADD],
            "<|tool_calls_section_begin|><|tool_call_begin|>?<|tool_call_end|>",
            1,
        ),
        "a mark inside": marked("kimi_k2"),
    },
    "deepseek_v3": {
        "malformed": broken(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{a}\n```<｜tool▁call▁end｜>"
        ),
        "malformed and a call": Case(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜>" + deepseek_v3(ADD),
            [ADD],
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜>",
            1,
        ),
        "a mark inside": marked("deepseek_v3"),
    },
    "deepseek_v31": {
        "malformed": broken("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>"),
        "malformed and a call": Case(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜>" + deepseek_v31(ADD),
            [ADD],
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜>",
            1,
        ),
        "a mark inside": marked("deepseek_v31"),
    },
    "deepseek_v32": {
        "malformed": broken(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a">1</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>"
        ),
        "malformed and a call": Case(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">1</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            [("stop", {})],
            '<｜DSML｜function_calls> <｜DSML｜invoke name="add">1</｜DSML｜invoke>',
            1,
        ),
        "a mark inside": broken(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="say">\n'
            '<｜DSML｜parameter name="text" string="true">a </｜DSML｜invoke>'
        ),
    },
    "llama3": {
        "malformed": broken('{"name": "add", "parameters": {"a": }}'),
        "malformed and a call": Case(
            '<|python_tag|>add.call(a=1)<|python_tag|>{"name": "stop", "parameters": {}}',
            [("stop", {})],
            "<|python_tag|>add.call(a=1)",
            1,
        ),
        "a mark inside": marked("llama3"),
        "a type": Case('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        "an answer in json": Case('{"answer": 15}', [], '{"answer": 15}'),
        "an answer with a name": Case('{"name": "Bob", "age": 5}', [], '{"name": "Bob", "age": 5}'),
    },
    "mistral": {
        "malformed": broken('[TOOL_CALLS] [{"name": "add", "arguments": }]'),
        "malformed and a call": Case(
            '[TOOL_CALLS] [{"name": 5}]\n' + mistral(ADD), [ADD], '[TOOL_CALLS] [{"name": 5}]', 1
        ),
        "a mark inside": marked("mistral"),
        "a name in front": Case('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]stop[ARGS]{}', [ADD, ("stop", {})]),
        "an id": Case('[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1, "b": 2}', [ADD]),
    },
    "harmony": {
        "malformed": broken("<|channel|>commentary to=functions.add <|constrain|>json<|message|>{a: 1}<|call|>"),
        "malformed and a call": Case(
            "<|channel|>commentary to=functions.add <|constrain|>json<|message|>1<|call|><|start|>assistant"
            + harmony(ADD),
            [ADD],
            "<|channel|>commentary to=functions.add <|constrain|>json<|message|>1<|call|>",
            1,
        ),
        "a mark inside": marked("harmony"),
        "the recipient in front": Case(
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>', [ADD]
        ),
        "behind the reasoning": Case(f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{harmony(ADD)}", [ADD]),
        "without the stop token": Case(harmony(ADD).removesuffix("<|call|>"), [ADD]),
        "channels": Case(
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>It is 15.",
            [],
            "It is 15.",
        ),
    },
}
