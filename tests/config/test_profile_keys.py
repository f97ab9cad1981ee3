"""Keys of profiles: what is refused before a process starts, and verl's words for them."""

import pytest
from config_helpers import BASE

from megarl.config import ConfigError, load_config

STEPS = "trainer.profile.steps=[2]"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.profile.steps=[0]"], "trainer.profile.steps=[0]: expected steps, counted from 1"),
        (
            [STEPS, "trainer.profile.ranks=[0,2]", "trainer.n_gpus_per_node=2"],
            "trainer.profile.ranks=[0, 2]: the run has ranks 0 to 1, so there is no rank 2",
        ),
        (
            [STEPS, "trainer.profile.memory=true", "trainer.device=cpu"],
            "trainer.profile.memory=true: trainer.device=cpu has no GPU; expected trainer.profile.tool=torch alone",
        ),
        (
            ["trainer.profile.tool=nvtx"],
            "trainer.profile.tool=nvtx: has no effect, because trainer.profile.steps=[]: nothing is profiled",
        ),
        (["trainer.profile.tool=perf", STEPS], "trainer.profile.tool=perf: expected one of torch, nvtx"),
    ],
)
def test_what_cannot_be_profiled_is_one_sentence(words: list[str], sentence: str):
    with pytest.raises(ConfigError) as refusal:
        load_config([*BASE, *words])
    assert [str(found) for found in refusal.value.sentences] == [sentence]


@pytest.mark.parametrize(("tool", "ours"), [("torch", ("torch", False)), ("nsys", ("nvtx", False))])
def test_words_of_verl_are_ours(tool: str, ours: tuple[str, bool]):
    config, _ = load_config([*BASE, "global_profiler.steps=[3,4]", f"global_profiler.tool={tool}"])
    profile = config.trainer.profile
    assert (profile.steps, (profile.tool, profile.memory)) == ([3, 4], ours)
