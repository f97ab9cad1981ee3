#!/usr/bin/env python
"""Does every file of pins resolve against the package index alone, with every Python that megarl runs with?

    .venv/bin/python launch/check_pins.py

What a machine has besides (a folder with torch's CPU build, an extra index, pip's or uv's configuration) is left out,
since a fresh machine has none of it.  uv reads metadata only (pip's dry run downloads every wheel); nothing is
installed.  A version counts if it has a wheel, but for SDISTS.  The extra `gpu` is not checked: the part of
Transformer-Engine for torch is source alone, and tells its needs only where torch's CUDA build is installed.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.commands.doctor import PYTHONS

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "launch/constraints.txt"
UV = (sys.executable, "-m", "uv")
# Hydra's parser has no wheel; it is Python only, and pip builds one in a second.
SDISTS = ("antlr4-python3-runtime",)
# The oldest C libraries that the wheels run with: torch's, and SGLang's.
GLIBC, SGLANG_GLIBC = "2_28", "2_34"
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


def installations() -> Iterator[Installation]:
    """All that the scripts of launch/ and benchmarks/ install from files of pins, and SGLang for a GPU."""
    packages = declared()
    trainer = (*packages["install_requires"], *packages["extras_require"]["dev"])
    yield Installation("launch/constraints.txt", "megarl[dev]", trainer, (CONSTRAINTS,))
    peer = ROOT / "benchmarks/peer.txt"
    yield Installation("benchmarks/peer.txt", "TRL and what it needs", pins_of(peer), (CONSTRAINTS,))
    for file in sorted((ROOT / "launch").glob("sglang-*.txt")):
        name, pins = f"launch/{file.name}", pins_of(file)
        yield Installation(name, "torch and what it needs", ("torch",), (file,))
        yield Installation(name, "each pin by itself (--no-deps)", pins, dependencies=False, glibc=SGLANG_GLIBC)
        sglang = tuple(pin for pin in pins if pin.startswith("sglang=="))
        yield Installation(name, "SGLang and all that it needs on a GPU", sglang, glibc=SGLANG_GLIBC)


def declared() -> dict[str, Any]:
    """The words of setup.py's call of `setup`."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return dict(setup.call_args.kwargs)


def pins_of(file: Path) -> tuple[str, ...]:
    """Example: ("trl==1.16.0", "torch==2.13.0")"""
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return tuple(line for line in lines if line)


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
    options = [] if asked.dependencies else ["--no-deps"]
    found = compile_pins(asked.requirements, python, asked.glibc, asked.constraints, *options)
    if found.returncode == 0:
        return None
    said = [line for line in found.stderr.splitlines() if not line.startswith("warning:")]
    return "\n".join(said).strip() or f"the resolver ended with exit code {found.returncode}"


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
