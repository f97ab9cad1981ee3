"""The manifest of a save: what it is, and size and SHA-256 of each of its files; it can check itself.

The text ends with the SHA-256 of all before it, so that one changed bit anywhere is noticed.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megarl.durable_files import ABSENT, THREADS, Unreadable, fault_of, write_text
from megarl.processes.presence import show_life

MANIFEST = "manifest.json"


class Damaged(ValueError):
    """A file of a save is missing, cut or changed; the sentence names it."""


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """`content["files"]`: the Facts of each other file in the folder, by its name relative to it."""
    write_text(folder / MANIFEST, _text(content))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises Damaged if it is missing, or not what was written; Unreadable if that cannot be said."""
    file = folder / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        del content["sha256"]
        intact = _text(content) == text
    except ABSENT:
        raise Damaged(f"{file} is missing") from None
    except OSError as error:
        raise Unreadable.of(file, error) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged(f"{file} is damaged, or of another version of megarl")
    return content


def faults_in(folder: Path, *, reads: bool, skip: str = "") -> list[str]:
    """A sentence for each damaged file of a save, its manifest included.

    `reads`: also compare digests, for which all of a file is read, except of files whose name has the pattern `skip`.
    Raises Unreadable.
    """
    try:
        files = read_manifest(folder)["files"]
    except Damaged as error:
        return [str(error)]

    def look(name: str) -> str | None:
        fault = fault_of(folder / name, files[name], reads=reads and not fnmatchcase(name, skip))
        return fault and f"{folder / name} {fault}"

    with ThreadPoolExecutor(THREADS) as threads:  # they read and digest beside each other
        faults: list[str] = []
        for sentence in threads.map(look, files):
            show_life()
            if sentence:
                faults.append(sentence)
        return faults


def _text(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)
