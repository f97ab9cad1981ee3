"""A driver of two machines whose main loop goes on for a while and then hangs: LIMIT_S KIND.

It prints its port; then, when machine 1 has come, "goes on" after twice the limit, and hangs as KIND says.
"""

import ctypes
import sys
import threading
import time

from megarl.machines.nodes import Nodes
from megarl.processes import watchdog

TOKEN = "the secret of these tests"


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def keeps_the_lock_of_python() -> None:
    ctypes.PyDLL(None).pause()


if __name__ == "__main__":
    limit_s, kind = float(sys.argv[1]), sys.argv[2]
    with watchdog.watch(limit_s), Nodes(2, 1, "127.0.0.1", 0, TOKEN) as nodes:
        print(nodes.port, flush=True)
        nodes.wait()
        began = time.monotonic()
        while time.monotonic() - began < 2 * limit_s:
            watchdog.heartbeat()
            time.sleep(0.1)
        print("goes on", flush=True)
        {"lock": waits_for_a_lock, "python": keeps_the_lock_of_python}[kind]()
