"""One rule for all that listen: how many callers without the key may wait, for how long, and which files they get."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

logger = logging.getLogger(__name__)

MOST = 256  # callers at once that have not shown the key, where each has a thread
PROOF_S = 10.0  # they have to show it
LOOK_S = 0.2  # between two looks at them, and before another try to accept one
SOON_S = 0.01  # that a thread has to end when its caller was turned away
_KEPT_FILES = 64  # of those that a process may open: pushes, and what it reads, get them
_SAY_S = 60.0

Peer = tuple[object, ...]  # address and port


def allow_all_files() -> None:
    """Raise the limit of open files of this process, and of those that it starts, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Callers:
    """Those of the listener `name` that have not shown the key yet; may be used by several threads.

    One more than `most`, or MOST, takes the place of the oldest of the address with the most; friends are fast.
    """

    def __init__(self, name: str, *, most: int = 0) -> None:
        self._name = name
        self._most = max(MOST, most)
        self._lock = threading.Lock()
        self._callers: dict[Peer, tuple[socket.socket, int]] = {}  # with the look before it, the oldest first
        self._num_looks = 0
        self._num_failed = 0
        self._said_at = -_SAY_S

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Peer] | None:
        """The next caller; None: there was no room for it, and another one was turned away, so try again soon.

        Raises OSError if there is none, or nobody who could make room.
        """
        try:
            free = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
            os.close(free)
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if 0 < most - _KEPT_FILES <= free:
                raise OSError(errno.EMFILE, f"{free} of {most} files are open, and the rest is kept for other uses")
            sock, peer = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM) and self._made_room(error):
                return None
            raise
        self.add(sock, peer)
        return sock, peer

    def add(self, sock: socket.socket, peer: Peer) -> None:
        with self._lock:
            self._callers.pop(peer, None)  # who had this port before has gone
            if len(self._callers) >= self._most:
                self._forget_closed()
            if len(self._callers) >= self._most:
                self._turn_one_away()
            self._callers[peer] = sock, self._num_looks

    def let_in(self, peer: Peer) -> None:
        """This caller has shown the key, or has gone."""
        with self._lock:
            self._callers.pop(peer, None)

    def look(self) -> None:
        """Turn away those that have had PROOF_S; to be called every LOOK_S by who reads what they send.

        Looks are counted, and not the time: who was busy has not read what they sent meanwhile.
        """
        with self._lock:
            self._num_looks += 1
            for peer, (_, before) in list(self._callers.items()):
                if self._num_looks - before > PROOF_S / LOOK_S:
                    self._turn_away(peer)

    def _made_room(self, error: OSError) -> bool:
        with self._lock:
            self._num_failed += 1
            if time.monotonic() - self._said_at >= _SAY_S:  # strangers do not fill the log
                logger.warning("%s: %d times no caller could be accepted: %s", self._name, self._num_failed, error)
                self._num_failed, self._said_at = 0, time.monotonic()
            self._forget_closed()
            if self._callers:
                self._turn_one_away()
                return True
            return False

    def _forget_closed(self) -> None:
        self._callers = {peer: each for peer, each in self._callers.items() if each[0].fileno() >= 0}

    def _turn_one_away(self) -> None:
        ((crowded, _),) = Counter(peer[0] for peer in self._callers).most_common(1)
        self._turn_away(next(peer for peer in self._callers if peer[0] == crowded))

    def _turn_away(self, peer: Peer) -> None:
        with suppress(OSError):  # it has gone by itself
            self._callers.pop(peer)[0].shutdown(socket.SHUT_RDWR)  # who reads from it closes it
