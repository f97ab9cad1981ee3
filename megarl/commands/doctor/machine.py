"""What a machine gives to a run: memory, disk, limits, network, GPUs, kernels.  Speeds are measured within a second."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.config import Config
from megarl.io.free_memory import CGROUP, free_bytes

OK, NOTE, FAIL = "ok", "note", "fail"

QUICKSTART_MEMORY_BYTES = 4 * 2**30
QUICKSTART_DISK_BYTES = 1 * 2**30
PROBE_BYTES = 2**26  # that are written to the disk, and sent over loopback
PIECE_BYTES = 2**20
SLOW_DISK = 100e6  # bytes/s: a save of 1.5 B parameters with Adam's moments takes three minutes there
SLOW_LOOPBACK = 200e6  # bytes/s: weights of 0.5 B parameters take five seconds there
OPEN_FILES = 4096  # a collector keeps one for each request in flight, machine 0 some for each rank
SHARED_MEMORY_BYTES = 2**30  # NCCL's and gloo's buffers, and tensors between processes
INFINIBAND = Path("/sys/class/infiniband")
APEX = "gradients added inside the matrix product on a GPU"
_INSTALL_TE = "bash launch/gpu/install.sh transformer_engine"


class Finding(NamedTuple):
    """Example: Finding("einops", "missing", "0.8.2", FAIL, mend="python -m pip install einops==0.8.2")."""

    subject: str
    found: str
    wanted: str
    verdict: str  # fail: a run cannot start
    mend: str = ""  # the command that brings what is missing
    value: float | None = None  # what was measured, in bytes, bytes per second, or as a count


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


def accelerator(device: str) -> Finding:
    """`device`: trainer.device."""
    wanted, otherwise = ("trainer.device=cuda needs one", FAIL) if device == "cuda" else ("optional", OK)
    try:
        import torch
    except ImportError as error:
        return Finding("CUDA", f"unknown: {error}", wanted, NOTE)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        mend = "bash launch/gpu/install.sh" if otherwise == FAIL else ""
        return Finding("CUDA", "none", wanted, otherwise, mend, value=0)
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = sorted({f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}" for gpu in gpus})
    return Finding("CUDA", f"{count} x {' and '.join(kinds)}; CUDA {torch.version.cuda}", wanted, OK, value=count)


def parts() -> list[Finding]:
    """What computes each part of a model: Transformer Engine's kernels, Apex's, DeepEP's, or ours.

    Megatron-Core and our layers are asked, not the list of packages: one that was built for another torch is there and
    cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Megatron about what is missing: the rows say it
            import torch
            from megatron.core.optimizer import Adam

            from megarl.mcore.logprobs import fused, fused_torch
            from megarl.mcore.models.execution import has_deep_ep, has_transformer_engine
            from megarl.mcore.models.fusions import has_fused_accumulation
    except ImportError as error:
        return [Finding("model", f"unknown: {error}", "Megatron-Core and torch", FAIL)]
    gpu, te = torch.cuda.is_available(), has_transformer_engine()
    slower = NOTE if gpu and not te else OK
    mend, wanted = _INSTALL_TE if slower == NOTE else "", "on GPUs Transformer Engine's"
    attention = "Transformer Engine" if te else "torch's scaled_dot_product_attention over packed rows"
    layers = "Transformer Engine" if te else "torch's norms, Megatron's linear layers"
    gradients = "added inside the matrix product by " + ("Transformer Engine; " if te else "")
    if not te and not has_fused_accumulation():
        gradients = "a product and an addition; "
    kernels = "our torch operations" if fused.gpu_kernels is fused_torch else "our Triton kernels"
    head = "Apex" if has_fused_accumulation() else "two operations"
    return [
        Finding("attention", attention, wanted, slower, mend),
        Finding("norms, linear layers", layers, wanted, slower, mend),
        Finding("optimizer", f"{Adam.__module__.partition('.')[0]}'s {Adam.__name__}", "optional: a fused one", OK),
        Finding("weight gradients", f"{gradients}of the head: {head}", f"optional: Apex, {APEX}", OK),
        Finding("log-probs", kernels, "Triton on GPUs", OK),
        Finding("experts' exchange", "DeepEP" if has_deep_ep() else "all-to-all", "optional: deep_ep, bfloat16", OK),
    ]
