"""What requests carry beside a conversation, in all APIs: served, served after sampling, replaced, or refused."""

from types import SimpleNamespace

import pytest
from agent_endpoint import CALL, FUNCTION, QUESTION, THOUGHT, TOKEN, TOOLS, chat, check_exact, speaking
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megarl.agents.answer import Answer
from megarl.agents.chat_completions import write
from megarl.agents.fields import FIELDS
from megarl.agents.session import ChatReply
from megarl.samples.sample import Completion

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS_OF = {
    CHAT: TOOLS,
    RESPONSES: [{"type": "function", **FUNCTION}],
    MESSAGES: [{"name": "add", "input_schema": FUNCTION["parameters"]}],
}


def body_of(path, **fields):
    """A question in the form of an API."""
    if path == RESPONSES:
        return {"model": "policy", "input": "12 + 3?", **fields}
    return chat(max_tokens=200, **fields)


def parts_of(path, reply):
    """The text and the names of the calls of an answer, and how it ended."""
    if path == CHAT:
        (choice,) = reply["choices"]
        calls = choice["message"].get("tool_calls", [])
        return choice["message"]["content"] or "", [c["function"]["name"] for c in calls], choice["finish_reason"]
    if path == MESSAGES:
        texts = "".join(block.get("text", "") for block in reply["content"])
        return texts, [b["name"] for b in reply["content"] if b["type"] == "tool_use"], reply["stop_reason"]
    texts = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(texts), [i["name"] for i in reply["output"] if i["type"] == "function_call"], reply["status"]


SERVED = [
    (CHAT, {"reasoning_effort": "none", "verbosity": "low", "modalities": ["text"], "metadata": {"a": "b"}}),
    (CHAT, {"thinking": {"type": "enabled"}, "chat_template_kwargs": {}, "prediction": {"type": "content"}}),
    (RESPONSES, {"reasoning": {"summary": "auto"}, "client_metadata": {"x": "y"}, "text": {"verbosity": "low"}}),
    (RESPONSES, {"truncation": "auto", "include": ["reasoning.encrypted_content"], "store": False}),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "mcp_servers": []}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
]


@pytest.mark.parametrize(("path", "fields"), SERVED)
async def test_what_changes_nothing_of_the_policy_is_served_without_a_word(path, fields, caplog):
    async with speaking("hi") as (ask, session, _, seen):
        reply = await ask(path, body_of(path, **fields))
        assert reply.status_code == 200, reply.text
        assert parts_of(path, reply.json())[0] == "hi" and not caplog.text
        assert seen[0][0]["sampling_params"]["temperature"] == 1.0
        check_exact(session, seen)


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [(CHAT, {"stop": ["Observation:", "END"]}, "stop"), (MESSAGES, {"stop_sequences": ["END"]}, "stop_sequence")],
)
async def test_the_agent_reads_an_answer_up_to_its_stop_and_all_of_it_is_recorded(path, fields, end, caplog):
    text = "<think>\nEND here?\n</think>\n\nyes END no Observation: x"
    async with speaking(text, "more") as (ask, session, _, seen):
        reply = (await ask(path, body_of(path, **fields))).json()
        assert parts_of(path, reply) == ("yes ", [], end)
        assert reply.get("stop_sequence") in (None, "END")
        (turn,) = session.conversation.turns
        assert session.policy.text(turn.completion.token_ids).startswith(text)
        messages = [*QUESTION, {"role": "assistant", "content": "yes "}, {"role": "user", "content": "go on"}]
        await ask(path, {**body_of(path, **fields), "messages": messages})
        (row,) = check_exact(session, seen)
        assert len(row.learnt) == 2, "the history is what was sampled"
        assert caplog.text.count("the agent reads the answer up to it") == 1


async def test_a_text_of_completions_ends_at_its_stop():
    async with speaking("one two") as (ask, session, _, _):
        reply = (await ask("/v1/completions", {"model": "policy", "prompt": ["hello"], "stop": " t"})).json()
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("one", "stop")
        assert session.policy.text(session.conversation.turns[0].completion.token_ids).startswith("one two")
        reply = await ask("/v1/completions", {"model": "policy", "prompt": ["a", "b"]})
        assert reply.json()["error"]["message"].startswith("prompt=['a', 'b']: expected one text")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"parallel_tool_calls": False}),
        (RESPONSES, {"parallel_tool_calls": False}),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
