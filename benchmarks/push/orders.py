"""What bench_push.py asks of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.arch.layout import Layout
from megarl.group.message import Message
from megarl.weights.push.settings import PushSettings


@dataclass(frozen=True)
class Build(Message):
    """A model in a layout of its own, in place of the one before."""

    folder: str
    layout: Layout
    dtype: str


@dataclass(frozen=True)
class PushAll(Message):
    """So many pushes one after another, each of other weights than before; rank 0 tells of each."""

    settings: PushSettings
    first_version: int
    pushes: int
