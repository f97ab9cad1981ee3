"""The benchmark of leading many ranks: its model by hand, hollow machines under a real Group, and a whole small run."""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from bench_scale import MEMORY, SIMULATED, STEP, _say, parser, step_of, work
from page import Result, run
from scale_costs import ARGUMENTS, hollow_call, together
from scale_hollow import Machines, processor_s, reply_of
from scale_model import Costs, Leader, Tree, Way, call
from scale_picture import draw, series

from megarl.group import Group
from megarl.layout import Layout
from megarl.machines import Nodes
from megarl.servers.server_process import free_ports

ROOT = Path(__file__).parents[2]
FREE = Way(0.0)


def test_a_tree_has_ranks_beside_the_driver_and_relays_for_the_others() -> None:
    tree = Tree(20, per_node=8, replica=4)
    assert (tree.direct, tree.relays) == (range(8), [range(8, 16), range(16, 20)])
    assert Tree(16, 8, beside=False).relays == [range(8), range(8, 16)]
    assert (tree.bytes_down(range(8, 16), 5), tree.bytes_up(7, 5), tree.bytes_up(8, 5)) == (10, 5, 0)


def test_the_driver_sends_one_after_another_and_then_takes_the_answers() -> None:
    """Three ranks beside it: 3 sends; the answers of the first two are there when the last send is done."""
    found = call(Tree(3), Costs(send=1.0, take=2.0, rank=0.5), FREE)
    assert (found.seconds, found.leader_s) == (9.0, 9.0)
    slow = call(Tree(3), Costs(call=5.0, send=1.0, take=0.25, rank=10.0), FREE)
    assert slow.seconds == 5.0 + 3.0 + 10.0 + 0.25, "the last rank begins last"


def test_a_relay_passes_on_down_and_up() -> None:
    """One relay with two ranks: in 1, down 2 each, the ranks 3 each, up 4 each, the driver 0.5 for each answer."""
    costs = Costs(relay_in=1.0, relay_down=2.0, rank=3.0, relay_up=4.0, take=0.5)
    found = call(Tree(2, beside=False), costs, Way(hop_s=0.125))
    # down at 0.125 + 1 + 2 and + 2; answers at 6.125 and 8.125; up until 10.125 and 14.125
    assert found.seconds == 14.125 + 0.125 + 0.5


def test_processes_that_share_a_core_wait_for_it() -> None:
    tree, costs = Tree(4), Costs(send=1.0, rank=1.0, take=1.0)
    assert call(tree, costs, FREE).seconds == 8.0
    assert call(tree, costs, Way(0.0, cores=1)).seconds == 12.0


def test_tensors_cross_the_drivers_link_once_for_each_replica() -> None:
    tree, way = Tree(16, per_node=4, replica=8, beside=False), Way(0.0, bytes_per_s=10.0)
    assert call(tree, Costs(), way, down=100).seconds == 20.0
    assert call(tree, Costs(), way, down=100, up=50).seconds == 30.0
    assert call(tree, Costs(send_byte=0.5), FREE, down=100).leader_s == 100.0


def test_hollow_machines_are_one_process() -> None:
    tree, costs = Tree(4, per_node=1, beside=False), Costs(relay_in=1.0)
    assert call(tree, costs, FREE).seconds == 1.0
    assert call(tree, costs, Way(0.0, one_relay=True)).seconds == 4.0


def test_ten_thousand_ranks_cost_the_driver_what_each_costs() -> None:
    costs = Costs(send=2e-5, take=3e-5, relay_in=2e-5, relay_down=1e-5, relay_up=2e-5, rank=5e-5)
    found = call(Tree(10_000), costs, Way(5e-5, 5e-5, 3e9))
    assert found.leader_s == pytest.approx((8 + 1249) * 2e-5 + 10_000 * 3e-5)
    assert found.leader_s <= found.seconds < 1.1 * found.leader_s


def test_a_step_is_all_its_calls() -> None:
    tree = Tree(64, replica=64)
    assert step_of(tree, Costs(send=1.0), FREE).leader_s == 15 * (STEP["columns"] + STEP["updates"] + 1)
    tokens = 64 * STEP["tokens_per_rank"]
    taken = step_of(tree, Costs(take_byte=1.0), FREE).leader_s
    assert taken == STEP["columns"] * 4 * tokens, "a column of each token comes back"