async def test_the_agent_reads_the_first_of_two_calls_where_it_wants_one(path, fields):
    async with speaking(CALL + CALL.replace("12", "13")) as (ask, session, _, seen):
        reply = await ask(path, body_of(path, tools=TOOLS_OF[path], **fields))
        assert parts_of(path, reply.json())[1] == ["add"]
        assert session.policy.text(session.conversation.turns[0].completion.token_ids).count("<tool_call>") == 2
        both = await ask(path, body_of(path, tools=TOOLS_OF[path]))
        assert parts_of(path, both.json())[1] == ["add", "add"]
        check_exact(session, seen)


NOT_ENFORCED = [
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}),
    (MESSAGES, {"tool_choice": {"type": "any"}}),
    (MESSAGES, {"output_config": {"effort": "low", "format": {"type": "json_schema"}}}),
]


@pytest.mark.parametrize(("path", "fields"), NOT_ENFORCED)
async def test_a_form_that_is_wanted_is_not_enforced_which_is_said_once(path, fields, caplog):
    async with speaking("free") as (ask, _, _, _):
        for _ in range(2):
            reply = await ask(path, body_of(path, tools=TOOLS_OF[path], **fields))
            assert parts_of(path, reply.json())[0] == "free"
        assert caplog.text.count("the model has to learn it") == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_tools_of_a_provider_are_left_out_which_is_said_once(path, caplog):
    others = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "code_interpreter"}]
    async with speaking(CALL, "hi") as (ask, session, _, seen):
        reply = await ask(path, body_of(path, tools=[*others, *TOOLS_OF[path]]))
        assert parts_of(path, reply.json())[1] == ["add"]
        assert parts_of(path, (await ask(path, body_of(path, tools=others))).json())[0] == "hi"
        assert caplog.text.count("['code_interpreter', 'web_search_20250305']: they run at a provider") == 1
        asked = [session.policy.text(body["input_ids"]) for body in seen[0]]
        assert "web_search" not in asked[0] and "add" in asked[0] and "<tools>" not in asked[1]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_field_of_another_api_in_a_tool_is_not_looked_at(path):
    async with speaking(CALL) as (ask, _, _, _):
        for odd in (None, "add", {"name": 5}):
            tools = [{**tool, "function": odd} for tool in TOOLS_OF[path]]
            assert parts_of(path, (await ask(path, body_of(path, tools=tools))).json())[1] == ["add"]


async def test_functions_of_a_namespace_are_called_by_a_longer_name_in_the_prompt_alone():
    """As Codex sends the tools of MCP."""
    one, two = CALL.replace("add", "sums__add"), CALL.replace("add", "sub")
    async with speaking(one + two, "It is 15.") as (ask, session, _, seen):
        functions = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
        spaces = [{"type": "namespace", "name": "sums", "tools": functions}, {"type": "namespace"}]
        body = body_of(RESPONSES, tools=[*spaces, {"type": "function", **FUNCTION, "name": "sub"}])
        items = (await ask(RESPONSES, body)).json()["output"]
        assert [(item["name"], item.get("namespace")) for item in items] == [("add", "sums"), ("sub", None)]
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "15"} for item in items]
        body["input"] = [{"role": "user", "content": body["input"]}, *items, *results]
        assert (await ask(RESPONSES, body)).json()["output"][0]["content"][0]["text"] == "It is 15."
        assert session.conversation.counts == {"appended": 1, "rendered": 1}
        (row,) = check_exact(session, seen)
        assert '"name": "sums__add"' in session.policy.text(row.token_ids)
        body["tools"] = [{"type": "namespace", "name": "sums", "tools": ["add"]}]
        assert "tools has 'add'" in (await ask(RESPONSES, body)).json()["error"]["message"]


