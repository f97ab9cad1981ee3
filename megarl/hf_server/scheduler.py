"""Continuous batching of the HF server: one thread that admits, prefills, decodes and retires requests.

Only this thread uses the model and the running batch, so they need no locks. Other threads hand over calls (`submit`)
and small functions (`run_now`, `run_alone`), which it runs between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.hf_server.kv_cache import Decode, Prefill
from megarl.hf_server.model import HFModel
from megarl.hf_server.running_batch import ABORTED, Call, Request, Running
from megarl.hf_server.sampling import row_key

T = TypeVar("T")

_MAX_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass; bounds its activation memory
_FREE_PADDING, _MAX_PADDING = 64, 0.25  # prompts share a pass while padding is at most this many tokens or this share
_DEFAULT_CACHE_BYTES = 2 << 30
_GATHER_S = 0.001  # an idle engine waits until no call came for this time, so that a burst becomes one batch
_GATHER_LIMIT_S = 0.02


class HFEngine:
    """Example: engine = HFEngine(model, on_done=reply, on_death=stop); engine.start(); engine.submit(call)."""

    def __init__(
        self,
        model: HFModel,
        *,
        max_running: int,
        max_total_tokens: int | None,
        random_seed: int,
        weight_version: str,
        on_done: Callable[[list[Call]], object],
        on_death: Callable[[BaseException], object],
    ) -> None:
        self.model, self.max_running, self.weight_version = model, max_running, weight_version
        self.paused = False
        self.released = False  # the KV cache is released; nothing is admitted until it is resumed
        self.max_total_tokens = max_total_tokens or _default_tokens(model)
        self._cache = model.new_cache(self.max_total_tokens)
        self._running = Running(max_running, model.vocab_size)
        self._waiting: deque[Request] = deque()
        self._seed, self._num_calls = random_seed, 0
        self._on_done, self._on_death = on_done, on_death
        self._changed = threading.Condition()
        self._inbox: list[Call] = []
        self._orders: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._lone_orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="cpu-engine", daemon=True)

    # ---- what other threads call

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return self._running.count

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(len(call.rows) for call in self._inbox)

    def submit(self, call: Call) -> None:
        """Queue a call; `on_done` receives it when it is complete, in the engine's thread."""
        with self._changed:
            self._inbox.append(call)
            self._changed.notify()

    def run_now(self, order: Callable[[], T]) -> Future[T]:
        """Run between two steps, also while requests are running."""
        return self._hand_over(order, self._orders)

    def run_alone(self, order: Callable[[], T]) -> Future[T]:
        """Run between two steps: at once while paused, otherwise after all running requests; until then none starts."""
        return self._hand_over(order, self._lone_orders)

    def _hand_over(self, order: Callable[[], T], orders: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            orders.append((order, future))
            self._changed.notify()
        return future

    # ---- orders: these run in the engine's thread, through run_now or run_alone

    def pause(self, mode: str) -> None:
        """abort: end all requests; retract: put them back into the queue without their KV; in_place: keep all."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda row: True)
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self.paused = False

    def abort(self, wanted: Callable[[Request], bool]) -> None:
        """End the running and waiting requests that match; they keep their tokens so far."""
        running = self._take([place for place, row in enumerate(self._running.rows) if wanted(row)])
        waiting = [row for row in self._waiting if wanted(row)]
        self._waiting = deque(row for row in self._waiting if not wanted(row))
        for row in [*running, *waiting]:
            row.finish_with(ABORTED)
        self._report([*running, *waiting])

    def set_version(self, version: str) -> None:
        """Tokens sampled from now on have this version."""
        self.weight_version = version
        for row, num_new in zip(self._running.rows, self._running.column("num_new").tolist(), strict=True):
            row.stamp(version, num_new)

    def flush_cache(self) -> None:
        """Nothing to flush: KV does not outlive its request. As SGLang, raises ValueError while requests have KV."""
        if self._running.count:
            raise ValueError(f"the cache cannot be flushed while {self._running.count} completions are running")

    def release(self) -> None:
        self.flush_cache()
        self._cache.free()
        self.released = True

    def take_back(self) -> None:
        """Resume the KV cache: it may be allocated again."""
        self.released = False

    # ---- the thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._wait_for_work()
                    self._take_in()
                    if self._may_admit():
                        self._admit()
                    if self._running.count and not self.paused:
                        self._step()
        except BaseException as error:  # ends the process: a server that never answers would be worse
            self._on_death(error)

    def _wait_for_work(self) -> None:
        with self._changed:
            while not (self._stopping or self._orders or self._inbox or self._can_step() or self._can_obey_alone()):
                self._changed.wait()
            gather = bool(self._inbox) and not self._running.count and not self._waiting
        if gather:
            self._gather()

    def _take_in(self) -> None:
        """Queue the new calls, then run the orders: an order may concern a call that came just before it."""
        with self._changed:
            calls, self._inbox = self._inbox, []
            orders, self._orders = self._orders, []
        for call in calls:
            call.set_keys(row_key(self._seed, self._num_calls))
            self._num_calls += 1
            self._waiting.extend(call.rows)
        for order, future in orders:
            _run(order, future)
        while self._can_obey_alone():
            _run(*self._lone_orders.popleft())

    def _can_step(self) -> bool:
        return bool((self._running.count and not self.paused) or (self._waiting and self._may_admit()))

    def _can_obey_alone(self) -> bool:
        return bool(self._lone_orders) and (self.paused or not self._running.count)

    def _may_admit(self) -> bool:
        return not (self.paused or self.released or self._lone_orders)

    def _gather(self) -> None:
        limit = time.monotonic() + _GATHER_LIMIT_S
        seen = 0
        while seen != len(self._inbox) and time.monotonic() < limit:
            seen = len(self._inbox)
            time.sleep(_GATHER_S)

    def _admit(self) -> None:
        rows: list[Request] = []
        longest = self._running.max_length
        while self._waiting:
            num_rows = self._running.count + len(rows) + 1
            length = max(longest, self._waiting[0].max_length)
            if num_rows > self.max_running or not self._cache.fits(num_rows, length):
                break
            rows.append(self._waiting.popleft())
            longest = length
        if rows:
            used = (self._running.count, self._used_positions())
            self._cache.reserve(self._running.count + len(rows), longest, used)
            for sequences in _prefill_groups(rows):
                self._prefill(sequences)

    def _prefill(self, sequences: Sequence[list[Request]]) -> None:
        """One pass over distinct sequences; several requests may share one."""
        tokens, lengths = _right_padded([rows[0].sequence for rows in sequences])
        source = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(rows) for rows in sequences]))
        first = self._running.count
        hidden = self.model.prefill(tokens, Prefill(self._cache, first, source))
        logits = self.model.logits(hidden[torch.arange(len(sequences)), lengths - 1])
        for place, rows in enumerate(sequences):
            if rows[0].prompt_log_probs_from is not None and rows[0].prompt_log_probs is None:
                self._score_prompt(rows, hidden[place])
        rows = [row for group in sequences for row in group]
        for row in rows:
            row.stamp(self.weight_version, len(row.token_ids))
        self._running.add(rows)
        self._retire(self._running.draw_next(logits[source], first))

    def _score_prompt(self, rows: Sequence[Request], hidden: Tensor) -> None:
        prompt = torch.tensor(rows[0].prompt)
        log_probs = torch.log_softmax(self.model.logits(hidden[: len(prompt) - 1]).float(), dim=-1)
        scores = log_probs.gather(1, prompt[1:, None])[:, 0].tolist()
        for row in rows:
            row.prompt_log_probs = scores

    def _step(self) -> None:
        """One token for every running request."""
        positions = self._running.column("length") - 1
        length = self._used_positions() + 1
        logits = self.model.decode(
            self._running.column("last"), Decode(self._cache, positions, length), positions, length
        )
        self._retire(self._running.draw_next(logits))

    def _used_positions(self) -> int:
        """Positions in use: the KV of all tokens of the longest request except its last."""
        return int(self._running.column("length").max()) - 1 if self._running.count else 0

    def _retire(self, places: Tensor) -> None:
        if len(places):
            self._report(self._take(places.tolist()))

    def _take(self, places: Sequence[int]) -> list[Request]:
        """Remove requests from the running batch; returns them with their tokens so far."""
        if not places:
            return []
        chosen, used = torch.tensor(places), self._used_positions()
        rows = self._running.collect(chosen)
        self._cache.move(*self._running.remove(chosen), used)
        return rows

    def _retract(self) -> None:
        rows = self._take(range(self._running.count))
        for row in rows:
            row.num_retractions += 1
        self._waiting.extendleft(reversed(rows))

    def _report(self, rows: Iterable[Request]) -> None:
        calls = {id(row.call): row.call for row in rows if row.call.pending == 0}
        if calls:
            self._on_done(list(calls.values()))


def _run(order: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(order())
    except ValueError as error:  # a refusal is returned to the caller; any other error ends the engine
        future.set_exception(error)


def _default_tokens(model: HFModel) -> int:
    """As many tokens as fit into 2 GiB of keys and values, but at least one whole context."""
    one = model.new_cache(1)
    one.reserve(1, 1, used=(0, 0))
    return max(model.context_length, _DEFAULT_CACHE_BYTES // one.data.nbytes)


def _prefill_groups(rows: Sequence[Request]) -> list[list[list[Request]]]:
    """Requests of one prompt share a sequence, sequences of similar length a pass: passes -> sequences -> requests."""
    shared: dict[int, list[Request]] = {}
    for row in rows:
        shared.setdefault(id(row) if row.token_ids else id(row.prompt), []).append(row)
    groups: list[list[list[Request]]] = []
    real = 0
    for same in sorted(shared.values(), key=lambda same: len(same[0].sequence)):
        length = len(same[0].sequence)
        padded = (len(groups[-1]) + 1) * length if groups else 0
        padding = padded - real - length
        if not groups or padded > _MAX_PREFILL_TOKENS or padding > max(_FREE_PADDING, _MAX_PADDING * padded):
            groups.append([])
            real = 0
        groups[-1].append(same)
        real += length
    return groups


def _right_padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """-> tokens [S, longest], lengths [S]"""
    lengths = [len(s) for s in sequences]
    longest = max(lengths)
    tokens = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])
    return tokens, torch.tensor(lengths)
