"""`megarl doctor --run`: folders as runs leave them, written by the run's own parts around real errors."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.algo.finite import NonFiniteError
from megarl.cli import main
from megarl.commands.doctor.causes import CAUSES, WHO_ENDED, Source, known_cause
from megarl.commands.doctor.run_folder import explain
from megarl.group.failures import Places
from megarl.metrics.reading.jsonl import append_lines
from megarl.metrics.reading.status import end_noted
from megarl.metrics.trackers.status import StatusTracker
from megarl.metrics.trackers.tracker import Run
from megarl.processes.failure_report import write_report
from megarl.processes.ranks import Share
from megarl.processes.signals import Terminated
from megarl.trainer.run_lock import owned

AGAIN = "the same command starts it again, from its beginning"


def leave(run: Path, error: BaseException | Callable[[], object], *, log: str = "") -> Path:
    """A run in `run` that makes two of five steps and ends with the error, or with what the function raises.

    `log`: what its rank 0 wrote.
    """
    try:
        with owned(run), end_noted(run):
            tracker = StatusTracker(Run(run, "megarl", "try", {}, 5))
            tracker.log(2, {})
            tracker.stage("update_actor")
            tracker.close()
            (run / "logs" / "ranks_0").mkdir(parents=True)
            (run / "logs" / "ranks_0" / "rank_0.log").write_text(log)
            if isinstance(error, BaseException):
                raise error
            error()
    except ValueError:
        pass  # the command line prints it
    except Exception as raised:
        write_report(raised, run / "logs" / "failure.txt")
    except BaseException:
        pass
    return run


def full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"a")


def taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_server(server.getsockname())


def places_in(run: Path, memory: str = "") -> Places:
    """Of one rank; `memory`: how the kernel killed it."""
    return Places("ranks_0", [Share(0, 0, 0, 1)], run / "logs" / "ranks_0", lambda share: memory)


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (full_disk, "a disk is full"),
        (lambda: os.stat("/proc/1/mem/none"), ""),  # not known: the error's own sentence
        (lambda: torch.empty(2**60), "a process got no more host memory: can't allocate memory"),
        (lambda: __import__("no_such_package"), "the Python package no_such_package is missing"),
        (taken_port, "a port is taken by another process"),
    ],
)
def test_real_errors_are_known(tmp_path: Path, act: Callable[[], object], cause: str):
    found = explain(leave(tmp_path / "run", act))
    assert found.state == "failed"
    assert found.cause == cause or (not cause and "/proc/1/mem/none" in found.cause)
    assert found.next.endswith(AGAIN)


def test_a_crash_in_compiled_code_is_found_in_the_log_of_the_rank_that_died(tmp_path: Path):
    crash = [sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"]
    log = subprocess.run(crash, capture_output=True, text=True).stderr
    places = places_in(tmp_path / "run")
    found = explain(leave(tmp_path / "run", places.died(0, "update"), log=f"loading\n{log}"))
    assert found.cause == "a process crashed in compiled code"
    assert found.evidence[0] == "logs/ranks_0/rank_0.log:2: Fatal Python error: Segmentation fault"
    assert found.evidence[1].startswith("status.json: group ranks_0: rank 0 died in update; see ")


def test_a_rank_that_the_kernel_killed_for_memory_is_the_cause(tmp_path: Path):
    words = "killed by SIGKILL, as the kernel does when memory ends (oom_kill of this cgroup 3 -> 4, limit 700 MB)"
    places = places_in(tmp_path / "run", words)
    found = explain(leave(tmp_path / "run", places.died(0, "load"), log="loading\n"))
    assert found.cause == f"a process got no more host memory: {words}"
    assert "megarl plan --config" in found.next


def test_a_rank_that_died_without_a_word_was_ended_from_outside(tmp_path: Path):
    places = places_in(tmp_path / "run")
    found = explain(leave(tmp_path / "run", places.died(0, "update"), log="loading\n"))
    ended = "a rank was ended from outside, and its log has no error: group ranks_0: rank 0 died in update"
    assert found.cause == ended
    assert "dmesg" in found.next


def test_logs_that_the_error_does_not_name_are_not_its_cause(tmp_path: Path):
    """A server that ran out of memory hours ago was started again, and is not why the rank hangs."""
    run, places = tmp_path / "run", places_in(tmp_path / "run")
    leave(run, places.hangs([0], "did not end update within 120 s"), log="")
    (run / "logs" / "server_0.log").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    assert explain(run).cause == "a rank hung: group ranks_0: rank 0 did not end update within 120 s"


SURVIVED = "WARNING: server 1: torch.OutOfMemoryError: CUDA out of memory; it is started again\n"


def test_the_sentence_with_which_a_run_ended_beats_an_older_warning(tmp_path: Path):
    """That a GPU ran out of memory stands above all in the table, but the run survived it."""
    run = leave(tmp_path / "run", RuntimeError("RewardError: sample 3 of prompt 7; see collector.log"))
    (run / "logs" / "collector.log").write_text(SURVIVED)
    assert explain(run).cause == "a reward failed: sample 3 of prompt 7; see collector.log"


def test_the_log_of_a_rank_that_died_is_looked_at_before_it_is_said_to_have_no_error(tmp_path: Path):
    places = places_in(tmp_path / "run")
    found = explain(leave(tmp_path / "run", places.died(0, "update"), log=SURVIVED))
    assert found.cause == "a GPU ran out of memory"


@pytest.mark.parametrize(
    "what", ["it leaves its group", "counted as 0", "counted as 0; further errors are only counted"]
)
def test_what_one_sample_met_is_not_why_a_run_ended(tmp_path: Path, what: str):
    run = leave(tmp_path / "run", RuntimeError("nobody knows this sentence"))
    warning = f"reward r.py:bad, sample 3#0: OSError: [Errno 24] Too many open files; {what}\n"
    (run / "logs" / "collector.log").write_text(warning)
    assert explain(run).cause == "nobody knows this sentence"


def test_no_log_explains_a_users_mistake(tmp_path: Path):
    run = leave(tmp_path / "run", ValueError("data/a.jsonl:3: expected a prompt"), log=SURVIVED)
    assert explain(run).cause == "data/a.jsonl:3: expected a prompt"


def test_a_bad_number_is_told_with_what_the_metrics_showed_before(tmp_path: Path):
    run = leave(tmp_path / "run", NonFiniteError("advantages", 3, 7, float("nan")))
    rows = [{"step": step, "actor/grad_norm": norm} for step, norm in enumerate([1.0] * 6 + [50.0], 1)]
    append_lines(run / "metrics.jsonl", rows)
    append_lines(run / "advice.jsonl", [{"step": 7, "advice": "lower the learning rate"}])
    found = explain(run)
    assert found.cause.startswith("training met a bad number: advantages is nan at token 7 of sequence 3")
    assert "metrics.jsonl: actor/grad_norm is 50 at step 7, and was 1 before" in found.evidence
    assert "advice.jsonl: at step 7: lower the learning rate" in found.evidence


def test_a_users_mistake_is_its_own_sentence(tmp_path: Path):
    found = explain(leave(tmp_path / "run", ValueError("data/a.jsonl:3: expected a prompt")))
    assert (found.state, found.cause) == ("failed", "data/a.jsonl:3: expected a prompt")


@pytest.mark.parametrize(
    ("error", "cause"),
    [(Terminated("SIGTERM: step 2 is saved"), "SIGTERM: step 2 is saved"), (KeyboardInterrupt(), "Ctrl-C ended it")],
)
def test_a_run_that_was_asked_to_stop_did_not_fail(tmp_path: Path, error: BaseException, cause: str):
    found = explain(leave(tmp_path / "run", error))
    assert (found.state, found.cause, found.next) == ("stopped", cause, AGAIN)


def test_the_failure_of_an_earlier_start_is_not_told_of_a_later_one(tmp_path: Path):
    run = leave(tmp_path / "run", full_disk)
    os.utime(run / "logs" / "failure.txt", (0, 0))
    with owned(run), end_noted(run):
        (run / "summary.json").write_text('{"steps": 5}')
    assert explain(run).state == "finished"


KILLED = """
import os, signal, sys, time
from pathlib import Path
from megarl.metrics.trackers.tracker import Run
from megarl.metrics.reading.status import end_noted
from megarl.metrics.trackers.status import StatusTracker
from megarl.trainer.run_lock import owned
run = Path(sys.argv[1])
with owned(run), end_noted(run):
    tracker = StatusTracker(Run(run, "megarl", "try", {}, 5))
    tracker.log(2, {})
    tracker.stage("update_actor")
    print("here", flush=True)
    time.sleep(600)
