"""The list of a Megatron checkpoint is a pickle from somebody else: nothing in it runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from megarl.mcore.checkpoint.torch_dist import METADATA, TorchDistReader


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_what_a_list_would_run_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"\.metadata: it cannot be read \(.*\); expected an unchanged folder$"):
        TorchDistReader(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})[:-3]])
def test_a_damaged_list_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata: it cannot be read"):
        TorchDistReader(tmp_path)
