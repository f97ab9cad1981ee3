"""Makes the collectors of a run, the agents and rewards that run in them, and the server of a reward model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from megarl import sandbox
from megarl.agents.episodes import Episodes, Settings
from megarl.agents.load import absolute_address, load_episode
from megarl.agents.process import Job
from megarl.config import Config
from megarl.config.names import REWARDS_OF_CODE
from megarl.config.settings import show
from megarl.config.validate.rewards import names_of, starts_reward_server, trained_names
from megarl.data.chat import load_tokenizer
from megarl.data.template import ChatTemplate
from megarl.metrics.trackers.console import warn
from megarl.rewards import REWARDS, SERVICES, load_reward
from megarl.rewards.scorer import Rewards
from megarl.rewards.services.judge import Judge
from megarl.rewards.services.limit import Limit
from megarl.rewards.services.model import RewardModel, ScoredOnRanks
from megarl.rewards.services.service import api_key
from megarl.rewards.surroundings import Surroundings
from megarl.rollout.collect import Completions, MakeWriter
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import EngineColumn
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import ServerDied, Servers, State
from megarl.trainer.build import model_folder, num_token_ids, plugins, supervision

SERVERS_PER_COLLECTOR = 8


def make_collectors(
    config: Config,
    urls: Sequence[str],
    token: str,
    *,
    reward_url: str | None = None,
    fenced: bool = False,
    reports_unfit: bool = False,
    salted: bool = False,
    dp_ranks: int = 1,
    columns: Sequence[EngineColumn] = (),
) -> Collectors:
    """The collectors of a run, started; `fenced`: they send requests to a server only once that is trusted.

    `reports_unfit`: they take servers that hang, fail or are slow out of service, and somebody starts these again.
    `reward_url`: see make_rewards.  `salted`: all servers know salts of their prefix caches, and need them because they
    keep their KV in a push.  `dp_ranks`: data-parallel ranks of each server.  `columns`: what is to travel with the
    tokens of every completion.
    """
    rollout = config.rollout
    servers = max(len(urls), len(rollout.urls) or rollout.num_servers)
    count = min(len(urls), rollout.num_collectors or -(-len(urls) // SERVERS_PER_COLLECTOR))
    in_flight = rollout.max_in_flight or servers * rollout.max_running_requests
    return Collectors(
        urls=urls,
        token=token,
        tokenizer_path=model_folder(config.model.tokenizer_path),
        make_scorer=make_rewards(config, count, reward_url=reward_url, token=token),
        make_writer=make_writer(config, count),
        num_collectors=count,
        piece_tokens=rollout.piece_tokens,
        timeout_s=rollout.request_timeout_s,
        max_in_flight=-(-in_flight // count),
        log_path=config.trainer.run_dir / "logs" / "collector.log",
        fenced=fenced,
        salted=salted,
        dp_ranks=dp_ranks,
        joins=rollout.engine == "hf",  # in a request of several SGLang fails them all together
        columns=columns,
        num_ids=num_token_ids(config),
        reports_unfit=reports_unfit,
        slow_factor=rollout.slow_factor,
        joined_slots=0 if rollout.max_in_flight else rollout.max_running_requests,
        warn=warn,
    )


def make_writer(config: Config, num_collectors: int) -> MakeWriter:
    """What writes the samples of one of so many collectors, which share the processes of agents.  Can be pickled.

    Raises ValueError for a variable that is not set.
    """
    agent, rollout = config.agent, config.rollout
    if not config.has_agents:
        return partial(Completions, special_tokens=config.reward.special_tokens)
    assert agent.max_tokens is not None, "it is resolved"
    environment = variables("agent.environment", agent.environment)
    settings = Settings(
        job_of(config),
        history=agent.history,
        tool_parser=agent.tool_parser,
        max_turns=agent.max_turns,
        max_tokens=agent.max_tokens,
        timeout_s=agent.timeout_s,
        num_processes=-(-agent.num_processes // num_collectors),
        on_error=agent.on_error,
        over_limit_reward=agent.over_limit_reward,
        surroundings=Surroundings(agent.memory_mb, agent.file_mb, environment=environment),
        training=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
        system_prompt=config.data.system_prompt,
        template=config.data.apply_chat_template_kwargs,
        special_tokens=config.reward.special_tokens,
    )
    return partial(Episodes, settings)


def job_of(config: Config) -> Job:
    """The agent of a run, with absolute paths, which are valid in any working directory."""
    fn = None if config.agent.fn is None else absolute_address(config.agent.fn)
    return Job(fn, tuple(config.agent.command), config.agent.args)


def check_agents(config: Config) -> str:
    """A sentence on what the chat template does not allow; "" if there is none, or no agent.

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
    if reason is None or agent.history == "rendered":
        return ""
    return f"agent.history=generated: {reason}; such prompts are rendered as a whole, and begin rows of their own"


