"""What replies tell of an episode's tokens: their experts, and the tokens that could be drawn.  Rows join the turns."""

from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from chat_templates import template_of, tokenizer_of
from fake_servers import Handler, reply_to
from pools import pool_of
from routing_server import ROUTES, RoutingServer, entry

from megarl.agents.session import Policy, Session
from megarl.agents.tool_calls.forms import FORMS
from megarl.data.batch import make_batch
from megarl.rollout.engine_columns import EngineSupport
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import EngineColumn
from megarl.samples.ragged import COUNTS, gathered
from megarl.samples.sample import SUPPORT, Prompt, Row, Sample

PARAMS = SamplingParams(top_p=0.9, top_k=20, max_new_tokens=3)


async def episode(
    server: Handler, column: EngineColumn, params: SamplingParams, prompts: Sequence[list[int]], **how: int
) -> tuple[Row, ...]:
    """A turn, a second one behind it, and a third one behind the first."""
    async with pool_of(server, columns=[column], **how) as (pool, *_):
        policy = Policy("policy", tokenizer_of("qwen3"), template_of("qwen3"), pool, params, FORMS["hermes"], 100)
        session = Session("0-1/0", policy)
        (first,) = await session.continue_ids(prompts[0], 1, None)
        for behind in prompts[1:]:
            await session.continue_ids([*first.prompt_ids, *first.completion.token_ids, *behind], 1, None)
        session.close()
        return session.conversation.rows()


@pytest.mark.parametrize(("how", "starts"), [({}, [0, 6, 6]), ({"piece_tokens": 3}, [0, 5, 6, 11, 6, 10])])
async def test_a_turn_asks_for_the_experts_behind_the_turn_before_and_a_row_has_those_of_all_its_tokens(
    how: dict[str, int], starts: list[int]
) -> None:
    """Prompts of 3, answers of 4 tokens."""
    server, params = RoutingServer(), SamplingParams(max_new_tokens=4, sampling_seed=3)
    rows = await episode(server, ROUTES, params, ([3, 4, 5], [9, 9], [8]), **how)
    assert [body["routed_experts_start_len"] for body in server.bodies] == starts
    assert [len(row.token_ids) for row in rows] == [3 + 4 + 2 + 4, 3 + 4 + 1 + 4]
    for row in rows:
        experts = [[[0, 0], [0, 0]], *(entry(token) for token in range(1, len(row.token_ids)))]
        assert row.columns["routed_experts"].tolist() == experts


def support_of(position: int) -> list[int]:
    """Of the token at this position, which is 7 and a few more: another number of them, with another one first."""
    return [100 + position, 7, *range(200, 200 + position % 3)]


async def telling(request: web.Request) -> web.Response:
    """Writes the token 7 over and over."""
    body: dict[str, Any] = await request.json()
    assert body["return_sampling_mask"] is True
    num_asked, num_new = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
    (item,) = reply_to([7] * num_new, finish="length", spans=[("0", 0, num_new)])
    masks = [support_of(num_asked + i) for i in range(num_new)]
    item["meta_info"] |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": [-0.25] * num_new}
    return web.json_response([item])


def supports(context: int) -> list[list[int]]:
    """Of prompt, first answer, so much of context, second answer."""
    learnt = {*range(2, 5), *range(5 + context, 8 + context)}
    return [support_of(position) if position in learnt else [] for position in range(8 + context)]


@pytest.mark.parametrize("how", [{}, {"piece_tokens": 2}])
async def test_rows_of_turns_have_the_supports_of_their_answers_in_the_batch_too(how: dict[str, int]) -> None:
    told = EngineSupport(PARAMS.top_p, PARAMS.top_k)
    rows = await episode(telling, told, PARAMS, ([3, 4], [9, 9, 9], [8]), **how)
    assert [row.columns[SUPPORT].lists() for row in rows] == [supports(3), supports(1)]  # type: ignore[attr-defined]
    batch = make_batch([[Sample(Prompt("0-1", [3, 4], ""), rows, 1.0)]])
    counts = batch.columns[SUPPORT + COUNTS].long()
    starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
    lists = [ids[a : a + n].tolist() for a, n in zip(starts.tolist(), counts.tolist(), strict=True)]
    assert lists == supports(3) + supports(1)