"""


def test_a_run_that_goes_on_and_one_that_was_killed_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Through the command, as JSON and as text; the exit code is 1 only for the killed one."""
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(run)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        try:
            code = main(["doctor", "--run", str(run), "--json"])
        finally:
            process.kill()
    told = json.loads(capsys.readouterr().out)
    assert (code, told["state"]) == (0, "running")
    assert told["cause"].startswith("it runs: step 3 of 5, update_actor for ")
    assert main(["doctor", "--run", str(run)]) == 1
    state, cause, following = capsys.readouterr().out.splitlines()
    assert state == f"{run}: killed"
    who = f"the driver (pid {process.pid} on {socket.gethostname()}) was killed after step 2 of 5"
    assert cause.startswith(f"cause: {who}, in the stage update_actor")
    assert following.endswith(AGAIN)


def test_a_stage_that_takes_far_longer_than_before_is_late(tmp_path: Path):
    run = tmp_path / "run"
    with owned(run):
        hour_ago = time.time() - 3600
        tracker = StatusTracker(Run(run, "megarl", "try", {}, 5), clock=lambda: hour_ago)
        tracker.stage("update_actor")
        append_lines(run / "metrics.jsonl", [{"step": 1, "timing_s/update_actor": 3.0}])
        assert explain(run).cause.startswith("it runs, but it is late: step 1 of 5, update_actor for 36")


