"""Each rule speaks on the curves of a run that has its fault, and no rule on those of runs that have none."""

import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from advice_curves import Toy, run
from readme_blocks import ROOT, blocks
from rich.console import Console

import megarl
from megarl.algo import Correction, register_policy_loss
from megarl.config.keys import groups, leaf_types
from megarl.metrics.advice import signals
from megarl.metrics.advice.advice import Advisor, Rule
from megarl.metrics.advice.rules import RULES
from megarl.metrics.computing.stats import batch_stats
from megarl.metrics.reading.jsonl import read_lines
from megarl.metrics.trackers.trackers import make_trackers
from megarl.samples.batch import Batch
from megarl.trainer.pairs import STATISTICS, Dpo, Rm
from megarl.trainer.sft import Sft

HEALTHY = [Toy(steps=100), Toy(steps=80, estimator="grpo"), Toy(kl_in_reward=True)]
GREEDY, NOISY = Toy(steps=60, lr=2.0), Toy(steps=20, trainer_noise=1.2)
AIMLESS = Toy(steps=40, certainty=4.0, loss=(("entropy_coeff", 5.0),))
DISTANT = Toy(steps=10, server_noise=1.5)
REINFORCE = (("policy_loss", "reinforce"),)
FAULTS: dict[str, Toy] = {
    "policy_loss_rises": Toy(reward_turns=30, loss=REINFORCE),
    "drifts_against_advantages": AIMLESS,
    "loss_contradicts_ratio": Toy(steps=12, loss=(("policy_loss", "backwards"),)),
    "score_falls": Toy(reward_turns=30),
    "ratio_explodes": NOISY,
    "clipped_often": NOISY,
    "clipped_below": NOISY,
    "policy_kl_spikes": Toy(steps=35, lr_jump=(30, 2.0)),
    "gradient_spikes": Toy(steps=35, estimator="rloo", jolts=(25, 30)),
    "entropy_collapses": GREEDY,
    "entropy_explodes": AIMLESS,
    "reference_kl_runs_away": AIMLESS,
    "reward_kl_runs_away": Toy(steps=30, lr=0.5, kl_in_reward=True),
    "nothing_moves": Toy(lr=1e-6),
    "value_loss_flat": Toy(critic_lr=1e-6),
    "values_mislead": Toy(steps=25, critic_lr=5.0, cliprange_value=None),
    "values_clipped": Toy(steps=20, critic_lr=0.5, epochs=4, cliprange_value=0.001),
    "rewards_all_equal": Toy(steps=6, reward_scale=0.0),
    "groups_all_equal": Toy(estimator="grpo", certainty=6.0),
    "groups_dropped": Toy(steps=6, dropped_share=0.9),
    "advantages_large": Toy(steps=6, estimator="rloo", reward_scale=100.0),
    "answers_cut_off": Toy(steps=6, end_bias=-8.0),
    "steps_skipped": Toy(steps=12, end_bias=-30.0, overlong_filtering=True),
    "rollout_gap": DISTANT,
    "few_samples_count": DISTANT,
    "samples_too_old": Toy(steps=20, ahead=8, lr=0.3),
    "moved_before_training": NOISY,
    "correction_cuts": Toy(steps=10, server_noise=1.5, correction=Correction("token", None, 0.8, 1.25)),
    "correction_rejects": Toy(
        steps=10, server_noise=1.5, correction=Correction(reject_by="ratio", reject_low=0.5, reject_high=2.0)
    ),
    "correction_missing": Toy(steps=20, ahead=8, lr=0.3),
    "ahead_too_small": Toy(steps=11, schedule=(("idle_share", 0.3), ("finished_waiting", 0))),
    "rewards_slow": Toy(steps=11, reward_s=1.5),
    "drain_waits": Toy(steps=11, schedule=(("idle_share", 0.3),)),
    "turn_too_long": Toy(steps=11, schedule=(("iterations_waiting", 0.6),)),
    "ahead_too_large": Toy(steps=11, schedule=(("iterations_waiting", 1.5),)),
    "prefix_stale": Toy(steps=4, schedule=(("stale_prefix", 20), ("tokens_wasted_share/stale", 0.08))),
    "tokens_wasted": Toy(steps=6, schedule=(("tokens_wasted_share", 0.2),)),
    "answers_unscored": Toy(steps=4, schedule=(("tokens_wasted_share/unscored", 0.25),)),
    "rollouts_lost": Toy(steps=6, lost=3),
    "episodes_fail": Toy(steps=4, episodes=(64, 5, 3, 0)),
    "requests_refused": Toy(steps=4, episodes=(64, 0, 0, 2)),
}
BY_NAME = {rule.name: rule for rule in RULES}
TURNS, DRAIN = {"ahead": 0, "turn_s": 60.0, "order": "finished"}, {"ahead": 2, "turn_s": None, "update": "drain"}
SCHEDULES = {"turn_too_long": TURNS, "drain_waits": DRAIN}  # of rules that apply to these alone


