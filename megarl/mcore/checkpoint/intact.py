"""Whether the files of a sharded checkpoint are still what its ranks wrote.

Each rank takes the SHA-256 of a file directly after it wrote it, in the thread that writes, and lists it in
`rank_N.json`.  So digests are made on all machines at once, from pages that are still in memory, and no process reads
a checkpoint a second time.  They are checked in the same way: every file by one rank.
"""

from __future__ import annotations

from pathlib import Path

from megarl.durable_files import Facts, fault_of
from megarl.mcore.checkpoint.files import about_of
from megarl.rank_files import list_of, read_json


def faults_of_share(folder: Path, rank: int, num_ranks: int) -> list[str]:
    """Read this rank's share of the files that the ranks of a save have listed; a sentence for each damaged one."""
    listed: dict[Path, Facts] = {}
    for writer in range(about_of(folder)["ranks"]):
        files = read_json(folder / list_of(writer))["files"]
        listed |= {folder / name: facts for name, facts in files.items()}
    share = sorted(listed.items())[rank::num_ranks]
    return [f"{file} {fault}" for file, facts in share if (fault := fault_of(file, facts, reads=True))]
