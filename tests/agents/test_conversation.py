"""Conversations as token ids: each generated token is learnt once, behind what the server saw, whatever is asked."""

from dataclasses import replace

import pytest
from chat_templates import STYLES, template_of, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.agents.conversation import HISTORIES, Conversation, RenderedPrompt
from megarl.samples.sample import Completion, VersionSpan

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def completion(ids, *, number=0, finish="stop"):
    """Log-probs that name the turn and the position, and two versions."""
    log_probs = [-(number + 1) - position / 1000 for position in range(len(ids))]
    spans = [VersionSpan(number, 0, 1), VersionSpan(number + 1, 1, len(ids))]
    return Completion(ids, log_probs, finish, tuple(s for s in spans if s.end > s.start))


class Agent:
    """An agent and a model that writes given ids; keeps what the server saw and what the agent knows."""

    def __init__(self, name="qwen3", history="generated"):
        self.name, self.tokenizer = name, tokenizer_of(name)
        self.conversation = Conversation(template_of(name), history=history)
        self.seen = []  # (prompt ids, completion)
        self.histories = []  # messages, the answer included

    def ask(self, messages, ids, *, finish="stop", tools=(), calls=()):
        asked = self.conversation.prompt(messages, tools)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        thought, found, rest = text.partition("</think>")
        answer = {"role": "assistant", "content": rest if found else text}
        if found:
            answer["reasoning_content"] = thought.removeprefix("<think>")
        if calls:
            answer["tool_calls"] = [call(*c) for c in calls]
        written = completion(ids, number=len(self.seen), finish=finish)
        number = self.conversation.add(asked, written, answer)
        assert number == len(self.seen)
        self.seen.append((asked.prompt_ids, written))
        self.histories.append([*messages, {k: v for k, v in answer.items() if k != "reasoning_content"}])
        return asked.prompt_ids

    def write(self, text):
        """Ids of a text and the stop token: a byte each, never as the tokenizer would write them."""
        ids = [token for letter in text for token in self.tokenizer.encode(letter, add_special_tokens=False)]
        return [*ids, self.tokenizer.eos_token_id]

    def text(self, number):
        return self.tokenizer.decode(self.conversation.token_ids(number))


def call(number, arguments, name="add"):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def check_exact(agent):
    """Every generated token is learnt in one row, where all before it is what the server saw; rows are no more."""
    rows = agent.conversation.rows()
    learnt = {}
    for row in rows:
        assert row.learnt, "a row teaches something"
        position = 0
        for span in row.learnt:
            assert span.turn not in learnt, "learnt once"
            prompt_ids, written = agent.seen[span.turn]
            learnt[span.turn] = row
            assert row.token_ids[: span.start] == prompt_ids
            assert row.token_ids[span.start : span.end] == written.token_ids
            size = span.end - span.start
            assert row.log_probs[position : position + size] == written.log_probs
            inside = [s for s in row.versions if position <= s.start < position + size]
            moved = tuple(replace(s, start=s.start - position, end=s.end - position) for s in inside)
            assert moved == written.versions
            position += size
        assert row.num_learnt == position
        prompt_ids, written = agent.seen[row.learnt[-1].turn]
        assert row.token_ids == prompt_ids + written.token_ids and row.finish_reason == written.finish_reason
    assert sorted(learnt) == list(range(len(agent.seen))), "every turn is learnt"
    assert [row.learnt[0].turn for row in rows] == sorted(row.learnt[0].turn for row in rows), "in the order of time"
    return rows


