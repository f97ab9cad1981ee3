"""What a server may answer to /generate, spoilt in any place: a completion that is whole, or one sentence."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import Cases, examples, read_refusal
from fake_servers import Telling, serving_in_a_thread
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.rollout.client import ServerError
from megarl.rollout.protocol import Route, SamplingParams, error_message, parse_replies
from megarl.weights.push.servers import Server

SCALARS = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=4)
ODD = st.sampled_from([10**400, -(10**400), 2**63, "stop", "3", "٣", "\ud800", "1e9", 0.5, [[]], {"type": "stop"}])
JUNK = st.recursive(
    SCALARS | ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
)


def reply() -> dict[str, Any]:
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "prompt_tokens": 2, "cached_tokens": 1}
    meta["weight_versions"] = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    meta["output_token_logprobs"] = [[-0.5, 4, None], [-0.25, 6, None], [0.0, 1, None]]
    return {"output_ids": [4, 6, 1], "meta_info": meta}


@examples(500)
@given(data=st.data())
def test_bad_input_a_reply_with_junk_in_any_place(cases: Cases, data: st.DataObject) -> None:
    cases.add()
    spoilt: Any = {"reply": copy.deepcopy(reply())}
    at, key = spoilt, "reply"
    while isinstance(at[key], (dict, list)) and at[key] and data.draw(st.integers(0, 4)):
        at = at[key]
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
    if data.draw(st.booleans()) or at is spoilt:
        at[key] = data.draw(JUNK)
    else:
        del at[key]
    try:
        (parsed,) = parse_replies(spoilt["reply"], 1, num_asked=2)
    except ValueError as error:
        read_refusal(error)
        return
    completion = parsed.completion
    assert len(completion.log_probs) == len(completion.token_ids)
    assert all(type(token) is int and token >= 0 for token in completion.token_ids)
    assert all(-float("inf") < value <= 1e-3 for value in completion.log_probs)
    assert sum(span.end - span.start for span in completion.versions) == len(completion.token_ids)


@examples(100)
@given(value=JUNK, n=st.integers(1, 3))
def test_bad_input_a_reply_that_is_none(cases: Cases, value: Any, n: int) -> None:
    cases.add()
    try:
        parse_replies(value, n, num_asked=2)
    except ValueError as error:
        read_refusal(error)
    else:
        raise AssertionError(f"{value!r} holds no completion")


@examples(100)
@given(body=st.dictionaries(st.sampled_from(["n", "top_k", "temperature", "stop_token_ids", "x"]), JUNK) | JUNK)
def test_bad_input_sampling_parameters_of_a_stranger(cases: Cases, body: Any) -> None:
    cases.add()
    try:
        params, n = SamplingParams.from_json(body)
    except ValueError as error:
        read_refusal(error)
        return
    assert SamplingParams.from_json(params.to_json(n)) == (params, n)


@examples(60)
@given(text=st.text(max_size=8) | JUNK.map(json.dumps) | st.dictionaries(
    st.sampled_from(["message", "error", "detail"]), JUNK).map(json.dumps))  # fmt: skip
def test_bad_input_an_error_of_any_form_is_text(cases: Cases, text: str) -> None:
    cases.add()
    assert isinstance(error_message(text, "empty"), str)


SIZES = ["tp_size", "ep_size", "attn_dp_size", "pp_size", "dp_size", "moe_dp_size", "attn_cp_size", "base_gpu_id"]
OTHERS = ["version", "device", "quantization", "custom_weight_loader", "moe_dense_tp_size", "load_format"]
OTHERS += ["startup_time"]
HF = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[dict[str, Any], Server]]:
    """What a server says of itself, to be changed, and the server."""
    info: dict[str, Any] = {}
    with serving_in_a_thread(Telling(Route.SERVER_INFO, lambda: info)) as (urls, _):
        server = Server(urls[0], "", HF, 60.0)
        yield info, server
        server.engine.close()


@examples(300)
@given(info=st.dictionaries(st.sampled_from(SIZES + OTHERS), JUNK | st.sampled_from([0, -3, 8, 10**9, "8"])))
@example(info={"tp_size": 10**9})
@example(info={"tp_size": [2]})
@example(info={"ep_size": 5})
@example(info={"pp_size": {"size": 1}})
@example(info={"base_gpu_id": [], "device": "cuda"})
@example(info={"custom_weight_loader": 5})
def test_bad_input_what_a_server_says_of_itself(
    cases: Cases, told: tuple[dict[str, Any], Server], info: dict[str, Any]
) -> None:
    """Before a push it is read, or the server is left out of the push: no failure of the ranks."""
    cases.add()
    says, server = told
    says.clear()
    says.update(info)
    try:
        server.probe()
    except ServerError as error:
        read_refusal(ValueError(str(error)), server.url)
        assert not server.is_there()
        return
    assert 1 <= len(server.capabilities.layout.coordinates) <= 4096
    assert all(0 <= c.ep_rank < c.ep and 0 <= c.attn_rank < c.attn for c in server.capabilities.layout.coordinates)
