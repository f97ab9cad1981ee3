"""Plans carried out between real gloo ranks: what arrives, how it is checked, and what stops before the first byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_cases import PADDING, disagree, exchange_all, exchange_by_server, nothing, peak_memory, positions
from plan_reference import cut_by_hand, whole_tensors
from spawn import Ranks
from spread_tables import Model

from megarl.weights.mapping.names import Rename
from megarl.weights.reshard.describe import to_json
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding, Sharding

pytestmark = pytest.mark.dist

DENSE, SPARSE, TIED = Model(num_groups=2), Model(num_experts=4), Model(is_tied=True, vocab_size=21)


def trainer(model: Model, **sizes: Any) -> MegatronSharding:
    return MegatronSharding(model.trainer_table(), dtype="float32", **sizes)


def server(model: Model, **sizes: Any) -> ServerSharding:
    return ServerSharding(model.server_table(), dtype="float32", **sizes)


CASES: dict[str, tuple[Sharding, Sharding, int]] = {
    "tp and pp to two servers": (
        trainer(DENSE, world_size=4, tp=2, pp=2),
        server(DENSE, tp=2, num_replicas=2),
        200,
    ),
    "chunks and context": (trainer(DENSE, world_size=4, pp=2, vpp=2, cp=2), server(DENSE, tp=4), 1 << 20),
    "experts to experts": (trainer(SPARSE, world_size=4, tp=2, pp=1, ep=2, etp=1), server(SPARSE, tp=4, ep=2), 1000),
    "cut experts": (trainer(SPARSE, world_size=4, tp=1, pp=2, ep=1, etp=2), server(SPARSE, tp=2, ep=2), 4000),
    "a tied head in half the type": (
        trainer(TIED, world_size=4, tp=2, pp=2),
        replace(server(TIED, tp=2, num_replicas=2), dtype="bfloat16"),
        300,
    ),
    "to one rank that holds all": (
        trainer(SPARSE, world_size=7, tp=1, etp=1),
        ServerSharding(SPARSE.plain_table(), dtype="float32"),
        16,
    ),
    "from one to seven": (trainer(SPARSE), ServerSharding(SPARSE.plain_table(), dtype="float32", num_replicas=7), 999),
}


def as_text(case: tuple[Sharding, Sharding, int]) -> tuple[str, str, int]:
    return to_json(case[0]), to_json(case[1]), case[2]


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        ranks.run(nothing, timeout_s=600)  # eight processes that import Megatron, perhaps on few cores
        yield ranks


def assert_received(
    receiver: Sharding, rank: int, whole: dict[str, torch.Tensor], held: dict[str, torch.Tensor]
) -> None:
    expected = cut_by_hand(receiver, rank, whole, padding=PADDING)
    assert held.keys() == expected.keys()
    for name, param in expected.items():
        assert torch.equal(held[name], param.to(held[name].dtype)), name


@pytest.mark.slow
def test_receivers_hold_what_is_cut_from_whole_tensors_by_hand(eight_ranks: Ranks) -> None:
    by_rank = eight_ranks.run(exchange_all, {name: as_text(case) for name, case in CASES.items()}, timeout_s=120)
    for name, (sender, receiver, _) in CASES.items():
        whole = whole_tensors(sender)
        for rank in range(sender.num_ranks):
            assert by_rank[rank][name] == []
        for rank in range(receiver.num_ranks):
            assert_received(receiver, rank, whole, by_rank[sender.num_ranks + rank][name])


@pytest.mark.slow
def test_one_plan_is_carried_out_over_a_group_for_each_server(eight_ranks: Ranks) -> None:
    sender, receiver, message_bytes = CASES["tp and pp to two servers"]
    by_rank = eight_ranks.run(exchange_by_server, to_json(sender), to_json(receiver), message_bytes)
    assert by_rank[:4] == [[[], []]] * 4
    for rank in range(4):
        assert_received(receiver, rank, whole_tensors(sender), by_rank[4 + rank][0])


def test_a_changed_element_is_found_and_named_by_its_sender(eight_ranks: Ranks) -> None:
    name = "experts to experts"
    by_rank = eight_ranks.run(
        exchange_all, {name: as_text(CASES[name])}, "model.layers.2.mlp.experts.w13_weight", timeout_s=60
    )
    found = sorted(fault for rank in range(4) for fault in by_rank[rank][name])
    assert found == [
        f"model.layers.2.mlp.experts.{expert}.gate_proj.weight[{rows}, 0:8] on rank {rank}"
        for expert, rows, rank in ((0, "0:2", 0), (0, "4:6", 1), (2, "0:2", 2), (2, "4:6", 3))
    ]


def test_ranks_stand_where_megatron_puts_them(eight_ranks: Ranks) -> None:
    layouts = [
        {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "pp": 1, "cp": 1, "ep": 4, "etp": 1},
        {"tp": 1, "pp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"tp": 4, "pp": 2, "cp": 1, "ep": 1, "etp": 4},
    ]
    for of_rank in eight_ranks.run(positions, layouts):
        assert all(theirs == ours for theirs, ours in of_rank)


def test_peak_extra_memory_is_two_messages(two_ranks: Ranks) -> None:
    """1 MB of parameters in another type, cut across; nothing but small change beside the two buffers."""
    table = (Rename("w", "w", (512, 512), 1), Rename("v", "v", (64,)))
    sender, receiver = ServerSharding(table, dtype="float32"), ServerSharding(table, dtype="bfloat16")
    for peak in two_ranks.run(peak_memory, to_json(sender), to_json(receiver), 32_768, timeout_s=300):
        assert 2 * 32_768 <= peak <= 2 * 32_768 + 2048


def test_other_descriptions_are_refused_on_all_ranks_before_the_first_byte(two_ranks: Ranks) -> None:
    sharding = to_json(ServerSharding((Rename("w", "w", (4, 2)),), dtype="float32"))
    for told, held in two_ranks.run(disagree, sharding, sharding, timeout_s=300):
        assert told.startswith(
            "rank 1 of the weight group describes the model, its layout or the messages in another way"
        )
        assert held == str([PADDING])
