"""What this package prints is what it was given: rich must not read emoji, markup or colours into it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.table import Table

import megarl
from megarl.cli import main
from megarl.io import terminal
from megarl.metrics.trackers.tracker import Run
from megarl.metrics.trackers.trackers import make_trackers

PACKAGE = Path(megarl.__file__).parent
NAMES = "f:fire: my.py:three: [bold]:gem:[/] 12"


def makes_console(tree: ast.Module) -> bool:
    """Whether the code calls rich's Console, hands it on to be called, or derives a class from it."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used = [part for call in calls for part in (call.func, *call.args, *(word.value for word in call.keywords))]
    used += [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(getattr(part, "id", getattr(part, "attr", "")) == "Console" for part in used)


def test_all_consoles_are_made_in_one_place():
    files = [file for file in PACKAGE.rglob("*.py") if makes_console(ast.parse(file.read_text()))]
    assert files == [PACKAGE / "io/terminal.py"]


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]):
    terminal.sentences().print(NAMES)
    terminal.sentences(stderr=True).print(NAMES * 20)
    terminal.pages().print(NAMES)
    shown = capsys.readouterr()
    assert shown.out == f"{NAMES}\n{NAMES}\n"
    assert shown.err == f"{NAMES * 20}\n"


def test_a_table_keeps_the_names_in_it(capsys: pytest.CaptureFixture[str]):
    table = Table("f:fire:", title="a:gem:")
    table.add_row("b:three:")
    terminal.pages(markup=True).print(table)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("f:fire:", "a:gem:", "b:three:"))


def test_an_error_has_what_was_typed(capsys: pytest.CaptureFixture[str]):
    assert main(["my.py:three:"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no command my.py:three:; ")


def test_the_printed_configuration_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "recipe=quickstart", "trainer.experiment_name=a:fire:b"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["trainer"]["experiment_name"] == "a:fire:b"


def test_a_run_prints_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trackers = make_trackers(["console"], tmp_path, "megarl", "try", {}, 5)
    trackers.log(1, {"val-core/set:fire:/reward/mean@1": 0.5})
    trackers.close()
    assert "val-core/set:fire:/reward/mean@1 0.500" in capsys.readouterr().out
    Run(tmp_path, "megarl", "try", {}, 5).console.print(NAMES)
    assert NAMES in capsys.readouterr().out


def test_terminal_text_has_no_characters_that_a_terminal_obeys_but_all_signs(capsys: pytest.CaptureFixture[str]):
    obeyed = [chr(code) for code in (*range(32), 127, *range(128, 160), 0x202E, 0x2066, 0x2028, 0x200F) if code != 10]
    signs = "\u00e9\u00a0\u3000\U0001f469\u200d\U0001f4bb \u2713\u0627"
    terminal.sentences().print(f"a{''.join(obeyed)}b{signs}")
    table = Table(title=f"t{obeyed[27]}")
    table.add_row(f"c{''.join(obeyed)}")
    terminal.pages(markup=True).print(table)
    terminal.say("two\n  lines\r\nof \x1b[31m others", "and one")
    shown = capsys.readouterr()
    assert not set(shown.out + shown.err) & set(obeyed)
    assert re.search(f"a +b{signs}\n", shown.out)
    assert shown.err == "two\n      lines\n    of  [31m others\nand one\n"
    assert terminal.one_line(" a\nb\x1b ") == "a b"


STDERR = r"""
import logging, sys, warnings
from megarl.io.terminal import own_process

own_process()
logging.getLogger("x").warning("log \x1b[2J %s", "\r\nstep")
warnings.warn("warned \x1b[2J\nstep")
print("\u2713", file=sys.stdout)
try:
    raise OSError("caught \x1b[2J\nstep")
except OSError:
    logging.getLogger("x").exception("log of it")
raise RuntimeError("raised \x1b[2J\nstep")
"""


def test_terminal_text_of_logs_warnings_and_tracebacks_is_text(tmp_path: Path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, "-c", STDERR], capture_output=True, env=environment, timeout=60)
    assert done.stdout == rb"\u2713" + b"\n"
    assert not re.search(rb"[\x00-\x09\x0b-\x1f]|^step", done.stderr, re.M), done.stderr
    assert b"\n      File " in done.stderr, "a traceback keeps its form"
    assert b"OSError: caught  [2J\n    step" in done.stderr
    for words in (b"log  [2J  \n    step", b"UserWarning: warned  [2J\n    step", b"RuntimeError: raised  [2J"):
        assert words in done.stderr
