"""A rank that hangs in a call, with the interpreter's lock in hand, and heeds nobody who asks it to end."""

import ctypes
import os
import signal
from dataclasses import dataclass

from megarl.group.follow import follow
from megarl.group.message import Message


@dataclass(frozen=True)
class Hang(Message):
    pass


def hang() -> None:
    """As a collective does whose partner is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("hangs", flush=True)
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock; longer than a test may take


if __name__ == "__main__":
    assert os.environ["RANK"] == "0"
    follow({Hang: lambda message, tensors: hang()}, lambda: None, lambda: True)
