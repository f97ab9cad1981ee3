"""Environment variables and import path of processes in SGLang's Python environment, whose packages differ from ours.

Such a process can import this package and nothing else of our environment: a folder on its path has a link to the
package and the entry points of the SGLang plug-ins.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import megarl
from megarl.io.auth import without_tokens
from megarl.io.sockets import interface_variables
from megarl.servers.nccl import VARIABLES, versions_in

PYTHON_VARIABLE = "MEGARL_SGLANG_PYTHON"
DEFAULT_PYTHON = ".venv-sglang/bin/python"
_CUDA = "cu13"  # of the locked wheels
KERNELS = ("sglang-kernel", "sgl-kernel")  # SGLang's own for GPUs: the name today, and before

# Variables that a trainer, its launcher or an active virtual environment set for themselves; not passed on.
# SGLang refuses to release memory with expandable_segments, which trainers often set.
_OURS = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CUDA_DEVICE_MAX_CONNECTIONS"}) | frozenset(
    {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    | {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"}
    | {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
)
_OURS_PREFIX = "TORCHELASTIC_"


def sglang_python(configured: str | None) -> Path:
    """Python of SGLang's environment: `configured`, or from MEGARL_SGLANG_PYTHON, or .venv-sglang/bin/python.

    Raises ValueError if it does not exist.
    """
    name, found = f"rollout.sglang.python={configured}", configured
    if found is None:
        name, found = f"{PYTHON_VARIABLE}={os.environ.get(PYTHON_VARIABLE)}", os.environ.get(PYTHON_VARIABLE)
    if found is None:
        name, found = f"{DEFAULT_PYTHON} in {Path.cwd()}", DEFAULT_PYTHON
    python = Path(found).absolute()  # not resolved: Python finds its virtual environment by the link
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ValueError(
            f"{name}: no Python there, expected that of an environment with SGLang: run `bash launch/sglang_cpu.sh` "
            "(a machine without GPU), or set rollout.sglang.python"
        )
    return python


def sglang_gpu_python(configured: str | None) -> Path:
    """As `sglang_python`, of an environment whose SGLang can use a GPU; its packages' metadata is read.

    Raises ValueError if there is none: launch/sglang_cpu.sh leaves out the packages for GPUs.
    """
    python = sglang_python(configured)
    found = versions_in(python, ["sglang", *KERNELS])
    if "sglang" not in found:
        raise ValueError(f"{python}: no package sglang there; expected it: run `bash launch/gpu/install.sh`")
    if not found.keys() & set(KERNELS):
        raise ValueError(
            f"{python}: SGLang {found['sglang']} for machines without GPU, without the package {KERNELS[0]}; expected "
            "it: run `bash launch/gpu/install.sh`"
        )
    return python


def foreign_environment(
    python: Path, folder: Path, host: str, *, path: Sequence[Path] = (), plugins: str = ""
) -> dict[str, str]:
    """The environment variables of such a process, whose temporary files go into `folder`.

    `host`: its address.  `path`: further folders to import from.  `plugins`: the text of an entry_points.txt.
    """
    ours = without_tokens(os.environ)
    kept = {key: value for key, value in ours.items() if key not in _OURS and not key.startswith(_OURS_PREFIX)}
    temporary = folder / "tmp"  # SGLang does not delete its socket files
    temporary.mkdir()
    # SGLang sends requests with the token to its own url: a proxy must not see them.
    no_proxy = ",".join(filter(None, (kept.get("no_proxy"), kept.get("NO_PROXY"), "127.0.0.1,localhost", host)))
    return (
        interface_variables(host)
        | VARIABLES
        | kept
        | {
            "PATH": f"{python.parent}:{kept.get('PATH', os.defpath)}",
            "PYTHONPATH": ":".join(map(str, (_importable(folder, plugins), *path))),
            "PYTHONSAFEPATH": "1",  # otherwise `-m` puts the working directory first
            "TMPDIR": str(temporary),
            "no_proxy": no_proxy,
            "NO_PROXY": no_proxy,
        }
    )


def with_cuda_libraries(python: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """These variables, with the folder of CUDA's runtime in that Python's environment as the last to look into.

    SGLang preloads the library of torch_memory_saver, which wants the runtime before torch is there to load it.  The
    loader does not know the folder of pip's wheels; it ignores a library that lacks one, and no memory is released.
    """
    folders = [variables.get("LD_LIBRARY_PATH"), *map(str, _packages(python, f"nvidia/{_CUDA}/lib"))]
    return {**variables, "LD_LIBRARY_PATH": ":".join(filter(None, folders))}


def preload_faults(python: Path) -> list[str]:
    """What a server that releases memory would lack: the library that it preloads, or libraries that this one wants."""
    libraries = _packages(python, f"torch_memory_saver_hook_mode_preload_{_CUDA}.*.so")
    if not libraries:
        return [f"torch_memory_saver for {_CUDA}"]
    environment = with_cuda_libraries(python, os.environ)
    try:
        found = subprocess.run(["ldd", str(libraries[0])], env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []  # only ldd knows, and this machine has none
    return [line.split()[0] for line in found.stdout.splitlines() if line.endswith("not found")] or (
        [found.stderr.strip()] if found.returncode else []
    )


def _packages(python: Path, pattern: str) -> list[Path]:
    """The files that match `pattern` among the packages of that Python's environment."""
    # Debian calls them dist-packages
    return sorted(python.parents[1].glob(f"lib/python3*/*-packages/{pattern}"))


def _importable(folder: Path, plugins: str) -> Path:
    path = folder / "path"
    about = path / "megarl_server.dist-info"
    about.mkdir(parents=True)
    (path / "megarl").symlink_to(Path(megarl.__file__).resolve().parent)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megarl_server\nVersion: {megarl.__version__}\n")
    (about / "entry_points.txt").write_text(plugins)
    return path
