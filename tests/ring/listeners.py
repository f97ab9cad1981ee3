"""Where processes listen while something runs."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

_LOOK_S = 0.1


class Listeners:
    """Notes every address at which this process, or one that it starts meanwhile, listens or takes datagrams.

    Example: with Listeners() as seen: ...; then seen.addresses == {("python -m megarl.roles.worker", "127.0.0.1")}
    """

    def __init__(self) -> None:
        self.addresses: set[tuple[str, str]] = set()  # what the process is, and the address
        self._me = psutil.Process()
        self._others = {child.pid for child in self._me.children(recursive=True)}
        self._mine = {connection.laddr for connection in self._me.net_connections("inet")}
        self._done = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        assert not self._error, f"the watcher stopped: {self._error!r}"

    def _watch(self) -> None:
        try:
            while not self._done.wait(_LOOK_S):
                for process in (self._me, *self._me.children(recursive=True)):
                    if process.pid not in self._others:
                        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended
                            self._look(process)
        except Exception as error:  # else nobody would hear of it
            self._error = error

    def _look(self, process: psutil.Process) -> None:
        for entry in process.net_connections("inet"):
            listens = entry.status == psutil.CONN_LISTEN or (entry.status == psutil.CONN_NONE and not entry.raddr)
            if listens and entry.laddr and not (process == self._me and entry.laddr in self._mine):
                words = process.cmdline()
                name = " ".join([Path(words[0]).name, *words[1:]][:4]) if words else process.name()
                self.addresses.add((name, entry.laddr.ip))
