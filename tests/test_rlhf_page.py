"""The page on human preferences, typed from its beginning to its end: every command as it is printed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from readme_blocks import BOOK, blocks

pytestmark = [pytest.mark.full, pytest.mark.dist]

PAGE = blocks(BOOK["rlhf.md"])


def summary(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"runs/{name}/summary.json").read_text())
    return found


def accuracy(name: str) -> float:
    """The share of right greetings among answers that were drawn."""
    return float(json.loads(Path(f"runs/{name}_test/evaluations/1/summary.json").read_text())["accuracy"])


def test_the_page_s_commands_lead_from_demonstrations_and_pairs_to_better_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in PAGE:
        if block.file:
            Path(block.file).write_text(block.text)
    assert Path("rlhf_data.py").exists()
    subprocess.run([sys.executable, "rlhf_data.py"], check=True)
    lines = [
        line for block in PAGE if block.language == "bash" for line in block.text.replace("\\\n", " ").splitlines()
    ]
    assert [line.split()[1] for line in lines] == ["sft", "rm", "train", "dpo", *["evaluate"] * 3]
    for line in lines:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)], check=False, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert summary("rm")["val_accuracy"] > 0.95
    assert summary("dpo")["val_accuracy"] > 0.95
    at_first, of_ppo, of_dpo = (accuracy(name) for name in ("sft", "ppo", "dpo"))
    assert 0.4 < at_first < 0.7
    assert of_ppo > at_first + 0.2, "the reward model of `megarl rm` pays for what people like"
    assert of_dpo > at_first + 0.05
    assert summary("ppo")["score_after"] > summary("ppo")["score_before"] + 1