OPERATION = st.tuples(
    st.integers(0, 5),  # which history it goes on from
    st.sampled_from(["user", "tool", "tools", "edit", "system", "again", "retell"]),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),  # what the model writes
    st.booleans(),  # whether it was cut off
)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=40)
@given(operations=st.lists(OPERATION, min_size=1, max_size=7))
def test_each_generated_token_is_learnt_once_over_any_tree_of_requests(name, history, operations):
    agent, style = Agent(name, history), STYLES[name]
    pieces = [
        agent.tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "</think>", "1", "2", "h", "e", "he", "\u010a")
    ]
    pieces = [token for token in pieces if token is not None]
    for pick, kind, drawn, cut in operations:
        ids = [pieces[i % len(pieces)] for i in drawn] + [agent.tokenizer.eos_token_id] * (not cut)
        finish = "length" if cut else "stop"
        base = agent.histories[pick % len(agent.histories)] if agent.histories else []
        tools = TOOLS if style.tools else ()
        if not base or kind == "system":
            messages = [{"role": "system", "content": f"be {pick}"}, user("start")]
        elif kind == "again":
            messages = base[:-1]
        elif kind == "edit":
            messages = [*base[:-2], user("edited")] if base[-2]["role"] == "user" else [*base, user("edited")]
        elif kind == "retell":  # another answer than the model gave
            messages = [*base[:-1], {"role": "assistant", "content": "retold"}, user("next")]
        elif kind in ("tool", "tools") and base[-1].get("tool_calls"):
            results = base[-1]["tool_calls"]
            messages = [
                *base,
                *({"role": "tool", "tool_call_id": c["id"], "name": "add", "content": "5"} for c in results),
            ]
        else:
            messages = [*base, user(f"go {pick}")]
        if messages[-1]["role"] == "user" and kind in ("tool", "tools") and style.tools:
            calls = [(i, '{"a": 1}') for i in range(2 if kind == "tools" and style.parallel else 1)]
        else:
            calls = ()
        try:
            agent.ask(messages, ids, finish=finish, tools=tools, calls=calls)
        except ValueError as error:  # roles that must alternate, a call without its response
            assert "the chat template refuses these messages" in str(error)
    if agent.seen:
        check_exact(agent)


@pytest.mark.parametrize("name", STYLES)
def test_a_plain_conversation_is_one_row_whatever_the_template_does_to_history(name):
    agent, messages = Agent(name), [{"role": "system", "content": " be  brief "}, user("12 + 3?")]
    for turn in range(4):
        agent.ask(messages, agent.write(f"<think>hm {turn}</think>\n\n the  answer,\n{turn} "))
        messages = [*agent.histories[-1], user(f"and {turn}?")]
    (row,) = check_exact(agent)
    assert [span.turn for span in row.learnt] == [0, 1, 2, 3]
    assert agent.conversation.counts == {"appended": 3, "rendered": 1}


def test_a_history_that_is_rendered_again_begins_a_row_where_the_template_changes_it():
    """Qwen3 removes the reasoning before the last question, and keeps it while tools answer."""
    agent = Agent("qwen3", "rendered")
    thought = [agent.tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "\u010a")]
    done = [agent.tokenizer.convert_tokens_to_ids(t) for t in ("\u010a", "</think>", "\u010a\u010a")]
    called = agent.tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    agent.ask(
        [user("1+1?")], [*thought, *agent.write("so")[:-1], *done, *called, agent.tokenizer.eos_token_id], tools=TOOLS
    )
    # What the endpoint would have made of it.
    answer = {"role": "assistant", "content": "", "tool_calls": [call(0, '{"a":1}')], "reasoning_content": "so"}
    agent.conversation = Conversation(template_of("qwen3"), history="rendered")
    agent.conversation.add(agent.conversation.prompt([user("1+1?")], TOOLS), agent.seen[0][1], answer)
    sent_back = {"role": "assistant", "content": None, "tool_calls": [call(0, '{"a": 1}')]}
    response = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}
    agent.ask([user("1+1?"), sent_back, response], agent.write("two"), tools=TOOLS)
    assert [len(row.learnt) for row in check_exact(agent)] == [2], "the reasoning was put back, and nothing changed"
    agent.ask([*agent.histories[-1], user("thanks")], agent.write("please"), tools=TOOLS)
    first, second = check_exact(agent)
    assert [[span.turn for span in row.learnt] for row in (first, second)] == [[0, 1], [2]]
    assert "so" in agent.text(1) and "<think>" not in agent.text(2)


