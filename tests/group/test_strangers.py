"""A stranger on this machine, who reaches the store at which ranks meet, executes nothing."""

from __future__ import annotations

import base64
import os
import pickle
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from test_group import make, worker_on_path
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
)

from megarl.network.sockets import host_store

__all__ = ["worker_on_path"]  # a fixture


class Command:
    """Executed by whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._mark),)


def poison(port: int, mark: Path) -> None:
    """What any user of this machine can do: put a pickle where torchrun's rendezvous looks for its state."""
    stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    for run_id in ("none", "0", ""):
        stranger.set(f"torch.rendezvous.{run_id}", base64.b64encode(pickle.dumps(Command(mark))).decode())


def test_torchruns_rendezvous_executes_it(tmp_path: Path) -> None:
    """So `poison` is the attack that the next test wants to fail."""
    store = host_store("127.0.0.1")
    poison(store.port, tmp_path / "executed")
    settings = RendezvousSettings("none", 1, 1, RendezvousTimeout(), timedelta(seconds=5), 3)
    with pytest.raises(AttributeError):  # of what it got in the place of its state
        _BackendRendezvousStateHolder(C10dRendezvousBackend(store, "none"), settings).sync()
    assert (tmp_path / "executed").is_dir()


@pytest.mark.dist
def test_the_ranks_of_a_group_do_not(tmp_path: Path, worker_on_path: None) -> None:  # noqa: F811
    """Before they have met, and while they work."""
    mine = psutil.Process()
    before = {entry.laddr.port for entry in mine.net_connections("tcp")}
    with make(tmp_path, "two", 2, 1) as group:
        found = [entry for entry in mine.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
        ports = {entry.laddr.port for entry in found} - before
        poisoned = []
        for port in ports:  # the store, and the listener for the ranks, which turns strangers away
            try:
                poison(port, tmp_path / "executed")
            except RuntimeError:
                continue
            poisoned.append(port)
        assert len(poisoned) == 1, "the stranger reached the store"
        group.start()
        poison(poisoned[0], tmp_path / "executed")
        replies = group.call("double", {}, [{"x": torch.ones(1)}] * 2)
        assert [reply.tensors["x"].item() for reply in replies] == [2.0, 2.0]
    assert not (tmp_path / "executed").exists()