@pytest.fixture(scope="module", autouse=True)
def backwards():
    """A user's loss with a wrong sign; the tables are put back behind this file (conftest.py)."""

    @register_policy_loss("backwards")
    def backwards(log_probs, old_log_probs, advantages, mask, segment_ids):
        return advantages * (log_probs - old_log_probs).exp(), {}


def said(toy: Toy, rollout: dict | None = None) -> dict[str, int]:
    """Which rules spoke, and in which step first."""
    advisor, first = Advisor(RULES, config={"rollout": rollout or {}}), {}
    for step, metrics in enumerate(run(toy), 1):
        for sentence in advisor.advise(step, metrics):
            first.setdefault(sentence.partition(":")[0], step)
    return first


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_speaks_on_curves_that_have_its_fault(name):
    assert name in said(FAULTS[name], SCHEDULES.get(name))


def test_rules_are_silent_where_a_run_has_nothing_of_their_kind():
    """No ratio where only teachers teach, and by a loss; no wait for a reward model whose pass is on ranks."""
    ratio, slow = {"actor/ratio_mean": 3.0, "actor/ratio_std": 5.0}, {"timing_s/reward": 5.0, "timing_s/step": 10.0}
    taught = {"algorithm": {"adv_estimator": "none"}, "distill": {"form": "loss"}}
    silent = [(ratio, taught), (slow, {"reward": {"model": {"engine": "megatron"}}})]
    for metrics, config in silent + [(ratio, taught | {"distill": {"form": "reward"}}), (ratio, {}), (slow, {})]:
        advisor = Advisor(RULES, config=config)
        spoken = any(advisor.advise(step, metrics) for step in range(10))
        assert spoken == ((metrics, config) not in silent)


@pytest.mark.full
@pytest.mark.parametrize("toy", HEALTHY, ids=["ppo", "grpo", "kl_in_reward"])
def test_a_healthy_run_gets_no_advice_at_all(toy):
    assert said(toy) == {}
    assert run(toy)[-1]["critic/score/mean"] > 3 * run(toy)[0]["critic/score/mean"], "it learns"


def test_advice_on_the_schedule_can_be_followed():
    """In turns rollout.ahead is refused; with drain it changes nothing; a turn ends where order=prompts lets it."""
    waits = FAULTS["ahead_too_small"]
    assert set(said(waits, {"ahead": 1, "update": "in_place"})) == {"ahead_too_small"}
    assert set(said(waits, DRAIN)) == {"drain_waits"}
    assert not said(waits, TURNS), "the trainer always waits for the servers' turn"
    many = FAULTS["turn_too_long"]
    assert set(said(many, TURNS)) == {"turn_too_long"}
    assert not said(many, TURNS | {"order": "prompts"}) and not said(many, DRAIN)


def test_what_a_schedule_brings_with_it_is_no_fault():
    """Waiting of who does not run ahead is on-policy; a push overtakes single requests."""
    waits = (("idle_share", 0.3), ("finished_waiting", 0), ("in_flight", 0))
    overtaken = [(("stale_prefix", n), ("tokens_wasted_share/stale", share)) for n, share in ((1, 0.08), (20, 0.04))]
    for schedule in (waits, *overtaken):
        assert not said(Toy(steps=11, schedule=schedule))


