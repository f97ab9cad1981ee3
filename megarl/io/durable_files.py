"""Files that outlive a power cut and can be checked: on the disk when a call returns, with size and SHA-256.

Storage may take nothing: a full disk, a quota, a faulty or a read-only file system.  A run waits there for room, since
what was trained is worth more than the time (`kept`).

A name that comes from a file becomes a path in one place, `inside`: a folder that somebody else made names no file
outside of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

SUMS = "SHA256SUMS"  # of an exported folder's weights, as `sha256sum --check` reads it
WEIGHTS = "*.safetensors"  # of an exported folder
THREADS = 8  # that read files together
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # modes: of the owner alone

MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # somebody frees space, a file server is back
_NAMED = (*MAY_PASS, errno.EFBIG)
_OF_STORAGE = (*_NAMED, errno.EACCES, errno.EPERM)  # these say which file it is
LOOK_S = 1.0  # between two looks at the free bytes
AGAIN_S = 60.0  # between two attempts, and two sentences, while nothing is freed: a quota shows nothing

_limit_s = 0.0  # 0: nobody waits
_say: Callable[[str], None]
_make_room: Callable[[], None]


# What reading a file raises if it is not there.  Other errors say nothing about it.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class StorageError(OSError):
    """Files are not taken, for which no rank, server or setting is to blame; one sentence that names the place."""

    def __str__(self) -> str:
        return str(self.strerror)


def number_of(error: BaseException) -> int:
    """The errno of an error of storage, as itself or by its words, which Python and Rust share; 0 for any other."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _OF_STORAGE else 0
    return next((number for number in _OF_STORAGE if os.strerror(number) in str(error)), 0)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Raises an error of storage as a StorageError that names what was written there, and the free bytes."""
    try:
        yield
    except OSError as error:
        place, is_known = str(error.filename or path), isinstance(error, StorageError)
        if error.errno not in _NAMED or (is_known and place in str(error)):
            raise
        why = str(error) if is_known else os.strerror(error.errno)
        raise StorageError(error.errno, f"{place}: {why} ({_free(path):,} bytes free)") from error


@contextmanager
def patient(limit_s: float, say: Callable[[str], None], make_room: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `kept` waits.  `make_room` is called again and again then; `say` gets a sentence once a minute."""
    global _limit_s, _say, _make_room
    _limit_s, _say, _make_room = limit_s, say, make_room
    try:
        yield
    finally:
        _limit_s = 0.0


def kept(path: Path, write: Callable[[], object]) -> None:
    """Call `write`, which writes `path` as a whole or not at all, until storage takes it.

    Raises StorageError when a run has waited for so long that it ends; those that write then do not wait any more.
    """
    global _limit_s
    began, said = time.monotonic(), -AGAIN_S
    while True:
        try:
            with named(path):
                write()
                return
        except StorageError as error:
            free, waited = _free(path), time.monotonic() - began  # before a word is said, after which room may be made
            if error.errno not in MAY_PASS or waited >= _limit_s:
                if waited >= LOOK_S:
                    error.strerror = f"{error}; the run has waited {waited:.0f} s for room (trainer.call_timeout_s)"
                _limit_s = 0.0
                raise
            if waited - said >= AGAIN_S:
                said = waited
                _say(f"{error}; the run waits for room, {_limit_s - waited:.0f} s more at most")
        tried = time.monotonic()
        _make_room()
        while _free(path) <= free and time.monotonic() - tried < min(AGAIN_S, _limit_s - waited):
            time.sleep(LOOK_S)
            _make_room()


def _free(path: Path) -> int:
    """Bytes that this user may still write there; 0 if nobody knows, since a file system is away."""
    with suppress(OSError):
        return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
    return 0


class Unreadable(OSError):
    """A file that may be whole cannot be read now: the file server is away, too many files are open, no permission."""

    @classmethod
    def of(cls, file: Path, error: OSError) -> Unreadable:
        return cls(f"{file} cannot be read ({error.strerror}), and may be whole")


class Facts(TypedDict):
    """What a file must still be when it is read."""

    bytes: int
    sha256: str  # hexadecimal


def inside(folder: Path, name: object) -> Path:
    """The path of a name that a file gives, as "a.safetensors" or "actor/rank_00000.json", in that file's folder.

    Raises ValueError for any other name than plain ones, and for a link that leads out of the folder.  The blobs beside
    a snapshot in a cache of Hugging Face, to which its files are links, belong to it.
    """
    if not isinstance(name, str) or "\0" in name or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"{folder}: one of its files names the file {name!r}; expected a name in this folder")
    home, real = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    blobs = {place.with_name("blobs") for place in home.parents if place.name == "snapshots"}
    if not {home, *blobs} & set(real.parents):
        wanted = "expected the file itself there, or a link to the whole folder"
        raise ValueError(f"{folder / name}: a link to {real}, outside of its folder; {wanted}")
    return folder / name


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


def kept_text(file: Path, text: str) -> None:
    """As `write_text`; a run waits for room."""
    kept(file, lambda: write_text(file, text))


def write_bytes(file: Path, content: bytes) -> None:
    """Write a private file under a temporary name, wait until it is on the disk, and rename it."""
    partial = file.with_name(f".{file.name}.partial")
    with named(file):
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
    try:
        file = inside(folder, name)
    except ValueError as error:
        return f"{folder / SUMS} is damaged, or not its own ({error})"
    try:
        return None if facts_of(file)["sha256"] == digest else f"{file} is damaged: its SHA-256 is not that in {SUMS}"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
