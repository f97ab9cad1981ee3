"""Where programs of a run put what they compile: nowhere that another user could have prepared."""

import getpass
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_modes import NOBODY

from megarl.cli import main
from megarl.processes.own_places import own_places
from megarl.processes.ranks import RanksLaunch, _environment

COMPILES = """
import tempfile, torch
assert torch.compile(lambda x: (x * 3 + 1).sin())(torch.ones(3)).shape == (3,)
print(tempfile.gettempdir())
"""


@pytest.fixture
def foreign() -> Iterator[Path]:
    """What another user has put into a temporary folder for all: a folder open to all, of the name that torch takes."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o1777)
    folder = shared / f"torchinductor_{getpass.getuser()}"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(shared)


def run(code: str) -> str:
    """What a program says that has the variables of a rank."""
    environment = _environment(RanksLaunch("worker", "cpu", "logs", 1))
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()


@pytest.mark.full
def test_what_torch_compiles_is_not_in_a_foreign_folder(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in its own process
    monkeypatch.setenv("TMPDIR", str(foreign.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with own_places():
        said = run(COMPILES)
    assert Path(said).name.startswith("megarl-") and Path(said).parent == foreign.parent
    assert not list(foreign.iterdir()), "torch has taken what others have prepared"
    assert list((tmp_path / "home/megarl/compiled/torchinductor").iterdir())
    assert [path.name for path in foreign.parent.iterdir()] == [foreign.name], "the temporary folder is gone"
    run(COMPILES)
    assert list(foreign.iterdir()), "without these folders it would"


def test_programs_have_folders_of_their_own_and_this_process_keeps_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "mine"))
    before = dict(os.environ)
    with own_places():
        found = _environment(RanksLaunch("worker", "cpu", "logs", 1))
        assert stat.S_IMODE((tmp_path / "home/megarl/compiled").stat().st_mode) == 0o700
        assert stat.S_IMODE(Path(found["TMPDIR"]).stat().st_mode) == 0o711
    assert found["CUTE_DSL_CACHE_DIR"] == f"{tmp_path}/home/megarl/compiled/cute_dsl"
    assert found["QUACK_CACHE_DIR"] == f"{tmp_path}/mine"
    assert dict(os.environ) == before and not Path(found["TMPDIR"]).exists()


def test_without_a_home_what_is_compiled_goes_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in its own process
    with own_places():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{os.environ['TMPDIR']}/torchinductor"


HOLDS = """
import os, sys
from megarl.processes.own_places import own_places
with own_places():
    print(os.environ["TMPDIR"], flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_run_that_was_killed_goes_when_the_next_one_begins(foreign: Path) -> None:
    words, environment = [sys.executable, "-c", HOLDS], {**os.environ, "TMPDIR": str(foreign.parent)}
    pipe, runs, folders = subprocess.PIPE, [], []
    for _ in range(3):
        runs.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment))
        folders.append(runs[-1].stdout.readline().strip().decode())  # type: ignore[union-attr]
        if len(runs) == 1:
            runs[0].kill()
            runs[0].wait()
            assert Path(folders[0]).exists()
    assert sorted(map(str, foreign.parent.iterdir())) == sorted([*folders[1:], str(foreign)]), "those of the living"
    for run in runs:
        run.communicate()
    assert list(foreign.parent.iterdir()) == [foreign]


def test_a_long_name_of_the_temporary_folder_leaves_room_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (long := tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with own_places():
        assert Path(os.environ["TMPDIR"]).parent == Path("/tmp")
        run("from megarl.io.environment import start_fork_server; start_fork_server()")
    assert f"TMPDIR={long} is too long for names of sockets" in capsys.readouterr().err


def test_a_temporary_folder_that_others_can_rename_is_refused(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign.parent.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(foreign.parent))
    with pytest.raises(ValueError, match=f"^TMPDIR={foreign.parent}: others can change .* 0777 "), own_places():
        pass
    assert list(foreign.parent.iterdir()) == [foreign]


def test_a_home_of_another_user_gets_no_caches(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As root has with `sudo -E`, and in a container with the home of the machine's user."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(foreign))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with own_places():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{os.environ['TMPDIR']}/torchinductor"
    why = f"XDG_CACHE_HOME, {foreign}/.cache/megarl/compiled: others can change "
    assert capsys.readouterr().err.startswith(f"warning: what programs compile goes with this run: {why}")
    assert not list(foreign.iterdir())


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_foreign_folder_for_compiled_code_is_refused(
    variable: str, foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, str(foreign))
    assert main(["train", "recipe=quickstart", "trainer.check_only=true"]) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert sentence.startswith(f"error: {variable}={foreign}: others can change {foreign}")
    assert sentence.endswith(
        f"as {foreign} has mode 0777 and belongs to user {NOBODY} and group {NOBODY}; expected a folder that no other "
        "user can change, since code from it is run: `chmod go-w` it, or name another one"
    )
