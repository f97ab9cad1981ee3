"""Pushes of models with experts, from ranks that each have some of them, by each transport into a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from push_cases import HFServer, build, connect, push
from spawn import Ranks
from tiny_models import write_model

from megarl.arch.layout import Layout
from megarl.mcore.setup import destroy_groups

pytestmark = pytest.mark.dist

# The layout, and names of experts that may be taken for each other; gpt-oss has them stacked in one tensor.
STACKED = "gpt_oss"
CASES: dict[str, tuple[Layout, str]] = {
    "qwen3_moe": (Layout(ep=2), "model.layers.0.mlp.experts.{}.up_proj.weight"),  # replicas with other experts
    "mixtral": (Layout(tp=2, ep=2, etp=1), "model.layers.0.block_sparse_moe.experts.{}.w3.weight"),
    "deepseek_v3": (Layout(pp=2, vpp=2), "model.layers.1.mlp.experts.{}.up_proj.weight"),
    "kimi_k2": (Layout(ep=2), "model.layers.1.mlp.experts.{}.up_proj.weight"),
    "glm4_moe": (Layout(tp=2, ep=2, etp=1), "model.layers.1.mlp.experts.{}.up_proj.weight"),
    "minimax_m2": (Layout(tp=2, ep=2, etp=1), "model.layers.0.block_sparse_moe.experts.{}.w3.weight"),
    STACKED: (Layout(tp=2, ep=2, etp=1), "model.layers.1.mlp.experts.gate_up_proj"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "deepseek_v3" else pytest.mark.full) for name in CASES],
)
def served(request: pytest.FixtureRequest, two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_model(tmp_path_factory.mktemp("model"), request.param, tied=False)
    with HFServer(Path(folder)) as server:
        two_ranks.run(build, str(folder), CASES[request.param][0], timeout_s=240)
        yield request.param, server.wait()
        two_ranks.run(connect, [], "auto", {}, timeout_s=120)
        two_ranks.run(destroy_groups)


def pushed(ranks: Ranks, server: HFServer, transport: str, fault: str = "", **settings: Any) -> dict[str, Any]:
    ranks.run(connect, [server.url], transport, settings, timeout_s=120)
    return ranks.run(push, 1, fault, {}, timeout_s=240)[0]


@pytest.mark.parametrize(
    "transport",
    [*(pytest.param(each, marks=pytest.mark.full) for each in ("gathered", "mapped", "shared")), "sharded"],
)
def test_a_model_with_experts_arrives_whole(transport: str, served: Any, two_ranks: Ranks) -> None:
    """Stacks never as slices."""
    family, server = served
    found = pushed(two_ranks, server, transport, check_every=1)
    report, has_slices = found["report"], transport in ("shared", "sharded") and family != STACKED
    used = {"shared": "mapped", "sharded": "gathered"}.get(transport, transport) if not has_slices else transport
    assert (report.transports, report.compared) == ({server.url: used}, [server.url] if has_slices else []), found
    needs = ["sharded: it needs a model that does not stack its experts in one tensor"]
    assert report.fallbacks == ({server.url: needs} if (transport, used) == ("sharded", "gathered") else {})
    assert report.num_verified >= len(found["expected"])
    assert server.engine.checksums() == found["expected"]


@pytest.mark.full
@pytest.mark.megatron_0_19
def test_decays_arrive_unrounded_at_a_server_in_bfloat16(tmp_path: Path) -> None:
    """The norm of a delta net's heads, which is float32 in the trainer, too, is rounded: servers have it in theirs."""
    folder = write_model(tmp_path / "model", "qwen3_5_text", tied=False)
    with HFServer(folder, "bfloat16") as server, Ranks(2) as ranks:
        ranks.run(build, str(folder), Layout(tp=2), "bfloat16", timeout_s=240)
        server.wait()
        for transport in ("gathered", "mapped", "shared", "sharded"):
            found = pushed(ranks, server, transport, check_every=1, dtype="bfloat16")
            assert found["report"].transports == {server.url: transport}, found
            assert server.engine.checksums() == found["expected"]
        ranks.run(connect, [], "auto", {}, timeout_s=120)


@pytest.mark.full
def test_experts_that_go_to_each_others_place_are_named_and_the_next_push_heals_them(
    served: Any, two_ranks: Ranks
) -> None:
    (family, server), names = served, CASES[served[0]][1]
    told = ", ".join(dict.fromkeys(names.format(expert) for expert in (0, 1)))
    if family != STACKED:
        found = pushed(two_ranks, server, "sharded", f"swap-places {names}")
        (sentence,) = found["report"].fallbacks[server.url]
        assert sentence.endswith(f"after slices than after whole tensors: {told}")
        assert found["report"].transports == {server.url: "gathered"}
        assert server.engine.checksums() == found["expected"]
    fault = f"corrupt-in-server {server.url} {names}" if family == STACKED else f"swap-experts {names}"
    found = pushed(two_ranks, server, "gathered", fault)
    assert f"(differ: {told})" in found["report"].failed[server.url]
    assert server.is_paused
    assert pushed(two_ranks, server, "gathered")["report"].transports == {server.url: "gathered"}
