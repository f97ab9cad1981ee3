"""Pushes from two ranks into real servers on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from push_cases import TOKEN, all_cases
from spawn import run_ranks
from tiny_models import write_model

from megarl.rollout.client import Engine, EngineError
from megarl.rollout.launch import TOKEN_VARIABLE, EngineLaunch, cpu_command

pytestmark = pytest.mark.dist


def start_server(folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launch = EngineLaunch(
            "cpu", str(folder), port=free.getsockname()[1], max_running_requests=4, max_total_tokens=512
        )
    return launch.url, subprocess.Popen(cpu_command(launch), env={**os.environ, TOKEN_VARIABLE: TOKEN})


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return Engine(url, TOKEN).health()
        except EngineError:
            assert process.poll() is None and time.monotonic() < deadline, f"{url} did not start"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    servers = [start_server(folder) for _ in range(2)]
    try:
        for url, process in servers:
            wait_until_healthy(url, process)
        urls, pids = [url for url, _ in servers], [process.pid for _, process in servers]
        yield run_ranks(2, all_cases, str(folder), urls, pids, timeout_s=120)
    finally:
        for _, process in servers:
            process.kill()
            process.wait()


def test_every_digest_of_every_server_is_verified(by_rank: list[dict[str, Any]]) -> None:
    report = by_rank[0]["first"]
    assert report.version == 1
    assert report.num_tensors == len(by_rank[0]["want"]) == 4 * 11 + 2
    assert report.num_verified == 2 * report.num_tensors
    assert set(report.timings) == {"join", "pause", "gather", "send", "verify", "resume"}
    assert by_rank[1]["first"] is None


def test_the_servers_hold_the_changed_weights_and_their_version(by_rank: list[dict[str, Any]]) -> None:
    assert by_rank[0]["held"] == [by_rank[0]["want"]] * 2
    assert [info["weight_version"] for info in by_rank[0]["info"]] == ["2", "2"]
    assert not any(info["is_paused"] for info in by_rank[0]["info"])


def test_a_corrupted_element_is_caught_and_named_and_the_servers_stay_paused(by_rank: list[dict[str, Any]]) -> None:
    sentence, _ = by_rank[0]["corrupted"]
    assert sentence.startswith("the push of weights version 3 failed: http://127.0.0.1:")
    assert sentence.endswith("the trainer sent (differ: model.layers.1.self_attn.k_proj.weight)")
    assert by_rank[0]["paused"] == [True, True]
    assert by_rank[1]["corrupted"][0] == ""


def test_the_next_good_push_repairs_a_server(by_rank: list[dict[str, Any]]) -> None:
    assert by_rank[0]["repaired"].version == 4


def test_a_push_in_many_buckets(by_rank: list[dict[str, Any]]) -> None:
    assert by_rank[0]["buckets"].num_verified == 46


def test_a_dropped_bucket_is_caught(by_rank: list[dict[str, Any]]) -> None:
    assert "differ: model.layers.0.self_attn.o_proj.weight" in by_rank[0]["dropped"][0]


def test_a_frozen_server_is_an_error_within_the_limit(by_rank: list[dict[str, Any]]) -> None:
    sentence, seconds = by_rank[0]["frozen"]
    assert "push of weights version 8 failed" in sentence
    assert "timed out" in sentence.lower() or "timeout" in sentence.lower()
    assert seconds < 5


def test_a_dead_server_is_an_error_at_once(by_rank: list[dict[str, Any]]) -> None:
    sentence, seconds = by_rank[0]["dead"]
    assert "ConnectError" in sentence or "ReadError" in sentence
    assert seconds < 1


def test_a_wrong_token_is_an_error_at_once(by_rank: list[dict[str, Any]]) -> None:
    sentence, seconds = by_rank[0]["stranger"]
    assert "answered 401" in sentence
    assert seconds < 1


def test_the_other_ranks_go_on_after_failures(by_rank: list[dict[str, Any]]) -> None:
    assert [found["ranks that go on"] for found in by_rank] == [2, 2]
    assert by_rank[1]["frozen"][0] == by_rank[1]["dead"][0] == ""


def test_a_tiny_push_is_quick(by_rank: list[dict[str, Any]]) -> None:
    # two servers and two ranks share two cores here, so the limit is generous
    assert sum(by_rank[0]["warm"].timings.values()) < 1.0
