"""The data of a page: curves, stages, answers and settings, bounded and as numbers that were worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from report_cases import MESSAGES, sample

from megarl.config import Config, load_config, resolved, to_yaml
from megarl.config.settings import read_yaml
from megarl.report import curves
from megarl.report.curves import groups_of, stages_of, thinned
from megarl.report.samples import MAX_CHARS, MAX_TEXT, cut, samples_of, spread
from megarl.report.settings import settings_of


def test_a_long_curve_keeps_its_peaks(monkeypatch):
    monkeypatch.setattr(curves, "MAX_POINTS", 4)
    steps, values = thinned(range(10, 20), [0, 9, 1, 1, 1, 2, 2, 2, -5, 2])
    assert (steps, values) == ([10, 11, 15, 18], [0, 9, 2, -5])
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_every_metric_has_one_panel_and_what_is_always_zero_is_put_away():
    series = {
        "actor/entropy": ([1, 2], [0.123456, float("nan")]),
        "critic/vf_loss": ([1, 2], [0.0, 0.0]),
        "my/own": ([1], [7.0]),
        "timing_s/gen": ([1], [1.0]),
    }
    policy, rest = groups_of(series, {"actor/entropy": ([1], [0.5]), "actor/lr": ([1], [0.1])})
    assert (policy["title"], policy["open"], rest["open"]) == ("Policy", True, False)
    entropy, rate = policy["panels"]
    assert entropy["curves"] == [
        {"name": "actor/entropy", "x": [1, 2], "y": [0.12346, None], "other": {"x": [1], "y": [0.5]}}
    ]
    assert rate["curves"] == [{"name": "actor/lr", "x": [], "y": [], "other": {"x": [1], "y": [0.1]}}]
    assert [panel["title"] for panel in rest["panels"]] == ["critic/vf_loss", "my/own"]


def test_the_stages_of_a_step_add_up_to_it():
    series = {
        "timing_s/gen": ([1, 2], [0.5, 0.5]),
        "timing_s/save_checkpoint": ([2], [2.0]),  # not of every step
        "timing_s/push/send": ([1, 2], [0.1, 0.1]),  # a part of another stage
        "timing_s/step": ([1, 2], [1.0, 4.0]),
        "perf/unaccounted": ([1, 2], [0.5, 0.375]),
    }
    assert stages_of(series) == {
        "steps": [1, 2],
        "stages": [
            {"name": "save_checkpoint", "s": [0.0, 2.0]},
            {"name": "unaccounted", "s": [0.5, 1.5]},
            {"name": "gen", "s": [0.5, 0.5]},
        ],
    }


def test_samples_are_of_steps_all_over_the_run_and_bounded():
    assert spread([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert spread([1, 2], 3) == [1, 2]
    assert spread([1, 2, 3], 1) == [3]
    assert cut("x" * MAX_TEXT) == "x" * MAX_TEXT
    long = cut("a" * MAX_TEXT + "b" * 10)
    assert long.endswith("a" * 10 + "b" * 10) and "[... 10 characters ...]" in long
    rows = [sample(step, at, completion="z" * 100_000) for step in range(1, 201) for at in range(20)]
    found = samples_of(rows)
    assert (found[0]["step"], found[-1]["step"]) == (1, 200)
    assert len(json.dumps(found)) <= MAX_CHARS


def test_a_sample_of_an_episode_keeps_what_was_said():
    (step,) = samples_of([sample(1, 0, messages=MESSAGES), sample(1, 1)])
    assert [each["messages"] for each in step["samples"]] == [MESSAGES, None]


def test_settings_that_follow_another_key_are_not_changed_ones(tmp_path):
    config, other = Config(), Config()
    config.actor.optim.lr, other.trainer.test_freq = 0.5, 3
    for name, written in (("a", config), ("b", other)):
        (tmp_path / f"{name}.yaml").write_text(to_yaml(resolved(written)))
    found = settings_of(read_yaml(tmp_path / "a.yaml"), read_yaml(tmp_path / "b.yaml"))
    rows = {row["key"]: row for row in found}
    lr = rows["actor.optim.lr"]
    assert lr["meaning"].startswith("peak learning rate") and lr["value"] == "0.5" and lr["changed"]
    assert [row["key"] for row in found if row["differs"]] == ["actor.optim.lr", "trainer.test_freq"]
    assert [row["key"] for row in found if row["changed"]] == ["actor.optim.lr"]
    assert rows["trainer.test_freq"]["other"] == "3"


def test_settings_of_a_run_stand_beside_those_of_its_recipe():
    config, _ = load_config(["recipe=quickstart_grpo", "rollout.n=3"])
    assert config.trainer.recipe == "quickstart_grpo"
    found = {row["key"]: row for row in settings_of(asdict(config), {})}
    of_recipe = load_config(["recipe=quickstart_grpo"])[0].rollout.n
    assert (found["rollout.n"]["value"], found["rollout.n"]["recipe"]) == ("3", str(of_recipe))
    own = {key for key, row in found.items() if row["own"]}
    assert own == {"rollout.n"}
    gone = settings_of({"trainer": {"recipe": "no/such.yaml", "seed": 1}}, {})
    assert [(row["recipe"], row["own"]) for row in gone] == [(None, False)] * 2


def test_without_another_run_no_setting_differs():
    (row,) = settings_of({"trainer": {"seed": 1}}, {})
    assert (row["other"], row["differs"], row["changed"]) == (None, False, True)


@pytest.mark.parametrize("unknown", ["not.a.key", "actor.gone"])
def test_a_key_of_another_version_is_shown(unknown):
    group, _, name = unknown.partition(".")
    (row,) = settings_of({group: {name: {}}}, {})
    assert (row["key"], row["value"], row["changed"]) == (unknown, "{}", False)
