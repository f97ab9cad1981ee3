"""An endpoint over a server that writes given texts, a letter per token: ids that no tokenizer would choose."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from aiohttp import web
from chat_templates import template_of, tokenizer_of
from fake_servers import reply_to
from pools import pool_of

from megarl.agents.endpoint import Endpoint
from megarl.agents.session import Policy
from megarl.agents.tool_calls.forms import AUTO, chosen
from megarl.rollout.protocol import SamplingParams

TOKEN = "token-of-the-endpoint"
CALL = '<tool_call>\n{"name": "add",  "arguments": {"a":12, "b": 3}}\n</tool_call>'


class Scripted:
    """Writes the texts one after the other, and then the last one again; `hangs`: waits until it is cancelled."""

    def __init__(self, style: str, texts: Sequence[str], version: str = "7") -> None:
        self.tokenizer, self.texts, self.version = tokenizer_of(style), list(texts), version
        self.hangs, self.waiting, self.cancelled = False, asyncio.Event(), asyncio.Event()

    def ids(self, text: str) -> list[int]:
        """A token for each letter; tags are tokens of their own."""
        out: list[int] = []
        while text:
            tag = next((t for t in self.tokenizer.get_added_vocab() if text.startswith(t)), text[0])
            out += self.tokenizer.encode(tag, add_special_tokens=False)
            text = text[len(tag) :]
        return [*out, self.tokenizer.eos_token_id]

    async def __call__(self, request: web.Request) -> web.Response:
        if self.hangs:
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        body = await request.json()
        ids = self.ids(self.texts.pop(0) if len(self.texts) > 1 else self.texts[0])
        most = body["sampling_params"]["max_new_tokens"]
        written, finish = ids[:most], "stop" if len(ids) <= most else "length"
        return web.json_response(reply_to(written, self.version, finish, [(self.version, 0, len(written))]))


@asynccontextmanager
async def endpoint_of(
    *servers: Any,
    style: str = "qwen3",
    params: SamplingParams | None = None,
    num_ids: int | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Endpoint, list[list[Any]]]]:
    """Yields (endpoint, list of bodies of /generate of each server); `num_ids`: the pool's, `options`: the policy's."""
    settings: dict[str, Any] = {"max_tokens": 4096, "history": "generated", **options}
    settings["tool_form"], _ = chosen(settings.pop("tool_parser", AUTO), template_of(style))
    params = params or SamplingParams(max_new_tokens=256, sampling_seed=3)
    async with pool_of(*servers, timeout_s=60, rest_s=0.001, retries=1, num_ids=num_ids) as (pool, _, seen):
        policy = Policy("policy", tokenizer_of(style), template_of(style), pool, params, **settings)
        async with Endpoint(policy, token=TOKEN) as endpoint:
            yield endpoint, seen


FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
QUESTION = [{"role": "user", "content": "12 + 3?"}]
THOUGHT = "<think>\nso\n</think>\n\n"


@asynccontextmanager
async def speaking(*texts, servers=None, **options):
    """Yields (ask, session, endpoint, bodies): `ask(path, body)` posts with the session's key."""
    servers = servers or [Scripted(options.get("style", "qwen3"), texts)]
    async with endpoint_of(*servers, **options) as (endpoint, seen), httpx.AsyncClient(timeout=60) as http:
        session = endpoint.open("0-17/0")

        async def ask(path, body=None, key=session.key, method="POST", **headers):
            headers = {"Authorization": f"Bearer {key}"} | headers
            return await http.request(method, endpoint.url + path, content=json.dumps(body), headers=headers)

        yield ask, session, endpoint, seen


def chat(messages=QUESTION, **fields):
    return {"model": "policy", "messages": messages, **fields}


def check_exact(session, seen):
    """What is recorded is what the server was asked and said, and all of it is learnt once."""
    asked = sorted(body["input_ids"] for bodies in seen for body in bodies)
    conversation = session.conversation
    turns = range(len(conversation.turns))
    assert asked == sorted(conversation.token_ids(i)[: conversation.turns[i].start] for i in turns)
    learnt = [span for row in conversation.rows() for span in row.learnt]
    assert sorted(span.turn for span in learnt) == list(turns)
    return conversation.rows()
