"""One agent's episode at the endpoint: its requests become turns of a conversation, until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from megarl.agents.answer import Answer, cut, read_answer
from megarl.agents.conversation import Conversation, RenderedPrompt, Turn
from megarl.agents.refusals import GOES_ON, OverLimit, Refused, shown
from megarl.agents.tool_calls.call import Form
from megarl.data.template import OPEN, ChatTemplate
from megarl.rollout.collect import for_completion
from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import NoFilesLeft, RolloutFailed
from megarl.rollout.pool.slots import Waiting
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Completion

MAX_IDS = 1 << 31  # of a vocabulary whose size is not known
LARGE = 1 << 13  # bytes of a request; what a smaller one needs is done within some ms
TOKEN_BYTES = 4  # of an answer that is written as JSON, at least
_THREADS = ThreadPoolExecutor(4, thread_name_prefix="large_request")
MAX_REFUSED = 32  # requests over the limit, one after the other; then the agent does not read the refusals


T = TypeVar("T")


@dataclass(frozen=True)
class Policy:
    """The model as agents see it, and how it generates."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    pool: EnginePool
    params: SamplingParams  # of every answer; max_new_tokens is its limit
    tool_form: Form
    max_tokens: int  # of all rows of an episode: prompts, answers, and what is between them
    max_turns: int = 1 << 30  # answers in an episode
    history: str = "generated"  # see conversation.HISTORIES
    urgent: bool = False  # see generate_completion
    ignore: tuple[str, ...] = ()  # fields of requests that the run's values replace

    def shown(self, num: int) -> str:
        """The number of tokens of a prompt; of one that is much too long not all are counted."""
        return f"more than {self.max_tokens}" if num > self.max_tokens else str(num)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))


