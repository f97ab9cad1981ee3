"""The experts of tokens in replies: SGLang's field, our own server's column, and attempts that lost them."""

from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from pools import pool_of
from routing_server import OF, ROUTES, RoutingServer, entry, experts_at, field_of
from states import trusted
from wire import column_on_the_wire

from megarl.arch.routed_experts import RoutedExperts
from megarl.rollout.continuation import generate_completion
from megarl.rollout.engine_columns import EngineRoutes
from megarl.rollout.pool.pool_server import RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import ColumnsLost, read_columns

PROMPT = [3, 4, 5]


def field_with_zeros(at: int) -> str:
    """Of four tokens; of the one at this position nothing was kept."""
    rows = np.array([experts_at(position) * (position != at) for position in range(4)])
    return b64encode(rows.astype("<i4").tobytes()).decode()


def meta_of(field: str | None = None, finish: str = "length", **more: Any) -> dict[str, Any]:
    return {"finish_reason": {"type": finish}, **({} if field is None else {"routed_experts": field}), **more}


def sent_as_column(column: np.ndarray) -> dict[str, Any]:
    """As our own server writes it."""
    return {"columns": {"routed_experts": column_on_the_wire(column)}}


def read(meta: dict[str, Any], num_known: int = 0, routes: EngineRoutes = ROUTES) -> np.ndarray:
    """Of a request of three tokens and a completion of two."""
    return read_columns(meta, 3, 2, [routes], num_known)["routed_experts"]


def test_sglangs_rows_are_of_the_tokens_that_were_read_and_entries_of_those_that_followed() -> None:
    column = read(meta_of(field_of(0, 4)))
    assert (column.dtype, column.shape) == (np.uint16, (5, 2, 2))
    assert column.tolist() == [[[0, 0], [0, 0]], *(entry(token) for token in range(1, 5))]


def test_what_the_caller_knows_is_not_sent_and_stays_zero() -> None:
    """It knows the first two tokens: the second was not read when it was written, so the rows begin there."""
    assert ROUTES.request(2) == {"return_routed_experts": True, "routed_experts_start_len": 1}
    assert ROUTES.request(0)["routed_experts_start_len"] == 0
    column = read(meta_of(field_of(1, 4)), num_known=2)
    assert column.tolist() == [[[0, 0], [0, 0]]] * 2 + [entry(token) for token in range(2, 5)]


def test_the_field_is_read_where_it_is_wanted_and_a_token_was_written() -> None:
    meta = meta_of(field_of(0, 4))
    assert sorted(read_columns(meta, 3, 2, [ROUTES])) == ["routed_experts"]
    assert read_columns(meta, 3, 2) == {}
    assert read_columns({}, 3, 0, [ROUTES]) == {}


def test_only_completions_that_are_learnt_have_them() -> None:
    routes = EngineRoutes(OF, (1.0, 0.9, 20))
    assert routes.is_of(1.0, 0.9, 20)
    assert not any(routes.is_of(*other) for other in ((0.0, 0.9, 20), (1.0, 1.0, 20), (1.0, 0.9, -1)))
    assert ROUTES.is_of(0.0, 1.0, -1)


