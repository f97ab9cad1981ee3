"""What a generated text says: reasoning, content and calls.  Whatever it is, it is an answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.agents.answer import Answer, read_answer
from megarl.agents.tool_calls.call import ToolCall
from megarl.agents.tool_calls.forms import FORMS

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(text):
    return read_answer(text, FORMS["hermes"], opened=False, tools=TOOLS)


def call(text):
    return f"<tool_call>{text}</tool_call>"


ADD = ToolCall("add", '{"a": 1}')
GOOD = call('\n{"name": "add", "arguments": {"a":1}}\n')


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Yes.\n", Answer("Yes.\n")),
        ("<think>\nso\n</think>\n\nYes.", Answer("Yes.", "so")),
        ("so</think>Yes.", Answer("Yes.", "so")),
        ("<think>never closed", Answer("", "never closed")),
        (GOOD, Answer("", tool_calls=(ADD,))),
        (f"I add.\n{GOOD}\n{GOOD}", Answer("I add.", tool_calls=(ADD, ADD))),
        (f"<think>{GOOD}</think>No.", Answer("No.", GOOD)),
        (call('{"name": "stop"}'), Answer("", tool_calls=(ToolCall("stop", "{}"),))),
        (call('{"name": "stop", "arguments": null}'), Answer("", tool_calls=(ToolCall("stop", "{}"),))),
        (call('{"name": "stop", "arguments": ""}'), Answer("", tool_calls=(ToolCall("stop", "{}"),))),
        (call('{"name": "add", "arguments": "{\\"a\\": 1}"}'), Answer("", tool_calls=(ADD,))),
        (call('{"name": "add", "parameters": {"a": 1}}'), Answer("", tool_calls=(ADD,))),
        (call('{"name": "add", "arguments": null, "parameters": {"a": 1}}'), Answer("", tool_calls=(ADD,))),
        (call('{"name": "add", "arguments": {}, "parameters": {"a": 1}}'), Answer("", tool_calls=(ADD,))),
        (
            call('{"name": "say", "arguments": {"it": "\u00e9"}}'),
            Answer("", tool_calls=(ToolCall("say", '{"it": "\u00e9"}'),)),
        ),
    ],
)
def test_an_answer_is_read(text, answer):
    assert read(text) == answer


@pytest.mark.parametrize(
    "inner",
    [
        *("", "add", "[]", "5", '{"name": 5}', '{"arguments": {}}', '{"name": "a", "arguments": 5}'),
        *('{"name": "a", "arguments": []}', '{"name": "a", "arguments": "x"}', '{"name": "\\ud800"}', '{"name": "a"'),
        '{"name": "a", "arguments": {"a": 1}, "parameters": {"a": 2}}',
    ],
)
def test_a_malformed_call_stays_text_and_is_counted(inner):
    answer = read(GOOD + call(inner))
    assert answer == Answer(call(inner), tool_calls=(ADD,), malformed_calls=1)


def test_a_call_that_was_cut_off_is_malformed():
    assert read('<tool_call>{"na') == Answer('<tool_call>{"na', malformed_calls=1)


def test_reasoning_that_the_prompt_opened_needs_no_tag():
    assert read_answer("so\n</think>\n\nYes.", FORMS["hermes"], opened=True, tools=[]) == Answer("Yes.", "so")
    assert read_answer("on and on", FORMS["hermes"], opened=True, tools=[]) == Answer("", "on and on")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "a"}', "{", "}", " x"]))
)
def test_any_text_is_an_answer(pieces):
    answer = read("".join(pieces))
    for found in answer.tool_calls:
        json.loads(found.arguments)
    assert answer.malformed_calls >= 0