def test_a_correction_that_is_on_is_not_missing():
    stale = FAULTS["correction_missing"]
    assert "correction_missing" not in said(replace(stale, correction=Correction("token")))


SIGNS = ("drifts_against_advantages", "loss_contradicts_ratio", "policy_loss_rises")


@pytest.mark.parametrize(("end_bias", "sign"), [(-1.0, 1), (1.5, -1)], ids=["wrong ones longer", "right ones longer"])
def test_the_sign_of_a_group_s_loss_alone_is_no_drift(end_bias, sign):
    """Advantages add up to 0 over a group's answers, not over their tokens: longer answers count more.

    So the loss stays on one side of 0 in a run that learns; what the ratio adds is far smaller, and says so.
    """
    toy = Toy(steps=40, estimator="grpo", end_bias=end_bias)
    late = run(toy)[20:]
    drift = fmean(row["actor/drift_good"] + row["actor/drift_bad"] for row in late)
    assert sign * fmean(row["actor/pg_loss"] for row in late) > 3 * drift
    assert all(row["actor/drift_good"] > 0 < row["actor/drift_bad"] for row in late)
    assert not set(said(toy)) & set(SIGNS)
    assert late[-1]["critic/score/mean"] > 2 * run(toy)[0]["critic/score/mean"], "it learns"


@pytest.mark.full
@pytest.mark.parametrize("name", BY_NAME)
def test_that_silence_is_no_lack_of_numbers(name):
    """In a healthy run every rule has full windows of all that it looks at."""
    rule = BY_NAME[name]
    listening = Rule(rule.name, rule.looks_at, rule.window, lambda *values: True, rule.advice)
    histories = [
        {m: [(i, row[m]) for i, row in enumerate(run(toy)) if m in row] for m in rule.looks_at} for toy in HEALTHY
    ]
    assert any(listening.speaks(history) for history in histories)


def test_every_rule_has_a_name_of_its_own_and_a_fault_that_shows_it():
    assert len(BY_NAME) == len(RULES)
    assert FAULTS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", BY_NAME)
