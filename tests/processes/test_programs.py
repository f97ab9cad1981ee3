"""Programs that are forked behave as those that `subprocess` starts; both ways are tested."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megarl.io.job_signals import ASKS
from megarl.processes import programs
from megarl.processes.programs import Program, preload, start_program

HELPERS = Path(__file__).parents[1] / "helpers"
PROGRAM = "forked_program"


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """One of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_forked", frozenset())
        patch.setattr(programs, "_server", None)
        patch.setenv("PYTHONPATH", str(HELPERS))
        patch.setenv("SECRET_OF_A_HUB", "hush")
        preload([PROGRAM], [PROGRAM, "torch"])
        yield
        assert programs._server is not None
        programs._server._stop()


@pytest.fixture(params=["forked", "started"])
def way(request: pytest.FixtureRequest, fork_server: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """How programs start in the test."""
    if request.param == "started":
        monkeypatch.setattr(programs, "_forked", frozenset())
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
    program = start(tmp_path / "log", "a", "b c", env={"OMP_NUM_THREADS": "2,1", "ONLY": "it"})
    assert program.wait(120) == 0, (tmp_path / "log").read_text()
    found = said(tmp_path / "log")
    assert found["words"] == ["a", "b c"]
    assert set(found["variables"]) - {"LC_CTYPE"} == {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "ONLY"}
    assert not [line for line in found["shown"] if "hush" in line], "no secret is in /proc/PID/environ"
    assert found["name"] == PROGRAM if way == "forked" else found["name"].startswith("python")
    assert found["folder"] == str(tmp_path)
    assert found["is_leader"] and found["pid"] == program.pid
    assert found["threads"] == 2 and found["sum"] == 1 << 20, "OpenMP takes a number for each nested level"
    assert found["inherited"] == ["main"]


@pytest.mark.parametrize(("words", "code"), [(("exit", "3"), 3), (("raise",), 1), (("kill",), -9), (("end",), 1)])
def test_its_exit_code_is_told(way: str, tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    program = start(tmp_path / "log", *words)
    assert program.wait(120) == code == program.returncode == program.poll()
    if code == 1:
        assert "it was asked to" in (tmp_path / "log").read_text()


def test_signal_tree_a_program_leaves_the_signals_to_a_job_to_its_driver(way: str, tmp_path: Path) -> None:
    """From its first moment on.  It has no exit code until it is killed."""
    program = start(tmp_path / "log", "wait")
    assert program.poll() is None
    for number in ASKS:
        program.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    program.kill()
    assert program.wait(120) == -signal.SIGKILL
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
    assert len({each["key"] for each in found}) == 8, "and a key of its own for what multiprocessing connects"


def test_other_programs_are_started_in_the_usual_way(fork_server: None, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        program = start_program(["/bin/echo", "usual"], env={}, log=log)
        other = start_program([sys.executable, "-m", "this"], env={}, log=log)
    assert isinstance(program, subprocess.Popen) and isinstance(other, subprocess.Popen)
    assert (program.wait(60), other.wait(60)) == (0, 0)
    assert "usual" in (tmp_path / "log").read_text()


DRIVER = f"""
import json, os, sys
sys.path.insert(0, {str(HELPERS)!r})
from megarl.processes.programs import preload, start_program
preload([{PROGRAM!r}], sys.argv[2].split())
def start(*words):
    command, env = [sys.executable, "-m", {PROGRAM!r}, *words], {{"PYTHONPATH": os.environ["PYTHONPATH"]}}
    with open(sys.argv[1], "ab") as log:
        return start_program(command, env=env, log=log)
"""


def driver(tmp_path: Path, code: str, imports: str = "", **variables: str) -> subprocess.Popen[str]:
    """A process with a fork server of its own; its files are in `tmp_path`."""
    env = os.environ | {"PYTHONPATH": f"{HELPERS}{os.pathsep}{tmp_path}", **variables}
    command = [sys.executable, "-c", DRIVER + code, str(tmp_path / "log"), imports]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def printed(tmp_path: Path, code: str, imports: str = "", **variables: str) -> dict[str, object]:
    """What such a process prints, as JSON."""
    with driver(tmp_path, code, imports, **variables) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def test_forks_end_with_the_process_that_wanted_them(tmp_path: Path) -> None:
    """Killed, it can tell nobody that it ends."""
    with driver(tmp_path, "print(start('wait').pid, flush=True); import time; time.sleep(600)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        family = psutil.Process(process.pid).children(recursive=True)
        assert pid in [child.pid for child in family]
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_signal_to_the_group_of_the_driver_does_not_reach_its_forks(tmp_path: Path) -> None:
    """Schedulers and terminals signal all processes of the group."""
    signalled = """
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
program = start("wait")
os.killpg(os.getpgrp(), signal.SIGTERM)
try:
    code = program.wait(1)
except Exception:
    code = "it goes on"
program.kill()
print(json.dumps([code, program.wait(60)]))
"""
    assert printed(tmp_path, "os.setpgid(0, 0)\n" + signalled) == ["it goes on", -signal.SIGKILL]


def test_where_the_fork_server_was_killed_its_programs_end_and_others_start_without_it(tmp_path: Path) -> None:
    killed = """
import psutil
first = start("wait")
psutil.Process(first.pid).parent().kill()
code = first.wait(60)
second = start("exit", "4")
print(json.dumps([code, second.wait(120), type(second).__name__]))
"""
    assert printed(tmp_path, killed, SECRET="hush") == [-signal.SIGKILL, 4, "Popen"]


def test_where_the_fork_server_is_stopped_ends_are_seen_and_others_start_without_it(tmp_path: Path) -> None:
    """Within the limit of seconds, which is shorter here; when it goes on, it starts nothing for a second time."""
    stopped = """
import psutil
from megarl.processes import programs
first = start("wait")
programs._ANSWER_S = programs._limit_s = 1.0
server = psutil.Process(first.pid).parent()
server.suspend()
first.kill()
code = first.wait(60)
second = start("exit", "4")
server.resume()
print(json.dumps([code, second.wait(120), type(second).__name__]))
"""
    assert printed(tmp_path, stopped) == [-signal.SIGKILL, 4, "Popen"]
    assert (tmp_path / "log").read_text().count('["exit", "4"]') == 1


def test_a_program_that_was_forked_too_late_does_not_run_beside_the_one_in_its_place(tmp_path: Path) -> None:
    late = """
from megarl.processes import programs
programs._ANSWER_S = 0.0  # it has no time at all to begin
program = start("exit", "4")
print(json.dumps([program.wait(120), type(program).__name__]))
"""
    assert printed(tmp_path, late) == [4, "Popen"]
    assert (tmp_path / "log").read_text().count('["exit", "4"]') == 1


SECOND = """
first = start("wait")
second = start("exit", "5")
print(json.dumps([type(first).__name__, first.poll(), second.wait(120), type(second).__name__]))
first.kill()
"""


def test_where_a_fork_fails_what_runs_goes_on_and_others_start_without_the_fork_server(tmp_path: Path) -> None:
    (tmp_path / "no_forks.py").write_text(NO_FORKS)
    assert printed(tmp_path, SECOND, "no_forks") == ["Fork", None, 5, "Popen"]


NO_FORKS = """
import errno
from megarl.processes import fork_server
fork, count = fork_server._fork, []

def once():
    count.append(1)
    if len(count) > 1:
        raise OSError(errno.EAGAIN, "no more processes")
    return fork()

fork_server._fork = once
"""


def test_where_the_name_of_its_socket_is_too_long_programs_start_without_it(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    assert printed(tmp_path, SECOND, TMPDIR=str(folder)) == ["Popen", None, 5, "Popen"]


def test_a_started_program_leads_its_session_already(tmp_path: Path) -> None:
    """Who ends a program at once signals its session, with all that the program has started."""
    (tmp_path / "late_session.py").write_text(LATE_SESSION)
    ended = "program = start('wait'); os.killpg(program.pid, 9); print(program.wait(60))"
    assert printed(tmp_path, ended, "late_session") == -signal.SIGKILL


LATE_SESSION = """
import os, time
setsid = os.setsid

def late():
    time.sleep(0.5)
    setsid()

os.setsid = late
"""


OURS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": None}
THEIRS = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0", "GOMP_SPINCOUNT": "5"}
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(
    ("set_by_user", "expected"),
    [({}, OURS), (THEIRS, {**THEIRS, "OMP_WAIT_POLICY": None}), (PASSIVE, {**OURS, **PASSIVE, "GOMP_SPINCOUNT": None})],
)
def test_memory_comes_in_huge_pages_and_idle_threads_wait_shortly_unless_the_user_sets_it(
    set_by_user: dict[str, str], expected: dict[str, str | None], tmp_path: Path
) -> None:
    found = printed(
        tmp_path,
        f"""
import psutil
program = start("a")
variables = psutil.Process(program.pid).environ()
print(json.dumps({{name: variables.get(name) for name in {sorted(expected)}}}))
program.wait(60)
""",
        **set_by_user,
    )
    assert found == expected
    assert "GLIBC_TUNABLES" not in said(tmp_path / "log")["variables"], "what a program starts has its own"
