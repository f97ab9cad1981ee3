"""Several rewards at once, rewards by data source, and what becomes of a sample that could not be scored."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from answers import completion

from megarl.rewards.pool import RewardError
from megarl.rewards.result import Outcome, RewardResult
from megarl.rewards.scorer import Rewards, RewardSettings
from megarl.rewards.surroundings import Surroundings
from megarl.samples.sample import Prompt

FILE = """
import asyncio

def tidy(prompt, completion):
    if completion.text == "raise":
        raise KeyError("gone")
    return {"score": 2.0, "length": len(completion.text)}

async def asked(prompt, completion):
    await asyncio.sleep(0)
    if completion.text == "refuse":
        raise ValueError("no")
    if completion.text == "cancel":
        await cancels_itself(prompt, completion)
    return {"score": 0.5, "words": 1}

async def cancels_itself(prompt, completion):
    task = asyncio.ensure_future(asyncio.sleep(900))
    task.cancel()
    await task
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return f"{tmp_path}/mine.py"


def score(rewards: Rewards, *texts: str, source: str = "", truth: str = "46") -> list[Outcome]:
    prompt = Prompt("0-3", [1], "x", truth, source)
    rewards.start()
    try:
        return asyncio.run(asyncio.wait_for(rewards.score(prompt, [completion(text) for text in texts]), 240))
    finally:
        rewards.stop()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_single_reward_is_passed_on_as_it_is(file: str, num_workers: int) -> None:
    rewards = Rewards([f"{file}:tidy"], RewardSettings(num_workers=num_workers))
    assert score(rewards, "a", "bb") == [RewardResult(2.0, {"length": 1.0}), RewardResult(2.0, {"length": 2.0})]


def test_a_sum_that_float32_cannot_hold_is_no_reward_and_names_its_sample(file: str) -> None:
    """Each reward alone is finite there."""
    rewards = [
        Rewards(["exact", f"{file}:tidy"], RewardSettings(weights={"exact": 3e38, "tidy": 1e38}, on_error=how))
        for how in ("stop", "unscored")
    ]
    with pytest.raises(RewardError, match=r"^sample 0-3#1: the weighted sum of its rewards is 5.0+5?e\+38; "):
        score(rewards[0], "4", "46")
    counted, refused = score(rewards[1], "4", "46")
    assert isinstance(counted, RewardResult) and "float32" in str(refused)


