"""What a file must still be: its size, its bits, and that it is there; and what a full disk does to a run."""

import errno
import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from saved_runs import flip
from small_disk import fill, small_disk

from megarl.io.durable_files import (
    SUMS,
    Facts,
    StorageError,
    Unreadable,
    facts_of,
    fault_of,
    faults_of_sums,
    kept,
    named,
    number_of,
    patient,
    seal,
    write_sums,
    write_text,
)
from megarl.metrics.reading.jsonl import append_lines
from megarl.processes import watchdog

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of b"abc", from FIPS 180-2


def test_a_sealed_file_is_private_and_known_by_size_and_digest(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    file.chmod(0o644)
    assert seal(file) == facts_of(file) == {"bytes": 3, "sha256": ABC}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    written = facts_of(file)
    assert fault_of(file, written, reads=True) is None
    flip(file, 1)
    assert fault_of(file, written, reads=False) is None
    assert fault_of(file, written, reads=True) == "is damaged: its SHA-256 is not that of what was written"
    file.write_bytes(b"ab")
    assert fault_of(file, written, reads=False) == "has 2 bytes, and 3 were written"
    file.unlink()
    assert fault_of(file, written, reads=False) == "is missing"
    file.mkdir()
    assert fault_of(file, facts_of_folder(file), reads=True) == "is missing"


def facts_of_folder(folder: Path) -> Facts:
    return {"bytes": folder.stat().st_size, "sha256": ABC}


def test_a_file_that_cannot_be_read_now_has_no_fault(tmp_path: Path) -> None:
    """A link to itself is followed by nobody; a file server that is away raises another error of this kind."""
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(Unreadable, match=r"a cannot be read \(.*\), and may be whole$"):
        fault_of(tmp_path / "a", {"bytes": 3, "sha256": ABC}, reads=False)


def test_a_text_replaces_another_at_once_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    write_text(tmp_path / "a", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "two")]


def test_sums_are_those_of_the_usual_tool(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    write_sums(tmp_path, "*.bin")
    assert (tmp_path / SUMS).read_text() == f"{ABC}  a.bin\n"
    assert faults_of_sums(tmp_path) == []
    (tmp_path / "a.bin").unlink()
    assert faults_of_sums(tmp_path) == [f"{tmp_path}/a.bin is missing"]


def test_sums_that_are_cut_are_a_fault(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    write_sums(tmp_path, "*.safetensors")
    whole = (tmp_path / SUMS).read_text()
    assert len(whole) == 2 * (64 + 2 + len("a.safetensors") + 1)
    for length in range(len(whole) - 1):  # only its last newline says nothing
        (tmp_path / SUMS).write_text(whole[:length])
        assert faults_of_sums(tmp_path), whole[:length]
    (tmp_path / SUMS).write_text(whole.splitlines(keepends=True)[0])
    assert faults_of_sums(tmp_path) == [f"{tmp_path}/b.safetensors has no line in {SUMS}, which is cut or not its own"]
    (tmp_path / SUMS).write_text("")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert faults_of_sums(tmp_path) == [f"{tmp_path}/{SUMS} is damaged: it lists no file"]


def test_full_disk_room_that_is_freed_is_used_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "16k") as run:
        log, said = run / "samples.jsonl", list[str]()
        append_lines(log, [{"step": 1}])
        filler = fill(run)

        def free(sentence: str) -> None:
            said.append(sentence)
            filler.unlink()

        row = {"step": 2, "text": "x" * 5000}  # more than is left in the page
        with patient(600, free, watchdog.heartbeat):
            append_lines(log, [row])
        assert [json.loads(line) for line in log.read_text().splitlines()] == [{"step": 1}, row]
    (sentence,) = said
    why = f"{log}: No space left on device (0 bytes free); the run waits for room, 600 s more at most"
    assert sentence == why


def test_full_disk_ends_the_wait_after_its_limit_and_nobody_waits_after_that(tmp_path: Path) -> None:
    said, looks = list[str](), list[int]()
    with small_disk(tmp_path / "run", "16k") as run, patient(1.5, said.append, lambda: looks.append(1)):
        fill(run)
        with pytest.raises(
            StorageError, match=f"^{run}/a.jsonl: No space .* waited [12] s for room .trainer.call_time"
        ):
            append_lines(run / "a.jsonl", [{"text": "x" * 5000}])
        begun = time.monotonic()
        with pytest.raises(StorageError, match=f"^{run}/b: No space left on device .0 bytes free.$"):
            kept(run / "b", lambda: write_text(run / "b", "x"))
        assert time.monotonic() - begun < 1, "a run that ends does not wait again"
        assert len(said) == 1 and looks


def test_full_disk_with_the_log_of_the_driver_takes_no_sentence_and_ends_no_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16k") as disk, (disk / "run.log").open("ab") as log:
        fill(disk)
        said = "from megarl.metrics.trackers.console import warn; warn('x' * 5000)"
        assert subprocess.run([sys.executable, "-c", said], stderr=log).returncode == 0


def test_full_disk_is_named_outside_of_a_run_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16k") as disk:
        fill(disk)
        with pytest.raises(StorageError, match=rf"^{disk}/config.yaml: No space left on device \(0 bytes free\)$"):
            write_text(disk / "config.yaml", "x" * 100)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), named(tmp_path):
        (tmp_path / "none").read_text()
    with pytest.raises(ValueError, match="28"), named(tmp_path):
        raise ValueError("a row has [Errno 28] in it")
    with pytest.raises(StorageError) as first, named(tmp_path / "file"):
        raise OSError(errno.EIO, "of a file server")
    with pytest.raises(StorageError) as second, named(tmp_path):
        raise first.value
    assert second.value is first.value, "the inner name says more"


def test_an_error_of_storage_is_known_by_its_number_and_by_its_text() -> None:
    assert number_of(OSError(errno.EDQUOT, "quota")) == errno.EDQUOT
    assert number_of(RuntimeError("I/O error: No space left on device (os error 28)")) == errno.ENOSPC
    assert number_of(RuntimeError("[Errno 30] Read-only file system")) == errno.EROFS
    assert number_of(ConnectionResetError(errno.ECONNRESET, "gone")) == 0
    assert number_of(RuntimeError(f"{StorageError(errno.EIO, 'a: Input/output error (0 bytes free)')}")) == errno.EIO
    assert number_of(RuntimeError("CUDA error 28")) == 0
