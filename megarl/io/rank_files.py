"""The files of a sharded checkpoint as the driver sees them: which each rank has listed, and what they must still be.

Megatron is not imported here, because the driver starts without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megarl.io.durable_files import ABSENT, Facts, Unreadable, facts_of, fault_of, inside

ABOUT = "checkpoint.json"
SHARED = "one file system that all machines of the run share"
UNWRITTEN = (OSError, SafetensorError)  # the disk's errors: full, read-only, no permission


def list_of(rank: int) -> str:
    """The name of a rank's list of its files and boxes."""
    return f"rank_{rank:05}.json"


def read_json(file: Path, expected: str = "an unchanged folder") -> dict[str, Any]:
    """Raises ValueError, one sentence, if it is not the JSON that was written; Unreadable if that cannot be said."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (*ABSENT, ValueError) as error:
        raise ValueError(f"{file}: it cannot be read ({error}); expected {expected}") from error
    except OSError as error:
        raise Unreadable.of(file, error) from error
    return found


def facts_under(folder: Path, *parts: str) -> dict[str, Facts]:
    """Of every file under a folder, by its name relative to it; only what no rank has listed is read.

    `parts`: the folders in it into which ranks have written; "": the folder itself.
    Raises ValueError if a list of a rank is not there, or a file that is listed, or if that has another size.
    """
    listed: dict[Path, Facts] = {}
    for part in (folder / name for name in parts):
        lists = [part / list_of(rank) for rank in range(read_json(part / ABOUT, SHARED)["ranks"])]
        for file in lists:
            listed |= {inside(part, name): facts for name, facts in read_json(file, SHARED)["files"].items()}
    for file, facts in listed.items():
        if fault := fault_of(file, facts, reads=False):
            raise ValueError(f"{file} {fault}; expected {SHARED}")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): listed.get(file) or facts_of(file) for file in files}
