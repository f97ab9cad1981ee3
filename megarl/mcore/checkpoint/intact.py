"""Whether the files of a sharded checkpoint are still what its ranks wrote.

Each rank takes the SHA-256 of a file directly after it wrote it, in the thread that writes, and lists it in
`rank_N.json`.  So digests are made on all machines at once, from pages that are still in memory, and no process reads
a checkpoint a second time.  They are checked in the same way: every file by one rank.
"""

from __future__ import annotations

from pathlib import Path

from megarl.durable_files import Facts, facts_of, fault_of
from megarl.mcore.checkpoint.files import LIST, about_of, list_of, read_json


def facts_under(folder: Path) -> dict[str, Facts]:
    """Of every file under a folder, by its name relative to it; only what no rank has listed is read.

    Raises ValueError for a file that is listed and not there, or has another size.
    """
    listed: dict[Path, Facts] = {}
    for file in sorted(folder.rglob(LIST)):
        listed |= {file.parent / name: facts for name, facts in read_json(file)["files"].items()}
    for file, facts in listed.items():
        if fault := fault_of(file, facts, reads=False):
            raise ValueError(f"{file} {fault}; expected one file system that all machines of the run share")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): listed.get(file) or facts_of(file) for file in files}


def faults_of_share(folder: Path, rank: int, num_ranks: int) -> list[str]:
    """Read this rank's share of the files that the ranks of a save have listed; a sentence for each damaged one."""
    listed: dict[Path, Facts] = {}
    for writer in range(about_of(folder)["ranks"]):
        files = read_json(folder / list_of(writer))["files"]
        listed |= {folder / name: facts for name, facts in files.items()}
    share = sorted(listed.items())[rank::num_ranks]
    return [f"{file} {fault}" for file, facts in share if (fault := fault_of(file, facts, reads=True))]
