"""How a rank joins its world."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.layout import Layout
from megarl.mcore import setup


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_the_world_speaks_one_backend(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    """With two, every group would open gloo's sockets between all pairs of its ranks."""
    joined: list[Any] = []
    monkeypatch.setattr(setup, "device_for", lambda _: torch.device(device, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(setup, "make_groups", lambda *_, **__: None)
    setup.initialize(Layout(), device=device)
    assert joined == [backend] == [setup.backend_of(device)]
