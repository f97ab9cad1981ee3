"""What a result was measured on: the hardware in words that name no machine, versions, its copies and its products."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
MATRIX = {"cpu": 1536, "cuda": 8192}  # rows and columns
PACKAGES = ("torch", "megatron-core", "transformers")


def hardware(device: str = "cuda") -> str:
    """Example: "AMD EPYC, 2 cores, 24 GiB"; with GPUs, "8 x NVIDIA H100 80GB HBM3, ..." in front.

    `device` "cpu" leaves out GPUs, which had no part in it.
    """
    cores, memory = len(os.sched_getaffinity(0)), round(psutil.virtual_memory().total / 2**30)
    words = [f"{_cpu_model()}, {cores} cores, {memory} GiB"]
    if device == "cuda" and torch.cuda.is_available():
        words.insert(0, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return ", ".join(words)


def slug(words: str) -> str:
    """As a part of a file's name: amd_epyc_2_cores_24_gib."""
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def versions() -> str:
    """Of Python, and of what the trainer is made of."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in PACKAGES)])


def version_in(python: Path, package: str) -> str:
    """Of a package in the environment of that interpreter."""
    script = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, env={}, check=True).stdout.strip()


def copy_bandwidth(device: str, repeats: int = 7) -> float:
    """Bytes a second of copying one large tensor to another, one thread or one GPU; the median."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the first one also maps the memory
    return source.numel() / statistics.median(timed(lambda: target.copy_(source), device) for _ in range(repeats))


def hash_bandwidth(num_bytes: int = 64 << 20) -> float:
    """Bytes a second of sha256 on one core: what a digest of CPU weights cannot be faster than."""
    data = bytes(num_bytes)
    return num_bytes / statistics.median(timed(lambda: hashlib.sha256(data).digest(), "cpu") for _ in range(3))


def matmul_rate(
    device: str, dtype: torch.dtype = torch.float32, *, threads: int | None = None, repeats: int = 7
) -> float:
    """FLOP a second of the fastest of a few products of two large matrices, on `threads` cores (None: all) or a GPU."""
    size, before = MATRIX[device], torch.get_num_threads()
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    try:
        seconds = [timed(lambda: left @ right, device) for _ in range(1 + repeats)]
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / min(seconds)


def commit() -> str:
    """Of this repository, with a word where files differ from it; "unknown" outside of one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds until `work()` is done on the device too."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
