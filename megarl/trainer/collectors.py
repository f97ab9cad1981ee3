"""Makes the collectors of a run, and the agents and rewards that run in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from megarl.agents.episodes import AgentSettings, Episodes
from megarl.agents.load import absolute_address, load_episode
from megarl.agents.process import AgentProgram
from megarl.agents.tool_calls.forms import chosen
from megarl.config import Config
from megarl.config.names import REWARDS_OF_CODE
from megarl.config.settings import show
from megarl.config.validate.rewards import names_of, trained_names
from megarl.data.chat import load_tokenizer
from megarl.data.template import ChatTemplate
from megarl.metrics.trackers.console import warn
from megarl.rewards.scorer import Rewards, RewardSettings
from megarl.rewards.services.judge import Judge, RewardModel, ScoredOnRanks
from megarl.rewards.services.limit import Limit
from megarl.rewards.services.service import api_key
from megarl.rewards.surroundings import Surroundings, check_sandbox
from megarl.rollout.collect import Completions, MakeGenerator
from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.trainer.build import model_folder, num_token_ids, plugins

SERVERS_PER_COLLECTOR = 8


def make_collectors(
    config: Config,
    urls: Sequence[str],
    token: str,
    generation: GenerationSettings,
    reward_url: str | None = None,
) -> Collectors:
    """The collectors of a run, started.  `generation`: see generation_settings.  `reward_url`: see make_rewards."""
    rollout = config.rollout
    servers = max(len(urls), len(rollout.urls) or rollout.num_servers)
    count = min(len(urls), rollout.num_collectors or -(-len(urls) // SERVERS_PER_COLLECTOR))
    in_flight = rollout.max_in_flight or servers * rollout.max_running_requests
    settings = CollectorSettings(
        tuple(urls),
        token,
        model_folder(config.model.tokenizer_path),
        replace(generation, max_in_flight=-(-in_flight // count)),
        make_rewards(config, count, reward_url=reward_url, token=token),
        config.trainer.run_dir / "logs" / "collector.log",
        make_generator(config, count),
    )
    joined_slots = 0 if rollout.max_in_flight else rollout.max_running_requests
    return Collectors(settings, num_collectors=count, joined_slots=joined_slots, warn=warn)


def generation_settings(config: Config) -> GenerationSettings:
    """What the configuration alone says of requests; servers have to say the rest."""
    rollout = config.rollout
    return GenerationSettings(
        timeout_s=rollout.request_timeout_s,
        piece_tokens=rollout.piece_tokens,
        joins=rollout.engine == "hf",  # in a request of several SGLang fails them all together
        num_ids=num_token_ids(config),
        slow_factor=rollout.slow_factor,
    )


def make_generator(config: Config, num_collectors: int) -> MakeGenerator:
    """The generator of the samples of one of so many collectors, which share the processes of agents.  Can be pickled.

    Raises ValueError for a variable that is not set.
    """
    agent, rollout = config.agent, config.rollout
    if not config.has_agents:
        return partial(Completions, special_tokens=config.reward.special_tokens)
    assert agent.max_tokens is not None, "it is resolved"
    environment = variables("agent.environment", agent.environment)
    settings = AgentSettings(
        job_of(config),
        history=agent.history,
        tool_parser=agent.tool_parser,
        max_turns=agent.max_turns,
        max_tokens=agent.max_tokens,
        timeout_s=agent.timeout_s,
        num_processes=-(-agent.num_processes // num_collectors),
        on_error=agent.on_error,
        over_limit_reward=agent.over_limit_reward,
        ignore=tuple(agent.ignore),
        surroundings=Surroundings(agent.memory_mb, agent.file_mb, environment=environment),
        training=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
        system_prompt=config.data.system_prompt,
        template=config.data.apply_chat_template_kwargs,
        special_tokens=config.reward.special_tokens,
    )
    return partial(Episodes, settings)


def job_of(config: Config) -> AgentProgram:
    """The agent of a run, with absolute paths, which are valid in any working directory."""
    fn = None if config.agent.fn is None else absolute_address(config.agent.fn)
    return AgentProgram(fn, tuple(config.agent.command), config.agent.args)


def check_agents(config: Config) -> str:
    """What the chat template does not allow, and where it writes calls otherwise than they are read; "" if nothing.

    Raises ValueError for an agent that does not load, a program that does not exist, a variable that is not set, or a
    tokenizer without chat template.
    """
    agent = config.agent
    if not config.has_agents:
        return ""
    variables("agent.environment", agent.environment)
    if agent.fn is not None:
        load_episode(agent.fn, agent.args)
    elif shutil.which(agent.command[0]) is None:
        raise ValueError(f"agent.command={show(agent.command)}: there is no program {agent.command[0]}")
    tokenizer = load_tokenizer(model_folder(config.model.tokenizer_path))
    template = ChatTemplate(tokenizer, settings=config.data.apply_chat_template_kwargs)
    reasons = (template.check(with_tools=tools) for tools in (False, agent.tool_parser != "none"))
    reason = next(filter(None, reasons), None)
    sentences = [chosen(agent.tool_parser, template)[1]]
    if reason is not None and agent.history == "generated":
        sentences.append(
            f"agent.history=generated: {reason}; such prompts are rendered as a whole, and begin rows of their own"
        )
    return "\n".join(filter(None, sentences))


def surroundings(config: Config) -> Surroundings:
    """What surrounds rewards in their processes.  Raises ValueError for a variable that is not set, or no sandbox."""
    reward = config.reward
    environment = variables("reward.environment", reward.environment)
    if any(fn in REWARDS_OF_CODE for fn in names_of(config)):
        check_sandbox(reward.sandbox)
    return Surroundings(reward.memory_mb, reward.file_mb, reward.sandbox, environment)


def variables(key: str, names: Sequence[str]) -> dict[str, str]:
    """Variables of this environment.  Raises ValueError for one that is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{key}=[{missing[0]}]: this environment has no variable of that name")
    return {name: os.environ[name] for name in names}


