#!/usr/bin/env python
"""Writes the lock files of the environments for GPUs, launch/gpu/*.txt: every package with the hashes of its files.

    .venv/bin/python launch/gpu_locks.py

uv resolves by metadata, from the package index alone; nothing is downloaded or installed.  The server's packages come
first; the trainer then takes the same torch, CUDA and NCCL, and otherwise the versions of launch/constraints.txt.  One
lock serves both versions of Python: versions are those that the older one takes, unless the constraints name another
for each, and hashes those of the wheels for both.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from check_pins import CONSTRAINTS, SERVER_LOCK, TRAINER_LOCK, Installation, compile_pins, gpu_installations, pins_of

from megarl.commands.doctor.versions import PYTHONS

# What torch's build for CUDA brings along, by which two environments have to agree.
CUDA_PACKAGES = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
HEADER = """\
# Written by launch/gpu_locks.py, not by hand.  Python 3.11 and 3.12, Linux on x86-64; install with
#   bash launch/gpu/install.sh
"""


def lock(asked: Installation, constraints: Callable[[str], Sequence[str]]) -> str:
    """The text of a lock; `constraints`: the pins for a version of Python, as "3.12".

    ValueError in the resolver's words if these requirements do not fit together.
    """
    hashes, pythons_of = dict[str, set[str]](), dict[str, list[str]]()
    for python in (".".join(map(str, pair)) for pair in PYTHONS):
        named = constraints(python)
        own = set(map(name_of, named))
        packages = resolved(asked, python, [*named, *(pin for pin in hashes if name_of(pin) not in own)])
        for pin, of_files in packages.items():
            hashes.setdefault(pin, set()).update(of_files)
            pythons_of.setdefault(pin, []).append(python)
    names = Counter(map(name_of, hashes))
    text = HEADER
    for pin in sorted(hashes):
        marker = f" ; python_version == '{pythons_of[pin][0]}'" if names[name_of(pin)] > 1 else ""
        text += " \\\n    ".join([pin + marker, *(f"--hash=sha256:{one}" for one in sorted(hashes[pin]))]) + "\n"
    return text


def name_of(pin: str) -> str:
    return pin.partition("==")[0]


def resolved(asked: Installation, python: str, pins: Iterable[str]) -> dict[str, list[str]]:
    """pin -> sha256 of its files for this Python: wheels, or the source if it has no wheel."""
    options = ["--format=pylock.toml", "--no-header", *([] if asked.dependencies else ["--no-deps"])]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        found = compile_pins(asked.requirements, python, asked.glibc, [Path(constraints.name)], *options)
    if found.returncode != 0:
        raise ValueError(f"{asked.pins}, Python {python}: {found.stderr.strip()}")
    packages = tomllib.loads(found.stdout)["packages"]
    return {f"{package['name']}=={package['version']}": hashes_of(package) for package in packages}


def hashes_of(package: Mapping[str, Any]) -> list[str]:
    """Of one package of a pylock.toml."""
    files = package.get("wheels") or [package["sdist"]]
    return [file["hashes"]["sha256"] for file in files]


def trainers_constraints(python: str) -> list[str]:
    """The server's CUDA, and otherwise launch/constraints.txt."""
    served = [pin for pin in pins_of(SERVER_LOCK, python) if CUDA_PACKAGES.match(pin)]
    return served + [pin for pin in pins_of(CONSTRAINTS, python) if not CUDA_PACKAGES.match(pin)]


def main() -> int:
    for asked in gpu_installations():
        (file,) = asked.constraints
        try:
            file.write_text(lock(asked, trainers_constraints if file == TRAINER_LOCK else lambda _: ()))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{asked.pins}: {len(pins_of(file))} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
