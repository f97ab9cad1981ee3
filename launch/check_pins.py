#!/usr/bin/env python
"""Does every file of pins resolve against the package index alone, with every Python that megarl runs with?

    .venv/bin/python launch/check_pins.py

What a machine has besides (a folder with torch's CPU build, an extra index, pip's or uv's configuration) is left out,
since a fresh machine has none of it.  uv reads metadata only (pip's dry run downloads every wheel); nothing is
installed.  A version counts if it has a wheel, but for SDISTS.  The environments for GPUs are locked: launch/gpu/ has
every package of them, with the hashes of its files; launch/gpu_locks.py writes these files.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.markers import Marker

from megarl.commands.doctor.versions import PYTHONS

OUR_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "launch/constraints.txt"
UV = (sys.executable, "-m", "uv")
# Packages without a wheel.  Hydra's parser, and cellpylib and zss of reasoning-gym, are Python only, and pip builds one
# in a second; pycosat wants a C compiler.  Transformer-Engine's part for torch is built on the machine that uses it.
SDISTS = ("antlr4-python3-runtime", "cellpylib", "pycosat", "zss", "transformer-engine-torch")
# The oldest C libraries that the wheels run with: torch's, and SGLang's.
GLIBC, SGLANG_GLIBC = "2_28", "2_34"
GPU = ROOT / "launch/gpu"
TRAINER_LOCK, SERVER_LOCK, ENGINE_LOCK = (GPU / f"{name}.txt" for name in ("trainer", "server", "transformer_engine"))
# Transformer-Engine's part for torch tells what it needs, and builds with, only where torch is installed, so that is
# written here: install_requirements in build_tools/pytorch.py of its 2.20.2, and what its setup.py imports.
ENGINE_NEEDS = (
    "einops",
    "onnxscript",
    "onnx",
    "packaging",
    "pydantic",
    "nvdlfw-inspect",
    "nvidia-cudnn-frontend>=1.29.0",
)
ENGINE_BUILDS_WITH = ("setuptools>=61.0", "wheel", "ninja", "pybind11")
DELTA_KERNELS = "flash-linear-attention~=0.4.0"  # Triton's, of gated delta nets: as Megatron-Core 0.19.2 declares it
KEPT_VARIABLES = ("UV_CACHE_DIR", "UV_DEFAULT_INDEX")  # a mirror in place of the index is the index


@dataclass(frozen=True)
class Installation:
    """Example: Installation("launch/constraints.txt", "torch", ("torch",), constraints=(CONSTRAINTS,))"""

    pins: str  # the file whose fault it is
    what: str
    requirements: tuple[str, ...]
    constraints: tuple[Path, ...] = ()
    dependencies: bool = True  # False: pip installs it with --no-deps
    glibc: str = GLIBC
    locked: bool = False  # its pins are all that it may take


def installations() -> Iterator[Installation]:
    """All that the scripts of launch/ and benchmarks/ install from files of pins, and SGLang for a GPU."""
    packages = declared()
    trainer = (*packages["install_requires"], *packages["extras_require"]["dev"])
    yield Installation("launch/constraints.txt", "megarl[dev]", trainer, (CONSTRAINTS,))
    peer = ROOT / "benchmarks/peer/peer.txt"
    yield Installation("benchmarks/peer/peer.txt", "TRL and what it needs", pins_of(peer), (CONSTRAINTS,))
    for agents in ("agents", "agents_instructor", "environments", "verifiers"):
        name = f"launch/{agents}.txt"
        yield Installation(name, "the packages of agents and what they need", pins_of(ROOT / name))
    ray = ROOT / "launch/ray.txt"
    yield Installation(
        "launch/ray.txt", "megarl on Ray", (*packages["install_requires"], *pins_of(ray)), (CONSTRAINTS,)
    )
    for file in sorted((ROOT / "launch").glob("sglang-*.txt")):
        name, pins = f"launch/{file.name}", pins_of(file)
        yield Installation(name, "torch and what it needs", ("torch",), (file,))
        yield Installation(name, "each pin by itself (--no-deps)", pins, dependencies=False, glibc=SGLANG_GLIBC)
    yield from gpu_installations()


def gpu_installations() -> Iterator[Installation]:
    """The environments for GPUs, the server's first, in the order in which launch/gpu_locks.py locks them.

    Trainer and server have the same torch, so the same NCCL, without which the two cannot form a group: SGLang's wheels
    are made for one torch, so the trainer takes that.
    """
    served = [pin for pin in pins_of(ROOT / "launch/sglang-0.5.23.txt") if pin.split("==")[0] in ("sglang", "smg")]
    name = "launch/gpu/server.txt"
    yield Installation(name, "SGLang and its router", tuple(served), (SERVER_LOCK,), glibc=SGLANG_GLIBC, locked=True)
    packages = declared()
    trainer = (*packages["install_requires"], *packages["extras_require"]["dev"])
    (engine,) = packages["extras_require"]["gpu"]
    version = engine.partition("==")[2]
    core = f"transformer-engine-cu13=={version}"
    yield Installation(
        "launch/gpu/trainer.txt",
        "megarl[dev], and what Transformer-Engine needs",
        (*trainer, f"transformer-engine=={version}", core, *ENGINE_NEEDS, *ENGINE_BUILDS_WITH, DELTA_KERNELS),
        (TRAINER_LOCK,),
        locked=True,
    )
    yield Installation(
        "launch/gpu/transformer_engine.txt",
        "Transformer-Engine's part for torch (--no-deps)",
        (f"transformer-engine-torch=={version}",),
        (ENGINE_LOCK,),
        dependencies=False,
        locked=True,
    )


def declared() -> dict[str, Any]:
    """The words of setup.py's call of `setup`."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return dict(setup.call_args.kwargs)