def test_several_rewards_are_weighted_added_and_reported_apart(file: str) -> None:
    rewards = Rewards(["exact", f"{file}:tidy", f"{file}:asked"], RewardSettings(weights={"tidy": 0.25, "asked": -1.0}))
    assert score(rewards, "46", "4") == [
        RewardResult(1.0, {"exact": 1.0, "tidy": 2.0, "tidy/length": 2.0, "asked": 0.5, "asked/words": 1.0}),
        RewardResult(0.0, {"exact": 0.0, "tidy": 2.0, "tidy/length": 1.0, "asked": 0.5, "asked/words": 1.0}),
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_audit_is_scored_beside_the_reward_and_counts_for_nothing(file: str, num_workers: int) -> None:
    rewards = Rewards([f"{file}:tidy"], RewardSettings(audit="exact", num_workers=num_workers))
    assert score(rewards, "46", "4") == [
        RewardResult(2.0, {"length": 2.0, "audit": 1.0}),
        RewardResult(2.0, {"length": 1.0, "audit": 0.0}),
    ]


def test_errors_of_the_audit_take_no_word_of_those_of_the_reward(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megarl.rewards.scorer"):
        rewards = Rewards([f"{file}:tidy"], RewardSettings(audit=f"{file}:cancels_itself", num_workers=0))
        assert score(rewards, *["a"] * 12) == [RewardResult(2.0, {"length": 1.0, "audit_error": 1.0})] * 12
        assert "it has no audit" in caplog.text
        assert list(rewards.first_errors) == ["audit"]
        outcomes = score(rewards, "raise")
    assert rewards.num_errors == {"audit": 13, "trained": 1} and isinstance(outcomes[0], str)
    assert rewards.first_errors["trained"] == f"{outcomes[0]}; it leaves its group"
    assert rewards.first_errors["audit"].startswith(f"reward.audit {file}:cancels_itself, sample 0-3#0: ")
    assert rewards.first_errors["trained"] in caplog.text and len(caplog.records) == 11


def test_a_row_of_a_data_source_has_the_reward_of_that_source(file: str) -> None:
    settings = RewardSettings(by_data_source={"my/words": f"{file}:tidy"}, num_workers=0)
    rewards = Rewards(["exact"], settings)
    assert score(rewards, "46", source="my/words") == [RewardResult(2.0, {"tidy": 2.0, "tidy/length": 2.0})]
    assert score(rewards, "46", source="my/other") == [RewardResult(1.0, {"exact": 1.0})]


DAPO = ("math_dapo", "math_dapo_reasoning", "math", "aime", "aime_2024")


@pytest.mark.parametrize(
    ("source", "text", "reward"),
    [
        ("openai/gsm8k", "so it is #### 46", 1.0),
        ("openai/gsm8k", "so it is 46", 0.0),  # the mark is wanted, as in verl
        ("lighteval/MATH", r"\boxed{ 46 }", 1.0),
        ("lighteval/MATH", "46", 0.0),  # the box is wanted
        ("numina_olympiads", r"\boxed{\frac{92}{2}}", 1.0),
        *((source, text, score) for source in DAPO for text, score in (("Answer: $46$", 1.0), (r"\boxed{47}", -1.0))),
        ("", "46", 1.0),
        ("arithmetic", " 46", 1.0),
        ("arithmetic", "#### 46", 0.0),
    ],
)
def test_auto_takes_the_built_in_reward_of_verls_data_sources(source: str, text: str, reward: float) -> None:
    (outcome,) = score(Rewards(["auto"], RewardSettings(num_workers=0)), text, source=source)
    assert isinstance(outcome, RewardResult) and outcome.reward == reward
    assert outcome.extra == ({"acc": float(reward > 0)} if source in DAPO else {})
    assert text != "Answer: $46$" or outcome.pred == "46"


def test_auto_scores_no_row_that_verl_scores_in_a_way_that_is_missing() -> None:
    (outcome,) = score(Rewards(["auto"], RewardSettings(num_workers=0)), "46", source="codecontests")
    assert isinstance(outcome, str)
    assert "no built-in reward fits data_source=codecontests; expected one in reward.by_data_source" in outcome


@pytest.mark.parametrize(("name", "text"), [("tidy", "raise"), ("asked", "refuse"), ("asked", "cancel")])
def test_a_failed_sample_is_unscored_named_and_leaves_its_neighbours_alone(
    file: str, name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = Rewards([f"{file}:tidy", f"{file}:asked"])
    with caplog.at_level(logging.WARNING, "megarl.rewards.scorer"):
        first, second, third = score(rewards, "a", text, "a")
    assert isinstance(first, RewardResult) and first == third
    assert isinstance(second, str) and second.startswith(f"reward {file}:{name}, sample 0-3#1: ")
    assert rewards.num_errors == {"trained": 1}
    assert f"{second}; it leaves its group" in caplog.text
    assert second.endswith("cancelled, by the reward itself") == (text == "cancel")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_may_look_at_the_runs_variables_when_it_is_imported(tmp_path: Path, num_workers: int) -> None:
    (tmp_path / "keyed.py").write_text(
        "import os\nKEY = os.environ['MEGARL_TEST_KEY']\ndef score(prompt, completion):\n    return len(KEY)\n"
    )
    surroundings = Surroundings(environment={"MEGARL_TEST_KEY": "abc"})
    try:
        settings = RewardSettings(num_workers=num_workers)
        rewards = Rewards([f"{tmp_path}/keyed.py:score"], settings, surroundings=surroundings)
        assert score(rewards, "a") == [RewardResult(3.0)]
    finally:
        os.environ.pop("MEGARL_TEST_KEY", None)


def test_zero_counts_a_failed_sample_as_0_and_stop_ends_the_run(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megarl.rewards.scorer"):
        rewards = Rewards([f"{file}:tidy"], RewardSettings(on_error="zero", num_workers=0))
        assert score(rewards, *["raise"] * 12) == [RewardResult(0.0, {"reward_error": 1.0})] * 12
    assert rewards.num_errors == {"trained": 12}
    first = rewards.first_errors["trained"]
    assert "sample 0-3#0: KeyError: 'gone'" in first and first.endswith("; counted as 0")
    assert len(caplog.records) == 10 and first in caplog.text, "only the first ones are written out"
    assert caplog.records[-1].message.endswith("; further errors are only counted")
    with pytest.raises(RewardError, match=r"reward .*mine.py:tidy, sample 0-3#1: KeyError: 'gone'"):
        score(Rewards([f"{file}:tidy"], RewardSettings(on_error="stop", num_workers=0)), "a", "raise")


def test_rewards_without_ordinary_functions_start_no_process(file: str) -> None:
    rewards = Rewards([f"{file}:asked"], RewardSettings(num_workers=3))
    assert rewards._pool is None
    assert score(rewards, "a") == [RewardResult(0.5, {"words": 1.0})]
