"""Accepts the callers of a process that know the token, whatever strangers do meanwhile."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.processes.connection import Connection
from megarl.processes.greeting import GREETING_S, greet

MAX_CALLERS = 256  # concurrent greetings; one more turns another away
_LOOK_S = 0.2


class Listener:
    """Accepts callers that know the token.  Each is greeted in its own thread, so that no caller blocks another.

    With MAX_CALLERS in greetings, a new caller takes the place of the oldest of the address that has the most: who
    knows the token needs milliseconds.

    `let_in(connection, hello)` is called in that thread.  The Listener owns the socket `listener` and closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        let_in: Callable[[Connection, dict[str, Any]], None],
        name: str = "door",
        greeting_s: float = GREETING_S,
    ) -> None:
        self._listener, self._token, self._let_in, self._greeting_s = listener, token, let_in, greeting_s
        self._callers: dict[socket.socket, str] = {}  # those in greetings, the oldest first -> their address
        self._lock = threading.Lock()  # of the callers
        self._closed = threading.Event()
        listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._open, daemon=True, name=name)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting callers."""
        self._closed.set()
        with suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def _open(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    sock, peer = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # closed, or temporarily out of file descriptors
                    self._closed.wait(_LOOK_S)
                    continue
                with self._lock:
                    if len(self._callers) == MAX_CALLERS:
                        self._turn_one_away()
                    self._callers[sock] = str(peer[0])
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _turn_one_away(self) -> None:
        crowded, _ = Counter(self._callers.values()).most_common(1)[0]
        oldest = next(sock for sock, address in self._callers.items() if address == crowded)
        del self._callers[oldest]
        with suppress(OSError):  # it has gone by itself
            oldest.shutdown(socket.SHUT_RDWR)  # ends its thread's wait

    def _greet(self, sock: socket.socket) -> None:
        arrival = greet(sock, self._token, self._greeting_s)
        with self._lock:
            self._callers.pop(sock, None)
        if arrival is not None and self._closed.is_set():
            arrival[0].close()
        elif arrival is not None:
            self._let_in(*arrival)