def pins_of(file: Path, python: str = OUR_PYTHON) -> tuple[str, ...]:
    """The pins for a version of Python: ("trl==1.16.0", "torch==2.13.0"); without the hashes of a lock."""
    lines = (re.split(r"#|\\|--hash", line)[0].partition(";") for line in file.read_text().splitlines())
    known = ((pin.strip(), marker.strip()) for pin, _, marker in lines)
    return tuple(pin for pin, marker in known if pin and (not marker or _holds(marker, python)))


def _holds(marker: str, python: str) -> bool:
    return Marker(marker).evaluate({"python_version": python})


def compile_pins(
    requirements: Iterable[str], python: str, glibc: str, constraints: Iterable[Path], *options: str
) -> subprocess.CompletedProcess[str]:
    """uv's answer to which versions these requirements take, from the package index alone."""
    command = [*UV, "pip", "compile", "--quiet", "--no-config", "--no-python-downloads", "--only-binary=:all:"]
    command += [f"--no-binary={name}" for name in SDISTS]
    command += [f"--python-version={python}", f"--python-platform=x86_64-manylinux_{glibc}"]
    command += [f"--constraint={file}" for file in constraints]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k in KEPT_VARIABLES}
    text = "\n".join(requirements)
    return subprocess.run([*command, *options, "-"], input=text, env=variables, capture_output=True, text=True)


def resolve(asked: Installation, python: str) -> str | None:
    """What is wrong with it for this version of Python ("3.12"), in the resolver's words; None if it resolves."""
    options = ["--no-header", "--no-annotate", *([] if asked.dependencies else ["--no-deps"])]
    found = compile_pins(asked.requirements, python, asked.glibc, asked.constraints, *options)
    if found.returncode == 0:
        return unlocked(asked, python, found.stdout) if asked.locked else None
    said = [line for line in found.stderr.splitlines() if not line.startswith("warning:")]
    return "\n".join(said).strip() or f"the resolver ended with exit code {found.returncode}"


def unlocked(asked: Installation, python: str, pins: str) -> str | None:
    """What is wrong with a lock that was asked for; `pins`: all that its requirements take under it."""
    (lock,) = asked.constraints
    held, taken = set(pins_of(lock, python)), set(pins.split())
    if held == taken:
        return None
    return f"it lacks {sorted(taken - held)} and has {sorted(held - taken)} too much: run python launch/gpu_locks.py"


def main() -> int:
    """Print a line for each installation and Python; 0 if all resolve, else 1 and why not."""
    pythons = [".".join(map(str, pair)) for pair in PYTHONS]
    cases = [(asked, python) for asked in installations() for python in pythons]
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda case: resolve(*case), cases)
        wrong = 0
        for (asked, python), why in zip(cases, answers, strict=True):
            if why is None:
                print(f"{asked.pins}: {asked.what}, Python {python}: resolves", flush=True)
            else:
                wrong += 1
                print(f"{asked.pins}: {asked.what}, Python {python}: does not resolve:\n{why}\n", flush=True)
    if wrong:
        print(
            f"{wrong} of {len(cases)} do not resolve against the package index alone: a fresh machine cannot install it"
        )
    else:
        print(f"all {len(cases)} resolve against the package index alone")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
