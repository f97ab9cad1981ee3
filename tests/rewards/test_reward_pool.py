"""One file of functions that fail in every way, and pools of real processes around them."""

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from answers import completion

import megarl
from megarl.rewards.pool import RewardError, RewardPool
from megarl.rewards.result import RewardResult
from megarl.rewards.surroundings import Surroundings
from megarl.samples.sample import Prompt

ROOT = Path(megarl.__file__).parent.parent
FILE = '''
import ctypes, os, signal, subprocess, sys, time

CHILD = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(900)
"""

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
        open(__file__ + ".begun", "w").close()
        time.sleep(600)
    if text == "locked":
        open(__file__ + ".begun", "w").close()
        ctypes.PyDLL(None).sleep(900)  # holds the interpreter's lock: no thread of the process runs
    if text == "die":
        os._exit(7)
    if text == "program":
        wait = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
        program = subprocess.Popen([sys.executable, "-c", wait, __file__ + ".go"])
        with open(__file__ + ".programs", "a") as file:
            print(os.getpid(), program.pid, file=file)
        return float(program.wait() == 0)
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
    if text == "columns":
        return float(len(completion.columns))
    if text == "memory":
        return len(bytearray(1500 << 20))
    if text == "file":
        with open(__file__ + ".big", "wb") as file:
            file.write(bytes(2 << 20))
    if text == "leave":  # a child of a child that has ended, in a session of its own
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
        return int(child.stdout.readline())
    if text == "killed with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
        open(__file__ + ".child", "w").write(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if text in os.environ:
        return float(os.environ[text])
    return {"score": 1.0, "length": len(text)}
'''


