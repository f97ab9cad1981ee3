"""Stock clients in environments of their own: they notice nothing, and every token that they got is recorded."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from agent_endpoint import CALL, THOUGHT, Scripted, endpoint_of

from benchmarks.common.machine import version_in
from megarl.agents.process import variables
from megarl.rollout.protocol import SamplingParams

pytestmark = pytest.mark.agents

CLIENTS = Path(__file__).parent / "clients"
# A proxy that is not there: what a client asks of the world fails at once, but litellm would try again for its prices.
NOWHERE = "http://127.0.0.1:9"
ALONE = {
    "HTTPS_PROXY": NOWHERE,
    "HTTP_PROXY": NOWHERE,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PATH": os.environ["PATH"],
}


def drive(script, texts, *words):
    """What the script printed, and its session; `texts`: what the model writes."""
    python, _ = python_and_package(script)

    async def test():
        params = SamplingParams(max_new_tokens=1024, sampling_seed=3)
        async with endpoint_of(Scripted("qwen3", texts), params=params, max_tokens=1 << 15) as (endpoint, seen):
            session = endpoint.open("0-17/0")
            process = await asyncio.create_subprocess_exec(
                python,
                str(CLIENTS / script),
                *words,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=ALONE | {"HOME": os.getcwd()} | variables(endpoint.url, session.key, "policy"),
            )
            said, complained = await asyncio.wait_for(process.communicate(), 240)
            print(complained.decode())
            assert process.returncode == 0, complained.decode().strip().rpartition("\n")[2]
            return said.decode(), session, seen[0]

    said, session, bodies = asyncio.run(test())
    conversation = session.conversation
    asked = [conversation.token_ids(i)[: turn.start] for i, turn in enumerate(conversation.turns)]
    assert sorted(asked) == sorted(body["input_ids"] for body in bodies)
    learnt = [span.turn for row in conversation.rows() for span in row.learnt]
    assert sorted(learnt) == list(range(len(asked)))
    return said, session


def python_and_package(script):
    """Of the client: `loop_openai_agents.py` is of openai-agents."""
    package = script.partition("_")[2].removesuffix(".py").replace("_", "-")
    return os.environ["MEGARL_INSTRUCTOR_PYTHON" if package == "instructor" else "MEGARL_AGENTS_PYTHON"], package


@pytest.fixture
def driven(tell):
    """As `drive`, and the page is told of it: `same`, whether its rows are those of openai."""

    def drive_and_tell(script, texts, *words, same, remarks=""):
        python, package = python_and_package(script)
        tell(client=package, version=version_in(python, package), way=", ".join(words))
        said, session = drive(script, texts, *words)
        conversation = session.conversation
        tell(turns=len(conversation.turns), rows=len(conversation.rows()), same=same, remarks=remarks)
        return said, conversation

    return drive_and_tell


# ---- the one conversation of clients/conversation.py


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def commands(form):
    return [form.format(c) for c in ("echo $((12 + 3))", "echo $((15 + 3))", f"echo {SUBMIT}; echo It is 18.")]


def fields(**values):
    """An answer in dspy's form."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()) + "\n\n[[ ## completed ## ]]"


def react(tool, **arguments):
    return fields(next_thought="so", next_tool_name=tool, next_tool_args=json.dumps(arguments))


SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ADDED = [THOUGHT + call("add", a=12, b=3), call("add", a=15, b=3)]
CALLS = [*ADDED, THOUGHT + "It is 18."]
# The ways of a client whose words are all given: each leaves the same row.
SAME = [
    ("anthropic", "messages"),
    ("anthropic", "tool_runner"),
    ("langgraph", "chat"),
    ("langgraph", "responses"),
    ("langgraph", "stream"),
    ("litellm", "anthropic"),
    ("litellm", "openai"),
    ("openai", "chat"),
    ("openai", "responses"),
    ("openai", "stream"),
    ("openai_agents", "chat"),
    ("openai_agents", "responses"),
    ("pydantic_ai_slim", "anthropic"),
    ("pydantic_ai_slim", "openai-chat"),
    ("pydantic_ai_slim", "openai-responses"),
]
# Those that add words of their own: what the model writes, how many rows it is, and why.
HISTORY_AS_TEXT = "writes its calls into the history as text"
OWN_WORDS = {
    ("ag2", "chat"): (CALLS, 1, ""),
    ("ag2", "responses"): (CALLS, 1, ""),
    ("dspy", "react"): (
        [
            react("add", a=12, b=3),
            react("add", a=15, b=3),
            react("finish"),
            fields(reasoning="so", answer="It is 18."),
        ],
        4,
        "each request is a new question that tells what happened",
    ),
    ("mini_swe_agent", "text"): (commands("THOUGHT: so\n\n```mswea_bash_command\n{}\n```"), 1, ""),
    ("mini_swe_agent", "tools"): ([call("bash", command=c) for c in commands("{}")], 1, ""),
    ("smolagents", "code"): (
        [f"<code>\n{line}\n</code>" for line in ("x = add(12, 3)", "add(15, 3)", "final_answer('It is 18.')")],
        3,
        HISTORY_AS_TEXT,
    ),
    ("smolagents", "tools"): (
        [ADDED[0] + "\nObservation: 99", ADDED[1], call("final_answer", answer="It is 18.")],  # it stops before 99
        3,
        HISTORY_AS_TEXT,
    ),
}


