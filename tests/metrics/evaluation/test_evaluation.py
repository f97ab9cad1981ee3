"""Metrics of an evaluation, by hand and against slow enumeration; and the rule of the audit."""

import io
import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from rich.console import Console

from megarl.metrics.computing.audit import ALARMS, Audit, outcome, sentence, slope_of
from megarl.metrics.computing.evaluation import Answers, Mean, expected_best, set_metrics, sizes
from megarl.metrics.reading.jsonl import read_lines
from megarl.metrics.trackers.trackers import Trackers, make_trackers


def test_a_standard_error_of_shares_is_the_binomial_one() -> None:
    found = Mean.of([1.0] * 30 + [0.0] * 70)
    assert found.value == 0.3
    assert found.stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert math.isnan(Mean.of([1.0]).stderr)


def test_one_answer_a_prompt_gives_the_mean_under_verls_name() -> None:
    found = set_metrics("openai/gsm8k", [Answers({"reward": [1.0]}), Answers({"reward": [0.0]})], 1)
    assert found == {
        "val-core/openai/gsm8k/acc/mean@1": 0.5,
        "val-aux/openai/gsm8k/acc/mean@1/stderr": pytest.approx(0.5),
        "val-aux/openai/gsm8k/reward/mean@1": 0.5,
        "val-aux/openai/gsm8k/reward/mean@1/stderr": pytest.approx(0.5),
    }


def test_a_reward_with_further_numbers_is_the_core_itself_and_those_of_the_run_are_none_of_them() -> None:
    ours = {"reward": [1.0], "agent/turns": [2.0], "audit": [0.0], "reward_error": [0.0]}
    assert "val-core/sums/acc/mean@1" in set_metrics("sums", [Answers(ours)], 1)
    found = set_metrics("sums", [Answers({"reward": [1.0], "format": [0.0]})], 1)
    assert "val-core/sums/reward/mean@1" in found and not any("/acc/" in name for name in found)


def test_the_number_acc_is_the_core_of_a_set_that_has_it_and_a_prompt_without_a_score_does_not_count() -> None:
    answers = [Answers({"reward": [-1.0], "acc": [0.0]}), Answers({"reward": [1.0], "acc": [1.0]}), Answers({})]
    found = set_metrics("aime", answers, 1)
    assert found["val-core/aime/acc/mean@1"] == 0.5 and found["val-aux/aime/reward/mean@1"] == 0.0


