"""One run in a folder at a time: the second is told who is there, and a dead owner keeps nobody out."""

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from config_helpers import BASE
from saved_runs import no_file_above

from megarl.cli import main
from megarl.trainer import run_lock
from megarl.trainer.run_lock import LOCK, OWNER, owned

OWNS = """
import os
import sys
import time
from pathlib import Path
from megarl.processes import watchdog
from megarl.trainer.run_lock import owned
with owned(Path(sys.argv[1])), watchdog.watch(600.0):
    child = "import sys; print('here', flush=True); sys.stdin.read()"
    child = os.spawnvp(os.P_NOWAIT, sys.executable, [sys.executable, "-c", child])
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        watchdog.heartbeat()
        time.sleep(0.01)
"""


@contextmanager
def another_owner(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns the folder and has a child, until the end of the context."""
    words = [sys.executable, "-c", OWNS, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        yield process


def test_a_second_run_in_a_folder_is_told_who_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command, for both kinds of training; nothing in the folder changes."""
    run, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    with another_owner(run) as process:
        (run / "metrics.jsonl").write_text("of the first run")
        started = json.loads((run / OWNER).read_text())["started"]
        for words in (
            ["train", *BASE, f"data.train_files=[{rows}]"],
            ["sft", "model.path=m", f"sft.train_files=[{rows}]"],
        ):
            assert main([*words, f"trainer.default_local_dir={tmp_path}"]) == 2
            assert capsys.readouterr().err.splitlines()[-1] == (
                f"error: {run} is used by process {process.pid} on {socket.gethostname()}, which began at {started}; "
                "expected one run in a folder at a time: wait for its end, or set another trainer.experiment_name"
            )
        assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", OWNER, LOCK]
        process.stdin.close()  # type: ignore[union-attr]
    with owned(run):
        assert json.loads((run / OWNER).read_text())["pid"] == os.getpid()


def test_an_owner_that_is_killed_leaves_no_lock_though_its_child_lives(tmp_path: Path) -> None:
    with another_owner(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        with owned(tmp_path):
            pass


def test_other_folders_and_later_runs_are_free(tmp_path: Path) -> None:
    with owned(tmp_path / "a"), owned(tmp_path / "b"):
        assert stat.S_IMODE((tmp_path / "a" / OWNER).stat().st_mode) == 0o600
        with pytest.raises(ValueError, match=f"is used by process {os.getpid()} on "), owned(tmp_path / "a"):
            pass
    with owned(tmp_path / "a"):
        pass


def test_an_owner_that_put_nothing_into_a_folder_removes_it(tmp_path: Path) -> None:
    with owned(tmp_path / "refused"):
        pass
    assert not (tmp_path / "refused").exists()
    with owned(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", OWNER, LOCK]


def locked_from_elsewhere(folder: Path) -> int:
    """As by a run on another machine; the lock is free when the file is closed."""
    folder.mkdir()
    (folder / OWNER).write_text('{"host": "another machine", "pid": 1, "started": "yesterday"}')
    number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(number, fcntl.LOCK_EX)
    return number


def test_the_lock_of_a_machine_that_died_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = locked_from_elsewhere(tmp_path / "run")
    end = threading.Timer(1.5, os.close, [number])
    end.start()
    with owned(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / OWNER).read_text())["pid"] == os.getpid()
    end.join()
    assert capsys.readouterr().err == (
        f"{tmp_path}/run is used by process 1 on another machine, which began at yesterday, which may have died: "
        "waiting up to 120 s\n"
    )


def test_an_owner_on_another_machine_that_lives_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "LEASE_S", 0.0)
    number = locked_from_elsewhere(tmp_path / "run")
    refused = pytest.raises(ValueError, match="is used by process 1 on another machine, which began at yesterday; ")
    with refused, owned(tmp_path / "run"):
        pass
    os.close(number)


@pytest.mark.parametrize("how", ["deleted", "emptied", "moved"])
def test_a_run_whose_folder_is_gone_ends_before_another_one_has_it(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    with another_owner(run) as process:
        if how == "moved":
            run.rename(tmp_path / "moved")
        elif how == "deleted":
            shutil.rmtree(run)
        else:
            (run / LOCK).unlink()
        with owned(run):
            assert process.wait(60) == 1
            assert process.stderr is not None
            assert process.stderr.readline().decode() == (
                f"the run stopped: {run} was deleted, moved or replaced, so nothing more of this run is written there\n"
            )
            assert {path.name for path in run.iterdir()} == {OWNER, LOCK}, "those of the second one"


def test_on_a_full_disk_the_lock_holds(tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match="is used by another process; ")
    with no_file_above(0), owned(tmp_path), refused, owned(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(ValueError, match="cannot be written .Not a directory.; expected a folder")
    with refused, owned(tmp_path / "file" / "run"):
        pass