def learnt(conversation):
    return [(row.token_ids, row.learnt, row.log_probs) for row in conversation.rows()]


def loop(driven, client, way, texts, **told):
    said, conversation = driven(f"loop_{client}.py", texts, way, **told)
    assert said.split("\n")[-2] == "It is 18."
    assert len(conversation.turns) == len(texts)
    return conversation


@pytest.fixture(scope="module")
def row_of_openai():
    return learnt(drive("loop_openai.py", CALLS, "chat")[1].conversation)


@pytest.mark.parametrize(("client", "way"), SAME)
def test_clients_with_one_conversation_leave_one_row(client, way, driven, row_of_openai):
    conversation = loop(driven, client, way, CALLS, same="yes")
    assert learnt(conversation) == row_of_openai
    assert len(row_of_openai) == 1


@pytest.mark.parametrize(("client", "way"), sorted(OWN_WORDS))
def test_clients_with_words_of_their_own(client, way, driven):
    texts, num_rows, why = OWN_WORDS[client, way]
    conversation = loop(driven, client, way, texts, same="own words", remarks=why)
    assert len(conversation.rows()) == num_rows


def test_smolagents_calculates_and_posts_its_reward():
    texts = [call("multiply", a=120, b=300), call("final_answer", answer="36000")]
    _, session = drive("smolagents_calculator.py", texts, "120*300=", "36000")
    assert (session.reward, len(session.conversation.rows())) == (1.0, 2)


# ---- results of a form, which is not enforced

RESULT, RESULT_CALL = '{"total": 15}', call("Sum", total=15)
EACH_ITS_OWN = "each result is a conversation of its own"
STRUCTURED = {
    "instructor": {
        "ANTHROPIC_JSON": RESULT,
        "ANTHROPIC_PARALLEL_TOOLS": RESULT_CALL,
        "ANTHROPIC_REASONING_TOOLS": RESULT_CALL,
        "ANTHROPIC_TOOLS": RESULT_CALL,
        "FUNCTIONS": RESULT_CALL,
        "JSON": RESULT,
        "JSON_O1": RESULT,
        "JSON_SCHEMA": RESULT,
        "MD_JSON": f"```json\n{RESULT}\n```",
        "PARALLEL_TOOLS": RESULT_CALL,
        "RESPONSES_TOOLS": RESULT_CALL,
        "RESPONSES_TOOLS_WITH_INBUILT_TOOLS": RESULT_CALL,
        "TOOLS": RESULT_CALL,
        "TOOLS_STRICT": RESULT_CALL,
    },
    "langchain": {
        "agent_provider": RESULT,
        "agent_tool": RESULT_CALL,
        "function_calling": RESULT_CALL,
        "json_mode": RESULT,
        "json_schema": RESULT,
    },
    "pydantic_ai_slim": {
        "anthropic-prompted": RESULT,
        "anthropic-tool": call("final_result", total=15),
        "openai-chat-native": RESULT,
        "openai-chat-prompted": RESULT,
        "openai-chat-tool": call("final_result", total=15),
        "openai-responses-native": RESULT,
        "openai-responses-tool": call("final_result", total=15),
    },
}


@pytest.mark.parametrize("client", sorted(STRUCTURED))
def test_clients_get_results_of_a_form(client, driven):
    ways = STRUCTURED[client]
    said, conversation = driven(
        f"structured_{client}.py", list(ways.values()), *ways, same="own words", remarks=EACH_ITS_OWN
    )
    assert json.loads(said) == [15] * len(ways)
    assert len(conversation.rows()) == len(conversation.turns) == len(ways)


# ---- more of what the providers' own packages ask


def test_openai():
    texts = [THOUGHT + CALL, THOUGHT + "It is 15.", "one", "two", "three", "hello", "hello again", "text"]
    said, session = drive("with_openai.py", texts)
    said = json.loads(said)
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
    turns = session.conversation.turns
    assert [turn.parent for turn in turns] == [None, 0, 1, 1, 1, None, None, None]
    assert session.conversation.counts == {"appended": 3, "rendered": 3}


def test_openai_agents():
    said, session = drive("with_openai_agents.py", [THOUGHT + CALL, THOUGHT + "It is 15."] * 4)
    assert json.loads(said) == ["It is 15."] * 4
    assert [turn.parent for turn in session.conversation.turns] == [None, 0, None, 2, None, 4, None, 6]
    assert session.conversation.counts == {"appended": 4, "rendered": 4}


def test_anthropic():
    said, session = drive("with_anthropic.py", [THOUGHT + "Let me see." + CALL, "It is 15."])
    said = json.loads(said)
    assert said.pop("refused")[::2] == [400, "BadRequestError"]
    assert said == {
        "input": {"a": 12, "b": 3},
        "stop": ["tool_use", "end_turn"],
        "texts": ["It is 15."],
        "counted": 0,
        "usage": len(session.conversation.turns[1].completion.token_ids),
    }
    assert session.conversation.counts == {"appended": 1, "rendered": 1}
