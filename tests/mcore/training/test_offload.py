"""What a night does to tensors: bytes leave and come back, and every view stays a view."""

from typing import Any
from unittest import mock
from unittest.mock import call

import pytest
import torch
from late_copies import late_copies
from torch import nn

from megarl.mcore.training import host_memory
from megarl.mcore.training.offload import Moved, OffloadBuffer


class Views(nn.Module):
    """Two parameters in one buffer, as the distributed optimizer lays them, and a buffer of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.arange(12.0)
        self.gradients = torch.ones(12)
        self.a, self.b = nn.Parameter(self.flat[:8].view(2, 4)), nn.Parameter(self.flat[8:])
        for param, gradient in ((self.a, self.gradients[:8].view(2, 4)), (self.b, self.gradients[8:])):
            param.main_grad = gradient  # type: ignore[attr-defined]


@pytest.fixture
def views() -> Views:
    return Views()


@pytest.fixture
def sleeper(views: Views) -> OffloadBuffer:
    return buffer(views)


def buffer(views: Views, **how: Any) -> OffloadBuffer:
    return OffloadBuffer([views], None, **{"parameters": True, "gradients": True, "moments": True, **how})


def test_bytes_leave_and_come_back(views: Views, sleeper: OffloadBuffer) -> None:
    a, address = views.a, id(views.a)
    sleeper.onload()
    assert sleeper.offload() == Moved(parameters=48, gradients=48, optimizer=0, copied=48)
    assert views.flat.untyped_storage().nbytes() == views.gradients.untyped_storage().nbytes() == 0
    assert sleeper.is_offloaded
    assert sleeper.offload() == Moved(0, 0, 0, 0), "a second sleep does nothing, nor does a second wake"
    sleeper.onload()
    sleeper.onload()
    assert not sleeper.is_offloaded
    assert views.a is a
    assert id(views.a) == address
    assert views.flat.tolist() == list(range(12))
    assert torch.equal(views.a.detach(), torch.arange(8.0).view(2, 4))


def test_views_stay_views_and_gradients_come_back_as_zeros(views: Views, sleeper: OffloadBuffer) -> None:
    host = []
    for _ in range(2):
        sleeper.offload()
        host.append(sleeper._host)
        sleeper.onload()
    assert host[0] is host[1], "host memory is used again"
    views.flat += 1
    assert views.b.tolist() == [9, 10, 11, 12]
    views.gradients += 3
    assert views.b.main_grad.tolist() == [3, 3, 3, 3]  # type: ignore[attr-defined]


def test_tensors_that_appeared_since_the_last_sleep_sleep_too(views: Views, sleeper: OffloadBuffer) -> None:
    """The first step of an optimizer makes its moments."""
    sleeper.offload()
    sleeper.onload()
    views.moments = nn.Parameter(torch.arange(100.0))
    assert sleeper.offload().parameters == 48 + 400
    sleeper.onload()
    assert views.moments.tolist() == list(range(100))
    assert views.flat.tolist() == list(range(12))


def test_what_was_only_read_is_not_copied_again(views: Views, sleeper: OffloadBuffer) -> None:
    assert sleeper.offload().copied == 48
    for _ in range(2):
        sleeper.onload(to_read=True)
        assert views.flat.tolist() == list(range(12))
        assert sleeper.offload() == Moved(parameters=48, gradients=48, optimizer=0, copied=0)
    assert views.flat.untyped_storage().nbytes() == 0
    sleeper.onload()
    assert sleeper.offload().copied == 48, "without a word everything may have been written"


def test_what_comes_beside_other_work_is_there_once_somebody_has_waited(views: Views, sleeper: OffloadBuffer) -> None:
    sleeper.offload()
    with late_copies():
        sleeper.onload(beside=True)
        assert not sleeper.is_offloaded
        assert views.flat.isnan().all(), "the memory is taken, and nothing is in it"
        assert views.gradients.tolist() == [0] * 12
        sleeper.wait()
        assert views.flat.tolist() == list(range(12))
        views.flat += 1
        sleeper.wait()
        assert views.flat.tolist() == list(range(1, 13)), "it comes once"


def test_who_does_not_ask_for_it_beside_other_work_finds_it_there(views: Views, sleeper: OffloadBuffer) -> None:
    sleeper.offload()
    with late_copies():
        sleeper.onload()
        assert views.flat.tolist() == list(range(12))
        sleeper.offload()
        sleeper.onload(beside=True)
        sleeper.onload()
        assert views.flat.tolist() == list(range(12)), "it was on its way"


def test_what_leaves_before_it_has_come_is_not_lost(views: Views, sleeper: OffloadBuffer) -> None:
    sleeper.offload()
    with late_copies():
        for _ in range(2):
            sleeper.onload(beside=True)
            assert sleeper.offload().copied == 48
    sleeper.onload()
    assert views.flat.tolist() == list(range(12))


def test_frozen_parameters_and_buffers_of_modules(views: Views) -> None:
    """The former are never written, the latter may be by a pass that only reads parameters."""
    views.base = nn.Parameter(torch.arange(5.0), requires_grad=False)
    views.register_buffer("counts", torch.zeros(3))
    sleeper = buffer(views)
    assert sleeper.offload().copied == 48 + 20 + 12
    sleeper.onload(to_read=True)
    views.counts += 1  # type: ignore[operator]
    assert sleeper.offload().copied == 12
    sleeper.onload(to_read=True)
    sleeper.written()
    assert sleeper.offload().copied == 48 + 12
    sleeper.onload()
    assert views.counts.tolist() == [1, 1, 1] and views.base.tolist() == [0, 1, 2, 3, 4]


def test_a_parameter_with_another_storage_or_size_is_copied(views: Views) -> None:
    views.base = nn.Parameter(torch.arange(5.0), requires_grad=False)
    sleeper = buffer(views)
    sleeper.offload()
    sleeper.onload(to_read=True)
    views.base.data = torch.full((5,), 7.0)
    assert sleeper.offload().copied == 20
    sleeper.onload(to_read=True)
    views.more = nn.Parameter(torch.ones(100))
    assert sleeper.offload().copied == 48 + 20 + 400, "the host's memory is new"
    sleeper.onload()
    assert views.base.tolist() == [7] * 5 and views.flat.tolist() == list(range(12))


@pytest.mark.parametrize("gpu", [False, True])
def test_host_memory_has_no_more_than_its_bytes_and_is_pinned_as_one_block(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    runtime = mock.Mock(**{"cudaHostRegister.return_value": 0, "cudaHostUnregister.return_value": 0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = host_memory.HostMemory([1000, 0, 70_000])  # 2**17 bytes as torch's pinned memory for the last one alone
    assert [part.numel() for part in memory.parts] == [1000, 0, 70_000]
    assert memory.num_bytes == 1024 + 70_144
    address = memory.parts[0].data_ptr()
    assert [part.data_ptr() - address for part in memory.parts if part.numel()] == [0, 1024]
    assert address % 4096 == 0
    for value, part in enumerate(memory.parts):
        part.fill_(value)
    assert memory.parts[0].sum() == 0
    del memory, part
    pinned = [call.cudaHostRegister(address, 1024 + 70_144, 1), call.cudaHostUnregister(address)]
    assert runtime.mock_calls == (pinned if gpu else [])


def test_memory_that_cuda_does_not_pin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: mock.Mock(**{"cudaHostRegister.return_value": 2}))
    with pytest.raises(RuntimeError, match="256 bytes of host memory cannot be pinned: cudaHostRegister returned 2"):
        host_memory.HostMemory([100])


def test_weights_wake_alone_while_their_gradients_sleep_elsewhere(views: Views) -> None:
    weights, gradients = buffer(views, gradients=False), buffer(views, parameters=False)
    assert weights.offload() == Moved(parameters=48, gradients=0, optimizer=0, copied=48)
    assert gradients.offload() == Moved(parameters=0, gradients=48, optimizer=0, copied=0)
    weights.onload()
    assert views.flat.tolist() == list(range(12))
    assert views.gradients.untyped_storage().nbytes() == 0
    weights.offload()
    gradients.onload()
    weights.onload()
    assert views.b.tolist() == [8, 9, 10, 11]
    assert views.b.main_grad.tolist() == [0, 0, 0, 0]  # type: ignore[attr-defined]
