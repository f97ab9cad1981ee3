"""`megarl checkpoint`: names what is damaged, shows what is there, deletes what is not to be kept."""

import errno
import os
from pathlib import Path

import pytest
from config_helpers import load
from saved_runs import Shard, flip, save, save_steps, saver_of

from megarl.cli import main
from megarl.config import to_yaml
from megarl.io.durable_files import SUMS, write_sums
from megarl.trainer.checkpoint.checkpoint import MANIFEST
from megarl.trainer.run_lock import OWNER, owned


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saver = saver_of(tmp_path / "run" / "checkpoints", {"actor": Shard(1), "critic": Shard(2)}, best=1)
    for step in (2, 4, 6):
        save(saver, step)
        saver.note_score(step, 1 / step)
    return tmp_path / "run"


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def test_whole_saves_are_named_and_pass(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (run, run / "checkpoints", run / "checkpoints" / "step_00000004"):
        assert main(["checkpoint", "verify", str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 + 3 + 1
    assert said[-1] == f"{run}/checkpoints/step_00000004: whole"


def test_one_flipped_bit_anywhere_is_named_with_exit_code_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_folder = run / "checkpoints" / "step_00000004"
    files = [path for path in save_folder.rglob("*") if path.is_file()]
    assert len(files) == 2 * 3 + 2 + 1
    for file in files:
        whole = file.read_bytes()
        flip(file, len(whole) // 2, 3)
        assert main(["checkpoint", "verify", str(run)]) == 2
        said = capsys.readouterr()
        assert f"{save_folder}: 1 damaged" in said.out
        assert said.out.count(": whole\n") == 2
        assert said.err.startswith(f"  {file} is damaged")
        file.write_bytes(whole)


def test_missing_and_cut_files_are_all_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / "step_00000006"
    (folder / "actor" / "rank_00000.json").unlink()
    tensors = folder / "critic" / "rank_00000.0000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    (run / "checkpoints" / "step_00000002" / MANIFEST).unlink()
    assert main(["checkpoint", "verify", str(run)]) == 2
    size = tensors.stat().st_size
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"  {run}/checkpoints/step_00000002/{MANIFEST} is missing",
        f"  {folder}/actor/rank_00000.json is missing",
        f"  {tensors} has {size} bytes, and {size + 1} were written",
    ]


def test_an_exported_folder_is_checked_by_its_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    write_sums(tmp_path, "*.safetensors")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    flip(tmp_path / "b.safetensors", 5)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"  {tmp_path}/b.safetensors is damaged: its SHA-256 is not that in {SUMS}\n")
    (tmp_path / SUMS).write_text("../a.safetensors\n")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert f"{SUMS} is damaged" in capsys.readouterr().err


def test_the_list_says_what_each_save_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text(
        to_yaml(load("trainer.save_freq=2", "trainer.max_checkpoints_to_keep=1", "trainer.keep_every_steps=4"))
    )
    (run / "checkpoints" / "step_00000006" / "actor" / "checkpoint.json").unlink()
    assert main(["checkpoint", "list", str(run)]) == 0
    head, *rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (head, *rows)]
    assert cells[0] == ["step", "size", "saved", "roles", "files", "kept as", "score"]
    assert [(row[0], *row[3:]) for row in cells[1:]] == [
        ("2", "actor, critic", "complete", "0.5"),
        ("4", "actor, critic", "complete", "newest, milestone", "0.25"),
        ("6", "actor, critic", "1 damaged", "0.1667"),
    ]


def test_pruning_keeps_what_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "prune", str(run), "keep=1", "best=1"]
    assert main([*words, "--dry-run"]) == 0
    assert len(names(run)) == 3
    assert not (run / OWNER).exists()
    assert main(words) == 0
    assert names(run) == ["step_00000002", "step_00000006"]
    assert capsys.readouterr().out.splitlines() == [
        "step_00000002: kept (best)",
        "step_00000004: would be deleted",
        "step_00000006: kept (newest)",
        "step_00000002: kept (best)",
        "step_00000004: deleted",
        "step_00000006: kept (newest)",
    ]
    assert main(["checkpoint", "prune", str(run), "keep=1", "best=0", "every=2"]) == 0
    assert names(run) == ["step_00000002", "step_00000006"], "both are milestones"


def test_a_run_that_goes_on_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with owned(run):
        assert main(["checkpoint", "prune", str(run), "keep=1"]) == 2
    assert f"error: {run} is used by process " in capsys.readouterr().err
    assert len(names(run)) == 3


