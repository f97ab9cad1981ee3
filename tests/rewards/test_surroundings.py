"""Limits, variables and children of reward functions, in pools of real processes."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from test_reward_pool import ROOT, SCRIPT, completion, runs

from megarl.rewards.pool import RewardPool
from megarl.rewards.surroundings import Surroundings
from megarl.sample import Prompt

FILE = '''
import os, signal, subprocess, sys, time

CHILD = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(900)
"""

def by_text(prompt, completion):
    text = completion.text
    if text == "memory":
        return len(bytearray(1500 << 20))
    if text == "file":
        with open(__file__ + ".big", "wb") as file:
            file.write(bytes(2 << 20))
    if text == "leave":  # a child of a child that has ended, in a session of its own
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
        return int(child.stdout.readline())
    if text == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
        open(__file__ + ".child", "w").write(str(child.pid))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        os.kill(os.getpid(), signal.SIGKILL)
    if text in os.environ:
        return 1.0 + ("Z" in os.environ[text])
    names = open("/proc/self/environ").read().split("\\0") + open(f"/proc/{os.getppid()}/environ").read().split("\\0")
    return float(any(name.startswith(text + "=") for name in names))
'''


@pytest.fixture
def score(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)

    def all_of(*texts, **surroundings):
        fn = f"{tmp_path}/mine.py:by_text"
        pool = RewardPool([fn], timeout_s=100, surroundings=Surroundings(**surroundings))
        pool.start()
        try:
            return asyncio.run(pool.score(fn, Prompt("0-0", [1], "x"), [completion(text) for text in texts]))
        finally:
            pool.stop()

    return all_of


def test_a_reward_has_a_limit_of_memory_and_of_files(score, tmp_path):
    memory, file = score("memory", "file", memory_mb=1200, file_mb=1)
    assert memory.startswith("MemoryError")
    assert file.startswith("OSError: [Errno 27] File too large")
    assert (tmp_path / "mine.py.big").stat().st_size == 1 << 20
    assert score("memory")[0].reward == 1500 << 20


def test_what_a_sample_left_behind_ends_with_it(score):
    first, second = score("leave", "leave")
    assert first.reward != second.reward
    assert not runs(int(first.reward)) and not runs(int(second.reward))


def test_children_end_with_a_process_that_is_killed(score, tmp_path):
    score("hang")
    child = int((tmp_path / "mine.py.child").read_text())
    deadline = time.monotonic() + 240
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(child)


def test_rewards_get_the_variables_of_the_settings(score):
    assert score("MY_KEY", environment={"MY_KEY": "Z"})[0].reward == 2


LOCKED = """
import ctypes, os

def by_text(prompt, completion):
    if completion.text == "pid":
        return os.getpid()
    open(__file__ + ".begun", "w").close()
    ctypes.PyDLL(None).sleep(900)  # holds the interpreter's lock: no thread of the process runs
"""


def test_a_process_whose_function_holds_the_lock_ends_with_the_program_that_started_it(tmp_path):
    (tmp_path / "mine.py").write_text(LOCKED)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), f"{tmp_path}/mine.py:by_text"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        pid = int(program.stdout.readline())
        while not (tmp_path / "mine.py.begun").exists():
            assert program.poll() is None
            time.sleep(0.01)
        program.kill()
    deadline = time.monotonic() + 240
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(pid)
