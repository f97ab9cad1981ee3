"""Imports without collections of cycles."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.processes.garbage import imported

PROGRAM = """
import gc, sys
from megarl.processes.garbage import imported
begun = []
gc.callbacks.append(lambda phase, info: begun.append(phase))
module = imported(sys.argv[1])
assert gc.isenabled()
assert not begun, "a collection ran while the module was imported"
assert gc.get_freeze_count() > 100_000, "what it made stays out of later ones"
assert imported(sys.argv[1]) is module
"""


def test_no_collection_runs_during_an_import_nor_visits_it_later(tmp_path: Path) -> None:
    (tmp_path / "many_objects.py").write_text("made = [[] for _ in range(200_000)]\n")
    words = [sys.executable, "-c", PROGRAM, "many_objects"]
    done = subprocess.run(words, env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_after_an_import_that_fails_cycles_are_collected_again() -> None:
    with pytest.raises(ModuleNotFoundError):
        imported("megarl.there_is_none")
    assert gc.isenabled()
    gc.unfreeze()
