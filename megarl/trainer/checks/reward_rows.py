"""Looks at all rows of the data before a run starts: whether they have what its rewards read."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from megarl.config import Config
from megarl.config.names import AUTO
from megarl.config.validate.rewards import names_of
from megarl.data.fields import Question
from megarl.data.prompts import Prompts
from megarl.metrics.evaluation.audit import MIN_PROMPTS
from megarl.metrics.trackers.console import warn
from megarl.rewards import REWARDS, load_reward
from megarl.rewards.functions.auto import EXACT, NEAREST, reward_of
from megarl.sample import Prompt

TRUTH = "ground_truth"
_SOURCES = 3  # that are named


class Need(Enum):
    """Whether a reward reads the ground truth of a row."""

    NEVER = 0
    PERHAPS = 1
    BY_SIGNATURE = 2  # it takes it, and has no default for a row without


def check_truths(config: Config, read: Sequence[Prompts]) -> None:
    """Warn once of rows without ground truth, of those whose reward may read it.

    Raises ValueError if no row of a file has one and a reward takes it by its signature: all would score alike.
    """
    if config.has_agents:  # their own functions score
        return
    needs = {fn: need_of(fn, config) for fn in names_of(config)}
    rows: Counter[tuple[str, str]] = Counter()  # of a file and a reward
    without: dict[tuple[str, str], list[Question]] = {}
    for question in (question for prompts in read for question in prompts.questions):
        for fn in rewards_of(question.data_source, config):
            at = question.where.rpartition(":")[0], fn
            rows[at] += 1
            if question.ground_truth is None and needs[fn] is not Need.NEVER:
                without.setdefault(at, []).append(question)
    key = f"data.ground_truth_key={config.data.ground_truth_key}"
    for (file, fn), found in without.items():
        if len(found) == rows[file, fn] and needs[fn] is Need.BY_SIGNATURE:
            fields = ", ".join(map(repr, found[0].extra)) or "nothing"
            raise ValueError(
                f"{key}: no row of {file} has a ground truth, which reward {fn} takes; expected the name of its field "
                f"(besides the prompt {found[0].where} has {fields}), or a function with {TRUTH}=None if it needs none"
            )
    if without:
        (_, fn), (first, *_) = next(iter(without.items()))
        count, total = len({q.where for found in without.values() for q in found}), sum(map(len, read))
        warn(
            f"{key}: {count} of {total} rows have no ground truth, the first is {first.where}, and reward {fn} may "
            "read it; name its field, or leave these rows out, if their scores are to mean something"
        )


def chosen_rewards(config: Config, rows: Sequence[Question | Prompt]) -> dict[str, int]:
    """How many rows each reward scores that reward.fn=auto chose; {} if it chooses none."""
    chosen = [row for row in rows if not config.has_agents and AUTO in rewards_of(row.data_source, config)]
    return dict(Counter(map(_chosen, chosen)).most_common())


def _chosen(row: Question | Prompt) -> str:
    return reward_of(row.data_source, row.extra, row.ground_truth)


def say_chosen(config: Config, rows: Sequence[Question | Prompt], say: Callable[[str], None]) -> None:
    """Say in a line which rewards reward.fn=auto chose, and why a row may get less than it deserves."""
    if not (chosen := chosen_rewards(config, rows)):
        return
    counts = ", ".join(f"{name} scores {count:,} row{'s' * (count > 1)}" for name, count in chosen.items())
    more = ""
    if EXACT in chosen:
        found = dict.fromkeys(row.data_source for row in rows if _chosen(row) == EXACT)
        sources = ", ".join([repr(source) for source in found][:_SOURCES])
        more = f"; exact pays for the bare ground truth only, as there is no rule for data_source {sources}"
    if any(row.data_source.startswith(NEAREST) for row in rows):
        more += f"; verl scores {NEAREST}* with a function of its own, math is the nearest"
    say(f"reward.fn=auto: by the data source {counts}{more}")


def check_audited(config: Config, num_prompts: int) -> None:
    """Warn of an audit whose evaluation has too few prompts for a conclusion."""
    if (audit := config.reward.audit) and num_prompts < MIN_PROMPTS:
        few = f"the evaluation has {num_prompts} prompts, and the audit compares {MIN_PROMPTS} at least"
        warn(f"reward.audit={audit}: {few}, so it is scored and nothing is concluded")


def rewards_of(data_source: str, config: Config) -> list[str]:
    """The rewards of a row of this source, the audit among them."""
    reward = config.reward
    trained = [reward.by_data_source[data_source]] if data_source in reward.by_data_source else reward.fn
    return [*trained, *([] if reward.audit is None else [reward.audit])]


def need_of(fn: str, config: Config) -> Need:
    """What the signature of a reward says, and whether the file of its function has the word at all."""
    if fn == "model":
        return Need.NEVER
    if fn == "judge":
        return Need.PERHAPS if "{truth}" in (config.reward.judge.prompt or "") else Need.NEVER
    if isinstance(REWARDS.get(fn), str):  # a built-in one
        return Need.PERHAPS
    function = inspect.unwrap(load_reward(fn))
    try:
        parameters = inspect.signature(function).parameters
        if TRUTH in parameters:
            return Need.BY_SIGNATURE if parameters[TRUTH].default is inspect.Parameter.empty else Need.PERHAPS
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if "solution_str" in parameters and not takes_any:
            return Need.NEVER
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
        return Need.PERHAPS if file is None or TRUTH in Path(file).read_text(errors="replace") else Need.NEVER
    except (TypeError, ValueError, OSError):  # built in C: nothing is known
        return Need.PERHAPS
