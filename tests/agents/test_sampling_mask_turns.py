"""The tokens that could be drawn in an episode: a row has those of each of its answers, and of its context none."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from chat_templates import template_of, tokenizer_of
from fake_servers import reply_to, serving

from megarl.agents.answer import hermes
from megarl.agents.session import Policy, Session
from megarl.data.batch import make_batch
from megarl.ragged import COUNTS, gathered
from megarl.rollout.engine_support import EngineSupport
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.sample import SUPPORT, Prompt, Row, Sample

PARAMS = SamplingParams(top_p=0.9, top_k=20, max_new_tokens=3)


def support_of(position: int) -> list[int]:
    """Of the token at this position, which is 7 and a few more: another number of them, with another one first."""
    return [100 + position, 7, *range(200, 200 + position % 3)]


class Telling:
    """Writes the token 7 over and over."""

    async def __call__(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        assert body["return_sampling_mask"] is True
        num_asked, num_new = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        (item,) = reply_to([7] * num_new, finish="length", spans=[("0", 0, num_new)])
        masks = [support_of(num_asked + i) for i in range(num_new)]
        log_probs = [-0.25] * num_new
        item["meta_info"] |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": log_probs}
        return web.json_response([item])


def episode(**how: int) -> tuple[Row, ...]:
    """A turn, a second one behind it, and a third one behind the first."""

    async def test() -> tuple[Row, ...]:
        told = [EngineSupport(PARAMS.top_p, PARAMS.top_k)]
        async with serving(Telling()) as (urls, _), EnginePool(urls, "", timeout_s=200, columns=told) as pool:
            policy = Policy("policy", tokenizer_of("qwen3"), template_of("qwen3"), pool, PARAMS, hermes, 100, **how)
            session = Session("0-1/0", policy)
            (first,) = await session.continue_ids([3, 4], 1, None)
            begun = [*first.prompt_ids, *first.completion.token_ids]
            for behind in ([9, 9, 9], [8]):
                await session.continue_ids([*begun, *behind], 1, None)
            session.close()
            return session.conversation.rows()

    return asyncio.run(asyncio.wait_for(test(), 240))


def expected(context: int) -> list[list[int]]:
    """Prompt, first answer, so much of context, second answer."""
    answers = [range(2, 5), range(5 + context, 8 + context)]
    learnt = {position for answer in answers for position in answer}
    return [support_of(position) if position in learnt else [] for position in range(8 + context)]


def test_rows_of_turns_have_the_supports_of_their_answers_in_the_batch_too() -> None:
    for how in ({}, {"piece_tokens": 2}):
        rows = episode(**how)
        assert [row.columns[SUPPORT].lists() for row in rows] == [expected(3), expected(1)]  # type: ignore[attr-defined]
        batch = make_batch([[Sample(Prompt("0-1", [3, 4], ""), rows, 1.0)]])
        counts = batch.columns[SUPPORT + COUNTS].long()
        starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
        lists = [ids[a : a + n].tolist() for a, n in zip(starts.tolist(), counts.tolist(), strict=True)]
        assert lists == expected(3) + expected(1)
