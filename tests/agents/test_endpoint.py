"""The endpoint over raw HTTP: what it says, what it records, what it refuses."""

import asyncio
import json
import re
from dataclasses import replace

import httpx
import pytest
from agent_endpoint import (
    CALL,
    FUNCTION,
    QUESTION,
    THOUGHT,
    TOKEN,
    TOOLS,
    Scripted,
    chat,
    check_exact,
    endpoint_of,
    speaking,
)
from chat_templates import tokenizer_of, with_bos
from fake_servers import broken

from megarl.rollout.continuation import generate_completion
from megarl.rollout.protocol import SamplingParams


async def test_a_conversation_with_tools_goes_on_token_for_token():
    texts = [THOUGHT + CALL, THOUGHT + "It is 15.", "two", "three"]
    async with speaking(*texts) as (ask, session, endpoint, seen):
        first = (await ask("/v1/chat/completions", chat(tools=TOOLS))).json()
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == (None, "so")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 12, "b": 3}'}
        (turn,) = session.conversation.turns
        size = len(turn.completion.token_ids)
        assert first["usage"] == {"prompt_tokens": turn.start, "completion_tokens": size, "total_tokens": turn.end}
        call["function"]["arguments"] = '{"b":3,"a":12}'
        messages = [
            *QUESTION,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "15"}]},
        ]
        second = (await ask("/v1/chat/completions", chat(messages, tools=TOOLS))).json()
        assert second["choices"][0]["message"]["content"] == "It is 15."
        messages += [{"role": "assistant", "content": "It is 15."}, {"role": "user", "content": "Thanks"}]
        both = (await ask("/v1/chat/completions", chat(messages, tools=TOOLS, n=2))).json()["choices"]
        assert [c["message"]["content"] for c in both] == ["two", "three"] and [c["index"] for c in both] == [0, 1]
        rows = check_exact(session, seen)
        assert [len(row.learnt) for row in rows] == [3, 1]
        assert session.conversation.counts == {"appended": 2, "rendered": 1}
        assert {span.version for row in rows for span in row.versions} == {7}
        seeds = [body["sampling_params"]["sampling_seed"] for body in seen[0]]
        assert len(set(seeds)) == 4, "each answer has its own seed"


async def test_ids_log_probs_and_versions_are_there_for_who_asks():
    async with speaking("hi 5") as (ask, session, _, seen):
        plain = (await ask("/v1/chat/completions", chat())).json()
        assert "token_ids" not in plain["choices"][0] and plain["choices"][0]["logprobs"] is None
        full = (await ask("/v1/chat/completions", chat(logprobs=True, return_token_ids=True))).json()
        turn = session.conversation.turns[1].completion
        assert full["prompt_token_ids"] == seen[0][1]["input_ids"]
        assert full["choices"][0]["token_ids"] == turn.token_ids
        assert full["choices"][0]["weight_versions"] == [{"version": 7, "start": 0, "end": len(turn.token_ids)}]
        content = full["choices"][0]["logprobs"]["content"]
        assert [(c["token"], c["logprob"]) for c in content] == list(zip("hi 5", turn.log_probs[:-1], strict=True))
        text = {"model": "policy", "prompt": "a"}
        for path, body in (("/v1/chat/completions", chat(n=2)), ("/v1/completions", text)):
            stream = (await ask(path, body | {"stream": True, "return_token_ids": True})).text
            sent = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
            (ids,) = [chunk["prompt_token_ids"] for chunk in sent if "prompt_token_ids" in chunk]
            assert ids == seen[0][-1]["input_ids"], "as in the whole answer"


def events(*values):
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values) + b"data: [DONE]\n\n"


async def test_a_stream_is_the_same_reply_byte_for_byte():
    async with speaking(THOUGHT + "Yes. " + CALL) as (ask, session, _, seen):
        body = chat(tools=TOOLS, stream=True, stream_options={"include_usage": True})
        reply = await ask("/v1/chat/completions", body)
        assert reply.headers["content-type"] == "text/event-stream"
        first = json.loads(reply.content.split(b"\n\n")[0].removeprefix(b"data: "))
        head = {"id": first["id"], "created": first["created"], "model": "policy", "object": "chat.completion.chunk"}
        call = {"index": 0, "id": "call00000", "type": "function"}
        call["function"] = {"name": "add", "arguments": '{"a": 12, "b": 3}'}
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "so"}, {"content": "Yes."}]
        deltas.append({"tool_calls": [call]})
        more = {"finish_reason": None, "logprobs": None}
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, **more}]} for delta in deltas]
        last = {"index": 0, "delta": {}, "finish_reason": "tool_calls", "logprobs": None}
        (turn,) = session.conversation.turns
        size = len(turn.completion.token_ids)
        usage = {"prompt_tokens": turn.start, "completion_tokens": size, "total_tokens": turn.end}
        chunks += [{**head, "choices": [last]}, {**head, "choices": [], "usage": usage}]
        assert reply.content == events(*chunks)
        check_exact(session, seen)


