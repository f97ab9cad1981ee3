"""NCCL of the trainer's environment and of SGLang's: where a push goes over NCCL, both need the same version.

Read from the metadata of the installed packages: torch, which brings NCCL, is not imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # of torch for CUDA 13, and for CUDA 12
_LIMIT_S = 60.0
_QUESTION = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions_in(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that are in a Python's environment.

    Raises ValueError if that Python does not run.
    """
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    command = [str(python), "-P", "-c", _QUESTION, *names]
    try:
        said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
        return dict(json.loads(said.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(f"{python}: expected a Python that lists its packages, it failed: {error}") from error


def nccl_of(python: Path) -> str | None:
    """Version of NCCL in a Python's environment; None: not known, because NCCL is not there as a package."""
    found = versions_in(python, NCCL)
    return next((found[name] for name in NCCL if name in found), None)


def check_one_nccl(server: Path, trainer: Path = Path(sys.executable)) -> None:
    """Raises ValueError if the environments of these two Pythons have different versions of NCCL."""
    theirs, ours = nccl_of(server), nccl_of(trainer)
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"rollout.sglang.python={server}: its environment has NCCL {theirs} and the trainer's NCCL {ours}, and "
            "NCCL joins no two versions; expected the same one in both: run `bash launch/gpu/install.sh`"
        )
