"""One file of functions that fail in every way, and pools of real processes around them."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import megarl
from megarl.rewards.pool import RewardError, RewardPool
from megarl.rewards.result import RewardResult
from megarl.sample import Completion, Prompt, VersionSpan

ROOT = Path(megarl.__file__).parent.parent
FILE = """
import os, signal, time

def by_text(prompt, completion):
    text = completion.text
    if text.startswith("hurry, "):
        signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)  # brings the sample's own limit forward
        text = text.removeprefix("hurry, ")
    if text == "raise":
        raise KeyError("gone")
    if text == "loop":
        while True:
            pass
    if text == "stubborn":
        try:
            time.sleep(600)
        except Exception:
            return 1.0
    if text == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        open(__file__ + ".deaf", "w").close()
        time.sleep(600)
    if text == "die":
        os._exit(7)
    if text == "exit":
        raise SystemExit(1)
    if text == "nan":
        return float("nan")
    if text == "nothing":
        return None
    if text == "slow":
        time.sleep(0.06)
    if text == "pid":
        return os.getpid()
    return {"score": 1.0, "length": len(text)}
"""


@pytest.fixture
def fn(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return f"{tmp_path}/mine.py:by_text"


def completion(text):
    return Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text)


def run(fn, groups, **settings):
    """Score groups of texts at once."""
    pool = RewardPool([fn], **settings)

    async def score_all():
        calls = [
            pool.score(fn, Prompt(f"0-{g}", [1], "x", "46"), [completion(text) for text in texts])
            for g, texts in enumerate(groups)
        ]
        return await asyncio.wait_for(asyncio.gather(*calls), timeout=240)

    pool.start()
    try:
        return asyncio.run(score_all())
    finally:
        pool.stop()


def test_a_reward_process_gets_no_columns(tmp_path):
    """They may be a hundred times as large as the tokens, and no reward reads them."""
    (tmp_path / "mine.py").write_text("def count(prompt, completion): return float(len(completion.columns))")
    fn = f"{tmp_path}/mine.py:count"
    pool = RewardPool([fn])
    given = replace(completion("a"), columns={"routes": np.zeros((2, 4))})
    pool.start()
    try:
        (result,) = asyncio.run(pool.score(fn, Prompt("0-0", [1], "x"), [given]))
    finally:
        pool.stop()
    assert result.reward == 0
    assert list(given.columns) == ["routes"], "the sample keeps them"


def test_results_come_back_in_order_with_their_extra_numbers(fn):
    groups = [["a", "bb"], [], ["ccc"]]
    results = run(fn, groups, num_workers=2)
    assert results == [[RewardResult(1.0, {"length": len(text)}) for text in texts] for texts in groups]


def test_every_failure_is_a_sentence_and_leaves_its_neighbours_alone(fn):
    texts = ["a", "raise", "hurry, loop", "hurry, stubborn", "exit", "nan", "nothing", "b"]
    (outcomes,) = run(fn, [texts], timeout_s=200)
    good = RewardResult(1.0, {"length": 1.0})
    line = FILE[: FILE.index("raise KeyError")].count("\n") + 1
    assert outcomes[0] == outcomes[7] == good
    assert outcomes[1] == f"KeyError: 'gone' ({fn[:-8]}:{line})"
    assert outcomes[2] == outcomes[3] == "no answer within 200 s"
    assert outcomes[4].startswith("SystemExit: 1")
    assert outcomes[5].startswith("ValueError: returned nan; expected a finite number")
    assert outcomes[6].startswith("TypeError: returned None, a NoneType; expected a number")


def test_a_sample_has_as_long_as_the_settings_say(fn):
    assert run(fn, [["loop"]], timeout_s=0.3) == [["no answer within 0.3 s"]]


def test_a_process_that_dies_or_cannot_be_interrupted_costs_only_its_own_sample(fn, monkeypatch):
    monkeypatch.setattr("megarl.rewards.pool.GRACE_S", 0.3)
    results = run(fn, [["a", "die"], ["b", "deaf"], ["c"]], timeout_s=2)  # for good ones too
    good = RewardResult(1.0, {"length": 1.0})
    died, deaf = "its process died with exit code 7", "no answer within 2 s, and no way to interrupt it"
    assert results == [[good, died], [good, deaf], [good]]


def test_slow_samples_run_on_all_processes_and_lose_no_answer(fn):
    (results,) = run(fn, [["slow"] * 30 + ["pid"]], num_workers=2)
    assert results[:30] == [RewardResult(1.0, {"length": 4.0})] * 30
    assert results[30].reward != os.getpid()


def test_an_idle_pool_whose_process_was_killed_starts_another(fn):
    pool = RewardPool([fn])

    async def kill_between():
        (first,) = await pool.score(fn, Prompt("0-0", [1], "x"), [completion("pid")])
        os.kill(int(first.reward), 9)
        while runs(int(first.reward)):
            await asyncio.sleep(0.01)
        (second,) = await pool.score(fn, Prompt("0-1", [1], "x"), [completion("pid")])
        return first, second

    pool.start()
    try:
        first, second = asyncio.run(asyncio.wait_for(kill_between(), 240))
    finally:
        pool.stop()
    assert first.reward != second.reward > 0


def test_processes_that_cannot_start_stop_the_run_instead_of_waiting_for_ever(fn, monkeypatch):
    pool = RewardPool([fn])
    os.remove(fn.removesuffix(":by_text"))
    pool.start()
    try:
        with pytest.raises(RewardError, match="the reward processes cannot run"):
            asyncio.run(asyncio.wait_for(pool.score(fn, Prompt("0-0", [1], "x"), [completion("a")] * 2), 240))
    finally:
        pool.stop()


SCRIPT = """
import asyncio, sys
from megarl.rewards.pool import RewardPool
from megarl.sample import Completion, Prompt, VersionSpan

