"""Signals to all processes of a driver's group, as terminals, shells and schedulers send them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_servers import Writer, serving_in_a_thread

LIMIT_S = 240.0


@pytest.mark.slow
def test_signals_to_the_group_of_the_driver_reach_only_the_driver_and_its_end_ends_all(model_path, tmp_path):
    with serving_in_a_thread(Writer()) as (urls, _):
        words = [sys.executable, Path(__file__).parents[2] / "helpers/collector_driver.py", urls[0], model_path]
        driver = subprocess.Popen(
            [*words, tmp_path / "collector.log"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group as that of a command in a terminal
        )
        with driver:
            before = said_after(driver, "0-0\n")
            os.killpg(driver.pid, signal.SIGTERM)
            assert driver.stdout.readline() == "SIGTERM\n"
            assert said_after(driver, "0-1\n") == before, "the same collector, no restart"
            started = psutil.Process(driver.pid).children(recursive=True)
            assert len(started) >= 4, "the collector, multiprocessing's two servers, and a process of rewards"
            os.killpg(driver.pid, signal.SIGINT)
        assert driver.returncode == -signal.SIGINT
    gone, alive = psutil.wait_procs(started, timeout=LIMIT_S)
    assert not alive, f"left behind: {alive}"


def said_after(driver, line):
    driver.stdin.write(line)
    driver.stdin.flush()
    return json.loads(driver.stdout.readline())