async def test_messages_of_anthropics_api_as_a_whole_and_as_a_stream():
    texts = [THOUGHT + "Let me see. " + CALL, "It is 15.", "It is 15."]
    async with speaking(*texts) as (ask, session, _, seen):
        tool = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}
        body = {"model": "policy", "max_tokens": 200, "system": [{"type": "text", "text": "brief"}], "tools": [tool]}
        reply = (await ask("/v1/messages", {**body, "messages": QUESTION})).json()
        assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
        assert reply["content"][2]["input"] == {"a": 12, "b": 3} and reply["stop_reason"] == "tool_use"
        counted = (await ask("/v1/messages/count_tokens", {**body, "messages": QUESTION})).json()
        assert counted["input_tokens"] == reply["usage"]["input_tokens"] == len(seen[0][0]["input_ids"])
        result = {"type": "tool_result", "tool_use_id": reply["content"][2]["id"], "content": "15"}
        messages = [
            *QUESTION,
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [result]},
        ]
        stream = await ask("/v1/messages", {**body, "messages": messages, "stream": True})
        blocks = [block.decode().split("\n") for block in stream.content.split(b"\n\n")[:-1]]
        named = [event.removeprefix("event: ") for event, _ in blocks]
        values = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        of_block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert named == ["message_start", *of_block, "message_delta", "message_stop"]
        assert [value["type"] for value in values] == named
        assert values[2]["delta"] == {"type": "text_delta", "text": "It is 15."}
        assert values[4]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        (row,) = check_exact(session, seen)
        assert len(row.learnt) == 2


async def test_responses_as_a_whole_and_as_a_stream():
    texts = [THOUGHT + "Let me see. " + CALL, THOUGHT + "It is 15."]
    async with speaking(*texts) as (ask, session, _, seen):
        body = {"model": "policy", "instructions": "brief", "tools": [{"type": "function", **FUNCTION, "strict": True}]}
        reply = (await ask("/v1/responses", {**body, "input": "12 + 3?"})).json()
        assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call"]
        call = reply["output"][2]
        assert (reply["status"], call["name"], call["arguments"]) == ("completed", "add", '{"a": 12, "b": 3}')
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "12 + 3?"}]},
            *reply["output"],
            {"type": "function_call_output", "call_id": call["call_id"], "output": "15"},
        ]
        stream = await ask("/v1/responses", {**body, "input": items, "stream": True})
        lines = stream.content.split(b"\n")
        data = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data:")]
        assert [value["sequence_number"] for value in data] == list(range(len(data)))
        kinds = [value["type"].removeprefix("response.") for value in data]
        one = ["output_item.added", "content_part.added", "{}.delta", "{}.done"]
        one += ["content_part.done", "output_item.done"]
        items = [kind.format(name) for name in ("reasoning_text", "output_text") for kind in one]
        assert kinds == ["created", "in_progress", *items, "completed"]
        assert data[-1]["response"]["output"][1]["content"][0]["text"] == "It is 15."
        (row,) = check_exact(session, seen)
        assert len(row.learnt) == 2


async def test_text_and_ids_in_are_the_same_tree():
    async with speaking("one", "two", "three") as (ask, session, endpoint, seen):
        prompt_ids = tokenizer_of("qwen3").encode("hello")
        text = (await ask("/v1/completions", {"model": "policy", "prompt": "hello", "max_tokens": 2})).json()
        assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == ("on", "length")
        assert seen[0][0]["input_ids"] == prompt_ids
        held = prompt_ids + session.conversation.turns[0].completion.token_ids
        body = {
            "token_ids": [*held, 5],
            "sampling_params": {"max_tokens": 9, "temperature": 1.0, "stop_token_ids": [4]},
        }
        reply = (await ask("/inference/v1/generate", body)).json()["choices"][0]
        turn = session.conversation.turns[1].completion
        assert reply["token_ids"] == turn.token_ids
        pairs = zip(turn.token_ids, turn.log_probs, strict=True)
        assert reply["logprobs"]["content"] == [{"token": f"token_id:{i}", "logprob": p} for i, p in pairs]
        assert seen[0][1]["sampling_params"]["stop_token_ids"] == [4]
        stream = await ask("/v1/completions", {"model": "policy", "prompt": [*held, 6], "stream": True})
        assert stream.content.endswith(b"data: [DONE]\n\n") and b'"text": "three"' in stream.content
        assert [len(row.learnt) for row in check_exact(session, seen)] == [2, 1]


