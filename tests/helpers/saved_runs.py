"""Saves of small roles with real files, for the tests of what a save is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import torch

from megarl.mcore.checkpoint.files import Reader, Saving, faults_of_share, write
from megarl.mcore.checkpoint.held import Piece
from megarl.roles.handles import SaveError
from megarl.trainer.checkpoint.checkpoint import Checkpoint, Retention
from megarl.trainer.checkpoint.saver import Saver

SIZE = 64  # numbers of a role


class Shard:
    """A role of one tensor on one rank, which is this process."""

    def __init__(self, value: float = 0.0) -> None:
        self.tensor = torch.full((SIZE,), value)
        self.saving: Saving | None = None

    def save(self, folder: Path, *, in_background: bool) -> None:
        self.saving = write(folder, 0, [self._piece()], in_background=in_background, about={"ranks": 1})

    def is_saved(self) -> bool:
        assert self.saving is not None
        if self.saving.is_done and self.saving.error:
            raise SaveError(f"rank 0 could not write: {self.saving.error}")
        return self.saving.is_done

    def faults(self, folder: Path) -> list[str]:
        return faults_of_share(folder, 0, 1)

    def restore(self, folder: Path) -> None:
        Reader(folder, 1).fill([self._piece()])

    def _piece(self) -> Piece:
        return Piece("weight", (SIZE,), ((0, SIZE),), self.tensor)


def saver_of(
    root: Path,
    roles: dict[str, Any] | None = None,
    *,
    keep: int = 9,
    in_background: bool = False,
    limit_s: float = 600.0,
    warn: Callable[[str], None] | None = None,
    origin: str | None = None,
    allowed: int = 0,
    **more: Any,
) -> Saver:
    def unexpected(sentence: str) -> None:
        raise AssertionError(sentence)

    how: dict[str, Any] = {"in_background": in_background, "limit_s": limit_s, "origin": origin, "allowed": allowed}
    root.parent.mkdir(parents=True, exist_ok=True)
    return Saver(root, roles or {"actor": Shard()}, Retention(keep, **more), warn=warn or unexpected, **how)


def save_steps(root: Path, *steps: int, keep: int = 9, **more: Any) -> None:
    """The role's numbers are the step."""
    for step in steps:
        save(saver_of(root, {"actor": Shard(step)}, keep=keep, **more), step)


def save(saver: Saver, step: int, state: dict[str, Any] | None = None) -> Checkpoint | None:
    saver.start(step)
    saver.describe(state or {"seed": 0})
    saver.finish()
    return saver.last


def flip(file: Path, at: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more into a file, as a full disk does, whoever runs the tests."""
    soft, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