async def main(pool):
    def score(text):
        answer = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text)
        return pool.score(sys.argv[1], Prompt("0-0", [1], "x"), [answer])

    (pid,) = await score("pid")
    sys.stdout.write(f"{int(pid.reward)}\\n")
    sys.stdout.flush()
    await score("deaf")

if __name__ == "__main__":
    pool = RewardPool([sys.argv[1]], timeout_s=600)
    pool.start()
    asyncio.run(main(pool))
"""


def test_a_hanging_process_dies_with_the_program_that_started_it(fn, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command, environment = [sys.executable, str(script), fn], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        while not (tmp_path / "mine.py.deaf").exists():
            assert program.poll() is None
            time.sleep(0.01)
        program.kill()
    deadline = time.monotonic() + 240
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(pid)


def runs(pid):
    """Whether the process lives; a zombie that nobody has collected yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended, perhaps while its file was read
        return False


def test_the_pool_can_be_stopped_twice_and_before_it_starts(fn):
    others = set(multiprocessing.active_children())  # of tests that ran before in this process
    pool = RewardPool([fn])
    pool.stop()
    pool.start()
    pool.stop()
    pool.stop()
    assert not set(multiprocessing.active_children()) - others, "its processes are gone"


def test_a_wrong_function_is_refused_before_any_process_starts(tmp_path):
    with pytest.raises(ValueError, match="reward.fn=exakt: expected one of auto"):
        RewardPool(["exakt"])


def test_all_groups_of_a_step_are_scored_at_once():
    pool = RewardPool(["exact"])
    prompts = [Prompt(f"0-{g}", [1, 2, 3], "12+34=", "46") for g in range(64)]
    group = [completion("46"), completion("64")] * 4

    async def score_all():
        return await asyncio.gather(*(pool.score("exact", prompt, group) for prompt in prompts))

    pool.start()
    try:
        results = asyncio.run(score_all())
    finally:
        pool.stop()
    assert [[result.reward for result in found] for found in results] == [[1, 0] * 4] * 64
