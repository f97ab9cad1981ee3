"""Files that outlive a power cut and can be checked: on the disk when a call returns, with size and SHA-256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypedDict

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # modes: of the owner alone


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
    """Write a private file under a temporary name, wait until it is on the disk, and rename it."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
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

    `reads`: compare its SHA-256 too, for which all of it is read.
    """
    try:
        size = file.stat().st_size
        if size != written["bytes"]:
            return f"has {size} bytes, and {written['bytes']} were written"
        if reads and facts_of(file)["sha256"] != written["sha256"]:
            return "is damaged: its SHA-256 is not that of what was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
