"""What this package prints is what it was given: rich must not read emoji, markup or colours into it."""

import ast
from pathlib import Path

import pytest
import yaml
from rich.table import Table

import megarl
from megarl import terminal
from megarl.cli import main
from megarl.metrics.trackers.run import Run
from megarl.metrics.trackers.trackers import make_trackers

PACKAGE = Path(megarl.__file__).parent
NAMES = "f:fire: my.py:three: [bold]:gem:[/] 12"


def makes_console(tree: ast.Module) -> bool:
    """Whether the code calls rich's Console, or hands it on to be called."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used = [part for call in calls for part in (call.func, *call.args, *(word.value for word in call.keywords))]
    return any(getattr(part, "id", getattr(part, "attr", "")) == "Console" for part in used)


def test_all_consoles_are_made_in_one_place():
    files = [file for file in PACKAGE.rglob("*.py") if makes_console(ast.parse(file.read_text()))]
    assert files == [PACKAGE / "terminal.py"]


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
