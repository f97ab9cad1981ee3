"""What a file must still be: its size, its bits, and that it is there."""

import stat
from pathlib import Path

import pytest
from saved_runs import flip

from megarl.durable_files import (
    SUMS,
    Facts,
    Unreadable,
    facts_of,
    fault_of,
    faults_of_sums,
    seal,
    write_sums,
    write_text,
)

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
