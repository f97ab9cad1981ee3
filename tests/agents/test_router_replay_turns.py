"""The experts of an episode's tokens: each turn asks for those behind the turn before, and rows join them."""

from __future__ import annotations

import asyncio

from chat_templates import template_of, tokenizer_of
from fake_servers import serving
from routing_server import ROUTES, RoutingServer, entry

from megarl.agents.answer import hermes
from megarl.agents.session import Policy, Session
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Row

ZEROS = [[0, 0], [0, 0]]


def episode(server: RoutingServer, **how: int) -> tuple[Row, ...]:
    """A turn, a second one behind it, and a third one behind the first; prompts of 3, answers of 4 tokens."""

    async def test() -> tuple[Row, ...]:
        async with serving(server) as (urls, _), EnginePool(urls, "", timeout_s=200, columns=[ROUTES]) as pool:
            params = SamplingParams(max_new_tokens=4, sampling_seed=3)
            policy = Policy("policy", tokenizer_of("qwen3"), template_of("qwen3"), pool, params, hermes, 100, **how)
            session = Session("0-1/0", policy)
            (first,) = await session.continue_ids([3, 4, 5], 1, None)
            told = [*first.prompt_ids, *first.completion.token_ids]
            for behind in ([9, 9], [8]):
                await session.continue_ids([*told, *behind], 1, None)
            session.close()
            return session.conversation.rows()

    return asyncio.run(asyncio.wait_for(test(), 240))


def test_a_turn_asks_for_the_experts_behind_the_turn_before_and_a_row_has_those_of_all_its_tokens() -> None:
    server = RoutingServer()
    rows = episode(server)
    assert [body["routed_experts_start_len"] for body in server.bodies] == [0, 6, 6]
    assert [len(row.token_ids) for row in rows] == [3 + 4 + 2 + 4, 3 + 4 + 1 + 4]
    for row in rows:
        expected = [ZEROS, *(entry(token) for token in range(1, len(row.token_ids)))]
        assert row.columns["routed_experts"].tolist() == expected


def test_turns_in_pieces_give_the_same_rows() -> None:
    server = RoutingServer()
    rows = episode(server, piece_tokens=3)
    assert [body["routed_experts_start_len"] for body in server.bodies] == [0, 5, 6, 11, 6, 10]
    whole = episode(RoutingServer())
    both = [[row.columns["routed_experts"].tolist() for row in each] for each in (rows, whole)]
    assert both[0] == both[1]
