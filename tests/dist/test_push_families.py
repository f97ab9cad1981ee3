"""Pushes of models with experts, from ranks that each have some of them, by each transport into a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from push_cases import build, connect, push
from push_servers import HFServer
from spawn import Ranks
from tiny_models import write_model

from megarl.layout import Layout
from megarl.mcore.setup import destroy_groups

pytestmark = pytest.mark.dist

CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"ep": 2},  # two data-parallel replicas, which hold different experts
    "mixtral": {"tp": 2, "ep": 2, "etp": 1},
    "deepseek_v3": {"pp": 2, "vpp": 2},
    "kimi_k2": {"ep": 2},
    "glm4_moe": {"tp": 2, "ep": 2, "etp": 1},
    "minimax_m2": {"tp": 2, "ep": 2, "etp": 1},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "deepseek_v3" else pytest.mark.slow) for name in CASES],
)
def served(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_model(tmp_path_factory.mktemp("model"), request.param, tied=False)
    with HFServer(Path(folder)) as server:
        ranks.run(build, str(folder), Layout(**CASES[request.param]), timeout_s=240)
        yield request.param, server.wait()
        ranks.run(connect, [], "auto", {}, timeout_s=120)
        ranks.run(destroy_groups)


@pytest.mark.parametrize("transport", ["gathered", "shared", "sharded"])
def test_a_model_with_experts_arrives_whole(transport: str, served: Any, ranks: Ranks) -> None:
    _, server = served
    ranks.run(connect, [server.url], transport, {"check_every": 1}, timeout_s=120)
    found = ranks.run(push, 1, "", {}, timeout_s=240)[0]
    compared = [server.url] if transport == "sharded" else []
    assert (found["report"].transports, found["report"].compared) == ({server.url: transport}, compared), found
    assert server.engine.checksums() == found["expected"]


EXPERTS = {
    "qwen3_moe": "model.layers.0.mlp.experts.{}.up_proj.weight",
    **dict.fromkeys(("mixtral", "minimax_m2"), "model.layers.0.block_sparse_moe.experts.{}.w3.weight"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe"), "model.layers.1.mlp.experts.{}.up_proj.weight"),
}


def test_slices_of_experts_that_go_to_each_others_place_are_caught(served: Any, ranks: Ranks) -> None:
    (family, server), names = served, EXPERTS[served[0]]
    ranks.run(connect, [server.url], "sharded", {}, timeout_s=120)
    found = ranks.run(push, 1, f"swap-places {names}", {}, timeout_s=240)[0]
    (sentence,) = found["report"].fallbacks[server.url]
    assert sentence.endswith(f"after slices than after whole tensors: {names.format(0)}, {names.format(1)}"), family
    assert found["report"].transports == {server.url: "gathered"}
    assert server.engine.checksums() == found["expected"]


def test_two_swapped_experts_are_named_and_the_next_push_heals_them(served: Any, ranks: Ranks) -> None:
    (_, server), names = served, EXPERTS[served[0]]
    ranks.run(connect, [server.url], "gathered", {}, timeout_s=120)
    found = ranks.run(push, 1, f"swap-experts {names}", {}, timeout_s=240)[0]
    assert f"(differ: {names.format(0)}, {names.format(1)})" in found["report"].failed[server.url]
    assert server.is_paused
    assert ranks.run(push, 2, "", {}, timeout_s=240)[0]["report"].transports == {server.url: "gathered"}