@pytest.fixture(scope="module")
def fn(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(FILE)
    return f"{path}:by_text"


@contextmanager
def started(fn, **settings):
    pool = RewardPool([fn], **settings)
    pool.start()
    try:
        yield pool
    finally:
        pool.stop()


def scores(pool, fn, *groups):
    """The outcomes of groups of texts, scored at once."""

    async def score_all():
        prompts = [Prompt(f"0-{g}", [1], "x", "46") for g in range(len(groups))]
        calls = [
            pool.score(fn, prompt, [completion(text) for text in texts])
            for prompt, texts in zip(prompts, groups, strict=True)
        ]
        return await asyncio.wait_for(asyncio.gather(*calls), timeout=240)

    return asyncio.run(score_all())


def run(fn, *groups, **settings):
    with started(fn, **settings) as pool:
        return scores(pool, fn, *groups)


def until(condition, what):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def runs(pid):
    """Whether the process lives; a zombie that nobody has collected yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended, perhaps while its file was read
        return False


def test_results_come_back_in_order_with_their_extra_numbers(fn):
    groups = [["a", "bb"] * 4] * 64 + [[], ["ccc"]]
    results = run(fn, *groups, num_workers=2)
    assert results == [[RewardResult(1.0, {"length": len(text)}) for text in texts] for texts in groups]


def test_a_reward_process_gets_no_columns(fn):
    """They may be a hundred times as large as the tokens, and no reward reads them."""
    given = replace(completion("columns"), columns={"routes": np.zeros((2, 4))})
    with started(fn) as pool:
        (result,) = asyncio.run(pool.score(fn, Prompt("0-0", [1], "x"), [given]))
    assert result.reward == 0
    assert list(given.columns) == ["routes"], "the sample keeps them"


def test_every_failure_is_a_sentence_and_leaves_its_neighbours_alone(fn):
    assert run(fn, ["loop"], timeout_s=0.3) == [["no answer within 0.3 s"]]
    texts = ["a", "raise", "hurry, loop", "hurry, stubborn", "exit", "nan", "nothing", "b"]
    (outcomes,) = run(fn, texts, timeout_s=200)
    good = RewardResult(1.0, {"length": 1.0})
    line = FILE[: FILE.index("raise KeyError")].count("\n") + 1
    assert outcomes[0] == outcomes[7] == good
    assert outcomes[1] == f"KeyError: 'gone' ({fn[:-8]}:{line})"
    assert outcomes[2] == outcomes[3] == "no answer within 200 s"
    assert outcomes[4].startswith("SystemExit: 1")
    assert outcomes[5].startswith("ValueError: returned nan; expected a finite number")
    assert outcomes[6].startswith("TypeError: returned None, a NoneType; expected a number")


def test_a_process_that_dies_or_cannot_be_interrupted_costs_only_its_own_sample(fn, monkeypatch):
    monkeypatch.setattr("megarl.rewards.pool.GRACE_S", 0.3)
    results = run(fn, ["a", "die"], ["b", "deaf"], ["c"], timeout_s=1)  # for good ones too
    good = RewardResult(1.0, {"length": 1.0})
    died, deaf = "its process died with exit code 7", "no answer within 1 s, and no way to interrupt it"
    assert results == [[good, died], [good, deaf], [good]]


def test_slow_samples_run_on_all_processes_and_lose_no_answer(fn):
    (results,) = run(fn, ["slow"] * 12 + ["pid"], num_workers=2)
    assert results[:12] == [RewardResult(1.0, {"length": 4.0})] * 12
    assert results[12].reward != os.getpid()


def test_signal_tree_a_sample_whose_program_is_ended_by_one_is_scored_again(fn):
    """The process stays; what it has started has the usual effects of signals."""
    notes = Path(fn.partition(":")[0] + ".programs")
    with started(fn) as pool:
        with ThreadPoolExecutor(1) as threads:
            scored = threads.submit(scores, pool, fn, ["program"])
            until(lambda: notes.exists() and len(notes.read_text().splitlines()) == 1, "the program")
            worker, program = map(int, notes.read_text().split())
            for pid in (worker, program):
                os.kill(pid, signal.SIGTERM)
            until(lambda: len(notes.read_text().splitlines()) == 2, "the second program")
            Path(fn.partition(":")[0] + ".go").touch()
            assert scored.result() == [[RewardResult(1.0)]]
        assert {line.split()[0] for line in notes.read_text().splitlines()} == {str(worker)}


def test_an_idle_pool_whose_process_was_killed_starts_another(fn):
    with started(fn) as pool:
        ((first,),) = scores(pool, fn, ["pid"])
        os.kill(int(first.reward), 9)
        until(lambda: not runs(int(first.reward)), "it was killed")
        ((second,),) = scores(pool, fn, ["pid"])
    assert first.reward != second.reward > 0


def test_processes_that_cannot_start_stop_the_run_instead_of_waiting_for_ever(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    fn = f"{tmp_path}/mine.py:by_text"
    pool = RewardPool([fn])
    (tmp_path / "mine.py").unlink()
    pool.start()
    try:
        with pytest.raises(RewardError, match="the reward processes cannot run"):
            scores(pool, fn, ["a", "a"])
    finally:
        pool.stop()


SCRIPT = """
import asyncio, sys
from megarl.rewards.pool import RewardPool
from megarl.samples.sample import Completion, Prompt, VersionSpan

async def main(pool):
    def score(text):
        answer = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text)
        return pool.score(sys.argv[1], Prompt("0-0", [1], "x"), [answer])

    (pid,) = await score("pid")
    sys.stdout.write(f"{int(pid.reward)}\\n")
    sys.stdout.flush()
    await score(sys.argv[2])

if __name__ == "__main__":
    pool = RewardPool([sys.argv[1]], timeout_s=600)
    pool.start()
    asyncio.run(main(pool))
"""


@pytest.mark.parametrize("text", ["deaf", "locked"])
def test_a_hanging_process_dies_with_the_program_that_started_it(text, tmp_path):
    """Also where the function holds the interpreter's lock."""
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), f"{tmp_path}/mine.py:by_text", text]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        until(lambda: (tmp_path / "mine.py.begun").exists() or program.poll() is not None, "it hangs")
        assert program.poll() is None
        program.kill()
    until(lambda: not runs(pid), "it ends with its program")


def test_the_pool_can_be_stopped_twice_and_before_it_starts_and_refuses_a_wrong_function(fn):
    others = set(multiprocessing.active_children())  # of tests that ran before in this process
    with pytest.raises(ValueError, match="reward.fn=exakt: expected one of auto"):
        RewardPool(["exakt"])
    pool = RewardPool([fn])
    pool.stop()
    pool.start()
    pool.stop()
    pool.stop()
    assert not set(multiprocessing.active_children()) - others, "its processes are gone"


