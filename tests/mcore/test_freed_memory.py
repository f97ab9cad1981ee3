import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

from megarl.mcore import freed_memory
from megarl.mcore.freed_memory import keep_freed_memory

PASSES = """
import resource, runpy, sys

if sys.argv[1] == "kept":
    runpy.run_path(sys.argv[2])["keep_freed_memory"]()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (4 << 20) for _ in range(20)]  # 4 MiB each
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    faults()
print(sum(faults() for _ in range(5)))
"""
# Without it glibc may learn from the first passes to keep the memory of tensors of their size.
FIXED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def test_memory_of_a_pass_is_used_again_by_the_next():
    """Five passes of 80 MiB are 102,400 pages of 4 KiB; fewer where the kernel gives larger pages."""
    faults = {}
    for how in ("given back", "kept"):
        command = [sys.executable, "-c", PASSES, how, freed_memory.__file__]
        done = subprocess.run(command, env=os.environ | FIXED, check=True, capture_output=True)
        faults[how] = int(done.stdout)
    assert 10 * faults["kept"] < faults["given back"]


def test_older_glibc_that_takes_32_mib_at_most_keeps_tensors_of_that_size(monkeypatch):
    asked: list[tuple[int, int]] = []

    def mallopt(parameter: int, size: int) -> int:
        asked.append((parameter, size))
        return int(parameter != freed_memory.M_MMAP_THRESHOLD or size <= 32 << 20)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory()
    assert asked == [(-1, 1 << 30), (-3, 1 << 30), (-3, 32 << 20)]


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed_memory()
