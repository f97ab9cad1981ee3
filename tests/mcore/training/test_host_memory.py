"""In which order a GPU is told to copy beside its work; and that without one nothing is left to wait for."""

from typing import Any
from unittest import mock
from unittest.mock import call

import pytest
import torch

from megarl.mcore.training import host_memory


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """What is asked of CUDA, in its order; there is one stream, and `to` stands for all tensors on the GPU."""
    cuda = mock.MagicMock()
    cuda.is_available.return_value = True
    cuda.current_device.return_value, cuda.current_stream.return_value = 3, cuda.computing
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(host_memory, "_stream", host_memory._stream.__wrapped__)
    return cuda


def test_a_gpu_copies_on_a_stream_of_its_own_behind_what_it_was_given(cuda: mock.MagicMock) -> None:
    of_stream = cuda.Stream.return_value
    pairs: Any = [(cuda.to, "one"), (cuda.to, "two")]
    arrive = host_memory.begin_copies(pairs)
    begun = [call.is_available(), call.current_device(), call.Stream(3), call.current_stream()]
    begun += [call.Stream().wait_stream(cuda.computing), call.stream(of_stream), call.stream().__enter__()]
    begun += [call.to.copy_(source, non_blocking=True) for source in ("one", "two")]
    begun += [call.Stream().record_event(), call.stream().__exit__(None, None, None)]
    assert cuda.mock_calls == begun, "nobody has waited"
    arrive()
    assert cuda.mock_calls == [*begun, call.Stream().record_event().synchronize()]


def test_all_copies_to_a_gpu_are_made_on_one_stream() -> None:
    host_memory._stream.cache_clear()
    with mock.patch.object(torch.cuda, "Stream", lambda device: [device]):
        assert host_memory._stream(3) is host_memory._stream(3)
    host_memory._stream.cache_clear()


def test_what_is_waited_for_at_once_is_not_behind_what_comes_beside(cuda: mock.MagicMock) -> None:
    pairs: Any = [(cuda.to, "one"), (cuda.to, "two")]
    host_memory.copy_at_once(pairs)
    copied = [call.to.copy_(source, non_blocking=True) for source in ("one", "two")]
    on_the_stream_that_computes = [call.is_available(), call.current_stream(), call.computing.synchronize()]
    assert cuda.mock_calls == [*copied, *on_the_stream_that_computes]


def test_without_a_gpu_all_is_copied_at_once() -> None:
    to = torch.zeros(3)
    arrive = host_memory.begin_copies([(to, torch.arange(3.0))])
    assert to.tolist() == [0, 1, 2]
    to += 1
    arrive()
    assert to.tolist() == [1, 2, 3]
