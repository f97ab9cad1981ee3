"""What a run leaves behind at its end, whatever the rewards do there."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answers import completion
from config_helpers import load

from megarl.metrics.computing.audit import Audit
from megarl.samples.sample import Prompt, Sample
from megarl.trainer.artifacts import finish
from megarl.trainer.evaluation.evaluate import Evaluation
from megarl.trainer.telemetry.run_log import Totals


def run_of(folder: Path, *words: str) -> Any:
    """A run without ranks and servers, whose export writes nothing."""
    return SimpleNamespace(
        log=SimpleNamespace(trackers=SimpleNamespace(stage=lambda *_: None), audit=Audit(), totals=Totals(0.0, {})),
        server_manager=SimpleNamespace(release_memory=lambda: None, counts={"servers_died": 0}),
        roles=SimpleNamespace(actor=SimpleNamespace(export=lambda *_, **__: None)),
        infrastructure=SimpleNamespace(reward_url=None, server_token=""),
        plan=SimpleNamespace(
            config=load(*words),
            folder=folder,
            num_steps=3,
            shortened={"prompts_filtered": 0, "prompts_cut": 0},
            prompts=SimpleNamespace(questions=[Prompt("0-0", [1], "1+1=", "2")] * 3),
            val_prompts=[Prompt("eval-0", [1], "1+1=", "2")],
        ),
    )


def evaluation(**extra: float) -> Evaluation:
    return Evaluation([[Sample.of(Prompt("eval-0", [1], "1+1=", "2"), completion("2"), 1.0, extra)]], version=3)


def test_a_check_of_the_export_that_fails_is_one_warning_and_the_rest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process finds no model, and ends."""
    run = run_of(tmp_path, "trainer.check_export=true", "data.val_files=[v.jsonl]")
    story: list[str] = []
    run.server_manager.release_memory = lambda: story.append("servers release")
    run.roles.actor.export = lambda folder, **_: story.append(folder.name)
    summary = finish(run, evaluation())
    assert story == ["servers release", "hf"], "a model is written when the servers have given their memory back"
    assert summary["accuracy_after"] == 1.0 and summary["accuracy_transformers"] is None
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    page = (tmp_path / "README.md").read_text()
    assert "| `answers.md` |" in page and "1+1=" in (tmp_path / "answers.md").read_text()
    assert "checkpoints" not in page, "it lists what is there"
    err = capsys.readouterr().err
    assert err.count("warning: ") == 1
    said = r"warning: trainer.check_export=true: hf/ is written, and its check failed: the answers of transformers' "
    assert re.search(rf"(?s){said}generate ended with exit code 1; their log: \S+\n.*no tokenizer", err), err


def test_the_end_says_what_is_known_of_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, "reward.fn=exact", "reward.audit=gsm8k_strict")
    summary = finish(run, evaluation(audit_error=1.0))
    said = "reward.audit=gsm8k_strict: it failed on all 1 answers of the last evaluation; logs/collector.log says why"
    assert summary["audit"] == {"outcome": said, "answers": 1, "failed": 1}
    assert said in (tmp_path / "README.md").read_text() and said in " ".join(capsys.readouterr().out.split())
