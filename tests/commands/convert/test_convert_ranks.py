"""What is seen while ranks work: a line at the end of each job, and on a terminal a bar as long as a folder."""

import io
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megarl.commands.convert.convert import Ranks
from megarl.commands.convert.folders import ModelFolder
from megarl.group import Reply


class Reader:
    """A group whose ranks read or digest at once."""

    def call(self, message: Any) -> list[Reply]:
        return [Reply({"digests": {"w": message.folder}}, {})]

    def call_leader(self, message: Any) -> Reply:
        return self.call(message)[0]


def make(console: Console) -> Ranks:
    nobody: Any = None
    return Ranks(Reader(), console, nobody, {"w": ((10, 25), torch.float32)})  # type: ignore[arg-type]


def test_only_shards_are_read_before_their_digests(tmp_path: Path) -> None:
    for form, stages in (("hf", ["look"]), ("megatron", ["look: reading", "look"])):
        out = io.StringIO()
        folder = ModelFolder(tmp_path, form, "actor", tmp_path, "float32")  # type: ignore[arg-type]
        found = make(Console(file=out)).digests(folder, "look")
        assert found == {"w": str(tmp_path) if form == "hf" else None}
        assert [line.rpartition(", ")[0] for line in out.getvalue().splitlines()] == [
            f"{stage}: 1 tensors, 1.0 kB" for stage in stages
        ]


def test_a_terminal_sees_a_bar_that_grows_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(500))
    for is_terminal in (True, False):
        out = io.StringIO()
        ranks, before = make(Console(file=out, force_terminal=is_terminal, width=100)), time.monotonic()
        with ranks._timed("write", tmp_path):
            while is_terminal and "0.5/1.0 kB" not in out.getvalue() and time.monotonic() < before + 60:
                time.sleep(0.05)
        assert ("0.5/1.0 kB" in out.getvalue()) == is_terminal
        assert "write: 1 tensors, 1.0 kB, " in out.getvalue()
