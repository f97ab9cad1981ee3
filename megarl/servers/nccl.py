"""NCCL of the trainer and of servers: where a push goes over NCCL, both need the same version and the same variables.

The version is read from the metadata of the installed packages: torch, which brings NCCL, is not imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # of torch for CUDA 13, and for CUDA 12
# What SGLang sets in its processes unless the user has (_set_envs_and_config); ranks that join servers get the same.
VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# By these each of two ranks chooses for itself how it reaches the other one, and in which form it hands memory over.
PAIRED = (*VARIABLES, "NCCL_CUMEM_HOST_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") + (
    "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_PROTO",
)  # fmt: skip
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


def paired_variables(backend: str) -> dict[str, str | None]:
    """The variables in this process that its partners in a group of this backend need alike; None: not set."""
    return {name: os.environ.get(name) for name in PAIRED} if backend == "nccl" else {}


def check_one_environment(
    one: str, its: Mapping[str, str | None], other: str, theirs: Mapping[str, str | None]
) -> None:
    """Raises ValueError unless both processes, named `one` and `other`, have the same `paired_variables`."""
    for name, value in its.items():
        if value != theirs.get(name):
            raise ValueError(
                f"{name}: {one} has {value or 'none'} and {other} {theirs.get(name) or 'none'}, with which NCCL hangs "
                "between them; expected one value, exported where both are started"
            )