def test_the_column_of_our_own_server_is_taken_as_it_is() -> None:
    sent = np.array([[[0, 0], [0, 0]], *[[[1, 2], [3, 4]]] * 4], dtype=np.uint16)
    assert read(sent_as_column(sent)).tolist() == sent.tolist()


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (meta_of(), "expected one that was started with --enable-return-routed-experts"),
        (meta_of(field_of(0, 5)), "have 5 rows: expected 4, of numbers below 300"),
        (meta_of(field_of(1, 4)), "have 3 rows: expected 4, of numbers below 300"),
        (meta_of(""), "have 0 rows: expected 4"),
        (meta_of(field_of(0, 4)[:-8]), "cannot be read: "),
        (meta_of("no base64!"), "cannot be read: "),
        (meta_of(b64encode(np.full(24, 300, "<i4").tobytes()).decode()), "expected 4, of numbers below 300"),
        (meta_of(b64encode(np.full(24, -1, "<i4").tobytes()).decode()), "expected 4, of numbers below 300"),
        (meta_of(b64encode(np.zeros(24, "<i4").tobytes()).decode()), "the server's kernels do not report what they"),
        (meta_of(field_with_zeros(at=1)), "the server's kernels do not report what they"),
        (sent_as_column(np.zeros((0, 2, 2), np.uint16)), "has the shape [0, 2, 2]: expected 5 entries"),
        (sent_as_column(np.zeros((4, 2, 2), np.uint16)), "has the shape [4, 2, 2]: expected 5 entries"),
        (sent_as_column(np.zeros((5, 3, 2), np.uint16)), "are uint16 [5, 3, 2]: expected uint16 of 2 layers"),
        (sent_as_column(np.zeros((5, 2, 2), np.int64)), "are int64 [5, 2, 2]: expected uint16"),
    ],
)
def test_experts_that_cannot_be_the_models_are_one_sentence(meta: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        read(meta)
    assert words in str(error.value)
    assert not isinstance(error.value, ColumnsLost)
    assert "\n" not in str(error.value)


def test_entries_that_the_caller_knows_may_be_zeros() -> None:
    sent = np.array([[[0, 0], [0, 0]]] * 3 + [[[1, 2], [3, 4]]] * 2, dtype=np.uint16)
    assert read(sent_as_column(sent), num_known=3).tolist() == sent.tolist()
    with pytest.raises(ValueError, match="are not 2 different ones of 300"):
        read(sent_as_column(sent), num_known=2)


def test_with_one_expert_a_token_rows_that_are_missing_are_found() -> None:
    routes = EngineRoutes(RoutedExperts(num_layers=1, layers=(0,), num_experts=300, chosen=1))
    field = b64encode(np.array([7, 8, 9], "<i4").tobytes()).decode()
    assert read(meta_of(field), num_known=2, routes=routes).ravel().tolist() == [0, 0, 7, 8, 9]
    with pytest.raises(ValueError, match="have 3 rows: expected 4"):
        read(meta_of(field), routes=routes)


@pytest.mark.parametrize("meta", [meta_of(field_of(0, 4), num_retractions=1), meta_of(finish="abort")])
def test_after_a_retraction_sglang_has_only_the_experts_of_another_pass(meta: dict[str, Any]) -> None:
    with pytest.raises(ColumnsLost):
        read(meta)


async def written(server: RoutingServer, num_tokens: int) -> tuple[Any, dict[str, float]]:
    async with pool_of(server, columns=[ROUTES]) as (pool, *_):
        return await generate_completion(pool, PROMPT, SamplingParams(max_new_tokens=num_tokens)), pool.counters()


async def test_a_piece_that_lost_its_experts_is_written_again_and_counted_as_wasted() -> None:
    server = RoutingServer(num_lost=2)
    completion, counters = await written(server, 5)
    assert len(server.bodies) == 3
    assert completion.columns["routed_experts"][-1].tolist() == entry(7)
    assert (counters["wasted_retracted"], counters["tokens"]) == (10.0, 15.0)


async def test_a_piece_that_lost_its_experts_goes_to_another_server() -> None:
    async with pool_of(RoutingServer(num_lost=100), RoutingServer(), columns=[ROUTES]) as pooled:
        for _ in range(2):
            await generate_completion(pooled.pool, PROMPT, SamplingParams(max_new_tokens=5), prefer=pooled.urls[0])
        assert pooled.counts == [2, 2]


async def test_pushes_while_a_request_waits_to_be_computed_again_cost_no_attempt() -> None:
    """More of them than a request has attempts."""
    server = RoutingServer(num_lost=20)
    async with pool_of(server, columns=[ROUTES]) as (pool, urls, _):

        def push(number: int) -> None:  # of the driver, meanwhile
            pool.update(trusted(urls[0], number))
            server.version = str(number)

        server.before_reply = push
        pool.update(trusted(urls[0], 0))
        completion = await generate_completion(pool, PROMPT, SamplingParams(max_new_tokens=5))
        assert (len(completion.token_ids), len(server.bodies)) == (5, 21)


async def test_a_server_that_always_loses_them_ends_the_completion() -> None:
    with pytest.raises(RolloutFailed, match="5 attempts failed: .*the request was retracted"):
        await written(RoutingServer(num_lost=100), 5)
