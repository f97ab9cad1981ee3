"""Servers whose replies do not end, over plain sockets: one byte now and then, or as many as the caller takes."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

DRIP_S = 0.05  # between two bytes: far below the time limit of any call
OPENING = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{"a": "'
_PART = b"x" * (1 << 16)

Behaviour = Callable[[socket.socket, threading.Event], None]


def drip(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(OPENING)
    while not ended.wait(DRIP_S):
        connection.sendall(b"x")


def drip_headers(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Name: ")
    while not ended.wait(DRIP_S):
        connection.sendall(b"x")


def flood(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(OPENING)
    while not ended.is_set():
        connection.sendall(_PART)


def take_nothing(connection: socket.socket, ended: threading.Event) -> None:
    """It does not even read the request."""
    ended.wait()


@contextlib.contextmanager
def endless(behave: Behaviour) -> Iterator[str]:
    """Its url."""
    ended, threads = threading.Event(), list[threading.Thread]()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # its caller leaves
            if behave is not take_nothing:
                connection.recv(1 << 20)
            behave(connection, ended)

    def accept(listener: socket.socket) -> None:
        while not ended.is_set():
            connection, _ = listener.accept()
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = threading.Thread(target=accept, args=(listener,))
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            ended.set()
            socket.create_connection(("127.0.0.1", port)).close()  # wakes it
            server.join()
            for thread in threads:
                thread.join()
