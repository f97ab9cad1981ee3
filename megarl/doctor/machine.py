"""What a machine gives to a run: memory, disk, limits of the system, network; speeds are measured, within a second."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import psutil

from megarl.config import Config
from megarl.doctor.finding import FAIL, NOTE, OK, Finding
from megarl.plan.memory.cpu import CGROUP, free_bytes

QUICKSTART_MEMORY_BYTES = 4 * 2**30
QUICKSTART_DISK_BYTES = 1 * 2**30
PROBE_BYTES = 2**26  # that are written to the disk, and sent over loopback
PIECE_BYTES = 2**20
SLOW_DISK = 100e6  # bytes/s: a save of 1.5 B parameters with Adam's moments takes three minutes there
SLOW_LOOPBACK = 200e6  # bytes/s: weights of 0.5 B parameters take five seconds there
OPEN_FILES = 4096  # a collector keeps one for each request in flight, machine 0 some for each rank
SHARED_MEMORY_BYTES = 2**30  # NCCL's and gloo's buffers, and tensors between processes
INFINIBAND = Path("/sys/class/infiniband")


def findings(config: Config) -> list[Finding]:
    """`config`: trainer.default_local_dir is where runs are written."""
    runs = _nearest_folder(Path(config.trainer.default_local_dir))
    return [
        _memory(),
        _cores(),
        _free("free disk", shutil.disk_usage(runs).free, QUICKSTART_DISK_BYTES, FAIL),
        _disk_speed(runs),
        _shared_memory(),
        *_limits(),
        _loopback(),
        *_interfaces(),
        *_infiniband(),
    ]


def _memory() -> Finding:
    """Free host memory: what the machine and the container's limit leave."""
    return _free("free memory", free_bytes(), QUICKSTART_MEMORY_BYTES, FAIL)


def _cores() -> Finding:
    """Cores that this process may use; a container's quota may leave less of them."""
    cores, found = len(os.sched_getaffinity(0)), ""
    quota = CGROUP / "cpu.max"
    if quota.is_file() and (share := quota.read_text().split())[0] != "max":
        allowed = int(share[0]) / int(share[1])
        found = f", of which the container may use {allowed:g}" if allowed < cores else ""
    return Finding("CPU cores", f"{cores}{found}", "2", OK if cores >= 2 else NOTE, value=cores)


def _free(subject: str, free: int, wanted: int, otherwise: str) -> Finding:
    verdict = OK if free >= wanted else otherwise
    return Finding(subject, f"{free / 2**30:.1f} GiB", f"{wanted / 2**30:.1f} GiB", verdict, value=free)


def _nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _disk_speed(folder: Path) -> Finding:
    """Writes a file of 64 MiB, to the disk (fsync), and deletes it."""
    wanted, piece = f"{SLOW_DISK / 1e6:.0f} MB/s, for saves", os.urandom(PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begun = time.perf_counter()
            for _ in range(PROBE_BYTES // PIECE_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            speed = PROBE_BYTES / (time.perf_counter() - begun)
    except OSError as error:
        return Finding("disk speed", f"{folder}: {error.strerror}", wanted, NOTE)
    verdict = OK if speed >= SLOW_DISK else NOTE
    return Finding("disk speed", f"{speed / 1e6:.0f} MB/s written in {folder}", wanted, verdict, value=speed)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    wanted, mend = f"{SHARED_MEMORY_BYTES / 2**30:.0f} GiB", "docker run --shm-size=16g ..."
    if not folder.is_dir():
        return Finding("shared memory", "no /dev/shm", wanted, NOTE, mend)
    free = shutil.disk_usage(folder).free
    is_enough = free >= SHARED_MEMORY_BYTES
    found = f"{free / 2**30:.1f} GiB free in /dev/shm"
    return Finding("shared memory", found, wanted, OK if is_enough else NOTE, "" if is_enough else mend, free)


def _limits() -> list[Finding]:
    """ulimits.  A run raises its soft limits itself, up to the hard ones."""
    files = _limit("open files", resource.RLIMIT_NOFILE, OPEN_FILES, "ulimit -Hn 65536  # as root, or in limits.conf")
    processes = _limit("processes", resource.RLIMIT_NPROC, OPEN_FILES, "ulimit -Hu 65536  # as root, or in limits.conf")
    locked = _limit("locked memory", resource.RLIMIT_MEMLOCK, None, "ulimit -l unlimited  # as root; only InfiniBand")
    return [files, processes, locked]


def _limit(subject: str, kind: int, wanted: int | None, mend: str) -> Finding:
    """`wanted` None: unlimited, where the machine has InfiniBand."""
    _, hard = resource.getrlimit(kind)
    is_unlimited = hard == resource.RLIM_INFINITY
    is_enough = is_unlimited or (hard >= wanted if wanted is not None else not INFINIBAND.is_dir())
    words = "unlimited, for InfiniBand" if wanted is None else f"{wanted} or more"
    found = "unlimited" if is_unlimited else str(hard)
    value = None if is_unlimited else float(hard)
    return Finding(subject, found, words, OK if is_enough else NOTE, "" if is_enough else mend, value)


def _loopback() -> Finding:
    """Ranks and servers of one machine communicate over 127.0.0.1."""
    wanted = f"127.0.0.1 connects; {SLOW_LOOPBACK / 1e6:.0f} MB/s"
    try:
        speed = _speed_of_loopback()
    except OSError as error:
        return Finding("loopback socket", str(error), wanted, FAIL)
    verdict = OK if speed >= SLOW_LOOPBACK else NOTE
    return Finding("loopback socket", f"connects; {speed / 1e6:.0f} MB/s", wanted, verdict, value=speed)


def _speed_of_loopback() -> float:
    """Bytes per second of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), timeout=5)
        receiver, _ = server.accept()
        receiver.settimeout(5)
        with sender, receiver:
            piece = bytes(PIECE_BYTES)
            thread = threading.Thread(target=_send, args=(sender, piece, PROBE_BYTES // PIECE_BYTES))
            begun, left = time.perf_counter(), PROBE_BYTES
            thread.start()
            while left and (received := receiver.recv(PIECE_BYTES)):
                left -= len(received)
            seconds = time.perf_counter() - begun
            thread.join()
    return (PROBE_BYTES - left) / seconds


def _send(sender: socket.socket, piece: bytes, count: int) -> None:
    for _ in range(count):
        sender.sendall(piece)


def _interfaces() -> list[Finding]:
    """Network interfaces that are up, with the speed that their driver names; a virtual one names none."""
    rows = []
    for name, state in sorted(psutil.net_if_stats().items()):
        if state.isup and "loopback" not in state.flags:
            speed = f"{state.speed / 1000:g} Gbit/s" if state.speed else "of unknown speed"
            value = state.speed * 1e6 / 8 if state.speed else None
            rows.append(Finding(f"interface {name}", speed, "optional: several machines", OK, value=value))
    return rows


def _infiniband() -> list[Finding]:
    """Ports of InfiniBand and RoCE, as the kernel names them: "400 Gb/sec (4X NDR)"."""
    rows = []
    for rate in sorted(INFINIBAND.glob("*/ports/*/rate")):
        state = rate.with_name("state").read_text().strip()
        name = f"{rate.parts[-4]} port {rate.parts[-2]}"
        verdict = OK if state.endswith("ACTIVE") else NOTE
        rows.append(Finding(name, f"{rate.read_text().strip()}, {state}", "ACTIVE", verdict))
    return rows