def check_rewards(config: Config) -> None:
    """Raises ValueError for a user's function that does not load, a variable that is not set, and without a sandbox."""
    surroundings(config)
    for fn in names_of(config):
        if fn in SERVICES:
            api_key(f"reward.{fn}.api_key_env", getattr(config.reward, fn).api_key_env)
        elif not isinstance(REWARDS.get(fn), str):  # from a file or a plug-in
            load_reward(fn)


def surroundings(config: Config) -> Surroundings:
    """What surrounds rewards in their processes.  Raises ValueError for a variable that is not set, or no sandbox."""
    reward = config.reward
    environment = variables("reward.environment", reward.environment)
    if any(fn in REWARDS_OF_CODE for fn in names_of(config)):
        try:
            sandbox.check(reward.sandbox)
        except sandbox.SandboxError as error:
            raise ValueError(f"reward.sandbox={reward.sandbox}: {error}") from error
    return Surroundings(reward.memory_mb, reward.file_mb, reward.sandbox, environment)


def variables(key: str, names: Sequence[str]) -> dict[str, str]:
    """Variables of this environment.  Raises ValueError for one that is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{key}=[{missing[0]}]: this environment has no variable of that name")
    return {name: os.environ[name] for name in names}


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
        reward.start_timeout_s,
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
        folder = model_folder(reward.model.path or "", "reward.model.path")
        key = token if reward_url else api_key("reward.model.api_key_env", reward.model.api_key_env)
        services["model"] = partial(RewardModel, folder, reward_url or reward.model.url or "", key=key)
    return partial(
        Rewards,
        tuple(reward.fn),
        weights=reward.weights,
        by_data_source=reward.by_data_source,
        audit=reward.audit,
        num_workers=-(-reward.num_workers // num_collectors),
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        plugins=plugins(config),
        make_limit=limit,
        services=services,
        surroundings=surroundings(config),
    )


def make_reward_server(config: Config, token: str) -> Servers | None:
    """The server of the reward model, not yet started; None if the run needs none of its own.

    It is our own server, whose scores are those of transformers: SGLang 0.5.23 gave other ones for a Qwen3 model with a
    `score` head.  Nothing is ever pushed to it.
    Raises ValueError if the machine has GPUs and none is chosen for it.
    """
    if not starts_reward_server(config):
        return None
    rollout, model, device = config.rollout, config.reward.model, config.trainer.device
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus and not (model.first_gpu is not None and model.first_gpu < gpus):
        raise ValueError(
            f"reward.model.first_gpu={model.first_gpu}: expected the GPU of the reward model's server, 0 to {gpus - 1}"
        )
    patience = replace(supervision(config), start_timeout_s=config.reward.start_timeout_s)
    launch = EngineLaunch(
        "hf",
        model_folder(model.path or "", "reward.model.path"),
        scores=True,
        dtype=rollout.dtype,
        max_running_requests=config.reward.concurrency,
        device=None if device == "auto" else device,
        first_gpu=model.first_gpu,
        memory_fraction=model.memory_fraction,
    )
    return Servers([launch], token, config.trainer.run_dir / "logs" / "reward_model", patience)


def look_after(server: Servers, whose: str) -> None:
    """Restart a server that died.  Raises ServerDied if it may not be restarted any more."""
    events = server.poll()
    if State.OUT in server.states:
        raise ServerDied(f"the server of {whose} is gone; {events[-1].reason if events else 'see its log'}")
