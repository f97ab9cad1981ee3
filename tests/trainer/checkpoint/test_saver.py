"""Saves of a run: what counts as one, what is left by one that fails or dies, and which are kept."""

import errno
import os
import re
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from saved_runs import SIZE, Shard, no_file_above, save, save_steps, saver_of
from small_disk import fill, small_disk

from megarl.group.failures import RankError
from megarl.io.durable_files import StorageError, Unreadable, facts_of, patient
from megarl.mcore.checkpoint import files as files_module
from megarl.metrics.reading.jsonl import append_lines
from megarl.roles.handles import SaveError
from megarl.trainer.checkpoint import saver as saver_module
from megarl.trainer.checkpoint.checkpoint import (
    MANIFEST,
    SCORES,
    Checkpoint,
    all_checkpoints,
    faults_in,
    find,
    read_manifest,
    read_scores,
)


def steps_under(root: Path) -> list[int]:
    return [c.step for c in all_checkpoints(root)]


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_lists_every_file_with_its_size_and_digest(tmp_path: Path, in_background: bool) -> None:
    state = {"kl": {"value": 0.002}, "seed": 7}
    roles: Any = {"actor": Shard(1), "critic": Shard(2)}
    made = save(saver_of(tmp_path, roles, in_background=in_background), 12, state)
    assert made == Checkpoint(tmp_path / "step_00000012", 12, state)
    content = read_manifest(made.folder)
    assert (content["step"], content["roles"], content["state"]) == (12, ["actor", "critic"], state)
    files = [path for path in made.folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert content["files"] == {str(path.relative_to(made.folder)): facts_of(path) for path in files}
    assert len(files) == 2 * 3 + 2, "of each role its description, its list and its tensors; two of the waiting groups"
    assert names_in(tmp_path) == ["step_00000012"], "nothing temporary is left"


def test_only_the_owner_may_read_a_save(tmp_path: Path) -> None:
    root, before = tmp_path / "checkpoints", os.umask(0o022)
    try:
        save_steps(root, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (root, root / "step_00000001")} == {0o700}


def test_milestones_and_the_best_stay_besides_the_newest(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, keep=1, every=20, best=1)
    for step, score in ((10, 0.9), (20, 0.1), (30, 0.9), (40, 0.2), (50, 0.3), (60, None), (70, 0.5)):
        save(saver, step)
        if score is not None:
            saver.note_score(step, score)
    assert steps_under(tmp_path) == [20, 30, 40, 60, 70], "of two equal scores the later; 50 was good for a while only"
    assert read_scores(tmp_path) == {20: 0.1, 30: 0.9, 40: 0.2, 70: 0.5}


def test_scores_that_cannot_be_read_delete_nothing_and_do_not_stop_a_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    (tmp_path / SCORES).write_text("[")
    said: list[str] = []
    saver = saver_of(tmp_path, keep=1, best=1, warn=said.append)
    save(saver, 4)
    assert steps_under(tmp_path) == [2, 4]
    saver.note_score(4, 0.5)
    assert [SCORES in sentence for sentence in said] == [True, True]


@contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """The system refuses to open a link to itself, as it does with a file of a server that is away."""
    aside = file.with_name("aside")
    file.rename(aside)
    file.symlink_to(file)
    yield
    aside.replace(file)


def test_a_save_that_cannot_be_read_for_a_moment_is_neither_passed_over_nor_deleted(tmp_path: Path) -> None:
    said: list[str] = []
    saver = saver_of(tmp_path, keep=1, every=100, warn=said.append)
    for step in (100, 101):
        save(saver, step)
    with unreadable(tmp_path / "step_00000100" / MANIFEST):
        save(saver, 102)
        with pytest.raises(Unreadable, match=f"{tmp_path}/step_00000100/{MANIFEST} cannot be read"):
            find("auto", tmp_path, said.append, verify=True, before=101)
    assert len(said) == 1 and said[0].startswith(f"old checkpoints under {tmp_path} are left: ")
    save(saver, 103)
    assert steps_under(tmp_path) == [100, 103], "a milestone, and the newest"


def test_a_save_that_is_never_written_is_waited_for_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system takes no more bytes of the role, and says nothing."""
    monkeypatch.setattr(saver_module, "SAY_S", 0.1)

    class Stuck(Shard):
        def is_saved(self) -> bool:
            return False

    said: list[str] = []
    saver = saver_of(tmp_path / "saves", {"actor": Stuck()}, in_background=True, limit_s=0.4, warn=said.append)
    saver.start(1)
    saver.describe({})
    with pytest.raises(RankError, match=r"did not write the save of step 1 within 0\.4 s.*\(trainer.call_timeout_s\)"):
        saver.start(2)
    assert said and all(re.fullmatch(r"training has waited \d+ s for the save of step 1", one) for one in said)
    assert saver.poll(), "nothing is left that a later end would wait for"
    save(saver_of(tmp_path / "saves"), 1)
    assert names_in(tmp_path / "saves") == ["step_00000001"]


def test_a_run_begun_again_further_back_replaces_what_came_after(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4, 6, keep=3)
    save_steps(tmp_path, 3, keep=2)  # resumed from 2
    assert steps_under(tmp_path) == [2, 3], "else the next resume would take the step 6 of the abandoned run"
    save(saver_of(tmp_path, {"actor": Shard(5)}), 3, {"seed": 1})
    assert [c.state for c in all_checkpoints(tmp_path)] == [{"seed": 0}, {"seed": 1}], "the same step is saved anew"


def test_a_save_that_is_a_link_loses_its_name_only(tmp_path: Path) -> None:
    """As one that its user has moved to another disk; a link that leads nowhere, too."""
    root, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save_steps(root, 1, 2)
    for step in (1, 2):
        (root / f"step_{step:08d}").rename(archive if step == 1 else tmp_path / "lost")
    (root / "step_00000001").symlink_to(archive)
    (root / "step_00000002").symlink_to(tmp_path / "nowhere")
    save_steps(root, 2, 3, 4, keep=2)
    assert names_in(root) == ["step_00000003", "step_00000004"]
    assert faults_in(archive, reads=True) == []


def test_what_cannot_be_deleted_does_not_fail_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files that a machine still has open on NFS; what an interrupted deletion left does not stop the next one."""
    save_steps(tmp_path, 2)
    busy = tmp_path / ".step_00000002.deleted"
    (busy / "actor").mkdir(parents=True)
    said: list[str] = []
    saver = saver_of(tmp_path, keep=1, warn=said.append)

    def refused(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refused)
        save(saver, 4)
    assert (steps_under(tmp_path), saver.failed) == ([2, 4], 0)
    assert [f"[Errno 39] Directory not empty: '{busy}'" in sentence for sentence in said] == [True, True, False]
    assert said[2].startswith(f"old checkpoints under {tmp_path} are left: [Errno 39]")
    save(saver, 6)
    assert names_in(tmp_path) == ["step_00000006"]


def test_a_background_save_is_a_checkpoint_when_all_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, save_file = threading.Event(), files_module.save_file

    def later(*args: Any) -> None:
        assert may_write.wait(60)
        save_file(*args)

    monkeypatch.setattr(files_module, "save_file", later)
    saver = saver_of(tmp_path, {"actor": Shard(2)}, in_background=True)
    assert saver.poll(), "nothing was started"
    saver.start(2)
    assert not saver.poll(), "its state is still to come, too"
    saver.describe({"seed": 7})
    assert not saver.poll()
    assert (steps_under(tmp_path), saver.last, names_in(tmp_path)) == ([], None, [".step_00000002.partial"])
    may_write.set()
    saver.start(4)  # waits for the one before
    assert saver.last == Checkpoint(tmp_path / "step_00000002", 2, {"seed": 7})
    saver.describe({})
    saver.finish()
    assert steps_under(tmp_path) == [2, 4]


@pytest.mark.parametrize(
    ("in_background", "room", "why"),
    [
        (False, 4 * SIZE - 1, "rank 0 could not write: .*File too large"),
        (True, 4 * SIZE - 1, "rank 0 could not write: .*File too large"),
        (False, 2000, r"\S+manifest.json: File too large \([0-9,]+ bytes free\)"),  # the ranks' files are smaller
    ],
)
def test_a_save_without_room_is_deleted_and_the_run_goes_on(
    tmp_path: Path, in_background: bool, room: int, why: str
) -> None:
    save_steps(tmp_path, 2)
    said: list[str] = []
    saver = saver_of(tmp_path, {"actor": Shard(4)}, in_background=in_background, warn=said.append)
    with no_file_above(room):
        save(saver, 4, {"ledger": "x" * 3000})
    assert (names_in(tmp_path), saver.last, saver.failed) == (["step_00000002"], None, 1)
    (sentence,) = said
    goes_on = "the run goes on, and step_00000002 is its newest checkpoint"
    assert re.fullmatch(f"the save of step 4 failed and was deleted: {why}.*; {goes_on}", sentence), sentence
    save(saver, 6)  # there is room again
    assert steps_under(tmp_path) == [2, 6]


def test_full_disk_makes_a_save_owed_after_so_many_failures_which_is_made_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as root:
        save_steps(root, 1)
        said, filler = list[str](), fill(root)
        saver = saver_of(root, warn=said.append, allowed=2)
        save(saver, 2)
        saver.insist(lambda: pytest.fail("one may fail"))
        save(saver, 3)
        assert said[0].endswith("; the run goes on, and step_00000001 is its newest checkpoint")
        assert said[1].endswith("; 2 in a row have failed (trainer.failed_saves=2)") and len(said) == 2

        def save_now() -> None:
            saver.start(4)
            saver.describe({})

        def free(sentence: str) -> None:
            said.append(sentence)
            filler.unlink()

        with patient(600, free, saver.give_way):
            saver.insist(save_now)
        assert (steps_under(root), saver.failed) == ([1, 4], 3), "3 was not made up for, as its state is gone"
        saver.insist(lambda: pytest.fail("it is made"))
    assert said[2].startswith(f"{root}: the save of step 4 failed and was deleted: ")
    assert "; 3 in a row have failed (trainer.failed_saves=2) (" in said[2]


def test_full_disk_a_save_that_began_since_is_the_one_that_is_owed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as root:
        said, filler = list[str](), fill(root)
        saver = saver_of(root, in_background=True, warn=said.append)
        save(saver, 1)
        saver.finish()
        assert len(said) == 1 and said[0].endswith("; there is no earlier one to go on from")
        filler.unlink()
        save(saver, 2)
        saver.insist(lambda: pytest.fail("it is being written"))
        assert steps_under(root) == [2]


def test_full_disk_without_any_save_ends_with_the_folder_after_the_wait(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as root:
        said = list[str]()
        saver = saver_of(root, warn=said.append)
        fill(root)
        save(saver, 1)
        assert "the save of step 1 failed" in said[0], "also where the run ends and does not wait"
        ends = f"^{root}: the save of step 2 .*; there is no earlier one .* the run has waited 1 s for room"
        with patient(1.0, print, saver.give_way), pytest.raises(StorageError, match=ends):
            saver.insist(lambda: (saver.start(2), saver.describe({}))[1])


def test_full_disk_a_save_that_is_written_gives_its_room_to_the_log_of_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "128k") as run:
        said = list[str]()
        saver = saver_of(run / "checkpoints", warn=said.append)
        saver.start(1)
        fill(run)
        with patient(600, print, saver.give_way):
            append_lines(run / "visits.jsonl", [{"text": "x" * 4000}])
        saver.describe({})
        assert (names_in(run / "checkpoints"), saver.failed) == ([], 1)


@pytest.mark.parametrize("limit", [0, 40])
def test_the_first_save_of_a_run_must_succeed(tmp_path: Path, limit: int) -> None:
    no_earlier = "^the save of step 4 failed and was deleted: .*; there is no earlier one to go on from$"
    with no_file_above(limit), pytest.raises(SaveError, match=no_earlier):
        save(saver_of(tmp_path), 4)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("lacks", ["tensors", "the list of a rank", "the lists"])
def test_what_the_driver_does_not_see_fails_the_save(tmp_path: Path, lacks: str) -> None:
    """As on machines whose folders are not shared; nothing but its list says that the files of a rank are there."""
    saver = saver_of(tmp_path)
    saver.start(2)
    (folder,) = tmp_path.glob(".step_*/actor")
    if lacks == "tensors":
        next(folder.glob("*.safetensors")).unlink()
        said = "safetensors is missing"
    elif lacks == "the lists":
        (folder / "checkpoint.json").unlink()
        said = "checkpoint.json: it cannot be read .*"
    else:
        (folder / "checkpoint.json").write_text('{"ranks": 2}')
        said = "rank_00001.json: it cannot be read .*"
    with pytest.raises(SaveError, match=rf"{said}; expected one file system that all machines"):
        saver.describe({})


def killed_in_a_save(root: Path, module: Any, name: str) -> None:
    """A process that saves step 4 and is killed when it calls this function."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            setattr(module, name, lambda *_: os.write(write, b"here") and signal.pause())
            save(saver_of(root, {"actor": Shard(4)}), 4)
        finally:
            os._exit(1)
    os.close(write)
    came = os.read(read, 4)
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert came == b"here"


def test_a_run_that_is_killed_in_a_save_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """At three moments: when the ranks have written tensors, before the manifest, before the folder gets its name."""
    roots = [tmp_path / moment for moment in ("ranks", "manifest", "name")]
    places = ((files_module, "seal"), (saver_module, "write_manifest"), (saver_module, "sync"))
    for root, place in zip(roots, places, strict=True):
        save_steps(root, 2)
        killed_in_a_save(root, *place)
    for root in roots:
        assert names_in(root) == [".step_00000004.partial", "step_00000002"]
        found = find("auto", root, pytest.fail, verify=True)
        assert found is not None
        assert (found.step, steps_under(root)) == (2, [2])
        save_steps(root, 6)
        assert names_in(root) == ["step_00000002", "step_00000006"]


def test_the_folder_gets_its_name_when_all_files_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked to write all files and folders of a save before the rename, and the root after it."""
    synced: list[str] = []
    fsync = os.fsync

    def note(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    root = tmp_path / "checkpoints"
    logs = [tmp_path / name for name in ("metrics.jsonl", "visits.jsonl")]
    for log in logs:
        log.write_text('{"step": 2}\n')
    save_steps(root, 2)
    partial = str(root / ".step_00000002.partial")
    for name in [*read_manifest(root / "step_00000002")["files"], MANIFEST]:
        file = Path(partial, name)
        assert {str(file), str(file.with_name(f".{file.name}.partial"))} & set(synced), name
    assert {f"{partial}/actor", f"{partial}/rollouts"} <= set(synced)
    assert synced[-2:] == [partial, str(root)]
    manifest = synced.index(f"{partial}/.{MANIFEST}.partial")
    assert {*map(str, logs), str(tmp_path)} <= set(synced[:manifest]), "logs are never behind a save that counts"


class Slow(Shard):
    """Has written its files when it is asked for the third time; the disk is full if `fails`."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.asked, self.fails = 0, fails

    def is_saved(self) -> bool:
        self.asked += 1
        if self.asked < 3:
            return False
        if self.fails:
            raise SaveError("rank 0 could not write: no space left")
        return super().is_saved()


def test_a_run_that_ends_for_another_reason_finishes_the_save_it_has_begun(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, {"actor": Slow()}, in_background=True)
    saver.settle()
    saver.start(1)
    saver.describe({"seed": 0})
    saver.settle()
    assert steps_under(tmp_path) == [1] and saver.last is not None and saver.last.step == 1
    saver.start(2)
    saver.settle()
    assert steps_under(tmp_path) == [1], "the run has not come to the state after step 2"
    said: list[str] = []
    saver = saver_of(tmp_path / "full", {"actor": Slow(fails=True)}, in_background=True, warn=said.append)
    saver.start(1)
    saver.describe({"seed": 0})
    saver.settle()
    assert names_in(tmp_path / "full") == [] and saver.failed == 1, "the reason of the end stays"
    (sentence,) = said
    assert sentence.startswith("the save of step 1 failed and was deleted: rank 0 could not write: no space left; ")
