"""Pushes of a model whose experts are stacked outside, into a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from push_cases import build, connect, push
from push_servers import HFServer
from spawn import Ranks
from tiny_models import write_model

from megarl.layout import Layout
from megarl.mcore.setup import destroy_groups

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def server(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFServer]:
    folder = write_model(tmp_path_factory.mktemp("model"), "gpt_oss", tied=False)
    with HFServer(Path(folder)) as server:
        ranks.run(build, str(folder), Layout(tp=2, ep=2, etp=1), timeout_s=240)
        yield server.wait()
        ranks.run(connect, [], "auto", {}, timeout_s=120)
        ranks.run(destroy_groups)


@pytest.mark.parametrize("transport", ["gathered", "shared", "sharded"])
def test_stacks_arrive_whole_and_never_as_slices(transport: str, server: HFServer, ranks: Ranks) -> None:
    ranks.run(connect, [server.url], transport, {}, timeout_s=120)
    found = ranks.run(push, 1, "", {}, timeout_s=240)[0]
    used = {"sharded": "gathered"}.get(transport, transport)
    needs = ["sharded: it needs a model that does not stack its experts in one tensor"]
    assert found["report"].transports == {server.url: used}, found
    assert found["report"].fallbacks == ({server.url: needs} if transport == "sharded" else {})
    assert found["report"].num_verified == len(found["expected"])
    assert server.engine.checksums() == found["expected"]


def test_a_corrupted_stack_is_named(server: HFServer, ranks: Ranks) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    ranks.run(connect, [server.url], "gathered", {}, timeout_s=120)
    found = ranks.run(push, 2, f"corrupt-in-server {server.url} {name}", {}, timeout_s=240)[0]
    assert f"(differ: {name})" in found["report"].failed[server.url]
    assert ranks.run(push, 3, "", {}, timeout_s=240)[0]["report"].transports == {server.url: "gathered"}