async def test_ids_may_be_of_the_models_padding_and_no_more():
    size = len(tokenizer_of("qwen3"))
    async with speaking("one", num_ids=size + 3) as (ask, session, endpoint, seen):
        assert (await ask("/v1/completions", {"model": "policy", "prompt": [5, size + 2]})).status_code == 200
        assert seen[0][0]["input_ids"] == [5, size + 2]
        for body in ({"token_ids": [size + 3]}, {"token_ids": [5], "sampling_params": {"stop_token_ids": [size + 3]}}):
            reply = await ask("/inference/v1/generate", body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (
                400,
                f"{size + 3} is no token id: expected 0 to {size + 2}",
            )


async def test_a_text_that_begins_with_the_beginning_of_text_gets_no_other(monkeypatch):
    async with speaking("one", style="llama3") as (ask, session, endpoint, seen):
        tokenizer = session.policy.tokenizer
        monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", with_bos(tokenizer))
        for text in ("hello", "<bos>hello"):
            assert (await ask("/v1/completions", {"model": "policy", "prompt": text})).status_code == 200
        assert seen[0][0]["input_ids"] == seen[0][1]["input_ids"] == tokenizer.encode("hello")


REFUSED = [
    ({"temperature": 0.7}, "temperature=0.7: the run samples with temperature=1.0"),
    ({"top_p": 0.9}, "top_p=0.9: the run samples with top_p=1.0"),
    ({"top_k": 5}, "top_k=5: the run samples with top_k=-1"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5: it would change what is sampled"),
    ({"frequency_penalty": 1}, "frequency_penalty=1: it would change what is sampled"),
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ({"min_p": 0.1}, "min_p=0.1"),
    ({"logit_bias": {"5": 1}}, "logit_bias="),
    ({"seed": 1}, "seed=1: the run draws a seed for each answer itself"),
    ({"top_logprobs": 5}, "top_logprobs=5: there are log-probs of sampled tokens alone"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs={'enable_thinking': False}"),
    ({"input": "hi"}, "input='hi': this endpoint does not serve it; expected one of ['logprobs', "),
    ({"stop": [5]}, "stop=[5]: expected a text, or a list of texts"),
    ({"tool_choice": "sometimes"}, "tool_choice='sometimes': expected 'auto', 'none', 'required', or a tool"),
    ({"tools": [{"type": "function"}]}, "tools has {'type': 'function'}: expected a tool of the type 'function'"),
    ({"n": 0}, "n=0: expected a whole number >= 1"),
    ({"n": 65}, "n=65: expected at most 64"),
    ({"max_tokens": True}, "max_tokens=True: expected a whole number >= 1"),
    ({"stream": "false"}, "stream='false': expected true or false"),
    ({"messages": "hi"}, "messages='hi': expected a list of messages"),
    ({"messages": []}, "messages: the last one is the assistant's or there is none"),
    ({"messages": [{"role": "assistant", "content": "I"}]}, "messages: the last one is the assistant's"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0] has the role 'boss'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0] has a part of type 'image_ur"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: the prompt has more than 4096"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "the body is no JSON"),
]


async def test_what_would_falsify_log_probs_or_is_not_known_is_refused_with_one_sentence():
    async with speaking("never") as (ask, session, _, seen):
        for fields, message in REFUSED:
            reply = await ask("/v1/chat/completions", {**chat(), **fields})
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["type"] == "invalid_request_error", fields
            assert error["message"].startswith(message), error["message"]
        assert not seen[0] and not session.conversation.turns


async def test_parameters_that_change_nothing_are_taken():
    params = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64)
    async with speaking("hi", params=params) as (ask, _, _, seen):
        same = {"temperature": 0.7, "top_p": 0.9, "top_k": None, "presence_penalty": 0, "logit_bias": {}, "stop": []}
        more = {"user": "me", "metadata": {}, "max_tokens": 9000, "response_format": {"type": "text"}, "seed": None}
        reply = await ask("/v1/chat/completions", chat(**same, **more, tool_choice="auto"))
        assert reply.status_code == 200, reply.text
        sent = seen[0][0]["sampling_params"]
        assert (sent["temperature"], sent["top_p"], sent["max_new_tokens"]) == (0.7, 0.9, 64)


async def test_what_training_samples_with_is_taken_and_unused_where_the_session_has_other_values():
    """As in an evaluation, for an agent that always says the run's temperature."""
    training = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64)
    async with endpoint_of(Scripted("qwen3", ["hi"]), params=training) as (endpoint, (seen,)):
        policy = endpoint._policy
        session = endpoint.open("0-17/0", replace(policy, params=replace(training, temperature=0.0, top_p=1.0)))
        client = httpx.AsyncClient(base_url=endpoint.url_of(session))
        async with client:
            for fields in ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}):
                reply = await client.post("/v1/chat/completions", json={**chat(), **fields})
                assert reply.status_code == 200, reply.text
            reply = await client.post("/v1/chat/completions", json={**chat(), "temperature": 0.8})
            assert reply.json()["error"]["message"].startswith("temperature=0.8: the run samples with")
        assert [body["sampling_params"]["temperature"] for body in seen] == [0.0, 0.0]


