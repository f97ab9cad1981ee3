"""Programs that are forked from a warm process behave as those that `subprocess` starts; both ways are tested."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megarl.processes import warm
from megarl.processes.warm import Program, cool_down, start_program, warm_up

HELPERS = Path(__file__).parents[1] / "helpers"
PROGRAM = "warm_program"


@pytest.fixture(scope="module")
def warm_process() -> Iterator[None]:
    """A warm process of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_warm", None)
        patch.setenv("PYTHONPATH", str(HELPERS))
        patch.setenv("SECRET_OF_A_HUB", "hush")
        warm_up([PROGRAM], [PROGRAM, "torch"])
        yield
        cool_down()


@pytest.fixture(params=["forked", "started"])
def way(request: pytest.FixtureRequest, warm_process: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """How programs start in the test."""
    if request.param == "started":
        monkeypatch.setattr(warm, "_warm", None)
    return str(request.param)


def start(log: Path, *words: str, env: dict[str, str] | None = None, pass_fds: tuple[int, ...] = ()) -> Program:
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HELPERS), **(env or {})}
    with log.open("ab") as file:
        command = [sys.executable, "-m", PROGRAM, *words]
        return start_program(command, env=variables, log=file, pass_fds=pass_fds)


def said(log: Path) -> dict[str, object]:
    return json.loads(log.read_text().splitlines()[0])


