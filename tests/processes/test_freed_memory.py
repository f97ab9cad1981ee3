import subprocess
import sys

PASSES = """
import resource, sys, torch
from megarl.processes.freed_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1 << 20) for _ in range(20)]  # 4 MiB each
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    faults()
print(sum(faults() for _ in range(5)))
"""


def test_memory_of_a_pass_is_used_again_by_the_next():
    """Five passes of 80 MiB, which are 20,480 pages of 4 KiB each."""
    faults = {
        how: int(subprocess.run([sys.executable, "-c", PASSES, how], check=True, capture_output=True).stdout)
        for how in ("given back", "kept")
    }
    assert faults["kept"] < faults["given back"] / 4  # where pages are huge, both are few