def test_every_sentence_is_one_line_with_a_key_and_names_no_key_that_is_not_there(name):
    advice, keys = BY_NAME[name].advice, leaf_types().keys()
    assert "\n" not in advice
    metrics = ("rollout_corr/", "critic/", "actor/", "rollout/", "timing_s/", "agent/")
    words = [word.rstrip(".,;") for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)+|[a-z_]+/[a-z_/*]+", advice)]
    named = [word for word in words if "/" not in word and word != "samples.jsonl"]
    assert named, "it says which key to change"
    assert set(named) <= keys | groups()
    assert all(word.startswith(metrics) for word in words if "/" in word)


def test_every_metric_that_the_page_of_the_losses_explains_is_one_that_a_run_has():
    page = (Path(megarl.__file__).parent / "algo/README.md").read_text().partition("## What the statistics mean")[2]
    explained = {name for name in re.findall(r"`([a-z_]+/[a-z_0-9/]+)`", page) if not name.endswith("/")}
    toys = [
        *HEALTHY,
        Toy(steps=6, loss=(("policy_loss", "kl_cov"),)),
        Toy(steps=6, ahead=2, max_age=1, correction=Correction("token")),
    ]
    toys += FAULTS.values()
    made = {name for toy in toys for metrics in run(toy) for name in metrics}
    two_rows = Batch(torch.zeros(4, dtype=torch.int64), torch.tensor([2, 2]), rows=torch.tensor([2]))
    made |= set(batch_stats(two_rows.with_columns(response_mask=torch.tensor([0.0, 1.0, 0.0, 1.0]))))
    made |= {"distill/coef", "distill/divergence"}  # no toy has teachers: test_distill_teachers, test_distillation
    made |= {"actor/mtp_loss", "actor/mtp_acceptance"}  # nor MTP layers: test_mtp, test_ring_mtp
    made |= {*Sft.logged, *Dpo.logged, *Rm.logged, *(f"val/{each}" for each in (*STATISTICS, "score", "score_stderr"))}
    assert explained <= made
    assert {name for rule in RULES for name in rule.looks_at} <= explained


DOCUMENTED = {  # what the documents tell a reader to watch -> what a run logs
    "policy_loss": "actor/pg_loss",
    "value_loss": "critic/vf_loss",
    "ratio_mean": "actor/ratio_mean",
    "ratio_std": "actor/ratio_std",
    "advantage_mean": "critic/advantages/mean",
    "advantage_std": "critic/advantages/std",
    "learning_rate": "actor/lr",
    "kl_divergence": "actor/kl_loss",
}


def test_a_run_logs_all_that_the_documents_tell_to_watch_and_it_is_as_they_say():
    page = (ROOT / "tests/fixtures/source_documents/python_blocks.md").read_text()
    text = next(block.text for block in blocks(page) if block.file == "monitoring")
    assert re.findall(r'"(\w+)":', text) == list(DOCUMENTED)
    steps = run(HEALTHY[0])
    assert all(set(DOCUMENTED.values()) <= row.keys() for row in steps)
    assert all(abs(row["actor/ratio_mean"] - 1) < 0.01 and row["actor/ratio_std"] < 0.1 for row in steps)
    assert all(abs(row["critic/advantages/mean"]) < 1e-6 for row in steps)
    assert all(row["critic/advantages/std"] == pytest.approx(1, abs=0.01) for row in steps)


# how it speaks
def rule(window=2, holds=None, looks_at=("a",)):
    return Rule("large", looks_at, window, holds or signals.above(1.0), "make it smaller")


def test_a_rule_speaks_once_in_so_many_steps_while_the_fault_lasts():
    advisor = Advisor([rule()], every=10)
    spoken = {step: found for step in range(1, 31) if (found := advisor.advise(step, {"a": 2.0}))}
    assert spoken == {2: ["large: make it smaller"], 12: ["large: make it smaller"], 22: ["large: make it smaller"]}


def test_a_rule_is_silent_until_its_window_is_full_and_where_it_lacks_one_of_its_metrics():
    assert not rule(3).speaks({"a": [(1, 2.0), (2, 2.0)]})
    assert rule(3).speaks({"a": [(1, 0.0), (2, 2.0), (3, 2.0), (4, 2.0)]})
    both = rule(2, lambda a, b: True, ("a", "b"))
    assert both.speaks({"a": [(1, 0.0), (2, 0.0)], "b": [(1, 0.0), (2, 0.0)]})
    assert not both.speaks({"a": [(1, 0.0), (2, 0.0), (3, 0.0)], "b": [(1, 0.0), (2, 0.0)]})
    advisor = Advisor([rule()])
    steps = [(1, {"a": 2.0}), (1, {"val/score": 0.5}), (2, {"a": 2.0}), (200, {"b": 2.0})]
    assert [bool(advisor.advise(step, metrics)) for step, metrics in steps] == [False, False, True, False]


def test_a_number_that_is_not_finite_is_no_number():
    advisor = Advisor([rule()])
    values = [2.0, float("nan"), float("inf"), 2.0]
    assert [bool(advisor.advise(step, {"a": value})) for step, value in enumerate(values)] == [False] * 3 + [True]


def test_the_memory_is_as_long_as_the_longest_window_and_as_wide_as_the_rules():
    advisor = Advisor(RULES)
    for step in range(1000):
        advisor.advise(step, {name: 0.5 for r in RULES for name in r.looks_at} | {f"other/{step}": 1.0})
    assert {len(past) for past in advisor._history.values()} == {max(r.window for r in RULES)}
    assert advisor._history.keys() == {name for r in RULES for name in r.looks_at}


def followed(tmp_path, toy, config, resume_step=None):
    """What a run prints, and the lines of advice that it keeps in its folder."""
    console = Console(file=io.StringIO(), width=80)
    following = make_trackers(
        ["jsonl"], tmp_path, "megarl", "try", config, 10, resume_step=resume_step, console=console
    )
    for step, metrics in enumerate(run(toy), 1):
        following.log(step, metrics)
    file = tmp_path / "advice.jsonl"
    return console.file.getvalue(), list(read_lines(file)) if file.exists() else None


def test_a_run_prints_the_advice_of_its_own_schedule_and_keeps_it_in_its_folder(tmp_path):
    sentence = f"turn_too_long: {BY_NAME['turn_too_long'].advice}"
    printed, (kept,) = followed(tmp_path, FAULTS["turn_too_long"], {"rollout": TURNS})
    assert kept["advice"] == sentence
    assert printed == f"advice at step {kept['step']}: {sentence}\n"
    again = followed(tmp_path, Toy(steps=0), {"rollout": TURNS}, resume_step=kept["step"] - 1)
    assert again == ("", []), "the resumed run says again what it finds again"


def test_a_run_without_a_fault_has_no_advice_in_its_folder(tmp_path):
    assert followed(tmp_path, HEALTHY[2], {}) == ("", None)


# the shapes, by hand
def test_ends_are_the_means_of_the_first_and_last_fifth():
    assert signals.ends([1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 7.0]) == (2.0, 6.0)


def test_a_rise_is_told_from_noise_by_its_standard_error():
    change, error = signals.rise([0.0, 2.0, 4.0, 6.0])
    assert change == 4.0
    assert error == pytest.approx(2**0.5)  # (sqrt(2)^2 / 2 + sqrt(2)^2 / 2)^(1/2)


@pytest.mark.parametrize(
    ("holds", "yes", "no"),
    [
        (signals.rises, [0.0, 0.5, 4.0, 4.5], [0.0, 2.0, 4.0, 6.0]),
        (partial(signals.rises, by=4.0), [0.0, 0.0, 4.5, 4.5], [0.0, 0.5, 4.0, 4.5]),
        (signals.falls, [4.0, 4.5, 0.0, 0.5], [0.0, 0.5, 4.0, 4.5]),
        (signals.not_falling, [1.0, 1.0, 0.9, 0.9], [1.0, 1.0, 0.8, 0.8]),
        (signals.often(0.5), [0.0, 1.0], [0.0, 0.0, 1.0]),
        (signals.above(1.0), [1.1, 2.0], [1.0, 2.0]),
        (signals.away_from_0(0.1), [-0.2, 0.2], [-0.2, 0.05]),
        (signals.spikes(10, at_least=0.5), [-0.1, 0.1, 0.1, -2.0], [0.1, 2.0, 0.1, 0.1]),  # it is over
        (signals.spikes(10, at_least=2.0), [0.1, 0.1, 0.1, 2.1], [0.1, 0.1, 0.1, 1.9]),
        (signals.spikes(10, at_least=0.5, how_often=2), [0.1, 0.1, 0.1, 2.0, 2.0], [0.1, 0.1, 0.1, 0.1, 2.0]),
        (signals.runs_away(to=1.0, times=2), [0.5, 2.0], [1.5, 2.0]),
        (signals.runs_away(to=1.0, times=2), [-3.0, 2.0], [0.1, 0.9]),
    ],
)
def test_the_other_shapes(holds, yes, no):
    assert holds(yes) and not holds(no)


def test_a_short_run_is_advised_after_half_of_its_steps():
    """A critic that learns nothing: of a run of 25 steps half is looked at, of a long one 50."""
    flat = {"critic/vf_loss": 1.0, "critic/vf_explained_var": 0.0, "critic/returns/std": 1.0}
    found = {}
    for total in (25, 1000):
        advisor = Advisor([BY_NAME["value_loss_flat"]], steps=total)
        said = {step: advisor.advise(step, flat) for step in range(1, 61)}
        found[total] = next((step, lines[0]) for step, lines in said.items() if lines)
    assert [step for step, _ in found.values()] == [12, 50]
    assert "for 12 steps" in found[25][1] and "for 50 steps" in found[1000][1]
    assert BY_NAME["rewards_all_equal"].within(8).window == 5, "what needs few steps needs them all"
