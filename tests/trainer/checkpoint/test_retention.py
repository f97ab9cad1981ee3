"""Which saves are kept, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_helpers import load

from megarl.config import ConfigError
from megarl.trainer.checkpoint.retention import SCORES, Retention, read_scores, write_scores

STEPS = (10, 20, 30, 40)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(1), {40: ["newest"]}),
        (Retention(1, first=20), {20: ["first"], 40: ["newest"]}),
        (Retention(9), {step: ["newest"] for step in STEPS}),
        (Retention(1, every=20), {20: ["milestone"], 40: ["newest", "milestone"]}),
        (Retention(1, best=2), {10: ["best"], 30: ["best"], 40: ["newest"]}),
        (Retention(1, best=9), {10: ["best"], 20: ["best"], 30: ["best"], 40: ["newest"]}),
    ],
)
def test_newest_milestones_and_best(retention: Retention, kept: dict[int, list[str]]) -> None:
    scores = {10: 0.5, 20: 0.1, 30: 0.5}  # of step 40 there is none yet
    assert {step: why for step, why in retention.reasons(STEPS, scores).items() if why} == kept


def test_scores_come_back(tmp_path: Path) -> None:
    assert read_scores(tmp_path) == {}
    write_scores(tmp_path, {20: 0.25, 3: -1.0})
    assert read_scores(tmp_path) == {3: -1.0, 20: 0.25}
    (tmp_path / SCORES).write_text("[1]")
    with pytest.raises(ValueError, match=f"{SCORES}: it cannot be read"):
        read_scores(tmp_path)


def test_keys_without_an_effect_are_refused() -> None:
    saves = "trainer.save_freq=2"
    for words, because in (
        ([saves, "trainer.keep_best=1"], "data.val_files=[]: there are no scores"),
        ([saves, "trainer.keep_best=1", "data.val_files=[v.jsonl]"], "trainer.test_freq=-1: there are no scores"),
        (["trainer.resume_mode=disable", "trainer.verify_resume=false"], "trainer.resume_mode=disable"),
    ):
        with pytest.raises(ConfigError, match="has no effect, because") as caught:
            load(*words)
        assert because in str(caught.value)
    kept = load(saves, "trainer.keep_best=1", "data.val_files=[v.jsonl]", "trainer.test_freq=2")
    assert Retention.of(kept) == Retention(2, -1, 1)
    kept.trainer.resume_mode = str(kept.trainer.run_dir / "checkpoints" / "step_00000020")
    assert Retention.of(kept) == Retention(2, -1, 1, first=20)
    kept.trainer.resume_mode = "another/checkpoints/step_00000020"
    assert Retention.of(kept) == Retention(2, -1, 1)
