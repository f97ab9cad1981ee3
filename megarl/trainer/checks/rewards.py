"""Whether the rewards of a run can work, and whether all rows of its data have what they read."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from megarl.agents.process import fields_of
from megarl.config import Config
from megarl.config.names import AUTO
from megarl.config.settings import show
from megarl.config.validate.models import config_of_folder
from megarl.config.validate.rewards import names_of
from megarl.data.chat import load_tokenizer
from megarl.data.fields import Question
from megarl.data.prompts import Prompts
from megarl.metrics.computing.audit import MIN_PROMPTS
from megarl.metrics.trackers.console import warn
from megarl.rewards import REWARDS, SERVICES, load_reward
from megarl.rewards.functions.auto import EXACT, NEAREST, reward_of
from megarl.rewards.services.service import api_key
from megarl.samples.sample import Prompt
from megarl.trainer.build import model_folder
from megarl.trainer.collectors import surroundings
from megarl.weights.hf.folder import open_hf

HEAD = "score.weight"  # of a reward model
TRUTH = "ground_truth"
_SOURCES = 3  # that are named


class Need(Enum):
    """Whether a reward reads the ground truth of a row."""

    NEVER = 0
    PERHAPS = 1
    BY_SIGNATURE = 2  # it takes it, and has no default for a row without


def check_rewards(config: Config) -> None:
    """Raises ValueError for a user's function that does not load, a variable that is not set, and without a sandbox."""
    surroundings(config)
    for fn in names_of(config):
        if fn in SERVICES:
            api_key(f"reward.{fn}.api_key_env", getattr(config.reward, fn).api_key_env)
        elif not isinstance(REWARDS.get(fn), str):  # from a file or a plug-in
            load_reward(fn)


def check_reward_model(config: Config, *, wants_greedy: bool) -> None:
    """Raises ValueError for a model that has no head of one score or another vocabulary than the policy.

    It gets the policy's tokens, so both must mean the same by each of them.  `wants_greedy`: the estimator compares
    with the reward of a greedy completion.
    """
    if not config.scores_on_ranks:
        return
    key = f"reward.model.path={config.reward.model.path}"
    folder = model_folder(config.reward.model.path, "reward.model.path")
    hidden = config_of_folder(folder).get("hidden_size")
    with open_hf(folder) as weights:
        shape = weights.shapes.get(HEAD)
    if shape != (1, hidden):
        found = f"has {HEAD} of the shape {list(shape)}" if shape else f"has no {HEAD}"
        raise ValueError(f"{key}: it {found}; expected a model for sequence classification with one label")
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (model_folder(config.model.tokenizer_path), folder))
    if ours != theirs:
        raise ValueError(
            f"{key}: its tokenizer has other tokens than that of {config.model.tokenizer_path}, which it needs for "
            "reward.model.engine=megatron; expected a model of the same tokenizer, or reward.model.engine=server"
        )
    if wants_greedy:
        estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        raise ValueError(
            f"{estimator}: it compares with a greedy completion, which reward.model.engine=megatron does not score; "
            "expected reward.model.engine=server"
        )


def check_truths(config: Config, read: Sequence[Prompts]) -> None:
    """Warn once of rows without ground truth, of those whose reward may read it.

    Raises ValueError if no row of a file has one and a reward takes it by its signature: all would score alike; and for
    a field that agent.command names and a row has not.
    """
    if config.has_agents:  # their own functions score
        _check_words(config.agent.command, read)
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


def _check_words(command: Sequence[str], read: Sequence[Prompts]) -> None:
    """Raises ValueError if a word of agent.command has the name of a field in braces that a row has not."""
    wanted = fields_of(command)
    for question in (question for prompts in read for question in prompts.questions):
        for name in sorted(wanted - question.extra.keys()):
            raise ValueError(
                f"agent.command={show(command)}: {question.where} has no field {name}; expected prompt, uid, "
                f"ground_truth, data_source or one of {sorted(question.extra)}, or {{{{{name}}}}} for the word itself"
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
