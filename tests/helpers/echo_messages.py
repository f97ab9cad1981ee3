"""What the tests of Group ask of `echo_worker`."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.group.message import Message


@dataclass(frozen=True)
class Double(Message):
    """Tensors come back twice as large."""

    say: str | None = None


@dataclass(frozen=True)
class Gradient(Message):
    """That of the mean of a linear model's outputs, over all ranks: the mean of the rows."""


@dataclass(frozen=True)
class Pid(Message):
    pass


@dataclass(frozen=True)
class Where(Message):
    role: str = ""

    @property
    def label(self) -> str:
        return f"{self.method()} {self.role}".strip()


@dataclass(frozen=True)
class Fail(Message):
    """A rank raises an error while the others sleep."""

    rank: int
    kind: str
    text: str = "the shelf is empty"
    others_sleep_s: float = 0.0


@dataclass(frozen=True)
class Hang(Message):
    rank: int


@dataclass(frozen=True)
class Meet(Message):
    """A collective, and the ranks that never join it, by what they do."""

    stopped: int | None = None
    holds: int | None = None
    loops: int | None = None
    fails: int | None = None


@dataclass(frozen=True)
class Kill(Message):
    rank: int


@dataclass(frozen=True)
class Eat(Message):
    """A rank takes memory until the kernel kills it, where its cgroup has a limit."""

    rank: int
