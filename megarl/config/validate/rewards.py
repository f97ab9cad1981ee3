"""Checks of rewards, their names, weights and services, and of agents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from os.path import expanduser, isfile

from megarl.arch.layout import numbers_of
from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate.models import config_of_folder

_ENGINE = "reward.model.engine"
_ON_RANKS = f"{_ENGINE}={names.MEGATRON}"


def names_of(config: Config) -> dict[str, str]:
    """The rewards of a run, each with the short name under which it is weighted and logged; the audit too."""
    audit = config.reward.audit
    return trained_names(config) | ({} if audit is None else {audit: audit.rpartition(":")[2]})


def trained_names(config: Config) -> dict[str, str]:
    """Those of `names_of` that are trained."""
    reward = config.reward
    return {fn: fn.rpartition(":")[2] for fn in [*reward.fn, *reward.by_data_source.values()]}


def starts_reward_server(config: Config) -> bool:
    """Whether the run needs a reward model's server of its own."""
    return "model" in names_of(config) and config.reward.model.url is None and not config.scores_on_ranks


def advice(config: Config) -> Iterator[str]:
    """One sentence for each combination that is allowed but may surprise."""
    if config.scores_on_ranks and config.data.val_files:
        yield f"{_ON_RANKS}: it scores what is trained on only, so val/score leaves it out"


def contradictions(config: Config, command: str) -> Iterator[str]:
    """One sentence for each fault."""
    reward, short = config.reward, names_of(config)
    for fn in reward.fn:
        yield from _no_such(config, "reward.fn", fn)
    for source, fn in reward.by_data_source.items():
        yield from _no_such(config, f"reward.by_data_source.{source}", fn)
    if reward.audit is not None:
        yield from _no_such(config, "reward.audit", reward.audit)
    if reward.audit in trained_names(config):
        yield f"reward.audit={reward.audit}: expected a reward that is not trained, and reward.fn has this one"
    if reward.audit == "model" and reward.model.engine == names.MEGATRON:
        yield f"reward.audit=model: {_ON_RANKS} scores only what is trained; expected {_ENGINE}=server"
    if len(set(reward.fn)) < len(reward.fn):
        yield f"reward.fn={show(reward.fn)}: expected each reward once; reward.weights says how much it counts"
    for (fn, name), (other, its) in combinations(short.items(), 2):
        if its == name:
            yield f"reward.fn: {fn} and {other} are both called {name} in the log; expected functions of two names"
    trained = trained_names(config).values()
    unknown = [name for name in reward.weights if name not in trained]
    if unknown:
        yield f"reward.weights.{unknown[0]}: expected one of the rewards {', '.join(trained)}"

    if "judge" in short:
        yield from _judge(config)
    if "model" in short:
        yield from _model(config)
    if config.scores_on_ranks:
        yield from _on_ranks(config, command)


def _judge(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    for key, value in (("url", judge.url), ("model", judge.model), ("prompt", judge.prompt)):
        if not value:
            yield f"reward.judge.{key}={show(value)}: the reward judge needs it"
    yield from _url("reward.judge.url", judge.url)
    if judge.prompt and "{answer}" not in judge.prompt:
        yield f"reward.judge.prompt={judge.prompt}: expected {{answer}} in it, else the judge does not see the answer"
    wanted = "expected json:FIELD, or a regular expression with one group, which holds the number"
    try:
        is_fine = (
            len(judge.read) > len("json:") if judge.read.startswith("json:") else re.compile(judge.read).groups == 1
        )
    except re.error as error:
        yield f"reward.judge.read={judge.read}: {wanted} ({error})"
    else:
        if not is_fine:
            yield f"reward.judge.read={judge.read}: {wanted}"


def _model(config: Config) -> Iterator[str]:
    model = config.reward.model
    if not model.path:
        yield f"reward.model.path={model.path}: the reward model needs it, for its tokenizer at least"
    yield from _url("reward.model.url", model.url)


def _on_ranks(config: Config, command: str) -> Iterator[str]:
    """A model on ranks scores in the step, after all that looks at rewards before it."""
    wanted = f"expected {_ENGINE}=server"
    if command == "evaluate":
        yield f"{_ON_RANKS}: `megarl evaluate` has no ranks; {wanted}"
    if config.algorithm.filter_groups.enable:
        yield f"{_ON_RANKS}: algorithm.filter_groups compares rewards before the ranks score; {wanted}"
    if config.data.val_files and config.reward.fn == ["model"] and not config.reward.by_data_source:
        yield f"{_ON_RANKS}: there is no other reward to evaluate with; {wanted}, another reward, or data.val_files=[]"
    known = numbers_of(config_of_folder(config.reward.model.path)).max_position_embeddings
    keys, longest = config.longest
    if known is not None and longest > known:
        said = f"{keys} is {longest}"
        yield f"reward.model.path={config.reward.model.path}: it knows {known} positions, and {said}"


def _url(key: str, url: str | None) -> Iterator[str]:
    if url and not url.startswith(("http://", "https://")):
        yield f"{key}={url}: expected http://HOST:PORT or https://HOST"


def _no_such(config: Config, key: str, fn: str) -> Iterator[str]:
    known = (*names.REWARDS, *names.REWARD_SERVICES)
    if ":" not in fn and fn not in known and not config.algorithm.plugins:
        wanted = f"expected one of {', '.join(known)}, path/to/file.py:function, or a name that a file in "
        yield f"{key}={fn}: {wanted}algorithm.plugins registers"
    yield from missing_file(key, fn)


def missing_file(key: str, function: str) -> Iterator[str]:
    """One sentence if a function, such as path/to/file.py:function, is in a file that does not exist."""
    place = function.rpartition(":")[0]
    if place.endswith(".py") and not isfile(expanduser(place)):
        yield f"{key}={function}: expected a file that exists, as path/to/file.py:function"


def of_agents(config: Config) -> Iterator[str]:
    """One sentence for each fault."""
    agent = config.agent
    if not config.has_agents:
        return
    if agent.fn is not None and agent.command:
        yield f"agent.command={show(agent.command)}: expected [], because agent.fn={agent.fn} is the agent"
    if agent.fn is not None:
        yield from _no_agent(agent.fn)
    assert agent.max_tokens is not None, "it is resolved"
    if agent.max_tokens <= config.data.max_prompt_length:
        longest = f"data.max_prompt_length={config.data.max_prompt_length}"
        yield f"agent.max_tokens={agent.max_tokens}: expected more than {longest}, which an episode begins with"
    if config.data.overlong_prompts not in ("error", "filter"):
        wanted = "expected error or filter, because agents get the messages of a prompt, not its tokens"
        yield f"data.overlong_prompts={config.data.overlong_prompts}: {wanted}"
    if config.algorithm.overlong_buffer.enable:
        yield "algorithm.overlong_buffer.enable=true: expected false, because episodes have several answers"
    if config.trainer.check_export:
        yield "trainer.check_export=true: expected false, because transformers' generation runs no agents"


def _no_agent(fn: str) -> Iterator[str]:
    prefix, colon, address = fn.partition(":")
    if prefix in names.AGENT_ADAPTERS:
        return
    if not colon or not prefix or not address:
        known = "".join(f", {name}:..." for name in names.AGENT_ADAPTERS)
        yield f"agent.fn={fn}: expected path/to/file.py:function, package.module:function{known}"
    else:
        yield from missing_file("agent.fn", fn)
