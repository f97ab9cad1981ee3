"""Rows of reasoning-gym and the package's own scores, in an environment that has it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.prompts import Prompts, RowSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
# Says of each task how the right answer, a wrong one, and none are scored.
SCORES = """
import json, sys
from types import SimpleNamespace as Of
sys.path.insert(0, sys.argv[1])
from reasoning_tasks import score
for line in open("data/train.jsonl"):
    row = json.loads(line)
    extra = {"question": row["question"], "metadata": row["metadata"]}
    prompt = Of(ground_truth=row["ground_truth"], data_source=row["data_source"], extra=extra)
    said = "so answer: 0\\nanswer: " + row["ground_truth"], "answer: -1", row["ground_truth"]
    print(json.dumps([score(prompt, Of(text=text)) for text in said]))
"""


@pytest.mark.agents
def test_the_rows_are_read_and_scored_by_their_own_task() -> None:
    python = os.environ["MEGARL_VERIFIERS_PYTHON"]
    script = str(EXAMPLES / "reasoning_tasks.py")
    subprocess.run([python, script, "data", "chain_sum", "spell_backward", "--train", "2", "--test", "1"], check=True)
    prompts = Prompts("data/train.jsonl", tiny_tokenizer(), RowSettings(1024, shuffle=False)).all()
    assert [prompt.data_source for prompt in prompts] == ["chain_sum"] * 2 + ["spell_backward"] * 2
    assert all(set(prompt.extra) == {"question", "metadata"} and prompt.ground_truth for prompt in prompts)
    said = subprocess.run([python, "-c", SCORES, str(EXAMPLES)], check=True, stdout=subprocess.PIPE).stdout
    assert [json.loads(line) for line in said.splitlines()] == [[1.0, 0.0, 0.0]] * 4


def test_the_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    config, _ = load_config(["recipe=examples/reasoning_tasks.yaml", "rollout.engine=hf"])
    assert (config.algorithm.adv_estimator, config.rollout.n) == ("grpo", 8)
