"""How the ranks of a group lie over machines, and which network interface they speak over."""

from __future__ import annotations

import os

import pytest

from megarl.group.ranks import FIRST_GPU, RanksLaunch, Share, _arguments, _environment, interface_of, shares


@pytest.mark.parametrize(
    ("first", "count", "per_node", "wanted"),
    [
        (0, 4, 4, [Share(0, 0, 0, 4)]),
        (0, 8, 4, [Share(0, 0, 0, 4), Share(1, 0, 4, 4)]),
        (6, 8, 8, [Share(0, 6, 0, 2), Share(1, 0, 2, 6)]),
        (16, 4, 8, [Share(2, 0, 0, 4)]),
        (3, 1, 4, [Share(0, 3, 0, 1)]),
        (1, 3, 1, [Share(1, 0, 0, 1), Share(2, 0, 1, 1), Share(3, 0, 2, 1)]),
    ],
)
def test_ranks_take_the_gpus_of_one_machine_after_the_other(
    first: int, count: int, per_node: int, wanted: list[Share]
) -> None:
    assert shares(first, count, per_node) == wanted


def test_machines_of_a_group_meet_at_the_first_of_them() -> None:
    words = _arguments(
        RanksLaunch(
            "worker", "cuda", "logs", 6, first_gpu=0, num_shares=2, share=1, master_address="10.0.0.1", master_port=7
        )
    )
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=7", "--nproc-per-node=6"} <= set(
        words
    )


def test_a_group_of_one_machine_meets_on_loopback_at_a_port_of_its_own() -> None:
    words = _arguments(RanksLaunch("worker", "cpu", "logs", 2))
    assert {"--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"} <= set(words)


def test_ranks_know_their_first_gpu_and_not_the_runs_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TOKEN", "a secret of the whole run")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = _environment(RanksLaunch("worker", "cpu", "logs", 2, first_gpu=6), "127.0.0.1:5", "the group's")
    assert env[FIRST_GPU] == "6"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert "a secret of the whole run" not in env.values()


def test_the_interface_of_an_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("127.0.0.2") == loopback
    assert interface_of("203.0.113.9") is None, "an address of nobody's here"
