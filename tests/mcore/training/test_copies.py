"""In which order a GPU is told to copy beside its work; and that without one nothing is left to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.mcore.training import copies


class Cuda:
    """What is asked of CUDA, in its order."""

    def __init__(self) -> None:
        self.story: list[Any] = []

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 3

    def current_stream(self) -> str:
        return "computing"

    def Stream(self, device: int) -> Cuda:  # noqa: N802
        self.story.append(("made for", device))
        return self

    @contextmanager
    def stream(self, stream: Cuda) -> Iterator[None]:
        assert stream is self
        self.story.append("inside")
        yield
        self.story.append("outside")

    def wait_stream(self, stream: str) -> None:
        self.story.append(("behind", stream))

    def record_event(self) -> Cuda:
        self.story.append("event")
        return self

    def synchronize(self) -> None:
        self.story.append("waited")


class Noting:
    """A tensor on the GPU that notes what is copied into it."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.story.append(("copied", source.tolist()))


def test_a_gpu_copies_on_a_stream_of_its_own_behind_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    copies._stream.cache_clear()
    pairs: Any = [(Noting(cuda), torch.tensor([n])) for n in (1, 2)]
    arrive = copies.begin(pairs)
    begun = [("behind", "computing"), "inside", ("copied", [1]), ("copied", [2]), "event", "outside"]
    assert cuda.story == [("made for", 3), *begun], "nobody has waited"
    arrive()
    copies.begin(pairs)
    assert cuda.story == [("made for", 3), *begun, "waited", *begun], "one stream for all copies"
    copies._stream.cache_clear()


def test_what_is_waited_for_at_once_is_not_behind_what_comes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(cuda, "current_stream", lambda: cuda)
    pairs: Any = [(Noting(cuda), torch.tensor([n])) for n in (1, 2)]
    copies.at_once(pairs)
    assert cuda.story == [("copied", [1]), ("copied", [2]), "waited"], "on the stream that computes"


def test_without_a_gpu_all_is_copied_at_once() -> None:
    to = torch.zeros(3)
    arrive = copies.begin([(to, torch.arange(3.0))])
    assert to.tolist() == [0, 1, 2]
    to += 1
    arrive()
    assert to.tolist() == [1, 2, 3]
