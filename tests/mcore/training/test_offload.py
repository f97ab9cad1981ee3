"""What a night does to tensors: bytes leave and come back, and every view stays a view."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megarl.mcore.training.offload import Bed, Moved


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


def bed(views: Views, **how: Any) -> Bed:
    return Bed([views], None, **{"parameters": True, "gradients": True, "moments": True, **how})


def test_bytes_leave_and_come_back(views: Views) -> None:
    a, address = views.a, id(views.a)
    sleeper = bed(views)
    assert sleeper.sleep() == Moved(parameters=48, gradients=48, optimizer=0)
    assert views.flat.untyped_storage().nbytes() == views.gradients.untyped_storage().nbytes() == 0
    assert sleeper.is_asleep
    sleeper.wake()
    assert not sleeper.is_asleep
    assert views.a is a
    assert id(views.a) == address
    assert views.flat.tolist() == list(range(12))
    assert torch.equal(views.a.detach(), torch.arange(8.0).view(2, 4))


def test_views_stay_views_and_gradients_come_back_as_zeros(views: Views) -> None:
    sleeper = bed(views)
    for _ in range(2):
        sleeper.sleep()
        sleeper.wake()
    views.flat += 1
    assert views.b.tolist() == [9, 10, 11, 12]
    views.gradients += 3
    assert views.b.main_grad.tolist() == [3, 3, 3, 3]  # type: ignore[attr-defined]


def test_a_second_sleep_and_a_second_wake_do_nothing(views: Views) -> None:
    sleeper = bed(views)
    sleeper.wake()
    sleeper.sleep()
    assert sleeper.sleep() == Moved(0, 0, 0)
    sleeper.wake()
    sleeper.wake()
    assert views.flat.tolist() == list(range(12))


def test_host_memory_is_used_again(views: Views) -> None:
    sleeper = bed(views)
    sleeper.sleep()
    first = [host.data_ptr() for host in sleeper._host.values()]
    sleeper.wake()
    sleeper.sleep()
    assert [host.data_ptr() for host in sleeper._host.values()] == first
    sleeper.wake()


def test_nothing_sleeps_unasked(views: Views) -> None:
    assert bed(views, parameters=False, gradients=False).sleep() == Moved(0, 0, 0)
    assert views.flat.untyped_storage().nbytes() == 48


def test_weights_wake_alone_while_their_gradients_sleep_elsewhere(views: Views) -> None:
    weights, gradients = bed(views, gradients=False), bed(views, parameters=False)
    assert weights.sleep() == Moved(parameters=48, gradients=0, optimizer=0)
    assert gradients.sleep() == Moved(parameters=0, gradients=48, optimizer=0)
    weights.wake()
    assert views.flat.tolist() == list(range(12))
    assert views.gradients.untyped_storage().nbytes() == 0
    weights.sleep()
    gradients.wake()
    weights.wake()
    assert views.b.tolist() == [8, 9, 10, 11]
    assert views.b.main_grad.tolist() == [0, 0, 0, 0]  # type: ignore[attr-defined]
