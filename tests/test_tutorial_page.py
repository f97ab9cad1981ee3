"""The tutorial, typed from its beginning to its end: every file and every command as it is printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from readme_blocks import BOOK, blocks

pytestmark = [pytest.mark.full, pytest.mark.dist]

# What comes behind this heading takes a model from the package index: tests/commands/test_new.py (`long`) runs it.
PAGE = blocks(BOOK["tutorial.md"].partition("\n## A pretrained model\n")[0])


def test_the_page_s_commands_lead_to_a_model_that_has_learnt_each_task(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    folder = tmp_path
    for block in PAGE:
        if block.file:
            (folder / block.file).write_text(block.text)
        for line in block.text.splitlines() if block.language == "bash" else ():
            if line.startswith("cd "):
                folder /= line.removeprefix("cd ")
                continue
            done = subprocess.run(
                ["/bin/bash", "-c", line], check=False, cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert folder != tmp_path
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")}
    assert found.pop("own_task_sft")["loss"] < 1
    assert found.keys() == {"own_task", "slower", "first_letters", "next_letter"}
    for name, summary in found.items():
        assert summary["accuracy_before"] < 0.4 and summary["accuracy_after"] > 0.85, (name, summary)
