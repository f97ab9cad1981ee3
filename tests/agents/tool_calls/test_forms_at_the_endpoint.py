"""Each form through the endpoint: streamed replies carry the calls, and what an agent sends back is its own turn."""

import json

import httpx
import pytest
from agent_endpoint import Scripted, endpoint_of
from tool_call_texts import ADD, SAY, TOOLS, WRITE

from megarl.rollout.protocol import SamplingParams

STYLES = {
    **{"hermes": "qwen3", "glm": "glm4", "kimi_k2": "kimi", "harmony": "gpt_oss"},
    **{name: name for name in WRITE if name not in ("hermes", "glm", "kimi_k2", "harmony")},
}
PARAMS = SamplingParams(max_new_tokens=1000, sampling_seed=3)
QUESTION = {"role": "user", "content": "1 + 2?"}


def data(reply):
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("form", STYLES)
async def test_streams_carry_the_calls_and_the_conversation_goes_on(form):
    alone = form in ("llama3", "harmony")  # whose templates take one call at a time
    calls = [ADD] if alone else [ADD, SAY]
    written = WRITE[form](*calls).removesuffix("<|call|>")  # which is a stop token
    if form == "minimax_m2":  # its template opens the reasoning
        written = f"so\n</think>\n\n{written}"
    server = Scripted(STYLES[form], [written, written, written, "It is 3."])
    async with (
        endpoint_of(server, style=STYLES[form], params=PARAMS, max_tokens=16384) as (endpoint, seen),
        httpx.AsyncClient(timeout=60, base_url=endpoint.url) as http,
    ):
        session = endpoint.open("0-17/0")
        http.headers["Authorization"] = f"Bearer {session.key}"

        async def ask(path, **body):
            reply = await http.post(path, json={"model": "policy", "stream": True, **body})
            assert reply.status_code == 200, reply.text
            return data(reply)

        tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
        events = await ask("/v1/messages", messages=[QUESTION], tools=tools, max_tokens=1000)
        names = [e["content_block"]["name"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
        deltas = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
        assert list(zip(names, map(json.loads, deltas), strict=True)) == calls

        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        (*_, last) = await ask("/v1/responses", input="1 + 2?", tools=tools)
        items = [item for item in last["response"]["output"] if item["type"] == "function_call"]
        assert [(item["name"], json.loads(item["arguments"])) for item in items] == calls

        chunks = await ask("/v1/chat/completions", messages=[QUESTION], tools=TOOLS)
        sent = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        functions = [call["function"] for call in sent]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        if form == "kimi_k2":
            first = 2 * len(calls)
            assert [call["id"] for call in sent] == [f"functions.add:{first}", f"functions.say:{first + 1}"]

        answer = {"role": "assistant", "content": None, "tool_calls": sent}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in sent]
        await ask("/v1/chat/completions", messages=[QUESTION, answer, *results], tools=TOOLS)
        assert session.conversation.counts == {"appended": 1, "rendered": 3}
        asked, turn = seen[0][-1]["input_ids"], session.conversation.turns[2]
        assert asked[: turn.end] == [*seen[0][-2]["input_ids"], *turn.completion.token_ids]
        assert "3" in server.tokenizer.decode(asked[turn.end :])
        assert session.counts == {"tool_calls": 3 * len(calls), "malformed_tool_calls": 0}
