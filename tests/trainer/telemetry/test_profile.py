"""Profiles of a rank on a CPU, and what only a GPU has; a run's own profile is in tests/ring/test_ring.py."""

import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function
from traces import events_of

from megarl.arch.layout import Layout
from megarl.config.schema.trainer import Profile
from megarl.group import Group
from megarl.roles.profiler import RankProfiler
from megarl.trainer.telemetry.profile import check_profile, nsys_line


def test_a_trace_has_the_ranges_and_operations_between_start_and_stop(tmp_path: Path):
    profiler, a = RankProfiler(torch.device("cpu")), torch.ones(8, 8)
    for number in (1, 2):  # a run may profile several steps
        profiler.start("torch", memory=False)
        with record_function("update actor"):
            a @ a
        (file,) = profiler.stop(tmp_path / f"step_{number}" / "rank_0")
        assert file == f"{tmp_path}/step_{number}/rank_0.trace.json.gz"
        names = [event["name"] for event in events_of(file)]
        assert names.count("update actor") == 1
        assert "aten::mm" in names


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (Profile([2, 9]), "trainer.profile.steps=[2, 9]: the run has 3 steps, so there is no step 9"),
        (Profile([2], tool="nvtx"), "trainer.profile.tool=nvtx: the ranks have no GPU; expected"),
        (
            Profile([2], memory=True),
            "trainer.profile.memory=true: the ranks have no GPU; expected trainer.profile.tool",
        ),
    ],
)
def test_what_the_ranks_cannot_do_is_refused_before_the_models_are_loaded(
    settings: Profile, sentence: str, tmp_path: Path
):
    group = Group("ranks_0", 1, Layout(), log_dir=tmp_path)
    group.device_name = "cpu"  # as its ranks say
    with pytest.raises(ValueError) as refusal:
        check_profile(settings, 3, [group])
    assert str(refusal.value).startswith(sentence)
    check_profile(Profile([3]), 3, [group])


def test_the_line_for_nsight_systems_starts_the_same_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["megarl", "train", "recipe=quickstart", "data.prompt_key=a b"])
    assert nsys_line(Profile([3, 4], tool="nvtx")) == (
        "nsys profile --trace=cuda,nvtx,osrt --trace-fork-before-exec=true --capture-range=cudaProfilerApi "
        "--capture-range-end=repeat:2 --output=profile_%p megarl train recipe=quickstart 'data.prompt_key=a b'"
    )
