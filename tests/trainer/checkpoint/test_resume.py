"""What a resumed run takes over, and what it generates again because its settings are others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_helpers import BASE, load, tables_kept

from megarl.config import ConfigError, load_config
from megarl.data.groups import save_groups
from megarl.data.ledger import TRAINED, Ledger
from megarl.plugins import load_plugins
from megarl.sample import Completion, Prompt, Sample, VersionSpan
from megarl.trainer.checkpoint.checkpoint import ROLLOUTS, Checkpoint
from megarl.trainer.checkpoint.resume import announce, check_is_known, generated_with, take_over

REWARD = "def score(prompt, completion):\n    return 1.0\n"


def saved(folder: Path, settings: dict[str, Any]) -> Checkpoint:
    """A checkpoint with visit 0 trained, visit 1 open, and a finished group of visit 2."""
    ledger = Ledger("data")
    ledger.issue(3)
    ledger.settle(0, TRAINED)
    group = [Sample.of(Prompt("0-2", [5], "x"), Completion([6], [-0.5], "stop", (VersionSpan(0, 0, 1),)), 1.0)]
    save_groups(folder / ROLLOUTS, {2: group})
    state = {"ledger": ledger.state_dict(), "generated_with": settings}
    return Checkpoint(folder, 1, json.loads(json.dumps(state)))


def test_a_run_without_a_checkpoint_begins_with_a_new_ledger() -> None:
    ledger, waiting = take_over(None, "data", {}, pytest.fail)
    assert (ledger.issue(2), waiting) == ([0, 1], {})


def test_with_the_same_settings_the_finished_groups_are_used(tmp_path: Path) -> None:
    settings = generated_with(load("rollout.n=2", "rollout.sglang.args=[--a,--b]"), greedy=False)
    ledger, waiting = take_over(saved(tmp_path, settings), "data", settings, pytest.fail)
    assert list(waiting) == [2]
    assert ledger.issue(2) == [1, 3]


@pytest.mark.parametrize(
    "typed",
    [
        "rollout.n=2",
        "rollout.temperature=0.5",
        "rollout.top_p=0.5",
        "rollout.top_k=5",
        "rollout.engine=sglang",
        "data.max_response_length=7",
        "data.system_prompt=go",
        "reward.fn=gsm8k",
        "reward.on_error=stop",
    ],
)
def test_with_another_setting_they_are_generated_again_and_it_is_named(tmp_path: Path, typed: str) -> None:
    begun = load("rollout.engine=hf")
    config, _ = load_config([*BASE, "rollout.engine=hf", typed])
    now = generated_with(config, greedy=False)
    said: list[str] = []
    ledger, waiting = take_over(saved(tmp_path, generated_with(begun, greedy=False)), "data", now, said.append)
    assert waiting == {}
    assert ledger.issue(3) == [1, 2, 3], "the visit of the dropped group comes again, before new ones"
    (sentence,) = said
    key = typed.partition("=")[0]
    assert sentence == (
        f"the finished groups in {tmp_path} (1) are dropped and generated again, because these settings have "
        f"changed: {key}"
    )


def test_an_estimator_that_wants_greedy_completions_gets_groups_with_them(tmp_path: Path) -> None:
    before, now = (generated_with(load(), greedy=greedy) for greedy in (False, True))
    said: list[str] = []
    _, waiting = take_over(saved(tmp_path, before), "data", now, said.append)
    assert waiting == {} and said[0].endswith("changed: algorithm.adv_estimator (greedy)")


def test_settings_that_do_not_matter_for_a_group_drop_nothing(tmp_path: Path) -> None:
    before, now = (
        generated_with(load(*words), greedy=False) for words in ((), ("actor.optim.lr=1", "rollout.ahead=2"))
    )
    assert list(take_over(saved(tmp_path, before), "data", now, pytest.fail)[1]) == [2]


def test_a_reward_function_whose_file_was_edited_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(REWARD)
    config = load(f"reward.fn={file}:score")
    before = generated_with(config, greedy=False)
    said: list[str] = []
    assert generated_with(config, greedy=False) == before
    file.write_text(REWARD.replace("1.0", "2.0"))
    take_over(saved(tmp_path, before), "data", generated_with(config, greedy=False), said.append)
    assert said[0].endswith("changed: the file of reward.fn")


def test_a_command_whose_script_was_edited_is_another_one(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print(1)")
    config = load(f"agent.command=[python3,{script},--fast]")
    before = generated_with(config, greedy=False)
    assert list(before["the files of agent.command"]) == [str(script)]
    script.write_text("print(2)")
    assert generated_with(config, greedy=False) != before


def test_a_reward_function_of_a_plug_in_has_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "plug.py"
    file.write_text(f"from megarl.rewards import register_reward\n\n@register_reward('own')\n{REWARD}")
    with tables_kept():
        load_plugins([str(file)])
        config = load("reward.fn=own", f"algorithm.plugins=[{file}]")
        before = generated_with(config, greedy=False)
        file.write_text(file.read_text().replace("1.0", "2.0"))
        assert generated_with(config, greedy=False) != before
    assert generated_with(load("reward.fn=json:loads"), greedy=False)["the file of reward.fn"]["json:loads"]
    assert generated_with(load("reward.fn=gsm8k"), greedy=False)["the file of reward.fn"] == {}


STATE = {"ledger": Ledger("3-ab").state_dict(), "kl": {}, "spikes": {}, "generated_with": {}, "totals": {}}


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        (("ledger", "spikes"), "ledger, spikes"),
        (("ledger.skipped", "ledger.left_out"), "ledger.skipped, ledger.left_out"),
        *((name, name) for name in (*STATE, *(f"ledger.{name}" for name in STATE["ledger"]))),
    ],
)
def test_a_checkpoint_of_an_earlier_version_is_one_sentence(
    tmp_path: Path, lacks: str | tuple[str, ...], named: str
) -> None:
    lacks = (lacks,) if isinstance(lacks, str) else lacks
    ledger = {name: value for name, value in STATE["ledger"].items() if f"ledger.{name}" not in lacks}
    state = {name: value for name, value in (STATE | {"ledger": ledger}).items() if name not in lacks}
    with pytest.raises(ValueError) as error:
        check_is_known(Checkpoint(tmp_path, 3, state))
    assert str(error.value) == (
        f"trainer.resume_mode: {tmp_path} was saved by an older megarl (its state has no {named}); expected a "
        "checkpoint of this version, or trainer.resume_mode=disable"
    )
    check_is_known(Checkpoint(tmp_path, 3, STATE))


def test_a_checkpoint_of_sft_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"{tmp_path} is a checkpoint of `megarl sft`; expected one of `megarl train`"
    ):
        check_is_known(Checkpoint(tmp_path, 3, {"examples": {}, "loss": 1.0, "wall_s": 2.0}))


def test_settings_that_another_version_wrote_are_one_sentence(tmp_path: Path) -> None:
    config = load(f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=old")
    file = tmp_path / "old" / "config.yaml"
    file.parent.mkdir()
    file.write_text("reward: {fn: text}")
    with pytest.raises(ConfigError, match=rf"{file}: .*reward\.fn=text: expected a list of texts; another version"):
        announce(Checkpoint(tmp_path, 3, {}), config, 5)


def test_groups_that_waited_without_the_experts_of_tokens_are_dropped_where_these_are_replayed() -> None:
    off, old, rollout = (
        generated_with(load(f"actor.router_replay={chosen}"), greedy=False) for chosen in ("off", "old", "rollout")
    )
    assert off == old
    assert rollout == {**off, "actor.router_replay": "rollout"}