def reward_settings(config: Config, num_collectors: int) -> RewardSettings:
    """The reward settings of one of `num_collectors` collectors."""
    reward = config.reward
    return RewardSettings(
        weights=reward.weights,
        by_data_source=reward.by_data_source,
        audit=reward.audit,
        num_workers=-(-reward.num_workers // num_collectors),
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        plugins=plugins(config),
    )


def make_rewards(
    config: Config, num_collectors: int, *, reward_url: str | None = None, token: str = ""
) -> Callable[..., Rewards]:
    """Makes the rewards of one of so many collectors, which share workers and limits.  It can be pickled.

    `reward_url`: of the reward model's server that the run has started, which has the key `token`.
    """
    reward = config.reward
    limit = partial(
        Limit,
        -(-reward.concurrency // num_collectors),
        None if reward.per_minute is None else reward.per_minute / num_collectors,
        reward.retries,
        reward.request_timeout_s,
        config.rollout.start_timeout_s,
    )
    # Keys are read here: collectors do not have the run's environment.
    services: dict[str, Callable[..., Judge | RewardModel | ScoredOnRanks]] = {}
    if "judge" in names_of(config):
        settings = asdict(reward.judge)
        key = api_key("reward.judge.api_key_env", settings.pop("api_key_env"))
        services["judge"] = partial(Judge, **settings, key=key)
    if config.scores_on_ranks:
        services["model"] = partial(ScoredOnRanks, is_alone=len(trained_names(config)) == 1)
    elif "model" in names_of(config):
        folder = model_folder(reward.model.path, "reward.model.path")
        key = token if reward_url else api_key("reward.model.api_key_env", reward.model.api_key_env)
        services["model"] = partial(
            RewardModel,
            folder,
            reward_url or reward.model.url or "",
            key=key,
            system_prompt=config.data.system_prompt,
            template=config.data.apply_chat_template_kwargs,
        )
    return partial(
        Rewards,
        tuple(reward.fn),
        settings=reward_settings(config, num_collectors),
        make_limit=limit,
        services=services,
        surroundings=surroundings(config),
    )