def test_pruning_does_not_delete_the_last_hope(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in run.rglob(MANIFEST):
        flip(file, 10)
    assert main(["checkpoint", "prune", str(run)]) == 2
    assert "every save is damaged, so none is deleted" in capsys.readouterr().err
    assert len(names(run)) == 3


def test_a_folder_without_saves_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", "/no"]) == 2
    assert capsys.readouterr().err.startswith(f"error: /no: no saves of a run there, and no {SUMS}; expected ")


@pytest.mark.parametrize("fault", ["a cut file", "a flipped bit"])
def test_a_damaged_save_counts_for_nothing_when_saves_are_pruned(
    run: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    file = run / "checkpoints" / "step_00000006" / "actor" / "rank_00000.0000.safetensors"
    if fault == "a cut file":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        flip(file, 40)
    for words, done in ((["--dry-run"], "would be deleted"), ([], "deleted")):
        assert main(["checkpoint", "prune", str(run), "keep=1", *words]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == [f"step_00000002: {done}", "step_00000004: kept (newest)"]
        assert said[2].startswith(f"step_00000006: {done}, because {file} ")
    assert names(run) == ["step_00000004"]
    assert main(["checkpoint", "verify", str(run)]) == 0


def test_a_save_that_cannot_be_read_for_a_moment_keeps_all_from_being_pruned(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to itself is refused by the system, as a file is of a server that is away."""
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    file = next(file for file in newest.rglob("*.safetensors"))
    file.rename(file.with_name("aside"))
    file.symlink_to(file)
    before = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert main(["checkpoint", "prune", str(run), "keep=1"]) == 1
    assert f"{file} cannot be read (" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run)]) == 2
    assert f"{file} cannot be read (" in capsys.readouterr().err
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == before


def test_a_save_that_is_a_link_is_pruned_and_what_it_names_stays(run: Path) -> None:
    link = run / "checkpoints" / "step_00000002"
    link.rename(run.parent / "archive")
    link.symlink_to(run.parent / "archive")
    assert main(["checkpoint", "prune", str(run), "keep=1", "best=0"]) == 0
    assert [path.name for path in (run / "checkpoints").glob("*step_*")] == ["step_00000006"]
    assert main(["checkpoint", "verify", str(run.parent / "archive")]) == 0


def test_pruning_ends_what_an_interrupted_deletion_has_left(run: Path) -> None:
    for name in (".step_00000002.deleted", ".step_00000009.partial"):
        (run / "checkpoints" / name / "actor").mkdir(parents=True)
    assert main(["checkpoint", "prune", str(run), "keep=1", "best=0", "--dry-run"]) == 0
    assert len(list((run / "checkpoints").glob(".step_*"))) == 2
    assert main(["checkpoint", "prune", str(run), "keep=1", "best=0"]) == 0
    assert [path.name for path in (run / "checkpoints").glob("*step_*")] == ["step_00000006"]


def test_what_the_system_refuses_is_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder of another user does, or a file system that is read-only; tests may run as root."""

    def refused(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "rename", refused)
    assert main(["checkpoint", "prune", str(run), "keep=1", "best=0"]) == 1
    assert capsys.readouterr().err == f"error: [Errno 13] Permission denied: '{run}/checkpoints/step_00000002'\n"
    assert len(names(run)) == 3


def test_copies_of_saves_are_pruned_and_nothing_is_left_beside_them(run: Path, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    copies = (run / "checkpoints").rename(tmp_path / "copies" / "of_mine")
    before = {path.name for path in copies.iterdir()}
    assert main(["checkpoint", "prune", str(copies), "keep=1", "best=0"]) == 0
    assert {path.name for path in copies.iterdir()} == before - {"step_00000002", "step_00000004"}
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["of_mine"]
    with owned(copies):  # one who prunes it too
        assert main(["checkpoint", "prune", str(copies), "keep=1"]) == 2


def test_one_save_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "prune", str(run / "checkpoints" / "step_00000004")]) == 2
    assert "one save; expected the folder of a run" in capsys.readouterr().err


def test_a_save_that_goes_on_elsewhere_is_not_listed(tmp_path: Path) -> None:
    save_steps(tmp_path / "checkpoints", 2)
    (tmp_path / "checkpoints" / ".step_00000004.partial").mkdir()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