def test_what_the_driver_holds_grows_with_the_machines() -> None:
    holds = Leader(base_bytes=1e6, node_bytes=1e4, node_sockets=2.0, node_threads=1.0)
    assert holds.memory(Tree(24)) == 1.02e6 and holds.sockets(Tree(24)) == 12


def test_costs_of_both_sides_are_one_table() -> None:
    both = together(Costs(send=1.0, take=2.0), Costs(rank=3.0, relay_up=4.0))
    assert (both.send, both.take, both.rank, both.relay_up, both.relay_down) == (1.0, 2.0, 3.0, 4.0, 0.0)


def test_a_hollow_rank_knows_its_replica() -> None:
    said, body = reply_of(5, {"id": 3, "method": "setup", "arguments": {}}, 2)
    place = {"replica": 2, "is_reporter": True}
    assert said == {"id": 3, "ok": True, "result": place, "seconds": 0.0} and body == b""
    assert len(reply_of(5, {"id": 3, "method": "nothing", "arguments": {"up": 64}}, 2)[1]) > 64
    assert not reply_of(4, {"id": 3, "method": "nothing", "arguments": {"up": 64}}, 2)[1]


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
            replies = group.call("nothing", {**ARGUMENTS, "up": 128})
    thread.join(20.0)
    assert not thread.is_alive(), "they go when they are sent away"
    assert [len(reply.tensors["x"]) for reply in replies] == [128] * 6
    assert found.seconds > 0 and found.leader_s > 0


def test_the_time_of_all_threads_counts() -> None:
    done, leave = threading.Event(), threading.Event()

    def serve() -> None:
        sum(range(3_000_000))
        done.set()
        leave.wait()

    before, before_own = processor_s(os.getpid()), time.thread_time()
    thread = threading.Thread(target=serve)
    thread.start()
    done.wait()
    grown, own = processor_s(os.getpid()) - before, time.thread_time() - before_own
    leave.set()
    thread.join()
    assert grown > own + 0.001, "what the other thread did is more than what this one did"


def test_the_ratios_end_with_how_far_the_model_is_off() -> None:
    step = {"what": "calls of a step", "model": 7.0, MEMORY: 9.0, "sockets": 4}
    rows = [{"kind": "model", "ranks": max(SIMULATED), **row} for row in (step, {"what": "empty call", "model": 1.0})]
    result = Result("scale", "cpu", {}, [*rows, *({"kind": "hollow", "model/measured": r} for r in (0.5, 0.8, 1.5))])
    _say(result, beats=0.1)
    assert list(result.ratios) == [
        "model_over_measured_least",
        "model_over_measured_most",
        "calls_s",
        "model_off_error",
    ]
    assert result.ratios["calls_s"] == 7.0 and result.ratios["model_off_error"] == pytest.approx(math.log(1 / 0.8))


def test_the_picture_has_the_rows_of_each_line(tmp_path: Path) -> None:
    rows = [{"kind": "ranks", "what": "empty call", "ranks": n, "seconds": 0.01 * n} for n in (1, 2)]
    rows += [{"kind": "model", "what": "calls of a step", "ranks": 8, "model": 1.0, "driver's MB": 9.0, "sockets": 4}]
    assert series(rows, "ranks", "empty call", "seconds") == ([1, 2], [0.01, 0.02])
    assert series(rows, "ranks", "empty call", "model") == ([], [])
    draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--per-node", "1", "--hollow-nodes", "9"], "--per-node 1: expected at least 2"),
        (["--hollow-nodes", "1249"], "trainer.nnodes=1249: node 0 may open 4096 files; expected `ulimit -Hn` of 50472"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    assert run(work, parser(), ["--device", "cpu", "--out", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}") and error.count("\n") == 1


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(1500)
def test_a_whole_run_compares_the_model_with_what_was_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_scale.py", "--device", "cpu", "--quick", "--json", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    kinds = {(row["kind"], row["what"]) for row in said["rows"]}
    assert kinds >= {("ranks", "training step"), ("hollow", "empty call"), ("model", "calls of a step")}
    assert list(said)[-2:] == ["calls_s", "model_off_error"] and said["calls_s"] > 0
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".md", ".png"]