async def test_no_error_names_the_key_of_a_path(monkeypatch, caplog):
    def fail(*_):
        raise OSError("no luck")

    async with speaking("hi") as (ask, session, endpoint, _):
        monkeypatch.setattr("megarl.agents.chat_completions.read", fail)
        for path, status in (("/v1/nothing", 404), ("/v1/chat/completions", 500)):
            reply = await ask(f"/s/{session.key}{path}", chat())
            assert reply.status_code == status and session.key not in reply.text
            assert status == 500 or f"POST /s/KEY{path}" in reply.text
    assert "/s/KEY/v1/chat/completions failed" in caplog.text
    assert "/s/KEY" in caplog.text and len(re.findall(r"/s/(?!KEY/)", caplog.text)) == 0


async def test_an_answer_ends_where_the_agent_the_run_or_the_model_ends():
    params = SamplingParams(max_new_tokens=20)
    async with speaking("a" * 99, params=params, max_tokens=60) as (ask, _, endpoint, _):
        for size, fields, expected in (
            (1, {"max_tokens": 5}, 5),
            (1, {"max_completion_tokens": 99}, 20),
            (40, {}, None),
        ):
            session = endpoint.open(f"0-17/{size}")
            body = chat([{"role": "user", "content": "x" * size}], **fields)
            reply = await ask("/v1/chat/completions", body, key=session.key)
            assert reply.json()["choices"][0]["finish_reason"] == "length"
            turn = session.conversation.turns[-1]
            assert len(turn.completion.token_ids) == (expected or 60 - turn.start)


