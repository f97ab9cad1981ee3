"""Stock clients in an environment of their own: they notice nothing, and every token that they got is recorded."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from agent_endpoint import CALL, Scripted, endpoint_of

pytestmark = pytest.mark.agents

CLIENTS = Path(__file__).parent / "clients"
THOUGHT = "<think>\nso\n</think>\n\n"


def drive(script, texts, base="/v1"):
    """What the script printed, the session, and the bodies that its server got."""

    async def test():
        async with endpoint_of(Scripted("qwen3", texts)) as (endpoint, seen):
            session = endpoint.open("0-17/0")
            process = await asyncio.create_subprocess_exec(
                os.environ["MEGARL_AGENTS_PYTHON"],
                str(CLIENTS / script),
                endpoint.url + base,
                session.key,
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await asyncio.wait_for(process.communicate(), 240)
            assert process.returncode == 0
            return json.loads(said), session, seen[0]

    said, session, bodies = asyncio.run(test())
    conversation = session.conversation
    asked = [conversation.token_ids(i)[: turn.start] for i, turn in enumerate(conversation.turns)]
    assert sorted(asked) == sorted(body["input_ids"] for body in bodies)
    learnt = [span.turn for row in conversation.rows() for span in row.learnt]
    assert sorted(learnt) == list(range(len(asked)))
    return said, conversation


def test_openai():
    texts = [THOUGHT + CALL, THOUGHT + "It is 15.", "one", "two", "three", "hello", "hello again", "text"]
    said, conversation = drive("with_openai.py", texts)
    assert said.pop("refused")[::2] == [400, "BadRequestError"]
    assert {"chunk", "content.delta", "content.done"} <= set(said.pop("events"))
    assert said == {
        "arguments": '{"a": 12, "b": 3}',
        "finish": ["tool_calls", "stop"],
        "text": "It is 15.",
        "usage": 0,
        "both": ["one", "two"],
        "helper": "three",
        "response": "hello",
        "streamed": ["hello again", "hello again"],
        "completion": "tex",
        "models": ["policy"],
    }
    turns = conversation.turns
    assert [turn.parent for turn in turns] == [None, 0, 1, 1, 1, None, None, None]
    assert conversation.counts == {"appended": 3, "rendered": 3}


def test_openai_agents():
    said, conversation = drive("with_openai_agents.py", [THOUGHT + CALL, THOUGHT + "It is 15."] * 4)
    assert said == ["It is 15."] * 4
    assert [turn.parent for turn in conversation.turns] == [None, 0, None, 2, None, 4, None, 6]
    assert conversation.counts == {"appended": 4, "rendered": 4}


def test_anthropic():
    said, conversation = drive("with_anthropic.py", [THOUGHT + "Let me see." + CALL, "It is 15."], base="")
    assert said.pop("refused")[::2] == [400, "BadRequestError"]
    assert said == {
        "input": {"a": 12, "b": 3},
        "stop": ["tool_use", "end_turn"],
        "texts": ["It is 15."],
        "counted": 0,
        "usage": len(conversation.turns[1].completion.token_ids),
    }
    assert conversation.counts == {"appended": 1, "rendered": 1}
