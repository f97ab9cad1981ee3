"""What readers see of an episode: roles, texts, calls and their answers, and no more than a page can hold."""

import json

from megarl.agents.transcript import FIRST_MESSAGES, LAST_MESSAGES, MAX_TEXT, transcript


def test_a_conversation_by_hand() -> None:
    call = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "reasoning_content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call1"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert transcript(messages) == [
        {"role": "user", "text": '1+2?\n{"type": "image_url", "image_url": {}}'},
        {
            "role": "assistant",
            "text": "",
            "reasoning": "Let me see.",
            "calls": [{"name": "add", "arguments": '{"a": 1}'}],
        },
        {"role": "tool", "text": "3"},
        {"role": "assistant", "text": "It is 3."},
    ]
    assert transcript([]) == []


def test_a_long_conversation_and_long_texts_lose_their_middles() -> None:
    messages = [{"role": "tool", "content": f"{number} " + "x" * 10 * MAX_TEXT} for number in range(100)]
    found = transcript(messages)
    assert len(found) == FIRST_MESSAGES + 1 + LAST_MESSAGES
    assert found[FIRST_MESSAGES] == {"role": "left out", "text": f"{100 - FIRST_MESSAGES - LAST_MESSAGES} messages"}
    assert found[FIRST_MESSAGES - 1]["text"].startswith(f"{FIRST_MESSAGES - 1} x")
    assert found[FIRST_MESSAGES + 1]["text"].startswith(f"{100 - LAST_MESSAGES} x")
    assert all(len(each["text"]) < MAX_TEXT + 100 for each in found)


def test_what_an_agent_sends_in_another_shape_is_shown_and_raises_nothing() -> None:
    odd = [{"role": "user", "content": {"a": 1}}, {"role": "tool", "content": ["plain", 3]}, {"role": "user"},
           {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]  # fmt: skip
    found = transcript(odd)
    assert [each["text"] for each in found] == ['{"a": 1}', '"plain"\n3', "", ""]
    assert found[3]["calls"] == [{"name": "", "arguments": ""}]
    json.dumps(found)