async def test_calls_stay_text_where_the_agent_gave_no_tools_or_the_model_spelled_them_wrongly():
    wrong = '<tool_call>{"name": 5}</tool_call>'
    async with speaking(CALL, CALL, wrong, "<tool_call>{") as (ask, session, _, _):
        for fields, text in (({}, CALL), ({"tools": TOOLS, "tool_choice": "none"}, CALL), ({"tools": TOOLS}, wrong)):
            choice = (await ask("/v1/chat/completions", chat(**fields))).json()["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"
        await ask("/v1/chat/completions", chat(tools=TOOLS))
        assert session.counts["malformed_tool_calls"] == 2


@pytest.mark.parametrize(("path", "form"), [("/v1/chat/completions", "openai"), ("/v1/messages", "anthropic")])
async def test_keys_sessions_paths_and_sizes_are_checked(path, form):
    async with speaking("hi") as (ask, session, endpoint, seen):

        def check(reply, status, message):
            error = reply.json()["error"]
            assert reply.status_code == status and message in error["message"]
            assert ("code" in error) == (form == "openai") and error["type"]

        check(await ask(path, chat(), key="wrong"), 401, "the API key is of no session")
        check(await ask(path, chat(), Authorization="Basic x"), 401, "the API key is of no session")
        check(await ask(path, chat(), key=TOKEN), 401, "the API key is of no session")
        check(await ask(path, {**chat(), "model": "gpt-4o"}), 404, "this endpoint serves 'policy' alone")
        check(await ask(path, method="GET"), 405, "Method Not Allowed")
        check(await ask(path, {**chat(), "user": "x" * (17 << 20)}), 413, "Too Large")
        check(await ask(path, [1]), 400, "no JSON object")
        other = {"Authorization": "", "X-Api-Key": session.key}
        assert (await ask("/v1/models", method="GET", **other)).json()["data"][0]["max_model_len"] == 4096
        endpoint.close(session)
        check(await ask(path, chat()), 410, "session 0-17/0 is closed")
        assert not seen[0]


async def test_sessions_are_opened_read_and_closed_with_the_endpoints_token():
    async with speaking("hi") as (ask, own, endpoint, _):
        assert endpoint.url.startswith("http://127.0.0.1:") and len(own.key) > 40
        for method, path in (("POST", "/sessions"), ("GET", "/sessions/0-17/0"), ("DELETE", "/sessions/0-17/0")):
            assert (await ask(path, {}, method=method)).status_code == 401
        opened = (await ask("/sessions", {"name": "mine"}, key=TOKEN)).json()
        assert opened["base_url"] == endpoint.url + "/v1"
        assert (await ask("/sessions", {"name": "mine"}, key=TOKEN)).status_code == 400
        await ask("/v1/chat/completions", chat(), key=opened["key"])
        assert (await ask("/v1/reward", {"reward": 0.5}, key=opened["key"])).json()["reward"] == 0.5
        assert (await ask("/v1/reward", {"reward": float("inf")}, key=opened["key"])).status_code == 400
        record = (await ask("/sessions/mine", key=TOKEN, method="GET")).json()
        assert (record["reward"], record["rendered"], len(record["turns"])) == (0.5, 1, 1)
        (row,) = record["rows"]
        (span,) = row["learnt"]
        assert row["token_ids"][span["start"] : span["end"]] == record["turns"][0]["token_ids"]
        last = (await ask("/sessions/mine", key=TOKEN, method="DELETE")).json()
        assert last == {**record, "closed": True}
        assert (await ask("/sessions/mine", key=TOKEN, method="GET")).status_code == 410
        assert (await ask("/sessions/none", key=TOKEN, method="GET")).status_code == 404
        assert (await ask("/v1/chat/completions", chat(), key=opened["key"])).status_code == 410
        assert not own.conversation.turns, "sessions do not mix"


async def test_closing_a_session_ends_its_running_request_and_records_nothing():
    server = Scripted("qwen3", ["hi"])
    async with speaking(servers=[server]) as (ask, session, endpoint, _):
        server.hangs = True
        asked = asyncio.create_task(ask("/v1/chat/completions", chat(n=2)))
        await server.waiting.wait()
        endpoint.close(session)
        reply = await asked
        assert reply.status_code == 410 and reply.json()["error"]["code"] == "session_closed"
        await server.cancelled.wait()
        assert not session.conversation.turns


async def test_an_answer_that_ends_as_the_session_is_closed_is_not_recorded(monkeypatch):
    async def written(*args, **options):
        completion = await generate_completion(*args, **options)
        asyncio.get_running_loop().call_soon(endpoint.close, session)  # before anybody else hears of it
        return completion

    async with speaking("hi") as (ask, session, endpoint, _):
        monkeypatch.setattr("megarl.agents.session.generate_completion", written)
        assert (await ask("/v1/chat/completions", chat())).status_code == 410
        assert not session.conversation.turns


async def test_a_session_stays_on_its_server():
    servers = [Scripted("qwen3", ["hi"]) for _ in range(2)]
    async with speaking(servers=servers) as (ask, _, endpoint, seen):
        keys = [endpoint.open(str(i)).key for i in range(4)]
        for i in [0, 1, 2, 3, 1, 0, 3, 2, 2, 3, 0, 1]:
            question = [{"role": "user", "content": f"I am {i}"}]
            assert (await ask("/v1/chat/completions", chat(question), key=keys[i])).status_code == 200
        texts = [{tokenizer_of("qwen3").decode(body["input_ids"]) for body in bodies} for bodies in seen]
        assert not texts[0] & texts[1], "no session was on both servers"
        assert [len(bodies) for bodies in seen] == [6, 6]


async def test_servers_that_fail_are_a_503_and_no_turn():
    async with speaking(servers=[broken]) as (ask, session, _, _):
        reply = await ask("/v1/chat/completions", chat())
        assert reply.status_code == 503 and "2 attempts failed" in reply.json()["error"]["message"]
        assert reply.json()["error"]["type"] == "server_error" and not session.conversation.turns


async def test_history_may_be_rendered():
    async with speaking(THOUGHT + "one", "two", history="rendered") as (ask, session, _, seen):
        await ask("/v1/chat/completions", chat())
        messages = [*QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
        await ask("/v1/chat/completions", chat(messages))
        assert len(check_exact(session, seen)) == 2, "Qwen3's template removed the reasoning"


async def test_reasoning_that_the_prompt_opened_is_recognised():
    texts = ["so\n</think>\n\nYes.", "still thinking"]
    async with speaking(*texts, style="qwen3_thinking") as (ask, _, _, _):
        replies = [(await ask("/v1/chat/completions", chat())).json()["choices"][0]["message"] for _ in texts]
        assert [(m["reasoning_content"], m["content"]) for m in replies] == [("so", "Yes."), ("still thinking", "")]
