"""The verdict of a run that repeats a published one: its accuracy, with its error, beside the published figures.

Both accuracies are shares of right answers on finite numbers of questions, n here and m in the publication.  If the
same policy had been behind both, they would differ with the standard error sqrt(p (1 - p) (1 / n + 1 / m)).  A figure
counts as reproduced within 1.96 of these errors around the published p: 95 of 100 exact repetitions fall into this
band.  The spread between seeds is not in it, because one published run does not tell it; so a run just outside is no
proof of a fault, but it is not reproduced either.  A verdict says which rewards graded the answers: another grading, or
another question, would compare unlike things.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Z = 1.96  # of 95 %


def binomial_error(share: float, questions: int) -> float:
    """sqrt(p (1 - p) / n), the standard error of a share of right answers."""
    return math.sqrt(share * (1 - share) / questions)


def band(published: float, of_questions: int, questions: int) -> tuple[float, float]:
    """The accuracies on `questions` questions that reproduce one published for `of_questions`.

    >>> [round(100 * edge, 1) for edge in band(0.567, 1319, 1319)]
    [52.9, 60.5]
    """
    half = Z * math.hypot(binomial_error(published, of_questions), binomial_error(published, questions))
    return max(0.0, published - half), min(1.0, published + half)


def verdict(
    found: Mapping[str, float], published: Mapping[str, float], *, questions: int, of_questions: int, grading: str
) -> dict[str, Any]:
    """`found`, `published`: accuracies "before" and "after", where they are known; `grading`: the rewards of `found`.

    Returns {"questions", "grading", "reproduced", "before"/"after": {"accuracy", "stderr", "published", "band",
    "reproduced"}} for the figures that both have; reproduced is None if there is none.
    """
    out: dict[str, Any] = {"questions": questions, "grading": grading, "reproduced": None}
    for name in [name for name in ("before", "after") if name in found and name in published]:
        low, high = band(published[name], of_questions, questions)
        is_in = low <= found[name] <= high
        out[name] = {
            "accuracy": found[name],
            "stderr": binomial_error(found[name], questions),
            "published": published[name],
            "band": [low, high],
            "reproduced": is_in,
        }
        out["reproduced"] = is_in if out["reproduced"] is None else out["reproduced"] and is_in
    return out


def sentences(found: Mapping[str, Any]) -> list[str]:
    """A verdict for the console, in percent.

    >>> a, p = {"after": 0.5}, {"after": 0.567}
    >>> for line in sentences(verdict(a, p, questions=1319, of_questions=1319, grading="gsm8k_strict")):
    ...     print(line)
    after: 50.0 ± 1.4 on 1319 questions; published 56.7, reproduced from 52.9 to 60.5: below the band
    verdict: not reproduced, with answers graded by gsm8k_strict
    """
    lines = []
    for name in [name for name in ("before", "after") if name in found]:
        of, (low, high) = found[name], found[name]["band"]
        place = "in the band" if of["reproduced"] else "below the band" if of["accuracy"] < low else "above the band"
        figures = f"{100 * of['accuracy']:.1f} ± {100 * of['stderr']:.1f} on {found['questions']} questions"
        known = f"published {100 * of['published']:.1f}, reproduced from {100 * low:.1f} to {100 * high:.1f}"
        lines.append(f"{name}: {figures}; {known}: {place}")
    if found["reproduced"] is None:
        return ["verdict: none, because no accuracy of this run can be compared with a published one"]
    said = "reproduced" if found["reproduced"] else "not reproduced"
    return [*lines, f"verdict: {said}, with answers graded by {found['grading']}"]
