"""The sample generator of a run with agents: episodes in place of completions, each a session whose rows are learnt."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from megarl.agents.chat import Chat
from megarl.agents.endpoint import Endpoint
from megarl.agents.load import CHAT, PROCESS, load_episode
from megarl.agents.process import AgentProgram, EpisodeFailed, Processes, is_end, is_refusal, past_proxies
from megarl.agents.session import Policy, Session
from megarl.agents.tool_calls.forms import AUTO, chosen
from megarl.agents.transcript import transcript
from megarl.data.chat import as_messages
from megarl.data.template import ChatTemplate
from megarl.io.traces import span
from megarl.plugins.load import describe, place_of
from megarl.rewards.load import CONVERSATION
from megarl.rewards.result import RewardResult, to_result
from megarl.rewards.surroundings import Surroundings
from megarl.rollout.collect import NoSample, Score, grouped, text_of
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import OF_AGENTS, REWARD_ERROR, LostRollout, Prompt, Row, Sample

log = logging.getLogger(__name__)

MODEL = "policy"  # the name of the model for agents
ON_ERROR = ("unscored", "zero", "stop")
MAX_LOGGED = 10  # logged errors, and logged refusals; all are counted
_LOOK_S = 0.1  # between two looks at an episode whose time is over once the servers answer
_GRACE_S = 5.0  # for an agent to clean up when its time is over
# What happened to episodes, in total: see counters.
EPISODES, ERRORS, TIMEOUTS = "agent/episodes", "agent/errors", "agent/timeouts"
EMPTY, UNREWARDED, REFUSED = "agent/empty", "agent/unrewarded", "agent/refused"
COUNTS = (EPISODES, ERRORS, TIMEOUTS, EMPTY, UNREWARDED, REFUSED)


class EpisodeError(RuntimeError):
    """An episode failed with agent.on_error=stop."""


class _TimeIsUp(Exception):
    pass


@dataclass(frozen=True)
class AgentSettings:
    """The keys of `agent.*`, and what else of a run episodes need."""

    program: AgentProgram
    history: str = "generated"
    tool_parser: str = AUTO
    max_turns: int = 16
    max_tokens: int = 4096
    timeout_s: float = 600.0
    num_processes: int = 16
    on_error: str = "unscored"
    over_limit_reward: float | str | None = None  # a number, "unscored", "reward.fn"; None: see Episodes
    ignore: tuple[str, ...] = ()  # fields of requests that the run's values replace
    surroundings: Surroundings = field(default_factory=Surroundings)  # of processes; its environment: of all agents
    training: SamplingParams = field(default_factory=SamplingParams)  # how training samples; agents may say it
    system_prompt: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    special_tokens: bool = False  # what a reward reads has these


class _EpisodeEnd(NamedTuple):
    """An episode that is over: what it returned, or why it has no sample."""

    session: Session
    result: RewardResult | None = None
    failure: NoSample | None = None


_Episode = asyncio.Task[_EpisodeEnd]


class Episodes:
    """A `SampleGenerator`.  Example:

        async with Episodes(settings, pool, tokenizer, score) as episodes:
            group = await episodes.group(prompt, n=8, params=params)

    The reward of an episode is what its function returns, else what it reported to the endpoint, else the sum of its
    turns' own rewards, else what `score` says about its last answer.  `score` is never asked about an episode that a
    limit ended where others give rewards of their own.
    """

    def __init__(
        self, settings: AgentSettings, pool: EnginePool, tokenizer: PreTrainedTokenizerBase, score: Score
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._tokenizer = tokenizer
        self._score = score
        template = ChatTemplate(tokenizer, settings=settings.template)
        self._policy = Policy(
            name=MODEL,
            tokenizer=tokenizer,
            template=template,
            pool=pool,
            params=settings.training,
            tool_form=chosen(settings.tool_parser, template)[0],
            max_tokens=settings.max_tokens,
            max_turns=settings.max_turns,
            history=settings.history,
            ignore=settings.ignore,
        )
        program = settings.program
        os.environ.update(settings.surroundings.environment)  # an agent's file may look at them when it is imported
        os.environ.update(past_proxies())
        self._fn = None if program.fn is None else load_episode(program.fn, program.arguments)
        self._way = PROCESS if self._fn is None else self._fn.way
        self._processes = Processes(program, num=settings.num_processes, surroundings=settings.surroundings)
        self._endpoint: Endpoint | None = None
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._gives_rewards = self._has_warned = False  # whether an episode had one of its own
        self._num_logged = 0  # refusals
        self.first_errors: dict[str, str] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._way != CHAT:
            self._endpoint = await self._stack.enter_async_context(Endpoint(self._policy))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def counters(self) -> dict[str, float]:
        """Totals since the start: COUNTS.

        errors and timeouts are episodes that failed, empty ones generated nothing, and a limit ended the unrewarded
        ones before they gave their reward.  refused are requests.
        """
        return {name: float(count) for name, count in self._counts.items()}

    async def group(
        self, prompt: Prompt, n: int, params: SamplingParams, *, greedy: bool = False, urgent: bool = False
    ) -> list[Sample] | LostRollout:
        """n episodes of one prompt, and with `greedy` one more whose answers are greedy.

        An episode without a result leaves its group, as a completion does.  Raises EpisodeError with on_error="stop".
        """
        asked = [params] * n + [params.as_greedy()] * greedy
        async with asyncio.TaskGroup() as tasks:
            policies = (replace(self._policy, params=each, urgent=urgent) for each in asked)
            episodes = [
                tasks.create_task(self._ended(prompt, f"{prompt.uid}/{at}", policy))
                for at, policy in enumerate(policies)
            ]
            samples = [tasks.create_task(self._sample(prompt, episode, episodes)) for episode in episodes]
        return grouped(self._pool, prompt, [task.result() for task in samples], n)

    # ---- one episode

    async def _sample(self, prompt: Prompt, episode: _Episode, group: Sequence[_Episode]) -> Sample | NoSample:
        """A scored episode of a group, or why there is none; its tokens are then counted as wasted."""
        ended = await episode
        session = ended.session
        rows = session.conversation.rows()
        if not rows and not session.failure:
            self._counts[EMPTY] += 1
            return ended.failure or NoSample(self._why_empty(session))
        try:
            outcome = ended.failure or ended.result or await self._reward(prompt, session, group)
        except asyncio.CancelledError:
            self._pool.waste("cancelled", _num_generated(rows))
            raise
        if isinstance(outcome, NoSample):
            self._pool.waste("lost" if outcome.is_lost else "unscored", _num_generated(rows))
            return outcome
        return self._made(prompt, session, rows, outcome)

    async def _ended(self, prompt: Prompt, name: str, policy: Policy) -> _EpisodeEnd:
        """An episode from its beginning to its end, which closes its session."""
        self._counts[EPISODES] += 1
        with span("episode", episode=name):
            session = self._endpoint.open(name, policy) if self._endpoint else Session(name, policy)
            try:
                if self._way != PROCESS:
                    return await self._run(prompt, session)
                # Waiting for it takes nothing of the episode's time.
                async with self._processes.slot(urgent=policy.urgent):
                    return await self._run(prompt, session)
            except asyncio.CancelledError:
                self._pool.waste("cancelled", sum(len(t.completion.token_ids) for t in session.conversation.turns))
                raise
            finally:
                if session.num_refused:
                    self._note_refused(session)
                if self._endpoint:
                    self._endpoint.close(session)
                else:
                    session.close()

    def _note_refused(self, session: Session) -> None:
        self._counts[REFUSED] += session.num_refused
        what = f"episode {session.name}: {_refusals(session)}"
        self.first_errors.setdefault("refused", what)
        self._num_logged += 1
        if self._num_logged <= MAX_LOGGED:
            log.warning(what)

    def _why_empty(self, session: Session) -> str:
        refused = f"; {_refusals(session)}" if session.num_refused else ""
        reason = f"the agent asked for no answer{refused}"
        self.first_errors.setdefault("empty", f"episode {session.name}: {reason}")
        return reason

    async def _run(self, prompt: Prompt, session: Session) -> _EpisodeEnd:
        result, error = None, None
        try:
            result = await self._limited(session, self._call(prompt, session))
        except Exception as raised:
            error = raised
        if session.fatal is not None:
            raise session.fatal
        if session.failure is not None:  # a fault of the servers, also if the agent raised another error
            return _EpisodeEnd(session, failure=NoSample(session.failure, is_lost=True))
        if error is None or (session.over_limit and _is_end_at_limit(error)):
            self._gives_rewards |= bool(result is not None or session.reward is not None or session.turn_rewards)
            return _EpisodeEnd(session, result)
        if isinstance(error, _TimeIsUp):
            self._counts[TIMEOUTS] += 1
            return self._failed(session, f"no end within {self._settings.timeout_s:g} s{error}")
        self._counts[ERRORS] += 1
        return self._failed(session, str(error) if isinstance(error, EpisodeFailed) else describe(error))

    async def _call(self, prompt: Prompt, session: Session) -> RewardResult | None:
        if self._way != CHAT and self._settings.system_prompt is not None:
            prompt = replace(prompt, text=as_messages(prompt.text, self._settings.system_prompt))
        if self._way == PROCESS:
            assert self._endpoint is not None, "the generator is entered"
            return await self._processes.run(prompt, self._endpoint.url_of(session), session.key, model=MODEL)
        assert self._fn is not None, "a command runs in a process"
        if self._way == CHAT:
            given: dict[str, Any] = {"chat": Chat(session, as_messages(prompt.text, self._settings.system_prompt))}
        else:
            assert self._endpoint is not None, "the generator is entered"
            given = {"base_url": self._endpoint.url_of(session) + "/v1", "api_key": session.key}
        try:
            value = await self._fn.call(**given, prompt=prompt)
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit, and what packages made of it, would end the collector
            if is_end(error):
                return None
            raise EpisodeFailed(describe(error)) from None
        return None if value is None else to_result(value)

    async def _limited(self, session: Session, call: Awaitable[RewardResult | None]) -> RewardResult | None:
        """Raises _TimeIsUp if the call takes too long, the time that it waits for servers not counted, or is exhausted.

        Its text is where the call was, if that is known.  A call that does not let itself be cancelled is left behind.
        """
        task, exhausted = asyncio.ensure_future(call), asyncio.ensure_future(session.exhausted.wait())
        deadline = time.monotonic() + self._settings.timeout_s
        try:
            while not task.done():
                left = deadline + session.waiting.read() - time.monotonic()
                if left <= 0 or exhausted.done():
                    raise _TimeIsUp(await _stopped(task))
                both = (task, exhausted)
                await asyncio.wait(both, timeout=max(left, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
            return await _result(task)
        finally:
            exhausted.cancel()
            await _stopped(task)

    def _failed(self, session: Session, sentence: str) -> _EpisodeEnd:
        sentence = f"episode {session.name}: {sentence}"
        on_error, count = self._settings.on_error, self._counts[ERRORS] + self._counts[TIMEOUTS]
        if on_error == "stop":
            raise EpisodeError(sentence)
        what = "counted as 0" if on_error == "zero" else "it leaves its group"
        self.first_errors.setdefault("failed", f"{sentence}; {what}")
        if count <= MAX_LOGGED:
            more = "; further ones are only counted" if count == MAX_LOGGED else ""
            log.warning("%s; %s%s", sentence, what, more)
        if on_error == "zero":
            session.turn_rewards.clear()
            return _EpisodeEnd(session, RewardResult(0.0, {REWARD_ERROR: 1.0}))
        return _EpisodeEnd(session, failure=NoSample(sentence))

    async def _reward(self, prompt: Prompt, session: Session, group: Sequence[_Episode]) -> RewardResult | NoSample:
        """The reward of an episode that returned none."""
        if session.reward is not None:
            return RewardResult(session.reward)
        if session.turn_rewards:
            return RewardResult(0.0)
        if session.over_limit and (given := await self._over_limit(session, group)) is not None:
            return given
        last = session.conversation.turns[-1].completion
        text = text_of(self._tokenizer, last, special_tokens=self._settings.special_tokens)
        if session.messages:
            prompt = replace(prompt, extra={**prompt.extra, CONVERSATION: session.messages})
        (outcome,) = await self._score(prompt, [replace(last, text=text, columns={})])
        if isinstance(outcome, str):
            return NoSample(outcome)
        return RewardResult(float(outcome.reward), dict(outcome.extra), outcome.pred)

    async def _over_limit(self, session: Session, group: Sequence[_Episode]) -> RewardResult | NoSample | None:
        """The reward of an episode that a limit ended before it gave one; None if `score` is to give it."""
        worth = self._settings.over_limit_reward
        if worth == "reward.fn":
            return None
        if not isinstance(worth, str | None):
            return RewardResult(worth)
        if worth is None and not self._gives_rewards:
            await asyncio.wait(group)
        what = f"episode {session.name}: a limit ended it without a reward of its own"
        if worth == "unscored" or self._gives_rewards:
            self._counts[UNREWARDED] += 1
            return NoSample(f"{what}; agent.over_limit_reward=NUMBER, or reward.fn, gives it one")
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s, and no other had one so far: reward.fn scores its last answer", what)
        return None

    def _made(self, prompt: Prompt, session: Session, rows: Sequence[Row], result: RewardResult) -> Sample:
        of_turns = session.turn_rewards
        if of_turns:
            rows = [replace(row, rewards=tuple(of_turns[span.turn] for span in row.learnt)) for row in rows]
        text = "\n\n".join(str(self._tokenizer.decode(row.token_ids)) for row in rows)
        reward = math.fsum((result.reward, *of_turns.values()))  # independent of the order in which turns got theirs
        extra = {**result.extra, **numbers_of(session, rows)}
        truncated = session.over_limit or session.truncated
        messages = transcript(session.messages)
        return Sample(prompt, tuple(rows), reward, extra, None, text, truncated, result.pred, messages)


def numbers_of(session: Session, rows: Sequence[Row]) -> dict[str, float]:
    """What is measured of an episode: turns, calls, rows, how prompts were made, whether it wanted more than it may."""
    counts = {"turns": len(session.conversation.turns), "branches": len(rows), "over_limit": session.over_limit}
    counts |= {**session.conversation.counts, **session.counts}  # a union of Counters drops what is 0
    return {OF_AGENTS + name: float(count) for name, count in counts.items()}


def _is_end_at_limit(error: Exception) -> bool:
    """Whether an agent whose request was refused for a limit ended for that: it may have a fault behind the limit."""
    return isinstance(error, _TimeIsUp) or (error.refused if isinstance(error, EpisodeFailed) else is_refusal(error))


def _refusals(session: Session) -> str:
    return f"the endpoint refused {session.num_refused} of its requests, the latest with: {session.refused}"


def _num_generated(rows: Sequence[Row]) -> int:
    return sum(len(row.log_probs) for row in rows)


async def _stopped(task: asyncio.Future[RewardResult | None]) -> str:
    """Cancel the task if it still runs; where the agent was, as far as the task has ended and this is known."""
    if task.done():
        return ""
    task.cancel()
    await asyncio.wait([task], timeout=_GRACE_S)
    try:
        task.result()
    except asyncio.InvalidStateError:  # it goes on
        return ""
    except BaseException as error:
        return place_of(error)
    return ""


async def _result(task: asyncio.Future[RewardResult | None]) -> RewardResult | None:
    """The task's result; if the agent itself cancelled a part of it, that is an error of this episode alone."""
    if task.cancelled():
        raise EpisodeFailed("a part of it was cancelled, by the agent itself")
    return await task