@dataclass(frozen=True)
class ChatRequest:
    """A request in any of the APIs: messages and tools in the form of OpenAI's chat completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    deferred: list[dict[str, Any]] = field(default_factory=list)  # tools that stand in results alone
    num: int = 1  # answers
    max_tokens: int | None = None  # of each answer; None: as many as the run allows
    read_calls: bool = True  # False: tool_choice is "none"
    one_call: bool = False  # the agent reads the first call of an answer alone
    stop: tuple[str, ...] = ()  # texts at which the answer ends for the agent
    said: dict[str, str] = field(default_factory=dict)  # what is to be said once of a field, by its name


class ChatReply(NamedTuple):
    """An answer: as the model generated it, as the agent gets it, and as a message of chat completions."""

    turn: int
    prompt_ids: list[int]
    completion: Completion
    answer: Answer
    message: dict[str, Any]


class PendingRequest(NamedTuple):
    """Answers under way: the turn whose row they extend, how many they are, how long their rows become at most."""

    row: int | None
    num: int
    tokens: int  # prompts included


class Session:
    """Example: session.key is the agent's API key; after `close`, session.conversation.rows() are to be learnt.

    `reward`: as the agent reported it; None: it did not.  `turn_rewards`: those of single turns, by number.
    `counts`: tool_calls, malformed_tool_calls.  `over_limit`: whether a request was refused for want of turns or
    tokens.  `exhausted`: set when the agent asks on and on nevertheless.  `failure`: why the servers gave no answer;
    None if they did, or if a later request got one.  `waiting`: how long requests waited for the servers.
    `truncated`: whether a limit of the run cut the latest answer.
    `messages`: of the latest turn, its answer included; empty if there were only turns of ids.
    `items`: items of the API of responses by the id of each, and by that of a response all up to its end.  Each is
    kept once: it is also there by its digest.
    `refused`: sentences to requests that were not served, but for those over the limit; the latest.  `num_refused`.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        self.key = secrets.token_urlsafe(32)
        self.conversation = Conversation(policy.template, history=policy.history, enough=policy.max_tokens)
        self.reward: float | None = None
        self.turn_rewards: defaultdict[int, float] = defaultdict(float)
        self.closed = self.over_limit = self.truncated = False
        self.exhausted, self._num_refused = asyncio.Event(), 0
        self.failure: str | None = None
        self.fatal: NoFilesLeft | None = None  # ends the run, also if the agent catches it
        self.waiting = Waiting()
        self.messages: list[dict[str, Any]] = []
        self.items: dict[str, list[Any]] = {}
        self.refused, self.num_refused = "", 0
        self.counts: Counter[str] = Counter({"tool_calls": 0, "malformed_tool_calls": 0})
        self._numbers, self._call_numbers = itertools.count(), itertools.count()
        self._running: set[asyncio.Future[Any]] = set()
        self._pending: Counter[PendingRequest] = Counter()  # under way
        self._context = contextvars.copy_context()  # of the episode: requests of its agent may come by HTTP
        self._one_large = asyncio.Lock()
        self._left = contextlib.ExitStack()
        self._affinity = self._left.enter_context(policy.pool.session(1))

    def close(self) -> None:
        """End running requests; further ones are refused, so that a finished episode never changes."""
        self.closed = True
        for running in self._running:
            running.cancel()
        self._left.close()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Around a request: notes why it is refused, which the agent may catch, but not where its client goes on."""
        try:
            yield
        except OverLimit:
            raise
        except (Refused, ValueError, RecursionError) as error:
            if not self.closed and getattr(error, "code", None) != GOES_ON:
                self.refused, self.num_refused = str(error), self.num_refused + 1
            raise

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns; where the size [bytes] is LARGE in a thread, which does one of a session at a time.

        So the loop goes on, and an agent with many large requests waits for itself alone, also if it gives them up.
        """
        if size < LARGE:
            return work()
        await self._one_large.acquire()
        working = asyncio.get_running_loop().run_in_executor(_THREADS, work)
        working.add_done_callback(lambda _: self._one_large.release())  # a thread goes on when its request has ended
        return await asyncio.shield(working)

    async def chat(self, request: ChatRequest, size: int = 0) -> list[ChatReply]:
        """Answers to messages; `size`: of the request [bytes].

        Raises ValueError if the template refuses them, Refused, RolloutFailed.
        """
        if not request.messages or request.messages[-1]["role"] == "assistant":
            raise Refused(
                400, "messages: the last one is the assistant's or there is none; expected a question behind it"
            )
        prompt = await self.aside(size, lambda: self.conversation.prompt(request.messages, request.tools))
        form, tools = self.policy.tool_form, [*request.tools, *request.deferred] if request.read_calls else []
        opened = self.policy.text(prompt.prompt_ids[-4:]).rstrip().endswith(OPEN)
        replies = []
        for completion in await self._generate(prompt.prompt_ids, request.num, request.max_tokens):
            self._note_end(completion, request.max_tokens)
            text = self.policy.text(without_stop(completion))
            answer = read_answer(text, form, opened=opened, tools=tools, stop=request.stop)
            self.counts["tool_calls"] += len(answer.tool_calls)
            self.counts["malformed_tool_calls"] += answer.malformed_calls
            if request.one_call:
                answer = replace(answer, tool_calls=answer.tool_calls[:1])
            message = self._message(answer)
            turn = self.conversation.add(prompt, completion, message)
            self.messages = [*request.messages, message]
            replies.append(ChatReply(turn, prompt.prompt_ids, completion, answer, message))
        return replies

    async def continue_ids(
        self,
        prompt_ids: list[int],
        num: int,
        max_tokens: int | None,
        stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> list[ChatReply]:
        """The same for a prompt of ids.  `stop_ids`: tokens that end these answers too; `stop`: see ChatRequest."""
        most = (self.policy.pool.settings.num_ids or MAX_IDS) - 1
        for token in (*prompt_ids[: self.policy.max_tokens + 1], *stop_ids):  # with more it is refused anyway
            if type(token) is not int or not 0 <= token <= most:
                raise Refused(400, f"{shown(token)} is no token id: expected 0 to {most}")
        if not prompt_ids:
            raise Refused(400, "the prompt has no token ids: expected one or more")
        replies = []
        for completion in await self._generate(prompt_ids, num, max_tokens, stop_ids):
            self._note_end(completion, max_tokens)
            text, stopped_at = cut(self.policy.text(without_stop(completion)), stop)
            turn = self.conversation.add(RenderedPrompt(prompt_ids), completion)
            replies.append(ChatReply(turn, prompt_ids, completion, Answer(text, stopped_at=stopped_at), {}))
        return replies

    async def _generate(
        self, prompt_ids: list[int], num: int, max_tokens: int | None, stop_ids: Sequence[int] = ()
    ) -> list[Completion]:
        pending, room = await self._reserved(prompt_ids, num, max_tokens)
        earlier = self.failure
        params = self.policy.params
        params = replace(params, max_new_tokens=room, stop_token_ids=(*params.stop_token_ids, *stop_ids))
        tasks = [asyncio.create_task(self._one(prompt_ids, params), context=self._context) for _ in range(num)]
        running = asyncio.gather(*tasks)
        self._running.add(running)
        self._pending[pending] += 1
        try:
            completions = await running
        except NoFilesLeft as error:
            self.fatal = error
            raise
        except (RolloutFailed, asyncio.CancelledError) as error:
            if isinstance(error, RolloutFailed):
                self.failure = str(error)
            done = [task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception()]
            cause = "lost" if isinstance(error, RolloutFailed) else "cancelled"
            self.policy.pool.waste(cause, sum(len(completion.token_ids) for completion in done))
            if self.closed:
                raise closed(self.name) from None
            raise
        finally:
            self._running.discard(running)
            self._pending -= Counter([pending])
            for task in tasks:
                task.cancel()
        if self.closed:  # since they were generated
            raise closed(self.name)
        if self.failure is earlier:  # a request that fails meanwhile is another one
            self.failure = None
        return completions

    async def _reserved(self, prompt_ids: list[int], num: int, max_tokens: int | None) -> tuple[PendingRequest, int]:
        """Room for `num` answers, and how long each may become.  Waits for answers under way, which may leave some.

        Raises OverLimit if there is no room.
        """
        num_refused = self._num_refused + 1  # of requests at the same time, one counts
        while True:
            if self.closed:
                raise closed(self.name)
            try:
                return self._room(prompt_ids, num, max_tokens)
            except OverLimit:
                if not self._running:
                    self.over_limit = True
                    await asyncio.sleep(0)  # what else asks now has begun
                    self._num_refused = max(self._num_refused, num_refused)
                    if self._num_refused == MAX_REFUSED:
                        self.exhausted.set()
                    raise
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    def _room(self, prompt_ids: list[int], num: int, max_tokens: int | None) -> tuple[PendingRequest, int]:
        policy, conversation = self.policy, self.conversation
        turns = len(conversation.turns) + sum(pending.num for pending in self._pending.elements())
        if turns + num > policy.max_turns:
            raise OverLimit(f"the episode has {turns} turns, and may have {policy.max_turns}: it is over")
        row = conversation.extended(prompt_ids)
        if any(pending.row == row for pending in self._pending):  # one of them extends it, the other begins a new row
            row = None
        held = 0 if row is None else conversation.turns[row].end
        left = policy.max_tokens - conversation.num_tokens - sum(map(self._added, self._pending.elements()))
        room = (left + held) // num - len(prompt_ids)
        if room < 1:
            raise OverLimit(
                f"the prompt has {policy.shown(len(prompt_ids))} tokens, and the episode {max(0, left + held)} of "
                f"its {policy.max_tokens} left: it is over"
            )
        room = min(room, policy.params.max_new_tokens, max_tokens or room)
        return PendingRequest(row, num, num * (len(prompt_ids) + room)), room

    def _added(self, pending: PendingRequest) -> int:
        """The tokens that answers under way add to the rows: all, if another answer has extended theirs meanwhile."""
        conversation, row = self.conversation, pending.row
        held = 0 if row is None or not conversation.is_leaf(row) else conversation.turns[row].end
        return pending.tokens - held

    def _note_end(self, completion: Completion, max_tokens: int | None) -> None:
        """`max_tokens`: what the agent asked for itself."""
        is_agents_own = max_tokens is not None and len(completion.token_ids) >= max_tokens
        self.truncated = completion.finish_reason == "length" and not is_agents_own

    async def _one(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        policy = self.policy
        params = for_completion(params, self.name, next(self._numbers))
        return await generate_completion(
            policy.pool,
            prompt_ids,
            params,
            affinity=self._affinity,
            urgent=policy.urgent,
            waiting=self.waiting,
            num_known=self.conversation.num_known(prompt_ids),
        )

    def _message(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if answer.tool_calls else ""),
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            call_id = self.policy.tool_form.call_id
            message["tool_calls"] = [
                {
                    "id": call_id.format(name=call.name, number=next(self._call_numbers)),
                    "type": "function",
                    "function": call._asdict(),
                }
                for call in answer.tool_calls
            ]
        return message

    def record(self) -> dict[str, Any]:
        """All that is known of the session, as JSON."""
        conversation = self.conversation
        return {
            "session": self.name,
            "closed": self.closed,
            "reward": self.reward,
            "turns": [_turn_record(turn) for turn in conversation.turns],
            "rows": [
                {
                    "token_ids": row.token_ids,
                    "learnt": [{"turn": span.turn, "start": span.start, "end": span.end} for span in row.learnt],
                }
                for row in conversation.rows()
            ],
            **conversation.counts,
            **self.counts,
        }


def _turn_record(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "parent": turn.parent,
        "prompt_tokens": turn.start,
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "versions": versions_json(completion),
        "finish_reason": completion.finish_reason,
    }


def versions_json(completion: Completion) -> list[dict[str, int]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in completion.versions]


def without_stop(completion: Completion) -> list[int]:
    """Without the token that ended the answer."""
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


def closed(name: str) -> Refused:
    return Refused(410, f"session {name} is closed: its episode is over, and nothing is added to it", "session_closed")
