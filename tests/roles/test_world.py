"""How a rank joins its world."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.arch.layout import Layout
from megarl.group.message import Setup
from megarl.mcore.setup import RankInfo, backend_of
from megarl.roles import worker


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_the_world_speaks_one_backend(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    """With two, every group would open gloo's sockets between all pairs of its ranks."""
    joined: list[Any] = []
    monkeypatch.setattr(worker, "device_for", lambda _: torch.device(device, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(worker, "join_world", lambda backend, _: joined.append(backend))
    monkeypatch.setattr(worker, "make_groups", lambda *_, **__: RankInfo(0, 0, 1, True, True))
    monkeypatch.setattr(worker, "replica_group", lambda **_: None)
    worker.Worker().setup(Setup(Layout(), device, 0, 60.0), {})
    assert joined == [backend] == [backend_of(device)]
