"""The benchmark of leading many ranks: its model by hand, and hollow machines under a real Group."""

import math
import os
import secrets
import threading
from pathlib import Path

import pytest

from benchmarks.common.page import Result
from benchmarks.scale.bench_scale import MEMORY, SIMULATED, _say
from benchmarks.scale.costs import hollow_call
from benchmarks.scale.hollow import Machines, Nothing
from benchmarks.scale.simulation import Costs, Tree, Way, call
from megarl.arch.layout import Layout
from megarl.group import Group
from megarl.machines.nodes import Nodes
from megarl.servers.server_process import free_ports

FREE = Way(0.0)


def test_the_driver_sends_one_after_another_and_then_takes_the_answers() -> None:
    """Three ranks beside it: 3 sends; the answers of the first two are there when the last send is done."""
    found = call(Tree(3), Costs(send=1.0, take=2.0, rank=0.5), FREE)
    assert (found.seconds, found.leader_s) == (9.0, 9.0)
    slow = call(Tree(3), Costs(call=5.0, send=1.0, take=0.25, rank=10.0), FREE)
    assert slow.seconds == 5.0 + 3.0 + 10.0 + 0.25, "the last rank begins last"
    equal = Costs(send=1.0, rank=1.0, take=1.0)
    assert call(Tree(4), equal, FREE).seconds == 8.0
    assert call(Tree(4), equal, Way(0.0, cores=1)).seconds == 12.0, "processes that share a core wait for it"


def test_a_relay_passes_on_down_and_up() -> None:
    """One relay with two ranks: in 1, down 2 each, the ranks 3 each, up 4 each, the driver 0.5 for each answer."""
    costs = Costs(relay_in=1.0, relay_down=2.0, rank=3.0, relay_up=4.0, take=0.5)
    found = call(Tree(2, beside=False), costs, Way(hop_s=0.125))
    # down at 0.125 + 1 + 2 and + 2; answers at 6.125 and 8.125; up until 10.125 and 14.125
    assert found.seconds == 14.125 + 0.125 + 0.5
    four = Tree(4, per_node=1, beside=False)
    assert call(four, Costs(relay_in=1.0), Way(0.0, one_relay=True)).seconds == 4.0, "hollow machines are one process"


def test_tensors_cross_the_drivers_link_once_for_each_replica() -> None:
    tree, way = Tree(16, per_node=4, replica=8, beside=False), Way(0.0, bytes_per_s=10.0)
    assert call(tree, Costs(), way, down=100).seconds == 20.0
    assert call(tree, Costs(), way, down=100, up=50).seconds == 30.0
    assert call(tree, Costs(send_byte=0.5), FREE, down=100).leader_s == 100.0


def test_a_real_group_leads_hollow_machines(tmp_path: Path) -> None:
    """Three of four ranks in replicas of two: the driver's side is the real one, tensors and all."""
    (port,), token = free_ports(["127.0.0.1"]), secrets.token_hex(8)

    def serve() -> None:
        Machines(f"127.0.0.1:{port}", token, 3, 4, 2).serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with Nodes(4, 4, "127.0.0.1", port, token) as nodes:
        nodes.wait(limit_s=60.0)
        with Group("hollow", 12, Layout(), log_dir=tmp_path, nodes=nodes, first_rank=4) as group:
            group.start()
            assert group.num_replicas == 6
            found = hollow_call(group, os.getpid(), 2, down=256, up=128)
            replies = group.call(Nothing(up=128))
    thread.join(20.0)
    assert not thread.is_alive(), "they go when they are sent away"
    assert [len(reply.tensors["x"]) for reply in replies] == [128] * 6
    assert found.seconds > 0 and found.leader_s > 0


def test_the_ratios_end_with_how_far_the_model_is_off() -> None:
    step = {"what": "calls of a step", "model": 7.0, MEMORY: 9.0, "sockets": 4}
    rows = [{"kind": "model", "ranks": max(SIMULATED), **row} for row in (step, {"what": "empty call", "model": 1.0})]
    result = Result("scale", "cpu", {}, [*rows, *({"kind": "hollow", "model/measured": r} for r in (0.5, 0.8, 1.5))])
    _say(result, beats=0.1)
    over = [f"model_over_measured_{end}" for end in ("least", "most")]
    assert list(result.ratios) == [*over, "calls_s", "model_off_error"]
    assert result.ratios["calls_s"] == 7.0 and result.ratios["model_off_error"] == pytest.approx(math.log(1 / 0.8))
