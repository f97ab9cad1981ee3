"""Which process was killed because memory ran out, as the kernel's counters say."""

import signal
from pathlib import Path

import pytest

from megarl.processes.lifetime import MemoryEnd

OWN = {  # lines of /proc/self/cgroup, folder of the cgroup, its files
    "the first version": (
        "9:memory:/pods/run\n8:pids:/\n0::/\n",
        "memory",
        "memory.oom_control",
        "memory.limit_in_bytes",
    ),
    "the second version": ("0::/pods/run\n", ".", "memory.events", "memory.max"),
    "a namespace of cgroups": ("0::/\n", "..", "memory.events", "memory.max"),
}
FORM = {"memory.oom_control": "oom_kill_disable 0\noom_kill {}\n", "memory.events": "low 0\noom 9\noom_kill {}\n"}


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("version", OWN)
def test_a_killed_process_has_the_counter_that_grew_and_the_limit(tmp_path: Path, version: str) -> None:
    lines, mount, counter, limit = OWN[version]
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    folder = root / mount / "pods" / "run" if mount != ".." else root
    write(proc / "self" / "cgroup", lines)
    write(proc / "vmstat", "nr_free_pages 7\noom_kill 5\n")
    kills = write(folder / counter, FORM[counter].format(3))
    write(folder / limit, "max\n" if counter == "memory.events" else "9223372036854771712\n")
    memory = MemoryEnd(root, proc)
    write(proc / "vmstat", "nr_free_pages 7\noom_kill 6\n")  # elsewhere on this machine
    assert memory.words(-signal.SIGKILL) == "", "somebody else has killed it"
    write(kills, FORM[counter].format(4))
    killed = "\n    killed by SIGKILL, as the kernel does when memory ends (oom_kill of this cgroup 3 -> 4{})"
    assert memory.words(-signal.SIGKILL) == killed.format("")
    write(folder / limit, "1400000000\n")
    if folder != root:
        write(folder.parent / limit, "700000000\n")  # of the ones above the smallest counts
    assert memory.words(-signal.SIGKILL) == killed.format(f", limit {1400 if folder == root else 700:,} MB")
    assert [memory.words(code) for code in (-signal.SIGTERM, 1, 0, None)] == [""] * 4


def test_where_no_cgroup_counts_the_machine_does(tmp_path: Path) -> None:
    write(tmp_path / "self" / "cgroup", "0::/\n")
    vmstat = write(tmp_path / "vmstat", "oom_kill 0\n")
    memory = MemoryEnd(tmp_path / "cgroup", tmp_path)
    write(vmstat, "oom_kill 2\n")
    assert memory.words(-signal.SIGKILL).endswith("when memory ends (oom_kill of this machine 0 -> 2)")
    nothing = MemoryEnd(tmp_path / "cgroup", tmp_path / "none")  # a kernel without cgroups
    assert nothing.words(-signal.SIGKILL) == "", "nothing is known"
