"""Files that outlive a power cut and can be checked: on the disk when a call returns, with size and SHA-256."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

SUMS = "SHA256SUMS"  # of an exported folder's weights, as `sha256sum --check` reads it
WEIGHTS = "*.safetensors"  # of an exported folder
THREADS = 8  # that read files together
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # modes: of the owner alone


# What reading a file raises if it is not there.  Other errors say nothing about it.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Unreadable(OSError):
    """A file that may be whole cannot be read now: the file server is away, too many files are open, no permission."""

    @classmethod
    def of(cls, file: Path, error: OSError) -> Unreadable:
        return cls(f"{file} cannot be read ({error.strerror}), and may be whole")


class Facts(TypedDict):
    """What a file must still be when it is read."""

    bytes: int
    sha256: str  # hexadecimal


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_text(file: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Write a private file under a temporary name, wait until it is on the disk, and rename it."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(content)
    partial.chmod(PRIVATE_FILE)
    sync(partial)
    partial.rename(file)
    sync(file.parent)


def seal(file: Path) -> Facts:
    """Make a file that was just written private, wait until it is on the disk, and return what it is.

    The bytes are read back at once, while the system still has them in memory.
    """
    file.chmod(PRIVATE_FILE)
    sync(file)
    return facts_of(file)


def facts_of(file: Path) -> Facts:
    """Size and SHA-256 of what is in a file.  Raises OSError."""
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": digest}


def fault_of(file: Path, written: Facts, *, reads: bool) -> str | None:
    """What is wrong with a file, in words that follow its name; None: nothing.

    `reads`: compare its SHA-256 too, for which all of it is read.  Raises Unreadable.
    """
    try:
        size = file.stat().st_size
        if size != written["bytes"]:
            return f"has {size} bytes, and {written['bytes']} were written"
        if reads and facts_of(file)["sha256"] != written["sha256"]:
            return "is damaged: its SHA-256 is not that of what was written"
    except ABSENT:
        return "is missing"
    except OSError as error:
        raise Unreadable.of(file, error) from error
    return None


def write_sums(folder: Path, pattern: str) -> None:
    """List the SHA-256 of the files in a folder, when they are on the disk."""
    files = sorted(folder.glob(pattern))
    with ThreadPoolExecutor(THREADS) as threads:
        sums = [facts["sha256"] for facts in threads.map(facts_of, files)]
    for file in files:
        sync(file)
    (folder / SUMS).write_text("".join(f"{s}  {file.name}\n" for s, file in zip(sums, files, strict=True)))
    sync(folder / SUMS)


def faults_of_sums(folder: Path) -> list[str]:
    """A sentence for each file of a folder that is not what its sums say; none for a folder without sums.

    A file of weights without a line is a fault too: a power failure can have cut the sums.
    """
    if not (folder / SUMS).is_file():
        return []
    lines = (folder / SUMS).read_text(errors="replace").splitlines()
    if not lines:
        return [f"{folder / SUMS} is damaged: it lists no file"]
    with ThreadPoolExecutor(THREADS) as threads:
        faults = [fault for fault in threads.map(lambda line: _fault_of_sum(folder, line), lines) if fault]
    listed = {line.partition("  ")[2] for line in lines}
    unlisted = sorted(file for file in folder.glob(WEIGHTS) if file.name not in listed)
    return faults + [f"{file} has no line in {SUMS}, which is cut or not its own" for file in unlisted]


def _fault_of_sum(folder: Path, line: str) -> str | None:
    digest, _, name = line.partition("  ")
    file = folder / name
    if not name or Path(name).name != name:
        return f"{folder / SUMS} is damaged: {line!r} is no line of a digest and a name"
    try:
        return None if facts_of(file)["sha256"] == digest else f"{file} is damaged: its SHA-256 is not that in {SUMS}"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
