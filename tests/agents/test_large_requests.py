"""Large requests and many of them: no request holds the loop, work grows with what is sent, and sessions stay apart."""

import asyncio
import hashlib
import json
import threading
from types import SimpleNamespace

import httpx
import pytest
from agent_endpoint import Scripted, chat, endpoint_of, speaking
from chat_templates import template_of, tokenizer_of

from megarl.agents import conversation as conversations
from megarl.agents.chat import Chat, OverLimit
from megarl.agents.conversation import Conversation
from megarl.agents.refusals import shown
from megarl.agents.session import LARGE
from megarl.io.http_limits import json_of
from megarl.samples.sample import Completion, VersionSpan

PATH = "/v1/chat/completions"


def user(text):
    return {"role": "user", "content": text}


async def test_others_are_answered_while_a_large_request_is_rendered(monkeypatch):
    async with speaking("hi") as (ask, session, endpoint, _):
        rendering, answered, prompt = threading.Event(), threading.Event(), session.conversation.prompt

        def patient_prompt(*args):
            rendering.set()
            assert answered.wait(60), "nobody else was answered meanwhile"
            return prompt(*args)

        monkeypatch.setattr(session.conversation, "prompt", patient_prompt)
        large = asyncio.create_task(ask(PATH, chat([user("x" * LARGE)])))
        await asyncio.to_thread(rendering.wait, 60)
        other = endpoint.open("0-17/1")
        assert (await ask(PATH, chat(), key=other.key)).status_code == 200
        answered.set()
        assert "prompt is too long" in (await large).json()["error"]["message"]


async def test_a_session_has_one_large_request_at_a_time_and_reads_it_beside_the_loop(monkeypatch):
    async with speaking("hi") as (ask, session, _, _):
        inside, most, threads, prompt = [0], [0], set(), session.conversation.prompt

        def counted(*args):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threads.add(threading.current_thread())
            try:
                return prompt(*args)
            finally:
                inside[0] -= 1

        monkeypatch.setattr(session.conversation, "prompt", counted)
        await asyncio.gather(*(ask(PATH, chat([user(f"{i}" + "x" * LARGE)])) for i in range(8)))
        assert most == [1] and threading.main_thread() not in threads
        await ask(PATH, chat())
        assert threading.main_thread() in threads  # a small one is not worth a thread


async def test_a_large_request_that_is_given_up_keeps_its_sessions_next_one_waiting():
    """As a client with a timeout asks again: else one session would hold all threads."""
    async with speaking("hi") as (_, session, _, _):
        began, go_on = threading.Semaphore(0), threading.Event()

        def work():
            began.release()
            assert go_on.wait(60)

        given_up = asyncio.create_task(session.aside(LARGE, work))
        await asyncio.to_thread(began.acquire)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled() and session._one_large.locked(), "its thread goes on"
        go_on.set()
        await session.aside(LARGE, work)


async def test_a_large_conversation_of_chat_is_rendered_beside_the_loop(monkeypatch):
    async with speaking("hi") as (_, session, _, _):
        threads, prompt = [], session.conversation.prompt

        def noted(*args):
            threads.append(threading.current_thread())
            return prompt(*args)

        monkeypatch.setattr(session.conversation, "prompt", noted)
        await Chat(session, [])([user("small")])
        with pytest.raises(OverLimit):
            await Chat(session, [])([user("x" * LARGE)])
        assert threads[0] is threading.main_thread() and threads[1] is not threads[0]


async def test_keys_of_many_sessions_at_once_lead_to_their_own_episodes_alone():
    async with endpoint_of(Scripted("qwen3", ["hi"]), max_tokens=1 << 20) as (endpoint, _):
        sessions = [endpoint.open(f"0-1/{i}") for i in range(24)]
        async with httpx.AsyncClient(timeout=60) as http:  # connections go from one session to the next

            async def ask(at, session, size):
                headers = {"Authorization": f"Bearer {session.key}"}
                body = chat([user(f"<{at}>" + "x" * size)])
                return await http.post(endpoint.url + PATH, json=body, headers=headers)

            sizes = (1, LARGE)
            replies = await asyncio.gather(*(ask(i, s, size) for i, s in enumerate(sessions) for size in sizes))
        assert {reply.status_code for reply in replies} == {200}
        for at, session in enumerate(sessions):
            texts = [session.policy.text(session.conversation.token_ids(turn)) for turn in (0, 1)]
            assert len(session.conversation.turns) == 2 and all(f"<{at}>" in text for text in texts)


@pytest.mark.parametrize(
    "path", [PATH, "/v1/messages", "/v1/responses", "/v1/completions", "/v1/messages/count_tokens"]
)
async def test_of_a_text_that_is_too_long_no_more_is_read_than_shows_it(path, monkeypatch):
    text = "a" * 1_000_000
    body = {"/v1/responses": {"input": text}, "/v1/completions": {"prompt": text}}.get(path, {"messages": [user(text)]})
    async with speaking("never") as (ask, session, _, seen):
        tokenizer, read = session.policy.tokenizer, []
        encode = type(tokenizer)._encode_plus

        def counted(self, text, *args, **kwargs):
            read.append(len(text) if isinstance(text, str) else sum(map(len, text)))
            return encode(self, text, *args, **kwargs)

        monkeypatch.setattr(type(tokenizer), "_encode_plus", counted)
        reply = await ask(path, {"model": "policy", **body})
        assert reply.status_code == 400 and "prompt is too long" in reply.json()["error"]["message"]
        assert read and max(read) < 100_000 and not seen[0]


def hashed_by_a_request(num_messages, monkeypatch):
    """Bytes that are hashed to find the last of so many turns."""
    tokenizer, hashed = tokenizer_of("qwen3"), []

    def sha256(data):
        hashed.append(len(data))
        return hashlib.sha256(data)

    found = Conversation(template_of("qwen3"))
    history = [
        message for i in range(num_messages // 2) for message in (user(f"{i}"), {"role": "assistant", "content": "x"})
    ]
    answer = Completion([5, tokenizer.eos_token_id], [-1.0, -1.0], "stop", (VersionSpan(0, 0, 2),))
    found.add(found.prompt(history[:-1]), answer, history[-1])
    monkeypatch.setattr(conversations, "hashlib", SimpleNamespace(sha256=sha256))
    found.prompt([*history, user("next")])
    assert found.counts["appended"] == 1
    return sum(hashed)


def test_a_conversation_is_looked_up_in_linear_time(monkeypatch):
    few, many = hashed_by_a_request(100, monkeypatch), hashed_by_a_request(1000, monkeypatch)
    assert 9 < many / few < 11


def test_a_body_of_many_items_is_decoded_by_pieces_to_the_same():
    value = {"ids": [*range(150_000)], "text": 'é"\\', "more": [{"a": None, "b": [1.5, True]}]}
    assert json_of(json.dumps(value).encode()) == value
    for wrong in ("[1," * 150_000, json.dumps(value)[:-1]):
        with pytest.raises(ValueError, match="the body is no JSON"):
            json_of(wrong.encode())


def test_a_sentence_shows_the_beginning_of_a_large_value():
    assert shown({"type": "adaptive"}) == "{'type': 'adaptive'}" and shown("abc") == "'abc'"
    assert max(len(shown(value)) for value in ("x" * 1_000_000, [1] * 1_000_000, {"a": ["y" * 1000] * 1000})) < 5000
