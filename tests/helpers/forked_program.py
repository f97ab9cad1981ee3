"""A program that tests fork from the fork server: says what it is, then does what its arguments say."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy

INHERITED: list[str] = []  # stays empty: a fork does not see what another one wrote


def main() -> None:
    INHERITED.append("main")
    said = {
        "words": sys.argv[1:],
        "variables": dict(os.environ),
        "shown": Path("/proc/self/environ").read_bytes().decode().split("\0"),
        "name": Path("/proc/self/comm").read_text().strip(),
        "folder": os.getcwd(),
        "is_leader": os.getsid(0) == os.getpid(),
        "inherited": INHERITED,
        "pid": os.getpid(),
        "key": multiprocessing.current_process().authkey.hex(),
        "drawn": float(numpy.random.random()),
    }
    if "OMP_NUM_THREADS" in os.environ:
        import torch  # which the fork server has imported already

        said["threads"] = torch.get_num_threads()
        said["sum"] = float(torch.ones(1 << 20).sum())  # computed by all threads
    print(json.dumps(said))
    what, *rest = sys.argv[1:] or [""]
    if what == "exit":
        sys.exit(int(rest[0]))
    if what == "end":
        sys.exit("it was asked to")
    if what == "raise":
        raise ValueError("it was asked to")
    if what == "write":
        os.write(int(rest[0]), b"written")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        time.sleep(600)


if __name__ == "__main__":
    main()
