"""What is seen while ranks work: a bar that grows with every step, and with a folder where a step is the whole job."""

import io
import threading
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megarl.convert import ranks as module
from megarl.convert.ranks import Ranks
from megarl.group import Reply


class Steps:
    """A group whose ranks take four steps of 250 bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, arguments: dict[str, Any]) -> None:
        self.calls.append((method, arguments))

    def call_leader(self, method: str, arguments: dict[str, Any]) -> Reply:
        self.call(method, arguments)
        step = len(self.calls) - 1
        return Reply({"finished": step == 4, "num_bytes": 250, "digests": {f"tensor {step}": "d"}}, {})


def make(console: Console) -> tuple[Ranks, Steps]:
    steps = Steps()
    return Ranks(steps, console, {"w": ((10, 25), torch.float32)}), steps  # type: ignore[arg-type]


def test_a_job_is_begun_once_and_carried_on_to_its_end() -> None:
    ranks, steps = make(Console(file=io.StringIO()))
    found = ranks.carry_out("digest_hf", "verify", folder="f")
    assert steps.calls[0] == ("begin", {"job": "digest_hf", "folder": "f"})
    assert [method for method, _ in steps.calls[1:]] == ["go_on"] * 4
    assert sorted(found) == [f"tensor {i}" for i in (1, 2, 3, 4)]


def test_a_terminal_sees_a_bar_and_a_log_one_line() -> None:
    for is_terminal in (True, False):
        out = io.StringIO()
        ranks, _ = make(Console(file=out, force_terminal=is_terminal, width=100))
        ranks.carry_out("read_hf", "read")
        assert ("1.0/1.0 kB" in out.getvalue()) == is_terminal
        assert "read: 1 tensors, 1.0 kB, " in out.getvalue()


def test_a_folder_that_grows_is_watched(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(7))
    seen: list[int] = []
    told = threading.Event()

    def advance(done: int) -> None:
        seen.append(done)
        told.set()

    with module._watched(tmp_path, advance):
        assert told.wait(timeout=60)
    assert set(seen) == {7}
