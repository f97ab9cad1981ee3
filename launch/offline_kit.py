#!/usr/bin/env python
"""Wheels for a machine without a package index: what megarl needs there, less what the machine has.

    python launch/offline_kit.py FOLDER --python 3.12 --have torch,transformers,numpy
    python launch/offline_kit.py --check FOLDER/requirements.txt

The packages are resolved by metadata for the Python and the platform of that machine, with the tested versions of
launch/constraints.txt; a package that is there already, and what only such packages need, is left out.  The second form
tells on the machine itself what megarl still cannot import.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from check_pins import CONSTRAINTS, GLIBC, SDISTS, compile_pins, declared, pins_of

LISTING, ROOTS = "kit.txt", "requirements.txt"  # what the kit holds; what pip is asked for there
_LINE = re.compile(r"^(?P<pin>(?P<name>[\w.-]+)==\S+)\s*(?:;.*?)?(?:#\s*via\s*(?P<parents>.*))?$")


def canonical(name: str) -> str:
    """A package's name as indexes compare it.  Example: "PyYAML" -> "pyyaml"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(pins: str, have: Iterable[str]) -> dict[str, str]:
    """name -> pin of what is needed by the roots, without passing through a package that is there.

    `pins`: what `uv pip compile --annotation-style=line` says, each package with those that need it.
    """
    there = {canonical(name) for name in have}
    pin_of: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    for line in pins.splitlines():
        if found := _LINE.match(line.strip()):
            name = canonical(found["name"])
            pin_of[name] = found["pin"]
            for parent in (found["parents"] or "").split(","):
                needs.setdefault(canonical(parent.strip()), set()).add(name)
    reached: set[str] = set()
    waiting = {child for parent, children in needs.items() if parent not in pin_of for child in children}
    while waiting:
        name = waiting.pop()
        if name not in reached and name not in there:
            reached.add(name)
            waiting |= needs.get(name, set())
    return {name: pin_of[name] for name in sorted(reached)}


def requirements(extras: Iterable[str]) -> list[str]:
    """What setup.py names, without and with extras."""
    package = declared()
    return [*package["install_requires"], *(line for extra in extras for line in package["extras_require"][extra])]


def resolve(asked: Sequence[str], python: str, have: Iterable[str]) -> dict[str, str]:
    """What that machine lacks of these requirements: name -> pin.  ValueError in the resolver's words."""
    there = {canonical(name) for name in have}
    pins = [pin for pin in pins_of(CONSTRAINTS, python) if canonical(pin.partition("==")[0]) not in there]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        found = compile_pins(asked, python, GLIBC, [Path(constraints.name)], "--annotation-style=line", "--no-header")
    if found.returncode != 0:
        raise ValueError(f"--python {python}: {found.stderr.strip()}")
    return lacking(found.stdout, there)


def collect(folder: Path, pins: Mapping[str, str], python: str) -> list[Path]:
    """Download the wheels, and build those that the index has as sources only; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    wheels = [pin for name, pin in pins.items() if name not in SDISTS]
    # A machine with glibc 2.28 takes wheels of every older one; pip compares the names only.
    tags = [*(f"_2_{minor}" for minor in range(28, 4, -1)), "2014", "2010", "1"]
    places = [f"--platform=manylinux{tag}_x86_64" for tag in tags]
    target = [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:", *places]
    commands = [[*pip, "download", "--no-deps", f"--dest={folder}", *target, *wheels]]
    for name in set(SDISTS) & pins.keys():  # Python only: a wheel built here is right there
        commands.append([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", pins[name]])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"pip could not fetch the wheels: {done.stderr.strip()[-2000:]}")
    return sorted(folder.glob("*.whl"))


def missing_here(requirements: Sequence[str]) -> list[str]:
    """One sentence for each requirement that this Python does not meet."""
    from packaging.requirements import Requirement  # with pip's friends on every machine that has torch

    found: list[str] = []
    for line in requirements:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{wanted.name} is not installed; expected {line}")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            found.append(f"{wanted.name} {version} is installed; expected {line}")
    return found


def main(words: list[str]) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("launch/offline_kit", description=about, epilog=more, formatter_class=form)
    parser.add_argument("folder", nargs="?", type=Path, help="where the wheels go")
    parser.add_argument("--python", default="3.12", choices=["3.11", "3.12"], help="of the machine")
    parser.add_argument("--have", default="", help="packages that the machine has, with commas between them")
    parser.add_argument("--extra", default="", help="extras of setup.py to add, with commas between them: dev,wandb")
    parser.add_argument("--list", action="store_true", help="print what the kit would hold, and download nothing")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="say which of a kit's requirements this machine lacks"
    )
    asked = parser.parse_args(words)
    if asked.check is not None:
        lacks = missing_here(asked.check.read_text().splitlines())
        print("\n".join(lacks) or "megarl has what it needs")
        return min(1, len(lacks))
    if asked.folder is None:
        parser.error("expected a folder, or --check")
    try:
        roots = requirements(filter(None, asked.extra.split(",")))
        pins = resolve(roots, asked.python, filter(None, asked.have.split(",")))
        if asked.list:
            print("\n".join(pins.values()))
            return 0
        files = collect(asked.folder, pins, asked.python)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (asked.folder / ROOTS).write_text("\n".join(roots) + "\n")
    (asked.folder / LISTING).write_text("\n".join([f"python {asked.python}", *pins.values()]) + "\n")
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"{len(files)} wheels, {size:.1f} MiB, in {asked.folder}; there: bash launch/install_offline.sh FOLDER")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
