"""What a program may do and how it ends, in every sandbox that this machine has."""

import ctypes
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from sandbox_modes import as_user, modes

from megarl_sandbox.execute import execute
from megarl_sandbox.kernel import PR_SET_PDEATHSIG, prctl
from megarl_sandbox.limits import Limits

# Which user starts the program changes little: without a mark it is the one who tests.
pytestmark = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=name, marks=pytest.mark.full if name.startswith("other_user") else ())
        for name, mode in modes().items()
    ],
)


@pytest.fixture
def place(monkeypatch):
    """Where the folders of programs are, of this test alone; pytest's own folders are closed to other users."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    monkeypatch.setattr("megarl_sandbox.execute._place", lambda: str(folder))
    yield folder
    shutil.rmtree(folder)


def processes_with(word):
    """Processes with this word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_bytes().decode(errors="replace"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_program_gets_its_input_and_its_output_and_exit_code_come_back(mode):
    source = "import os, sys; print(open('data.txt').read() + input()); print('no', file=sys.stderr)\n"
    source += "sys.stdout.flush(); os.write(1, b'a\\xff'); sys.exit(3)"
    result = mode.run(source, stdin="there\n", files={"data.txt": "hello "})
    assert (result.stdout, result.stderr, result.status, result.why) == ("hello there\na\ufffd", "no\n", 3, "")
    assert not result.is_good


def test_a_program_gets_no_variable_of_ours_no_descriptor_and_an_empty_folder(mode, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source = """
import json, os
found = {"names": [*os.environ], "files": os.listdir(".") + os.listdir(os.environ["TMPDIR"]), "open": []}
for number in range(3, 64):
    try: found["open"].append((number, os.fstat(number)))
    except OSError: pass
open("left", "w").close()
print(json.dumps(found), len(os.listdir(".")))
"""
    for _ in range(2):  # the second one finds nothing of the first
        found, end, count = mode.run(source).stdout.rpartition("}")
        found = json.loads(found + end)
        assert set(found["names"]) <= {"PATH", "HOME", "TMPDIR", "LANG", "MALLOC_ARENA_MAX", "LC_CTYPE", "PWD"}
        assert not found["open"] and "left" not in found["files"] and int(count) > 0


def test_an_ordinary_program_works(mode, tmp_path):
    ours = tmp_path / "ours"
    ours.touch()
    source = """
import asyncio, collections, decimal, fractions, heapq, itertools, json, math, os, random, re, subprocess, sys, tempfile
import threading, zlib
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True, check=True).stdout)
asyncio.run(asyncio.sleep(0))
os.mkdir("sub"); open("sub/file", "w").write("kept"); os.rename("sub/file", "file"); print(open("file").read())
with tempfile.TemporaryFile() as file: file.write(b"x" * 1000)
sys.setrecursionlimit(20000)
print(math.factorial(20), random.Random(1).random() < 1, os.path.exists("HERE"))
"""
    result = mode.run(source.replace("HERE", str(ours)))
    assert result.is_good, result
    assert result.stdout.split() == ["thread", "child", "kept", "2432902008176640000", "True", "False"]


@pytest.mark.parametrize(
    "source",
    ["while True: pass", "input()\nimport signal; signal.pause()", "import os; os.kill(0, 19)\nwhile True: pass"],
    ids=["works", "waits", "stops_its_own_group"],
)
def test_an_endless_program_ends_at_its_time(mode, source):
    result = mode.run(source, stdin="\n", seconds=0.3)
    assert (result.why, result.is_good) == ("time", False)


def test_endless_output_ends_the_program_and_only_its_begin_is_kept(mode):
    result = mode.run("while True: print('x' * 1000)", output_bytes=5000)
    assert (result.why, len(result.stdout)) == ("output", 5001)
    result = mode.run("import os\nwhile True: os.write(2, b'y' * 60000)", output_bytes=5000)
    assert (result.why, len(result.stderr)) == ("output", 5001)


def test_a_fork_bomb_stays_below_its_number_of_processes(mode):
    bomb = """
import os, time
open("forks", "w").close()
while True:
    try:
        os.fork()
        with open("forks", "a") as file: file.write("x")
    except OSError:
        break
time.sleep(600)
"""
    count = "import os, time\nif os.fork() == 0:\n    exec(BOMB)\nlast = -1\n"
    count += "while last != (last := os.path.getsize('forks') if os.path.exists('forks') else -1) or last < 0:\n"
    count += "    time.sleep(0.3)\nprint(last)"
    result = mode.run(f"BOMB = {bomb!r}\n{count}", processes=12)
    assert result.is_good, result
    assert 1 <= int(result.stdout) <= 40  # each fork is written by two


def test_nothing_is_left_of_a_program(mode):
    """Its children run on in the background, have other parents, and ignore signals."""
    word = f"megarl_left_{os.getpid()}_"
    source = f"""
import os, signal, subprocess, sys
child = "import os, signal, sys, time\\nfor n in (1, 2, 13, 15): signal.signal(n, signal.SIG_IGN)\\n"
child += "if os.fork(): os._exit(0)\\nprint('begun', flush=True); time.sleep(600)  # {word}"
child = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="")
child.wait()
"""
    result = mode.run(source)
    assert (result.stdout, result.status) == ("begun\n", 0)
    deadline = time.monotonic() + 60
    while (left := processes_with(word)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


MEGABYTES = "for number in range(60):\n    with open(f'file{number}', 'wb') as file: file.write(bytes(1 << 20))"
MANY = "for number in range(5000): open(f'file{number}', 'w').close()"


@pytest.mark.parametrize("source", [MEGABYTES, MANY], ids=["full", "many_files"])
def test_a_folder_that_is_too_large_ends_the_program_or_fails_its_writes(mode, source, request):
    if source == MANY and "bubblewrap" in request.node.callspec.id:
        return  # it has no such limit; the folder is in memory, and its size has one
    result = mode.run(f"{source}\nimport time; time.sleep(600)", folder_bytes=20 << 20, memory_bytes=1 << 30)
    assert result.why == "folder" or "No space left on device" in result.stderr


STRANGE_NAMES = """
import mmap, os, time
held = []
for folder in (b"\\xff", "\u2028 ".encode() + os.getcwdb()):
    os.makedirs(folder)
    with open(folder + b"/ (deleted)", "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        held.append(mmap.mmap(file.fileno(), 4096))
time.sleep(0.3)
print("looked at")
"""


def test_no_name_of_a_file_disturbs_a_look_and_who_looks_still_dies_with_its_parent(mode):
    def die_as() -> int:
        signal_number = (ctypes.c_int * 1)(signal.SIGKILL)
        prctl(PR_SET_PDEATHSIG, signal_number[0])
        result = execute(mode.jailer, STRANGE_NAMES, stdin="", files={}, limits=Limits(seconds=60))
        assert result.stdout == "looked at\n", result
        prctl(2, signal_number)  # PR_GET_PDEATHSIG
        return signal_number[0]

    assert as_user(mode.user, die_as) == signal.SIGKILL


def test_a_crash_is_a_status(mode):
    result = mode.run("import ctypes; ctypes.string_at(0)")
    assert result.status in (-11, 139)
    assert mode.run("print('bwrap: failed', file=__import__('sys').stderr); raise SystemExit(1)").status == 1
    killed = mode.run("import os, signal; os.kill(0, signal.SIGKILL)").status
    assert killed in (-9, 137, 0)  # 0: process 1 of a namespace is not killed by itself; in no case an error of ours


DEEP = "import os\nfor _ in range(DEPTH): os.mkdir(NAME); os.chdir(NAME); open('file', 'w').close()\nprint('made')"


@pytest.mark.parametrize(
    "source",
    [
        DEEP.replace("DEPTH", "20").replace("NAME", "'a' * 255"),
        DEEP.replace("DEPTH", "1500").replace("NAME", "'a'"),
        "import os; os.mkdir('a', 0); os.mkdir('b'); os.mkdir('b/a', 0); print('made')",
    ],
    ids=["too_long_a_path", "many_folders", "closed_folders"],
)
def test_folders_that_are_hard_to_remove_are_removed_and_the_program_has_its_result(mode, place, source):
    result = mode.run(f"{source}\nimport time; time.sleep(0.2)")  # long enough for a look at the folder
    refused = "No space left on device" in result.stderr  # where the kernel limits the number of files
    assert result.stdout == "made\n" or result.why == "folder" or refused, result
    assert not list(place.iterdir())
