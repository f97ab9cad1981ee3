"""Processes of collectors: signals to a driver's group, as terminals, shells and schedulers send them, and secrets."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from fake_servers import Writer, serving_in_a_thread

from megarl.rewards.scorer import Rewards
from megarl.rewards.surroundings import Surroundings
from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.settings import GenerationSettings

LIMIT_S = 240.0
SECRETS = ("MEGARL_TOKEN", "MEGARL_SERVER_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")


def variables_of(process: psutil.Process) -> str:
    """As a program got them; "" if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/environ").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_collectors_and_rewards_get_allowed_variables_only(model_path, tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, f"the secret of {name}")
    collectors = Collectors(
        CollectorSettings(
            ("http://127.0.0.1:9",),
            "",
            model_path,
            GenerationSettings(timeout_s=200),
            partial(Rewards, ["exact"], surroundings=Surroundings(environment={"OWN": "the secret of OWN"})),
            tmp_path / "collector.log",
        )
    )
    try:
        (pid,) = collectors.pids
        # multiprocessing's two servers of the collector, and a process of rewards
        while len(found := list(filter(None, map(variables_of, psutil.Process(pid).children(recursive=True))))) < 3:
            collectors.wait(0.05)  # raises if the collector ends
        found.append(variables_of(psutil.Process(pid)))
    finally:
        collectors.close()
    for variables in found:
        names = {variable.partition("=")[0] for variable in variables.split("\0")}
        assert "PATH" in names and not names & set(SECRETS)
        assert "the secret of" not in variables


@pytest.mark.full
def test_signal_tree_sigterm_to_all_processes_ends_no_collector_and_the_drivers_end_ends_all(model_path, tmp_path):
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
            started = psutil.Process(driver.pid).children(recursive=True)
            assert len(started) >= 4, "the collector, multiprocessing's two servers, and a process of rewards"
            for process in (*started, driver):
                process.send_signal(signal.SIGTERM)
            assert driver.stdout.readline() == "SIGTERM\n"
            assert said_after(driver, "0-1\n") == before, "the same collector, no restart"
            assert all(process.is_running() for process in started)
            os.killpg(driver.pid, signal.SIGINT)
        assert driver.returncode == -signal.SIGINT
    gone, alive = psutil.wait_procs(started, timeout=LIMIT_S)
    assert not alive, f"left behind: {alive}"


def said_after(driver, line):
    driver.stdin.write(line)
    driver.stdin.flush()
    return json.loads(driver.stdout.readline())