def test_a_run_before_its_first_stage_has_just_started(tmp_path: Path):
    """It loads data and tries rewards, and has no status.json yet."""
    with owned(tmp_path / "run"):
        found = explain(tmp_path / "run")
    assert (found.state, found.cause) == ("running", "it has just started")


def test_a_folder_of_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", f"--run={tmp_path}"]) == 2
    sentence = f"error: {tmp_path}: no status.json there; expected the folder of a run, such as runs/quickstart\n"
    assert capsys.readouterr().err == sentence


# Lines as torch, NCCL, SGLang and the system write them, where no test here can bring them about.
WORDS = {
    "a GPU ran out of memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
    "shared memory (/dev/shm) is too small": "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible",
    "a file may not be used: Permission denied: '/data/a'": "PermissionError: [Errno 13] Permission denied: '/data/a'",
    "a process may not open as many files as it needs": "OSError: [Errno 24] Too many open files",
    "trainer and SGLang have two versions of NCCL": "ValueError: NCCL 2.30, 2.29, and NCCL joins no two versions",
    "a GPU reported an error: an illegal memory access was encountered": (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    ),
    "NCCL failed between GPUs: ncclRemoteError": "torch.distributed.DistBackendError: ncclRemoteError: A call failed",
    "the system is too old for a package: it lacks GLIBC_2.34": (
        "ImportError: /lib/libm.so.6: version `GLIBC_2.34' not found (required by a.so)"
    ),
    "a library could not be loaded: libcudart.so.13": (
        "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"
    ),
    "a machine was lost: machine 1 (host b) is lost in update with ranks 2 to 3: it gave no sign": (
        "RankError: group ranks_0: machine 1 (host b) is lost in update with ranks 2 to 3: it gave no sign"
    ),
    "code of an agent or a reward hung: episode at agent.py:4 has blocked the event loop": (
        "ERROR episode at agent.py:4 has blocked the event loop of all episodes and rewards for 10 s; expected `def`"
    ),
    "the servers ended: no server is left; server 0 ended": "ServerDied: no server is left; server 0 ended",
    "the collector of completions ended: after 3 restarts": "CollectorError: after 3 restarts",
    "a reward failed: sample 3 of prompt 7": "megarl.rewards.pool.RewardError: sample 3 of prompt 7",
    "a reward failed: reward r.py:bad, sample eval-0#0: KeyError 'a'": (
        "RuntimeError: every prompt of the evaluation was lost; the first: "
        "reward r.py:bad, sample eval-0#0: KeyError 'a'"
    ),
}


@pytest.mark.parametrize("says", WORDS)
def test_words_of_others_are_known(says: str):
    found = known_cause([Source("status.json", ""), Source("a.log", f"first\n{WORDS[says]}\n")], "runs/a")
    assert found is not None
    assert found.says == says
    assert found.evidence == f"a.log:2: {WORDS[says]}"
    assert "{" not in found.next


def test_every_cause_says_what_to_do_next():
    assert all(cause.next and cause.says for cause in (*CAUSES, *WHO_ENDED))
