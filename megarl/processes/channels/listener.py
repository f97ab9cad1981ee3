"""Accepts the callers of a process that know the token, whatever others do meanwhile."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.io.callers import LOOK_S, PROOF_S, SOON_S, Callers, Peer
from megarl.processes.channels.connection import Connection, greet


class Listener:
    """Accepts callers that know the token.  Each is greeted in its own thread, so that no caller blocks another.

    `let_in(connection, hello)` is called in that thread.  The Listener owns the socket `listener` and closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        let_in: Callable[[Connection, dict[str, Any]], None],
        name: str = "door",
        greeting_s: float = PROOF_S,
    ) -> None:
        self._listener = listener
        self._token = token
        self._let_in = let_in
        self._greeting_s = greeting_s
        self._callers = Callers(name)
        self._closed = threading.Event()
        listener.settimeout(LOOK_S)
        self._thread = threading.Thread(target=self._open, daemon=True, name=name)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting callers."""
        self._closed.set()
        with suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def _open(self) -> None:
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        with self._listener:
            while not self._closed.is_set():
                if not waiting.poll(LOOK_S * 1000):
                    continue  # nobody is turned away for a caller who is not there
                try:
                    caller = self._callers.accept(self._listener)
                except TimeoutError:
                    continue
                except OSError:  # closed, or temporarily out of file descriptors
                    self._closed.wait(LOOK_S)
                    continue
                if caller is None:
                    self._closed.wait(SOON_S)
                else:
                    threading.Thread(target=self._greet, args=caller, daemon=True).start()

    def _greet(self, sock: socket.socket, peer: Peer) -> None:
        arrival = greet(sock, self._token, self._greeting_s)
        self._callers.let_in(peer)
        if arrival is not None and self._closed.is_set():
            arrival[0].close()
        elif arrival is not None:
            self._let_in(*arrival)