async def test_a_tool_that_is_loaded_later_stands_in_the_result_that_names_it():
    """As Claude Code sends most of its tools: it searches for them with another one."""
    find = {"name": "find", "input_schema": {"type": "object"}}
    late = {"name": "add", "description": "Adds late.", "input_schema": FUNCTION["parameters"], "defer_loading": True}
    search = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    async with speaking(search, CALL, "It is 15.") as (ask, session, _, seen):
        body = body_of(MESSAGES, tools=[find, late])
        messages = body["messages"] = [*body["messages"]]
        for result in ([{"type": "tool_reference", "tool_name": "add"}], "15"):
            reply = (await ask(MESSAGES, body)).json()
            (call,) = [block for block in reply["content"] if block["type"] == "tool_use"]
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [block]}]
        assert parts_of(MESSAGES, (await ask(MESSAGES, body)).json())[0] == "It is 15."
        assert session.conversation.counts == {"appended": 2, "rendered": 1}
        check_exact(session, seen)
        first, second, _ = [session.policy.text(sent["input_ids"]) for sent in seen[0]]
        assert "Adds late." not in first and "Adds late." in second.removeprefix(first)
        body["tools"] = [find]
        refused = (await ask(MESSAGES, body)).json()["error"]["message"]
        assert refused == "messages[2] refers to the tool 'add': expected one of ['find']"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_the_runs_values_replace_what_agent_ignore_names(path, caplog):
    theirs = {"temperature": 0, "top_p": 0.5, "seed": 7, "model": "gpt-4o"}
    async with speaking("hi", ignore=tuple(theirs)) as (ask, _, _, seen):
        for _ in range(2):
            reply = await ask(path, body_of(path) | theirs)
            assert reply.status_code == 200 and reply.json()["model"] == "policy"
        assert seen[0][0]["sampling_params"]["temperature"] == 1.0
        for said in ("temperature=0: the run samples with temperature=1.0", "model='gpt-4o': this endpoint serves"):
            assert caplog.text.count(said) == 1
        refused = await ask(path, body_of(path, min_p=0.5))
        assert "agent.ignore=[min_p] replaces it" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            RESPONSES,
            {"background": True},
            "background=True: this endpoint does not serve it; expected no such field or F",
        ),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include=["),
        (RESPONSES, {"max_tokens": 5}, "max_tokens=5: this endpoint does not serve it"),
        (MESSAGES, {"context_management": {"edits": [{"type": "compact"}]}}, "context_management={'edits'"),
        (MESSAGES, {"tool_choice": "auto"}, "tool_choice='auto': expected an object with a type"),
        (MESSAGES, {"tools": [{"name": "add"}]}, "tools has {'name': 'add'}: expected a tool of the type 'custom'"),
        (MESSAGES, {"temperature": 0.5}, "temperature=0.5: the run samples with temperature=1.0"),
    ],
)
async def test_all_else_is_refused_with_one_sentence(path, fields, message):
    async with speaking("never") as (ask, session, _, seen):
        reply = await ask(path, body_of(path, **fields))
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(message), reply.text
        assert not seen[0] and session.num_refused == 1


async def test_the_runs_own_template_arguments_may_be_sent(monkeypatch):
    async with speaking("hi") as (ask, session, _, _):
        monkeypatch.setitem(session.policy.template.settings, "enable_thinking", False)
        for value, status in ((False, 200), (True, 400)):
            fields = {"chat_template_kwargs": {"enable_thinking": value}}
            assert (await ask(CHAT, body_of(CHAT, **fields))).status_code == status


async def test_a_thread_is_refused_as_its_client_expects():
    async with speaking("hi") as (ask, session, _, _):
        reply = await ask(MESSAGES, body_of(MESSAGES, thread={"type": "create"}))
        assert reply.status_code == 400 and session.num_refused == 0, "it asks again without"
        assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_a_system_message_may_stand_in_the_middle_of_anthropics_messages():
    async with speaking("hi") as (ask, session, _, seen):
        messages = [*QUESTION, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}, *QUESTION]
        assert (await ask(MESSAGES, {**body_of(MESSAGES), "messages": messages})).status_code == 200
        assert "system\nbe brief" in session.policy.text(seen[0][0]["input_ids"])


def test_every_field_has_a_rule_and_a_sentence():
    assert {field.rule for field in FIELDS.values()} == {"read", "served", "after", "run", "none"}
    assert all(field.does for field in FIELDS.values())
    assert {"stop", "seed", "model", "thinking", "thread"} <= FIELDS.keys()


async def test_a_thought_has_a_signature_whole_and_as_a_stream():
    async with speaking(THOUGHT + "hi") as (ask, _, _, _):
        thought = (await ask(MESSAGES, body_of(MESSAGES))).json()["content"][0]
        assert thought == {"type": "thinking", "thinking": "so", "signature": "turn-0"}
        stream = await ask(MESSAGES, body_of(MESSAGES, stream=True))
        assert '"delta": {"type": "signature_delta", "signature": "turn-1"}' in stream.text


