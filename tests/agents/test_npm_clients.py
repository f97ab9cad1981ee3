"""Stock clients and programs from npm, unchanged: equal conversations leave equal rows, and every token is recorded."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from agent_endpoint import CALL, THOUGHT, Scripted, chat, check_exact, endpoint_of, speaking
from readme_blocks import files

from megarl.agents.process import variables
from megarl.rollout.protocol import SamplingParams

pytestmark = pytest.mark.agents

CLIENTS = Path(__file__).parent / "clients"
PACKAGES = Path(os.environ["MEGARL_NPM_AGENTS"]) / "node_modules"
TEXTS = [THOUGHT + CALL, THOUGHT + "And 4." + CALL.replace('12, "b": 3', '15, "b": 4'), THOUGHT + "It is 19."]
FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
WAYS = [
    ("with_ai", "anthropic"),
    ("with_ai", "anthropic_streamed"),
    ("with_ai", "openai"),
    ("with_ai", "openai_chat"),
    ("with_ai", "openai_chat_streamed"),
    ("with_ai", "openai_compatible"),
    ("with_ai", "openai_compatible_streamed"),
    ("with_ai", "openai_streamed"),
    ("with_anthropic", "streamed"),
    ("with_anthropic", "whole"),
    ("with_openai", "chat"),
    ("with_openai", "chat_streamed"),
    ("with_openai", "responses"),
    ("with_openai", "responses_streamed"),
]


PACKAGE_OF = {"with_ai": "ai", "with_anthropic": "@anthropic-ai/sdk", "with_openai": "openai"}


def of_package(name):
    version = json.loads((PACKAGES / name / "package.json").read_text())["version"]
    return {"client": f"npm {name}", "version": version}


async def ended(program, *words, given=b"", **options):
    """What a program printed that got `given` as its input."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(program, *words, stdin=pipe, stdout=pipe, stderr=pipe, **options)
    said, errors = await asyncio.wait_for(process.communicate(given), 240)
    assert process.returncode == 0, (said + errors).decode()
    return said.decode()


async def rows_by_hand():
    """Of the same conversation in requests that no client wrote."""
    async with speaking(*TEXTS) as (ask, session, _, seen):
        messages = [{"role": "user", "content": "12 + 3 + 4?"}]
        for result in ("15", "19", None):
            reply = await ask("/v1/chat/completions", chat(messages, tools=TOOLS))
            (choice,) = reply.json()["choices"]
            messages.append(choice["message"])
            for call in choice["message"].get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return check_exact(session, seen)


@pytest.mark.parametrize(("client", "way"), WAYS)
async def test_a_loop_with_a_tool_leaves_the_rows_of_plain_requests(client, way, tmp_path, tell):
    tell(**of_package(PACKAGE_OF[client]), way=way)
    for script in CLIENTS.glob("*.mjs"):
        shutil.copy(script, tmp_path)
    (tmp_path / "node_modules").symlink_to(PACKAGES)  # where Node.js looks for packages
    async with endpoint_of(Scripted("qwen3", TEXTS)) as (endpoint, seen):
        session = endpoint.open("0-17/0")
        said = await ended(PACKAGES / ".bin/node", tmp_path / f"{client}.mjs", endpoint.url, session.key, way)
        assert said == "It is 19.\n"
        rows = check_exact(session, seen)
        assert session.num_refused == 0 and session.conversation.counts == {"appended": 2, "rendered": 1}
        tell(turns=3, rows=len(rows))
    assert rows == await rows_by_hand()
    tell(same="yes")


# ---- programs, by the scripts of the documentation, with the variables that an agent's process has

SCRIPTS = files()
PROGRAMS = [
    ("claude.sh", "@anthropic-ai/claude-code", "Bash", "command"),
    ("codex.sh", "@openai/codex", "exec_command", "cmd"),
]


@pytest.mark.parametrize(("script", "package", "tool", "argument"), PROGRAMS)
async def test_a_program_reads_a_file_in_two_turns_of_one_row(script, package, tool, argument, tmp_path, tell):
    tell(**of_package(package), way=script)
    (tmp_path / "note.txt").write_text("the word is plum\n")
    (tmp_path / script).write_text(SCRIPTS[script])
    call = {"name": tool, "arguments": {argument: f"cat {tmp_path}/note.txt"}}
    texts = [f"{THOUGHT}I look.<tool_call>\n{json.dumps(call)}\n</tool_call>", THOUGHT + "It is plum."]
    params = SamplingParams(max_new_tokens=1000, sampling_seed=3)
    async with endpoint_of(Scripted("qwen3", texts), params=params, max_tokens=200_000) as (endpoint, seen):
        session = endpoint.open("0-17/0")
        own = {"PATH": f"{PACKAGES / '.bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        environment = own | variables(endpoint.url_of(session), session.key, "policy")
        question = b"Which word is in the note?"
        said = await ended("bash", script, given=question, cwd=tmp_path, env=environment)
        assert "It is plum." in said
        (row,) = check_exact(session, seen)
        tell(turns=2, rows=1, same="own words", remarks=f"{len(row.token_ids):,} tokens")
        assert session.num_refused == 0 and session.conversation.counts == {"appended": 1, "rendered": 1}
        assert session.counts == {"tool_calls": 1, "malformed_tool_calls": 0}
        first, second = [session.policy.text(body["input_ids"]) for body in seen[0]]
        assert first.count(question.decode()) == 1 and "the word is plum" in second.removeprefix(first)
        assert {path.name for path in tmp_path.iterdir()} == {"note.txt", script}
