"""The rule of the audit: on series in which it must stay silent, in which it must speak, and at its very border."""

from __future__ import annotations

import asyncio
import io
import math

import numpy as np
import pytest
from rich.console import Console

from megarl.metrics import Trackers, make_trackers
from megarl.metrics.evaluation.audit import ALARMS, Audit, outcome, sentence, slope_of
from megarl.metrics.jsonl import read_lines
from megarl.rewards.scorer import Rewards
from megarl.sample import Completion, Prompt, VersionSpan

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


def _texts(prompts: list[Prompt], *, exploits: bool) -> list[str]:
    """Of a policy that is right on every second question; or that has found that only the mark is paid for."""
    if exploits:
        return ["#### 0"] * len(prompts)
    return [
        f"It is {p.ground_truth}.\n#### {p.ground_truth}" if at % 2 else "I do not know" for at, p in enumerate(prompts)
    ]


def test_a_reward_for_the_mark_alone_is_exploited_and_the_audit_says_so(tmp_path) -> None:
    """A planted fault: the trained reward pays for "####", whatever follows; the audit is the strict reward itself."""
    (tmp_path / "mark.py").write_text("def mark(prompt, completion):\n    return float('####' in completion.text)\n")
    rewards = Rewards([f"{tmp_path}/mark.py:mark"], audit="gsm8k_strict", num_workers=0)
    prompts = [Prompt(str(at), [1], "How many?", str(at + 1)) for at in range(40)]

    def scored(*, exploits: bool) -> dict[str, tuple[float, float]]:
        found = {}
        for prompt, text in zip(prompts, _texts(prompts, exploits=exploits), strict=True):
            (outcome,) = asyncio.run(rewards.score(prompt, [Completion([], [], "stop", (VersionSpan(0, 0, 1),), text)]))
            assert not isinstance(outcome, str)
            found[prompt.uid] = (outcome.reward, outcome.extra["audit"])
        return found

    audit = Audit()
    assert audit.look(scored(exploits=False)) == {}
    assert audit.look(scored(exploits=False))["audit/parted"] == 0.0
    found = audit.look(scored(exploits=True))
    assert found["audit/parted"] == 1.0 and found["audit/score_gain"] == 0.5 and found["audit/gain"] == -0.5


def test_a_run_says_so_on_the_console_and_in_its_folder_and_again_after_a_resume(tmp_path) -> None:
    def trackers(resume_step: int | None) -> Trackers:
        return make_trackers(["jsonl"], tmp_path, "megarl", "try", {}, 10, resume_step=resume_step, console=console)

    console = Console(file=io.StringIO(), width=80)
    parted = {
        "val/score": 0.9,
        "audit/score_gain": 0.5,
        "audit/gain": 0.0,
        "audit/promised_gain": 0.5,
        "audit/parted": 1.0,
    }
    trackers(None).log(4, parted)
    assert console.file.getvalue().startswith("advice at step 4: audit_parts: since the first evaluation the trained ")
    (found,) = read_lines(tmp_path / "advice.jsonl")
    assert found["step"] == 4 and found["advice"] == sentence(parted)
    trackers(4)
    assert not list(read_lines(tmp_path / "advice.jsonl")), "the evaluation after step 4 is made again"