async def test_items_and_responses_are_found_by_their_ids():
    """Vercel's clients name items by their ids, OpenAI's agents the response before."""
    async with speaking(THOUGHT + "Let me see." + CALL, "It is 15.", "Yes.", "No.") as (ask, session, _, seen):
        first = (await ask(RESPONSES, body_of(RESPONSES, tools=TOOLS_OF[RESPONSES]))).json()
        names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "15"}
        items = [{"role": "user", "content": "12 + 3?"}, *names, result]
        body = body_of(RESPONSES, tools=TOOLS_OF[RESPONSES]) | {"input": items}
        second = (await ask(RESPONSES, body)).json()
        body |= {"input": "sure?", "previous_response_id": second["id"]}
        third = (await ask(RESPONSES, body)).json()
        assert third["previous_response_id"] == second["id"]
        await ask(RESPONSES, body | {"previous_response_id": third["id"]})
        (row,) = check_exact(session, seen)
        assert len(row.learnt) == 4 and session.conversation.counts == {"appended": 3, "rendered": 1}
        for fields, where in (
            ({"previous_response_id": "resp_x"}, "previous_"),
            ({"input": [{"id": "x"}]}, "input[0]"),
        ):
            reply = await ask(RESPONSES, body_of(RESPONSES) | fields)
            assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(where)
        other = await ask(RESPONSES, body, key=(await opened(ask)))
        assert other.json()["error"]["code"] == "previous_response_not_found", "of another episode"


async def test_items_that_a_client_sends_again_and_again_are_kept_once():
    async with speaking("hi") as (ask, session, _, _):
        items = []
        for at in range(8):
            items.append({"role": "user", "content": f"{at}?"})
            items += (await ask(RESPONSES, body_of(RESPONSES, input=items))).json()["output"]
        kept = [item for held in session.items.values() for item in held]
        assert len(kept) > 80 and len({id(item) for item in kept}) == 16
        reply = (await ask(RESPONSES, body_of(RESPONSES, input="and?", previous_response_id=last_of(session)))).json()
        assert session.conversation.counts == {"appended": 8, "rendered": 1} and reply["status"] == "completed"


def last_of(session):
    return [name for name in session.items if name.startswith("resp_")][-1]


async def opened(ask):
    return (await ask("/sessions", {"name": "other"}, key=TOKEN)).json()["key"]


async def test_the_order_in_which_a_client_writes_a_tool_changes_no_prompt():
    async with speaking("hi") as (ask, _, _, seen):
        for path, tools in TOOLS_OF.items():
            functions = [tool.get("function", tool) | {"description": "Adds."} for tool in tools]
            for given in (functions[0], dict(reversed(functions[0].items()))):
                tool = {"function": given, "type": "function"} if path == CHAT else given
                assert (await ask(path, body_of(path, tools=[tool]))).status_code == 200
        assert len(seen[0]) == 6 and len({tuple(body["input_ids"]) for body in seen[0]}) == 1


async def test_models_are_shown_in_the_forms_of_both_clients():
    async with speaking("hi") as (ask, _, _, _):
        listed = await ask("/v1/models", method="GET")
        (model,) = listed.json()["data"]
        assert (model["type"], model["display_name"], listed.json()["has_more"]) == ("model", "policy", False)
        assert (await ask("/v1/models/policy", method="GET")).json() == model
        other = await ask("/v1/models/gpt-4o", method="GET")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        numbers = {listed.headers["x-request-id"], other.headers["x-request-id"], other.headers["request-id"]}
        assert len(numbers) == 2 and all(number.startswith("req_") for number in numbers)


async def test_bytes_of_tokens_that_are_parts_of_a_character_join_to_it():
    async with speaking("é!") as (ask, _, _, _):
        choice = (await ask(CHAT, body_of(CHAT, logprobs=True))).json()["choices"][0]
        parts = [entry["bytes"] for entry in choice["logprobs"]["content"]]
        assert len(parts) == 3 and bytes(byte for part in parts for byte in part).decode() == "é!"


def test_tokens_of_a_sentencepiece_tokenizer_join_to_the_text():
    """Its decoder strips the first space of what it gets: here of each token."""
    vocab = {token: at for at, token in enumerate(["<unk>", "\u2581", "\u2581hello", "\u2581world", "!"])}
    inside = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    inside.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inside, unk_token="<unk>")
    policy = SimpleNamespace(name="policy", tokenizer=tokenizer, text=tokenizer.decode)
    completion = Completion([2, 1, 3, 4], [-1.0] * 4, "length", ())
    reply = write(policy, {"logprobs": True}, [ChatReply(0, [2], completion, Answer(""), {})])
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["hello", " ", " world", "!"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert joined == tokenizer.decode([2, 1, 3, 4]) == "hello  world!"


async def test_fields_of_requests_for_ids_stand_where_they_are_read():
    async with speaking("hi") as (ask, session, _, _):
        for fields in ({"max_tokens": 5}, {"sampling_params": {"token_ids": [5]}}, {"model": "gpt-4o"}):
            reply = await ask("/inference/v1/generate", {"token_ids": [5], **fields})
            assert reply.status_code in (400, 404) and not session.conversation.turns