def test_four_answers_a_prompt_by_hand() -> None:
    prompts = [
        Answers({"reward": [1.0, 1.0, 0.0, 0.0]}, ["4", "4", "5", "6"]),
        Answers({"reward": [0.0, 0.0, 0.0, 1.0]}, ["1", "1", "1", "2"]),
    ]
    found = set_metrics("sums", prompts, 4)
    assert found["val-core/sums/acc/mean@4"] == 0.375
    assert found["val-core/sums/acc/best@4/mean"] == pytest.approx((1 - 0.5**4 + 1 - 0.75**4) / 2)
    assert found["val-aux/sums/reward/worst@2/mean"] == pytest.approx((0.5**2 + 0.25**2) / 2)
    assert found["val-core/sums/acc/pass@4"] == 1.0
    assert found["val-aux/sums/reward/pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert found["val-aux/sums/reward/std@4"] == pytest.approx((0.5 + math.sqrt(3 / 16)) / 2)
    slow = [slow_majority(prompt.votes, prompt.numbers["reward"], 4) for prompt in prompts]
    assert slow[0] > 0.5 > 0.25 > slow[1], "right where most say 4, wrong where most say 1"
    assert found["val-core/sums/acc/maj@4/mean"] == pytest.approx(np.mean(slow), abs=0.03)
    assert all(f"val-aux/{name.partition('/')[2]}/stderr" in found for name in found if not name.endswith("stderr"))


def test_a_majority_needs_the_votes_of_all_answers_and_passing_needs_shares() -> None:
    found = set_metrics("sums", [Answers({"reward": [0.5, 1.0]}, ["4", None])], 2)
    assert not any("maj@" in name or "pass@" in name for name in found)
    assert found["val-core/sums/acc/best@2/mean"] == pytest.approx(0.75 * 1.0 + 0.25 * 0.5)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_is_the_mean_of_all_draws(k: int) -> None:
    numbers = np.array([0.2, -1.0, 0.7, 0.2])
    slow = np.mean([max(draw) for draw in product(numbers, repeat=k)])
    assert expected_best(numbers, k) == pytest.approx(slow)


def slow_majority(votes: Sequence[str | None], numbers: Sequence[float], k: int) -> float:
    value, each = dict(zip(votes, numbers, strict=True)), []
    for draw in product(votes, repeat=k):
        most = max(draw.count(vote) for vote in draw)
        each.append(np.mean([value[vote] for vote in set(draw) if draw.count(vote) == most]))
    return float(np.mean(each))


def test_sizes_are_verls() -> None:
    assert [sizes(n) for n in (2, 3, 8, 12)] == [[2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


LOOKS = 20


def series(rng: np.random.Generator, *, prompts: int = 256, kept: float = 1.0, fooled_from: int = LOOKS + 1):
    """(score, audit) of each prompt, evaluation after evaluation: answers get right more and more often.

    The audit sees a right answer as such nine times of ten.  `kept`: of newly right answers this share is right for
    the audit.  From `fooled_from` on nine of ten answers exploit the score, which are wrong for the audit.
    """
    skill = rng.beta(2, 3, prompts)
    first = rng.random(prompts) < skill
    for look in range(LOOKS + 1):
        grown = 1 - (1 - skill) * 0.9**look
        right = first if look == 0 else rng.random(prompts) < grown
        is_real = rng.random(prompts) < np.where(right, 1 - (1 - kept) * (1 - skill / grown), 1)
        audit = np.where(right & is_real, rng.random(prompts) < 0.9, rng.random(prompts) < 0.1)
        score = right.astype(float)
        if look >= fooled_from:
            fooled = rng.random(prompts) < 0.9
            score, audit = np.where(fooled, 1.0, score), np.where(fooled, 0.0, audit)
        yield {str(at): pair for at, pair in enumerate(zip(score.tolist(), audit.astype(float).tolist(), strict=True))}


def alarms(seed: int, **how: float) -> list[int]:
    audit, rng = Audit(), np.random.default_rng(seed)
    return [look for look, found in enumerate(series(rng, **how)) if audit.look(found).get("audit/parted")]


@pytest.mark.parametrize("seed", range(10))
def test_it_is_silent_while_the_audit_rises_with_the_score(seed: int) -> None:
    assert alarms(seed) == []


@pytest.mark.parametrize("seed", range(10))
def test_it_speaks_at_the_first_evaluation_of_an_exploit(seed: int) -> None:
    assert alarms(seed, fooled_from=8) == list(range(8, LOOKS + 1))


def test_at_the_border_of_half_the_gain_false_alarms_are_as_rare_as_stated() -> None:
    """The audit gains half of what was promised: of 400 runs of 20 looks about 4 may speak."""
    rng, spoken = np.random.default_rng(5), 0
    for _ in range(400):
        audit, (score, noise) = Audit(), rng.normal(size=(2, 100))
        audit.look({str(at): (score[at], score[at] + 0.1 * noise[at]) for at in range(100)})
        for _ in range(20):
            x, y = 1 + rng.normal(size=(2, 100))
            pairs = np.stack([score + x, score + 0.1 * noise + 0.5 * y], axis=1)
            found = audit.look({str(at): tuple(pair) for at, pair in enumerate(pairs.tolist())})
            if found["audit/parted"]:
                spoken += 1
                break
    assert spoken <= 400 * ALARMS + 3 * math.sqrt(400 * ALARMS)


def test_a_reference_needs_a_clear_slope_and_thirty_prompts() -> None:
    audit = Audit()
    unclear = {str(at): (float(at % 2), float(at // 2 % 2)) for at in range(100)}
    assert audit.look(unclear) == {} == audit.look({"0": (1.0, 1.0)})
    clear = {str(at): (float(at % 2), float(at % 2)) for at in range(100)}
    assert audit.look(clear) == {}, "this is the reference"
    found = audit.look({uid: (1.0, audited) for uid, (_, audited) in clear.items()})
    assert (found["audit/score_gain"], found["audit/gain"], found["audit/promised_gain"]) == (0.5, 0.0, 0.5)
    assert found["audit/parted"] == 1.0
    assert "risen by 0.5 and the held-out reward.audit has risen by 0, where 0.5 went with it" in sentence(found)
    assert sentence({}) == sentence({**found, "audit/parted": 0.0}) == ""


def test_the_end_of_a_run_says_what_is_known_of_its_audit() -> None:
    gains = {"audit/score_gain": 0.5, "audit/gain": -0.25, "audit/promised_gain": 0.4, "audit/parted": 0.0}
    moved = (
        "since the first evaluation the trained score has risen by 0.5 and the held-out reward.audit has fallen by "
        "0.25, where 0.4 went with it at the start"
    )
    assert outcome("strict", gains, 0, 40) == f"reward.audit=strict: {moved}: the two have not parted"
    parted = outcome("strict", gains | {"audit/parted": 1.0}, 3, 40)
    assert parted == f"reward.audit=strict: {moved}: the policy may exploit reward.fn; it failed on 3 of 40 answers"
    failed = "reward.audit=strict: it failed on all 40 answers of the last evaluation; logs/collector.log says why"
    assert outcome("strict", {}, 40, 40) == failed
    assert outcome("strict", gains, 40, 40) == f"{failed}; before that, {moved}"
    unknown = "reward.audit=strict: nothing is concluded: two evaluations with 30 audited prompts were not compared"
    assert outcome("strict", {}, 0, 0) == unknown


def test_the_last_comparison_is_kept_while_nothing_can_be_compared() -> None:
    audit = Audit()
    clear = {str(at): (float(at % 2), float(at % 2)) for at in range(30)}
    assert audit.look(clear) == audit.last == {}
    found = audit.look(clear)
    assert audit.look({}) == {} and audit.last == found and found["audit/parted"] == 0.0


def test_the_slope_by_hand() -> None:
    slope, error = slope_of(np.array([[0.0, 0.0], [0.0, 2.0], [2.0, 3.0], [2.0, 5.0]]))
    assert slope == 1.5  # from a mean of 1 to one of 4, over a distance of 2
    assert error == pytest.approx(math.sqrt(4 * (1 * 1) ** 2) / 4)  # residuals -1, 1, -1, 1; x is 1 away from its mean
    assert slope_of(np.ones((3, 2))) == (0.0, math.inf)


def test_a_run_says_so_on_the_console_and_in_its_folder_and_again_after_a_resume(tmp_path) -> None:
    def trackers(resume_step: int | None) -> Trackers:
        return make_trackers(["jsonl"], tmp_path, "megarl", "try", {}, 10, resume_step=resume_step, console=console)

    console = Console(file=io.StringIO(), width=80)
    parted = {"audit/score_gain": 0.5, "audit/gain": 0.0, "audit/promised_gain": 0.5, "audit/parted": 1.0}
    trackers(None).log(4, parted)
    assert console.file.getvalue().startswith("advice at step 4: audit_parts: since the first evaluation the trained ")
    (found,) = read_lines(tmp_path / "advice.jsonl")
    assert found["step"] == 4 and found["advice"] == sentence(parted)
    trackers(4)
    assert not list(read_lines(tmp_path / "advice.jsonl")), "the evaluation after step 4 is made again"
