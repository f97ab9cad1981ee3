"""Prints what a machine with GPUs has: versions of all that a run uses, and the GPUs; exit code 1 if torch sees none.

A package that is missing is said so, with what is then not checked.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

NEEDED = ("torch", "triton", "transformers", "megatron-core", "safetensors", "hydra-core")
OPTIONAL = {
    **dict.fromkeys(("pytest", "hypothesis", "pytest-timeout"), "rungs with tests fail; megarl's extra dev has it"),
    "transformer-engine": "tests of its layers are skipped; runs use the local layers",
    "apex": "no gradients added inside the matrix product on a GPU",
    "flash-attn": "nothing needs it",
    "sglang": "unless MEGARL_SGLANG_PYTHON names its environment, rungs with SGLang are not run",
}


def package(name: str, otherwise: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"missing: {otherwise}"


def gpus() -> list[str]:
    """One line for each GPU that torch sees, and for CUDA, NCCL and the driver."""
    import torch

    if not torch.cuda.is_available():
        return [f"GPU: torch {torch.__version__} sees none"]
    lines = [f"CUDA of torch: {torch.version.cuda}", f"NCCL: {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    lines.append(f"driver: {driver()}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        lines.append(
            f"GPU {index}: {name}, capability {major}.{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    return lines


def driver() -> str:
    """As nvidia-smi says it, which not every machine has."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        return f"unknown ({error})"


def main() -> int:
    print(f"Python: {platform.python_version()}, {sys.executable}")
    for name in NEEDED:
        print(f"{name}: {package(name, 'runs need it')}")
    for name, otherwise in OPTIONAL.items():
        print(f"{name}: {package(name, otherwise)}")
    found = gpus()
    print("\n".join(found))
    return int(any(line.startswith("GPU: ") for line in found))


if __name__ == "__main__":
    raise SystemExit(main())