def test_a_program_has_its_own_arguments_variables_and_session(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = start(tmp_path / "log", "a", "b c", env={"OMP_NUM_THREADS": "2", "ONLY": "it"})
    assert program.wait(120) == 0, (tmp_path / "log").read_text()
    found = said(tmp_path / "log")
    assert found["words"] == ["a", "b c"]
    assert set(found["variables"]) - {"LC_CTYPE"} == {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "ONLY"}
    assert not [line for line in found["shown"] if "hush" in line], "no secret is in /proc/PID/environ"
    assert found["command"] == [sys.executable, "-m", PROGRAM, "a", "b c"]
    assert found["folder"] == str(tmp_path)
    assert found["is_leader"] and found["pid"] == program.pid
    assert found["threads"] == 2 and found["sum"] == 1 << 20
    assert found["inherited"] == ["main"]


@pytest.mark.parametrize(("words", "code"), [(("exit", "3"), 3), (("raise",), 1), (("kill",), -9)])
def test_its_exit_code_is_told(way: str, tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    program = start(tmp_path / "log", *words)
    assert program.wait(120) == code == program.returncode == program.poll()
    if words[0] == "raise":
        assert "ValueError: it was asked to" in (tmp_path / "log").read_text()


def test_a_program_that_runs_has_no_exit_code_until_it_is_killed(way: str, tmp_path: Path) -> None:
    program = start(tmp_path / "log", "wait")
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.terminate()
    assert program.wait(120) == -signal.SIGTERM
    program.kill()  # it has ended: nothing happens


def test_it_may_be_looked_at_while_another_thread_waits_for_it(way: str, tmp_path: Path) -> None:
    program = start(tmp_path / "log", "wait")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(program.wait, 120)
        assert program.poll() is None
        program.kill()
        assert waiting.result() == -signal.SIGKILL == program.poll()


def test_files_are_passed_with_their_numbers(way: str, tmp_path: Path) -> None:
    """Two at once, of which each could take the number of the other on its way."""
    (mine, theirs), (_, other) = os.pipe(), os.pipe()
    try:
        program = start(tmp_path / "log", "write", str(theirs), pass_fds=(other, theirs))
        assert program.wait(120) == 0, (tmp_path / "log").read_text()
        os.close(theirs)
        assert os.read(mine, 100) == b"written"
        assert os.read(mine, 100) == b"", "no other process holds its other end"
    finally:
        for fd in (mine, _, other):
            os.close(fd)


def test_programs_are_started_by_several_threads_at_once(way: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        programs = list(threads.map(lambda n: start(tmp_path / f"log_{n}", "exit", str(n)), range(8)))
        assert list(threads.map(lambda program: program.wait(120), programs)) == list(range(8))
    found = [said(tmp_path / f"log_{n}") for n in range(8)]
    assert [each["words"] for each in found] == [["exit", str(n)] for n in range(8)]
    assert len({each["drawn"] for each in found}) == 8, "each has random numbers of its own"


def test_other_programs_are_started_in_the_usual_way(warm_process: None, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        program = start_program(["/bin/echo", "usual"], env={}, log=log)
        other = start_program([sys.executable, "-m", "this"], env={}, log=log)
    assert isinstance(program, subprocess.Popen) and isinstance(other, subprocess.Popen)
    assert (program.wait(60), other.wait(60)) == (0, 0)
    assert "usual" in (tmp_path / "log").read_text()


def test_where_the_warm_process_cannot_fork_it_lives_on_and_programs_start_in_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_warm", None)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    (tmp_path / "no_forks.py").write_text(NO_FORKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{HELPERS}{os.pathsep}{tmp_path}")
    warm_up([PROGRAM], ["no_forks"])
    first = start(tmp_path / "first", "wait")
    second = start(tmp_path / "second", "exit", "5")
    assert isinstance(second, subprocess.Popen) and second.wait(120) == 5
    assert not isinstance(first, subprocess.Popen) and first.poll() is None, "what runs goes on"
    cool_down()
    assert first.wait(60) == -signal.SIGKILL


NO_FORKS = """
import errno, os
fork, count = os.fork, []

def once():
    count.append(1)
    if len(count) > 1:
        raise OSError(errno.EAGAIN, "no more processes")
    return fork()

os.fork = once
"""

DRIVER = f"""
import sys, time
sys.path.insert(0, {str(HELPERS)!r})
from pathlib import Path
from megarl.processes.warm import start_program, warm_up
warm_up([{PROGRAM!r}], [])
with open(sys.argv[1], "ab") as log:
    program = start_program([sys.executable, "-m", {PROGRAM!r}, "wait"], env={{}}, log=log)
Path(sys.argv[2]).write_text(str(program.pid))
time.sleep(600)
"""


def test_forks_end_with_the_process_that_wanted_them(tmp_path: Path) -> None:
    """Killed, it can tell nobody that it ends."""
    log, told = tmp_path / "log", tmp_path / "pid"
    variables = os.environ | {"PYTHONPATH": str(HELPERS)}
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(log), str(told)], env=variables) as driver:
        while not told.exists() or not told.read_text():
            assert driver.poll() is None
            time.sleep(0.05)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert int(told.read_text()) in [process.pid for process in family]
        driver.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_where_the_warm_process_was_killed_programs_start_in_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_warm", None)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    warm_up([PROGRAM], [])
    first = start(tmp_path / "first", "wait")
    assert not isinstance(first, subprocess.Popen)
    psutil.Process(first.pid).parent().kill()
    assert first.wait(60) == -signal.SIGKILL, "its programs end with it"
    second = start(tmp_path / "second", "exit", "4")
    assert isinstance(second, subprocess.Popen)
    assert second.wait(120) == 4
    cool_down()


def test_a_list_of_numbers_of_threads_is_taken_by_its_first(way: str, tmp_path: Path) -> None:
    """OpenMP takes one for each nested level."""
    program = start(tmp_path / "log", "a", env={"OMP_NUM_THREADS": "2,1"})
    assert program.wait(120) == 0, (tmp_path / "log").read_text()


def test_after_an_interrupted_request_programs_start_in_the_usual_way(
    warm_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next program would get the process id of the one that nobody waited for."""
    monkeypatch.setattr(warm._warm, "_is_asking", True)
    program = start(tmp_path / "log", "a")
    assert isinstance(program, subprocess.Popen)
    assert program.wait(120) == 0, (tmp_path / "log").read_text()


def test_a_started_program_leads_its_session_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends a program at once signals its session, with all that the program has started."""
    monkeypatch.setattr(warm, "_warm", None)
    (tmp_path / "late_session.py").write_text(LATE_SESSION)
    monkeypatch.setenv("PYTHONPATH", f"{HELPERS}{os.pathsep}{tmp_path}")
    warm_up([PROGRAM], ["late_session"])
    program = start(tmp_path / "log", "wait")
    os.killpg(program.pid, signal.SIGKILL)
    assert program.wait(60) == -signal.SIGKILL
    cool_down()


LATE_SESSION = """
import os, time
setsid = os.setsid

def late():
    time.sleep(0.5)
    setsid()

os.setsid = late
"""


@pytest.mark.parametrize(
    ("set_by_user", "expected"), [(None, "glibc.malloc.hugetlb=1"), ("glibc.malloc.perturb=0",) * 2]
)
def test_memory_comes_in_huge_pages_unless_the_user_sets_the_c_library(
    set_by_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(warm, "_warm", None)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", set_by_user)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    warm_up([PROGRAM], [])
    try:
        assert warm._warm is not None
        assert psutil.Process(warm._warm._process.pid).environ()["GLIBC_TUNABLES"] == expected
        assert start(tmp_path / "log").wait(120) == 0
    finally:
        cool_down()
    assert "GLIBC_TUNABLES" not in said(tmp_path / "log")["variables"], "what a program starts has its own"
