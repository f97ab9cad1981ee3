"""Statistics of an evaluation: mean@N, best@N, worst@N, maj@N and pass@K of each set, each with its standard error.

Names and definitions are those of verl (`val-core/SET/VARIABLE/mean@N`), but nothing is estimated by resampling that
has a closed form.  A standard error is that of a mean over prompts: the answers of one prompt depend on each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.samples.sample import AUDIT, AUDIT_ERROR, OF_AGENTS, REWARD_ERROR

CORE, AUX = "val-core", "val-aux"
OF_EVALUATION = ("val/", f"{CORE}/", f"{AUX}/", "audit/")  # what the metrics of an evaluation begin with
STDERR = "stderr"
REWARD, ACC = "reward", "acc"  # the reward; the number that says, in verl's rewards, whether an answer is right
CLIP_RATIO, CUT_OFF = "val/clip_ratio", "evaluation_cut_off"
_MOST_CUT = 0.1  # of the answers, before their scores depend on the limit
_DRAWS, _SEED = 1000, 42  # of the answers that vote, as in verl


@dataclass(frozen=True)
class Answers:
    """The answers to one prompt.  Example: Answers({"reward": [1.0, 0.0]}, ["46", "37"])."""

    numbers: Mapping[str, Sequence[float]]  # variable -> a number for each answer
    votes: Sequence[str | None] = ()  # what each answer says in the end; None: not known


@dataclass(frozen=True)
class Mean:
    """A mean over prompts and its standard error, which is nan for a single prompt."""

    value: float
    stderr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """sqrt(sum (x - mean)^2 / (P - 1) / P); of shares 0 and 1 that is the binomial error."""
        wide = np.asarray(values, dtype=np.float64)
        error = wide.std(ddof=1) / math.sqrt(len(wide)) if len(wide) > 1 else math.nan
        return cls(float(wide.mean()), float(error))


def cut_off(metrics: Mapping[str, float]) -> str | None:
    """A sentence if more than a tenth of the answers of an evaluation were cut off at the limit."""
    if (share := metrics.get(CLIP_RATIO, 0.0)) <= _MOST_CUT:
        return None
    return (
        f"{CUT_OFF}: {share:.0%} of the evaluation's answers are cut off at the limit ({CLIP_RATIO}), so its scores "
        "depend on the limit, too; raise rollout.val_kwargs.max_response_length (of agents agent.max_tokens and "
        "agent.max_turns)"
    )


def set_metrics(name: str, prompts: Sequence[Answers], n: int) -> dict[str, float]:
    """The metrics of one set, of prompts with up to `n` answers each.

    The core ones are mean@n, best@n/mean, maj@n/mean and pass@n of `acc`, or of the reward if no answer has `acc`;
    all others, and the standard errors, are auxiliary.  As in verl, a reward that is a number alone is the `acc`, too.
    """
    if all(variable == REWARD or _is_ours(variable) for prompt in prompts for variable in prompt.numbers):
        prompts = [_with_acc(prompt) for prompt in prompts]
    variables = sorted({variable for prompt in prompts for variable in prompt.numbers})
    core = ACC if ACC in variables else REWARD
    out: dict[str, float] = {}
    for variable in variables:
        for metric, mean in _variable(variable, prompts, n).items():
            kind, _, size = metric.partition("/")[0].partition("@")
            is_core = variable == core and kind in ("mean", "best", "maj", "pass") and int(size) == n
            out[f"{CORE if is_core else AUX}/{name}/{variable}/{metric}"] = mean.value
            if math.isfinite(mean.stderr):
                out[f"{AUX}/{name}/{variable}/{metric}/{STDERR}"] = mean.stderr
    return out


def _is_ours(variable: str) -> bool:
    """Whether a number beside the reward's is one of the run, and not one that the reward returned."""
    return variable.startswith(OF_AGENTS) or variable in (AUDIT, AUDIT_ERROR, REWARD_ERROR)


def _with_acc(prompt: Answers) -> Answers:
    numbers = prompt.numbers
    return Answers({**numbers, ACC: numbers[REWARD]}, prompt.votes) if REWARD in numbers else prompt


def _variable(variable: str, prompts: Sequence[Answers], n: int) -> dict[str, Mean]:
    answered = [prompt for prompt in prompts if prompt.numbers.get(variable)]
    rows = [np.asarray(prompt.numbers[variable], dtype=np.float64) for prompt in answered]
    found = {f"mean@{n}": Mean.of([row.mean() for row in rows])}
    if n == 1:
        return found
    found[f"std@{n}"] = Mean.of([row.std() for row in rows])
    # Without all the votes of a prompt its majority is not known.
    is_voted = all(len(p.votes) == len(p.numbers[variable]) and None not in p.votes for p in answered)
    are_shares = is_share(value for row in rows for value in row)
    for k in sizes(n):
        found[f"best@{k}/mean"] = Mean.of([expected_best(row, k) for row in rows])
        found[f"worst@{k}/mean"] = Mean.of([-expected_best(-row, k) for row in rows])
        if is_voted:
            rng = np.random.default_rng(_SEED)
            found[f"maj@{k}/mean"] = Mean.of(
                [majority(p.votes, row, k, rng) for p, row in zip(answered, rows, strict=True)]
            )
        whole = [row for row in rows if len(row) >= k]
        if are_shares and whole:
            found[f"pass@{k}"] = Mean.of([pass_at(len(row), int(row.sum()), k) for row in whole])
    return found


def is_accuracy(variable: str) -> bool:
    """Whether it says if answers are right: `acc`, or that of one of several rewards.  One that lacks it is not."""
    return variable.rpartition("/")[2] == ACC


def is_share(numbers: Iterable[float]) -> bool:
    """Whether all numbers are 0 or 1, so that their mean is a share of right answers."""
    return all(number in (0.0, 1.0) for number in numbers)


def sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n, as in verl.

    >>> sizes(12)
    [2, 4, 8, 12]
    """
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n]


def expected_best(numbers: np.ndarray, k: int) -> float:
    """The expected largest of k draws, with replacement, from [M] numbers.

    sum_i x_(i) ((i / M)^k - ((i - 1) / M)^k): what verl's best@k estimates by 1,000 draws.
    """
    edges = (np.arange(len(numbers) + 1) / len(numbers)) ** k
    return float(np.sort(numbers) @ np.diff(edges))


def majority(votes: Sequence[str | None], numbers: np.ndarray, k: int, rng: np.random.Generator) -> float:
    """The expected number of the answer that most of k draws, with replacement, agree on; of a tie, the mean.

    By 1,000 draws, as verl's maj@k.
    """
    names = list(Counter(votes))
    of = np.array([names.index(vote) for vote in votes])
    counts = np.bincount(of)
    if len(counts) == 1:
        return float(numbers.mean())
    mean_of = np.bincount(of, weights=numbers) / counts
    drawn = rng.multinomial(k, counts / counts.sum(), size=_DRAWS)
    won = drawn == drawn.max(axis=1, keepdims=True)
    return float(((won * mean_of).sum(axis=1) / won.sum(axis=1)).mean())


def pass_at(n: int, right: int, k: int) -> float:
    """The chance that one of k of n answers, drawn without replacement, is right: 1 - C(n - right, k) / C(n, k).

    The unbiased estimate of Chen et al. 2021, https://arxiv.org/abs/2107.03374.
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
