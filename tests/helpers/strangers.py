"""Another user of this machine, who opens connections, says half of something, and waits."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SCRIPT = """
import os, resource, select, socket, sys, time

port, count, most = map(int, sys.argv[1:])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
"127.0.0.1".encode("idna")  # a module that another user may not be able to read
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
waiting, held = select.poll(), {}
for _ in range(count):
    sock = socket.create_connection(("127.0.0.1", port), timeout=300)
    sock.settimeout(None)
    try:
        sock.sendall(b"POST /generate HTTP/1.1\\r\\nX-Half:")
    except OSError:
        continue
    held[sock.fileno()] = sock
    waiting.register(sock, select.POLLIN)
begun = time.monotonic()

def until(num_left):
    while len(held) > num_left:
        for number, _ in waiting.poll():
            waiting.unregister(number)
            held.pop(number).close()

until(most)
print(len(held), flush=True)
until(0)
print(time.monotonic() - begun, flush=True)
"""


@dataclass
class Strangers:
    num_left: int  # connections that are open still
    process: "subprocess.Popen[str]"

    def gone_after_s(self) -> float:
        """Waits until the last one was closed; seconds since the last one was opened."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())


@contextmanager
def strangers_at(port: int, count: int, most: int) -> Iterator[Strangers]:
    """So many connections, of which so many are left at most."""
    words = [sys.executable, "-I", "-c", SCRIPT, str(port), str(count), str(most)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Strangers(int(process.stdout.readline()), process)
        finally:
            process.kill()


def with_files(number: int, command: Sequence[str]) -> list[str]:
    """The command as a process that may open so many files."""
    return ["bash", "-c", 'ulimit -n "$0" && exec "$@"', str(number), *command]