# surroundings: limits, variables and children
def test_a_reward_has_its_limits_its_variables_and_no_children_when_it_ends(fn):
    surroundings = Surroundings(memory_mb=1200, file_mb=1, environment={"MY_KEY": "7"})
    texts = ["memory", "file", "MY_KEY", "leave", "leave"]
    ((memory, file, key, first, second),) = run(fn, texts, timeout_s=100, surroundings=surroundings)
    assert memory.startswith("MemoryError")
    assert file.startswith("OSError: [Errno 27] File too large")
    assert Path(fn.replace(":by_text", ".big")).stat().st_size == 1 << 20
    assert key.reward == 7
    assert first.reward != second.reward
    assert not runs(int(first.reward)) and not runs(int(second.reward))


PROCESSES = """
import multiprocessing
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

kept = {}


def half(x):
    return x / 2


def put(queue):
    queue.put(1.0)


def by_processes(prompt, completion):
    what, _, method = completion.text.partition(" ")
    context = multiprocessing.get_context(method or None)
    if what == "process":
        queue = context.Queue()
        process = context.Process(target=put, args=(queue,))
        process.start()
        number = queue.get()
        process.join()
        return number
    if what == "pool":
        with context.Pool(2) as pool:
            return sum(pool.map(half, [1, 1]))
    if what == "executor":
        with ProcessPoolExecutor(1, context) as executor:
            return executor.submit(half, 2).result()
    if what == "manager":
        with context.Manager() as manager:
            shared = manager.list([1.0])
            return shared[0]
    if what == "threads":
        with ThreadPoolExecutor(2) as executor:
            return sum(executor.map(half, [1, 1]))
    if what == "kept":  # made by the first sample, used by all
        if method not in kept:
            kept[method] = context.Pool(1), ProcessPoolExecutor(1, context)
        pool, executor = kept[method]
        return pool.apply(half, [1]) + executor.submit(half, 1).result()
    if what == "popen":
        if what not in kept:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            kept[what] = subprocess.Popen(["cat"], **pipes)
        kept[what].stdin.write(b"1\\n")
        kept[what].stdin.flush()
        return float(kept[what].stdout.readline())
    if what == "lost":
        return subprocess.Popen(["sleep", "900"]).pid
    process = context.Process(target=time.sleep, args=(900,))
    process.start()
    if what == "raise":
        raise ValueError(process.pid)
    return process.pid
"""


@pytest.fixture(scope="module")
def with_processes(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "mine.py"
    path.write_text(PROCESSES)
    return f"{path}:by_processes"


def test_every_sample_may_start_processes_and_use_a_pool_that_the_first_one_made(with_processes):
    texts = ["process", "process", "kept", "kept", "process forkserver", "process forkserver", "threads", "threads"]
    ((*outcomes,),) = run(with_processes, texts, timeout_s=100)
    assert [outcome if isinstance(outcome, str) else outcome.reward for outcome in outcomes] == [1.0] * len(texts)


def test_a_process_that_the_reward_keeps_serves_every_sample_and_one_that_it_lost_ends(with_processes):
    ((*kept, lost, last),) = run(with_processes, ["popen", "popen", "lost", "popen"], timeout_s=100)
    assert [outcome if isinstance(outcome, str) else outcome.reward for outcome in (*kept, last)] == [1.0] * 3
    until(lambda: not runs(int(lost.reward)), "what a sample leaves running ends with it")


@pytest.mark.full
@pytest.mark.parametrize("method", ["", "fork", "spawn", "forkserver"])
def test_processes_pools_executors_and_managers_of_every_start_method_serve_every_sample(with_processes, method):
    kinds = ("process", "pool", "executor", "manager", "kept")
    ((*outcomes, left, other, raised),) = run(
        with_processes,
        [f"{kind} {method}" for kind in (*kinds * 3, "leave", "leave", "raise")],
        timeout_s=100,
    )
    assert [outcome if isinstance(outcome, str) else outcome.reward for outcome in outcomes] == [1.0] * len(outcomes)
    pids = [int(left.reward), int(other.reward), int(re.findall(r"ValueError: (\d+)", raised)[0])]
    until(lambda: not any(map(runs, pids)), "what a sample leaves running ends with it")


def test_children_end_with_a_process_that_is_killed_and_memory_has_no_limit_unless_set(fn):
    ((_, memory),) = run(fn, ["killed with a child", "memory"], timeout_s=100)
    assert memory.reward == 1500 << 20
    child = int(Path(fn.replace(":by_text", ".child")).read_text())
    until(lambda: not runs(child), "it ends with its parent")
