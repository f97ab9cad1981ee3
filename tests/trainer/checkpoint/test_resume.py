"""When a save is due, which are kept, and what a run that resumes takes over or generates again."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_helpers import BASE, load, tables_kept

from megarl.config import ConfigError, load_config
from megarl.data.groups import save_groups
from megarl.data.ledger import TRAINED, Ledger
from megarl.plugins.load import load_plugins
from megarl.processes.signals import Signals
from megarl.samples.sample import Completion, Prompt, Sample, VersionSpan
from megarl.trainer.checkpoint.checkpoint import ROLLOUTS, SCORES, Checkpoint, Retention, read_scores, write_scores
from megarl.trainer.checkpoint.resume import announce, check_is_known, generated_with, keep_code, take_over
from megarl.trainer.resumable import SaveTimes

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


def taken_over(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> tuple[Ledger, list[int], list[str]]:
    """The ledger, the visits of the groups that are used, and what is said."""
    said: list[str] = []
    ledger, waiting = take_over(saved(folder, before), "data", now, said.append)
    return ledger, list(waiting), said


def test_a_run_without_a_checkpoint_begins_with_a_new_ledger() -> None:
    ledger, waiting = take_over(None, "data", {}, pytest.fail)
    assert (ledger.issue(2), waiting) == ([0, 1], {})


@pytest.mark.parametrize("typed", [(), ("actor.optim.lr=1", "rollout.ahead=2")])
def test_with_the_same_settings_of_groups_the_finished_groups_are_used(tmp_path: Path, typed: tuple[str, ...]) -> None:
    begun = ("rollout.n=2", "rollout.sglang.args=[--log-level,warning]")
    before, now = (generated_with(load(*begun, *more), greedy=False) for more in ((), typed))
    ledger, used, said = taken_over(tmp_path, before, now)
    assert (used, said, ledger.issue(2)) == ([2], [], [1, 3])


OTHER = ["rollout.n=2", "rollout.temperature=0.5", "rollout.top_p=0.5", "rollout.top_k=5", "rollout.engine=sglang"]
OTHER += ["data.max_response_length=7", "data.system_prompt=go", "reward.fn=gsm8k", "reward.on_error=stop"]


@pytest.mark.parametrize("typed", [*OTHER, "algorithm.adv_estimator (greedy)"])
def test_with_another_setting_they_are_generated_again_and_it_is_named(tmp_path: Path, typed: str) -> None:
    """An estimator may want greedy completions with its groups."""
    greedy = "(greedy)" in typed
    config, _ = load_config([*BASE, "rollout.engine=hf", *([] if greedy else [typed])])
    before = generated_with(load("rollout.engine=hf"), greedy=False)
    ledger, used, said = taken_over(tmp_path, before, generated_with(config, greedy=greedy))
    assert used == []
    assert ledger.issue(3) == [1, 2, 3], "the visit of the dropped group comes again, before new ones"
    assert said == [
        f"the finished groups in {tmp_path} (1) are dropped and generated again, because these settings have "
        f"changed: {typed.partition('=')[0]}"
    ]


def test_a_function_or_a_script_whose_file_was_edited_is_another_one(tmp_path: Path) -> None:
    """Of a reward, of a reward of a plug-in, and of an agent's command."""
    file, plug, script = (tmp_path / name for name in ("score.py", "plug.py", "agent.py"))
    file.write_text(REWARD)
    plug.write_text(f"from megarl.rewards import register_reward\n\n@register_reward('own')\n{REWARD}")
    script.write_text("print(1.0)")
    with tables_kept():
        load_plugins([str(plug)])
        for edited, words, key in (
            (file, [f"reward.fn={file}:score"], "the file of reward.fn"),
            (plug, ["reward.fn=own", f"algorithm.plugins=[{plug}]"], "the file of reward.fn"),
            (script, [f"agent.command=[python3,{script},--fast]"], "the files of agent.command"),
        ):
            keep_code(load(*words), tmp_path / "code.json")
            assert json.loads((tmp_path / "code.json").read_text()) == {edited.name: edited.read_text()}
            before = generated_with(load(*words), greedy=False)
            assert len(before[key]) == 1 and generated_with(load(*words), greedy=False) == before
            edited.write_text(edited.read_text().replace("1.0", "2.0"))
            _, _, said = taken_over(tmp_path, before, generated_with(load(*words), greedy=False))
            assert said[0].endswith(f"changed: {key}")
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


def test_a_checkpoint_of_sft_and_settings_that_another_version_wrote_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path} is a checkpoint of `megarl sft`; expected one of `megarl tra"):
        check_is_known(Checkpoint(tmp_path, 3, {"examples": {}, "loss": 1.0, "wall_s": 2.0}))
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
        ([saves, "trainer.keep_best=1"], "data.val_files=[]"),
        ([saves, "trainer.keep_best=1", "data.val_files=[v.jsonl]"], "trainer.test_freq=-1"),
        (["trainer.resume_mode=disable", "trainer.verify_resume=true"], "trainer.resume_mode=disable"),
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


def times(signals: Signals, clock: list[float], **settings: Any) -> SaveTimes:
    found: Any = SimpleNamespace(**{"save_freq": -1, "save_every_s": None, "saves": bool(settings)} | settings)
    return SaveTimes(found, signals, first_step=0, num_steps=10, clock=lambda: clock[0])


def test_saves_are_due_by_steps_by_time_and_at_the_end() -> None:
    nothing, clock = Signals(1.0), [100.0]
    by_steps = times(nothing, clock, save_freq=4)
    assert [step for step in range(1, 11) if by_steps.due(step)] == [4, 8, 10]
    by_time = times(nothing, clock, save_every_s=30.0)
    due = []
    for step in range(1, 11):
        clock[0] += 20.0
        if by_time.due(step):
            due.append(step)
    assert due == [2, 4, 6, 8, 10], "30 s are over after two steps of 20 s"
    never = times(nothing, clock)
    assert not any(never.due(step) for step in range(1, 11))
    assert never.last == 0


def test_a_signal_makes_one_save_due_even_where_it_was_due_anyway() -> None:
    with Signals(60.0) as signals:
        saves = times(signals, [0.0], save_freq=2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [step for step in range(1, 6) if saves.due(step)] == [1, 2, 4]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [step for step in range(6, 10) if saves.due(step)] == [6, 8]
        assert saves.last == 8
