"""Tool calls in the form of each family, as agents get them, against answers that were written by hand."""

import json
import time

import pytest
from chat_templates import FORMS as FURTHER
from chat_templates import STYLES, template_of
from hypothesis import given
from hypothesis import strategies as st
from tool_call_texts import ADD, END, TOOLS, WRITE, cases

from megarl.agents.answer import read_answer
from megarl.agents.tool_calls.forms import AUTO, FORMS, chosen

CASES = [(form, name, case) for form in WRITE for name, case in cases(form).items()]


def read(form, text, tools=TOOLS):
    return read_answer(text, FORMS[form], opened=False, tools=tools)


def found(answer):
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def test_each_form_has_its_texts():
    assert set(WRITE) == set(FORMS) - {"none"} and all(len(cases(form)) >= 20 for form in WRITE)


@pytest.mark.parametrize(
    ("form", "case"), [(form, case) for form, _, case in CASES], ids=[f"{f}-{n}" for f, n, _ in CASES]
)
def test_calls_and_text_are_read(form, case):
    answer = read(form, case.text)
    assert found(answer) == case.calls
    assert " ".join(answer.content.split()) == case.content
    assert answer.malformed_calls == case.malformed


@pytest.mark.parametrize("form", WRITE)
def test_without_tools_nothing_is_a_call(form):
    answer = read(form, WRITE[form](ADD), tools=[])
    assert answer.content == WRITE[form](ADD) and not answer.tool_calls and not answer.malformed_calls
    assert read("none", WRITE[form](ADD)).content == WRITE[form](ADD)


@pytest.mark.parametrize("form", set(WRITE) - {"harmony"})
def test_reasoning_stands_in_front_of_calls(form):
    tags = ("[THINK]", "[/THINK]") if form == "mistral" else ("<think>", "</think>")
    answer = read(form, f"{tags[0]}so {WRITE[form](ADD)}{tags[1]}\n\n{WRITE[form](ADD)}")
    assert (answer.reasoning, found(answer)) == (f"so {WRITE[form](ADD)}", [ADD])


def test_the_channel_of_the_analysis_is_the_reasoning_and_the_others_are_the_text():
    first = "<|channel|>analysis<|message|>a to=functions.add b<|end|><|start|>assistant"
    both = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|> It is."
    answer = read("harmony", first + both, tools=[])
    assert (answer.reasoning, answer.content) == ("a to=functions.add b", "I look.\n It is.")
    assert read("harmony", "<|channel|>analysis<|message|>cut off").reasoning == "cut off"
    assert read("harmony", "It is.").content == "It is."


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "true", "true"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"enum": ["7", "b"]}, "7", "7"),
        ({"enum": ["b", 7]}, "7", 7),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, '{"a": "\u00e9"}', {"a": "\u00e9"}),
        ({"$ref": "#/$defs/Item"}, '{"a": 1}', {"a": 1}),
        ({}, "5", 5),
        (None, "words", "words"),
        (None, '"quoted"', '"quoted"'),
    ],
)
def test_the_schema_says_what_an_argument_without_quotes_is(schema, text, value):
    properties = {} if schema is None else {"it": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    assert found(read("glm", WRITE["glm"](("f", {"it": text})), tools)) == [("f", {"it": value})]


@pytest.mark.parametrize("value", ["NaN", "1e999", '{"a": NaN}'])
def test_what_is_no_json_is_malformed(value):
    answer = read("glm", f"<tool_call>find<arg_key>limit</arg_key><arg_value>{value}</arg_value></tool_call>")
    assert answer.malformed_calls == 1 or isinstance(found(answer)[0][1]["limit"], str)


AUTO_OF = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_thinking"), "hermes"),
    **{"llama3": "llama3", "mistral": "mistral", "deepseek_v3": "deepseek_v3", "glm4": "glm"},
    **{"gpt_oss": "harmony", "kimi": "kimi_k2"},
    **{name: name for name in FURTHER},
}


@pytest.mark.parametrize("name", STYLES | FURTHER)
def test_auto_is_the_form_that_the_template_writes_and_another_one_is_a_sentence(name):
    template, written = template_of(name), AUTO_OF.get(name)
    form, sentence = chosen(AUTO, template)
    assert form is FORMS[written or "hermes"]
    assert chosen("none", template) == (FORMS["none"], "")
    if written:
        assert sentence == "" and chosen(written, template) == (form, "")
        other = "glm" if written == "hermes" else "hermes"
        assert chosen(other, template)[0] is FORMS[other]
        assert all(word in chosen(other, template)[1] for word in (f"agent.tool_parser={other}", f"as {written}"))
    else:
        assert "agent.tool_parser=auto: tool calls are read as hermes, but the chat template" in sentence
        assert ("leaves them out" in sentence) == (name not in ("phi", "command_r"))


PIECES = [
    *('{"name": "add", "parameters": {}}', "[", "{", '"', "\\", ";", " ", "\n", "x", "```json", "functions.add"),
    *("<function=add>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<tool_call>", '<invoke name="add">', '<parameter name="a">', "<minimax:tool_call>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "[TOOL_CALLS]"),
    *("<|channel|>", "<|message|>", "<|start|>assistant", " to=", "<|python_tag|>", "<think>", "</think>", "[THINK]"),
    *('<｜DSML｜invoke name="add">', "<｜DSML｜function_calls>", *END.values()),
]


@given(st.lists(st.sampled_from(PIECES)), st.sampled_from(sorted(FORMS)))
def test_any_text_is_an_answer(pieces, form):
    answer = read(form, "".join(pieces))
    for call in answer.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert answer.malformed_calls >= 0


SECONDS, SIZE = 3, 20_000


@pytest.mark.parametrize("form", WRITE)
def test_texts_of_marks_are_read_in_linear_time(form):
    write = WRITE[form]
    begin, cut = write(ADD)[: write(ADD).index("add")], write(("say", {"text": "CUT"})).split("CUT")[0]
    before = time.process_time()
    for piece in (begin, cut, cut + END[form], begin + END[form], END[form], "{", " ", "\n"):
        read(form, piece * SIZE)
    assert time.process_time() - before < SECONDS