def test_an_answer_is_recognised_though_the_client_spelled_it_otherwise():
    agent = Agent("qwen2_5")
    agent.ask([user("1+2?")], agent.write("x"), tools=TOOLS, calls=[(0, '{"a":1,  "b": "two"}')])
    other = {"role": "assistant", "content": " x\n", "tool_calls": [call(7, {"b": "two", "a": 1})]}
    prompt = agent.ask(
        [user("1+2?"), other, {"role": "tool", "tool_call_id": "7", "content": "3"}], agent.write("3"), tools=TOOLS
    )
    prompt_ids, written = agent.seen[0]
    held = prompt_ids + written.token_ids
    assert prompt[: len(held)] == held
    assert prompt[len(held) :] == agent.tokenizer.encode(
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(check_exact(agent)) == 1


def test_several_answers_to_one_prompt_and_what_goes_on_from_one_of_them():
    agent = Agent("chatml")
    for text in ("one", "two", "two"):
        agent.ask([user("x")], agent.write(text))
    agent.ask([*agent.histories[1], user("y")], agent.write("more"))
    rows = check_exact(agent)
    assert sorted([span.turn for span in row.learnt] for row in rows) in ([[0], [1], [2, 3]], [[0], [1, 3], [2]])


def test_other_tools_another_system_prompt_and_an_edit_are_branches():
    agent = Agent("qwen2_5")
    agent.ask([user("x")], agent.write("one"), tools=TOOLS)
    agent.ask([*agent.histories[0], user("y")], agent.write("two"))
    agent.ask(
        [{"role": "system", "content": "sub-agent"}, *agent.histories[0], user("y")], agent.write("three"), tools=TOOLS
    )
    agent.ask([user("x"), {"role": "assistant", "content": "won"}, user("y")], agent.write("four"), tools=TOOLS)
    assert len(check_exact(agent)) == 4
    assert agent.conversation.counts == {"appended": 0, "rendered": 4}


def test_an_answer_that_the_model_did_not_give_is_only_rendered():
    agent = Agent("qwen3")
    agent.ask([user("x")], agent.write("<think>hm</think>one"))
    agent.ask([*agent.histories[0], user("y"), {"role": "assistant", "content": "mine"}, user("z")], agent.write("two"))
    assert agent.conversation.counts == {"appended": 0, "rendered": 2}
    assert "<think>" not in agent.text(1), "by the template, from the first message on"


def test_requests_of_ids_grow_the_same_tree():
    conversation = Conversation(template_of("chatml"))
    first = conversation.add(RenderedPrompt([5, 6]), completion([7, 8]))
    conversation.add(RenderedPrompt([5, 6, 7, 8, 9]), completion([10, 11], number=1))
    conversation.add(RenderedPrompt([5, 6, 7, 8]), completion([9, 10], number=2))  # goes on at once
    conversation.add(RenderedPrompt([5, 6, 7]), completion([8], number=3))  # not from the end of an answer
    assert [turn.parent for turn in conversation.turns] == [None, first, first, None]
    rows = conversation.rows()
    assert [row.token_ids for row in rows] == [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8]]
    assert [row.num_learnt for row in rows] == [4, 2, 1]


def test_an_unfinished_answer_is_closed_before_the_next_question():
    agent = Agent("chatml")
    agent.ask([user("x")], agent.write("unfinish")[:-1], finish="length")
    agent.ask([*agent.histories[0], user("y")], agent.write("z"))
    (row,) = check_exact(agent)
    assert "unfinish<|im_end|>\n<|im_start|>user\ny" in agent.tokenizer.decode(row.token_ids)
    assert row.num_learnt == len("unfinish") + len("z") + 1, "the end of the cut answer is not learnt"
