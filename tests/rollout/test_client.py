"""Replies of a server that its client has to read with care."""

import json
from contextlib import closing
from typing import Any

import pytest
from endless_servers import Behaviour, drip, endless, flood
from tiny_server import Served

from megarl.arch.routed_experts import RoutedExperts
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.engine_columns import EngineRoutes
from megarl.rollout.protocol import ORDER_BYTES, SamplingParams, completion_bytes, digest_bytes, score_bytes
from megarl.servers.supervisor import free_ports
from megarl.weights.push.servers import reply_bytes_of_digests


def rank(number: int, digest: str) -> dict[str, Any]:
    info = [{"role": "target", "tp_rank": number, "tp_size": 2, "dp_rank": number}]
    return {"checksums": {"w": digest}, "per_gpu_checksum": digest, "parallelism_info": info}


def checksums_of(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    client = ServerClient("http://127.0.0.1:1", "")
    monkeypatch.setattr(client, "_accepted", lambda route, body, most_bytes: {"ranks": ranks})
    return client.rank_checksums()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(0, "a"), rank(1, "b")], "ab"),
        ([rank(0, "a"), rank(1, "b")] * 2, "ab"),  # groups that all answer for all ranks are counted once
        (
            [rank(0, "a"), rank(1, "b"), rank(0, "x"), rank(1, "b")],
            "abx",
        ),  # answers that contradict each other are kept
        ([{"checksums": {"w": "a"}}] * 2, "aa"),  # ranks that do not say who they are, too
    ],
)
def test_each_rank_has_its_checksums_once(
    ranks: list[dict[str, Any]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(each["w"] for each in checksums_of(ranks, monkeypatch)) == list(expected)


@pytest.mark.parametrize(("behave", "how"), [(drip, "no whole reply within 0.15 s"), (flood, "a reply of more than")])
def test_a_server_whose_replies_do_not_end_fails_questions_and_orders(behave: Behaviour, how: str) -> None:
    limit_s = 0.15 if behave is drip else 600.0
    with endless(behave) as url, closing(ServerClient(url, "", timeout_s=limit_s)) as client:
        for call in (client.health, client.server_info, client.pause, client.checksums, client.adapters):
            with pytest.raises(ServerError, match=rf"^{url}/\w+.* failed: {how}"):
                call()


def test_an_error_is_one_sentence_with_url_route_and_status(server: Served) -> None:
    with (
        closing(ServerClient(server.url, "wrong")) as client,
        pytest.raises(ServerError, match=rf"^{server.url}/model_info answered 401: Unauthorized$") as caught,
    ):
        client.model_info()
    assert (caught.value.route, caught.value.status) == ("/model_info", 401)
    (port,) = free_ports(["127.0.0.1"])
    with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port}/health failed: no connection: Connection refused"):
        ServerClient(f"http://127.0.0.1:{port}", "").health()


def test_what_a_reply_may_have_follows_what_is_asked_for() -> None:
    of_one = completion_bytes(100, SamplingParams(max_new_tokens=1))
    assert completion_bytes(100, SamplingParams(max_new_tokens=4097)) - of_one == 4096 * 512
    routes = EngineRoutes(RoutedExperts(num_layers=61, layers=(60,), num_experts=256, chosen=8))
    columns = completion_bytes(1000, SamplingParams(max_new_tokens=24), [routes])
    assert columns - completion_bytes(1000, SamplingParams(max_new_tokens=24)) == 1024 * 61 * 8 * 6
    assert score_bytes(1000, 99) - score_bytes(0) == 1000 * 100 * 64
    assert digest_bytes(1000, 8) - digest_bytes(0) == 64 * 1000 * 256
    assert digest_bytes(10**6, 64) == 1 << 30


@pytest.mark.full
def test_the_digests_of_a_model_of_671_billion_parameters_are_within_their_limit() -> None:
    held = {f"model.layers.{60}.mlp.experts.{255}.down_proj.weight_scale_inv{i}": "0" * 64 for i in range(100_000)}
    told = json.dumps({"success": True, "ranks": [{"checksums": held}]})
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "moe_intermediate_size": 2048}
    assert ORDER_BYTES < len(told) < reply_bytes_of_digests(deepseek, 1)
