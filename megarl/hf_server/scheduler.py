"""Continuous batching of the HF server: one thread that admits, prefills, decodes and retires requests.

Only this thread uses the model, the running batch and the prefix cache, so they need no locks. Other threads hand over
calls (`submit`) and small functions (`run_now`, `run_alone`), which it runs between two steps.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.hf_server import device as devices
from megarl.hf_server.kv_cache import Decode, Prefill
from megarl.hf_server.model import HFModel
from megarl.hf_server.prefix_cache import PrefillSequence, PrefixCache, Written, distinct, passes
from megarl.hf_server.running_batch import ABORTED, Call, CompletionRequest, Running
from megarl.hf_server.sampling import row_key

T = TypeVar("T")

_CACHED_SHARE = 0.25  # of max_total_tokens: the most that the prefix cache takes of what the running requests leave
_MOST_CACHED = 1 << 18  # its tokens at most: each takes about 400 bytes of the host's memory, wherever its KV is
WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"  # SGLang's tags of memory; this server has no graphs
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
        memory_fraction: float | None = None,
        random_seed: int,
        weight_version: str,
        on_done: Callable[[list[Call]], object],
        on_death: Callable[[BaseException], object],
    ) -> None:
        self.model = model
        self.max_running = max_running
        self.weight_version = weight_version
        self.paused = False
        self.num_decoded = 0  # tokens of steps of running requests, in total
        self.decode_sleep_s = 0.0  # of each step: benchmarks on few cores stand for servers that are apart
        self._released: set[str] = set()  # what is released; nothing is admitted until all of it is resumed
        self.max_total_tokens = max_total_tokens or model.most_tokens(memory_fraction)
        self._max_cached = min(int(_CACHED_SHARE * self.max_total_tokens), _MOST_CACHED)
        self._cache = model.new_cache(self.max_total_tokens)
        self._prefixes = PrefixCache(model.new_cache(self._max_cached))
        self._left: list[Written] = []  # the KV of the rows that ended last, while nothing else needs their slots
        self._running = Running(max_running, model.vocab_size, model.device)
        self._waiting: deque[CompletionRequest] = deque()
        self._seed = random_seed
        self._num_calls = 0
        self._num_loads = 0
        self._on_done, self._on_death = on_done, on_death
        self._changed = threading.Condition()
        self._inbox: list[Call] = []
        self._orders: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._lone_orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

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

    @property
    def num_kv_tokens(self) -> int:
        """Tokens for which the running requests have reserved KV: the longest one's positions, for each of them."""
        return math.prod(self._cache.size)

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

    def abort(self, wanted: Callable[[CompletionRequest], bool]) -> None:
        """End the running and waiting requests that match; they keep their tokens so far."""
        running = self._take([place for place, row in enumerate(self._running.rows) if wanted(row)])
        waiting = [row for row in self._waiting if wanted(row)]
        self._waiting = deque(row for row in self._waiting if not wanted(row))
        for row in [*running, *waiting]:
            row.finish_with(ABORTED)
        self._report([*running, *waiting])

    def load(self, load: Callable[[], None], version: str | None, *, flush: bool) -> None:
        """Change the weights by calling `load`; tokens sampled from now on have this version, None: the one of before.

        `flush`: empty the prefix cache first, as `flush_cache`.  Without it, KV is kept for requests with a salt.
        """
        self.model.check_memory()
        if flush:
            self.flush_cache()
        self._num_loads += 1
        load()
        if version is None:
            return
        self.weight_version = version
        for row, num_new in zip(self._running.rows, self._running.column("num_new").tolist(), strict=True):
            row.stamp(version, num_new)

    def flush_cache(self) -> None:
        """Empty the prefix cache.  As SGLang, raises ValueError while requests have KV."""
        if self._running.count:
            raise ValueError(f"the cache cannot be flushed while {self._running.count} completions are running")
        self._prefixes.clear()
        self._left = []

    def release(self, tags: Collection[str]) -> None:
        """Free the memory of these kinds: the KV caches, and on a GPU the weights, whose values are lost.

        On a CPU the weights stay, as in SGLang without its memory saver: no process waits for their memory.
        """
        self.flush_cache()
        if CACHE in tags:
            self._cache.free()
        if WEIGHTS in tags and self.model.device.type == "cuda":
            self.model.memory.release()
        self._released |= set(tags) - {GRAPHS}
        devices.free_cached(self.model.device)

    def take_back(self, tags: Collection[str]) -> None:
        """Resume: the KV cache may be allocated again; released weights need a push."""
        if WEIGHTS in tags and self.model.memory.released:
            self.model.memory.resume()
        self._released -= set(tags)

    # ---- the thread

    def _main(self) -> None:
        try:
            devices.use(self.model.device)
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
        return not (self.paused or self._released or self._lone_orders)

    def _gather(self) -> None:
        limit = time.monotonic() + _GATHER_LIMIT_S
        seen = 0
        while seen != len(self._inbox) and time.monotonic() < limit:
            seen = len(self._inbox)
            time.sleep(_GATHER_S)

    def _admit(self) -> None:
        rows: list[CompletionRequest] = []
        longest = self._running.max_length
        while self._waiting:
            num_rows = self._running.count + len(rows) + 1
            length = max(longest, self._waiting[0].max_length)
            if num_rows > self.max_running or not self._cache.fits(num_rows, length):
                break
            rows.append(self._waiting.popleft())
            longest = length
        if rows:
            self._reserve(len(rows), longest)
            self._prefill(rows)

    def _reserve(self, num_rows: int, positions: int) -> None:
        """Slots for so many more rows; the prefix cache makes room for them, or has more again when they are few."""
        self._keep_left()
        running, slots = self._running.count, self._running.count + num_rows
        if not running and math.prod(self._cache.size) > self.max_total_tokens - self._max_cached:
            self._cache.free()
        taken = math.prod(self._cache.size_for(slots, positions))
        self._prefixes.limit(min(self._max_cached, self.max_total_tokens - taken))
        self._cache.reserve(slots, positions, used=(running, self._used_positions()))

    def _prefill(self, rows: Sequence[CompletionRequest]) -> None:
        """The KV and the first token of new rows.  Those without a salt share KV until the weights change."""
        for row in rows:
            row.salt = self._num_loads if row.salt is None else row.salt
        groups = passes(distinct(rows, self._prefixes), first_slot=self._running.count)
        fills = [fill for group in groups for fill in group]
        self._prefixes.load(self._cache, [(fill.places, fill.slots) for fill in fills])
        complete = [self._prefill_together(group) for group in groups]
        self._prefixes.store(self._cache, [(f.salt, f.slots[0], len(f.places), f.tokens) for f in fills])
        self._retire(torch.cat(complete))

    def _prefill_together(self, fills: Sequence[PrefillSequence]) -> Tensor:
        """One pass over sequences whose slots hold what is cached of them; returns the places of complete rows."""
        device = self.model.device
        tokens = _right_padded([fill.tokens[len(fill.places) :] for fill in fills], device)
        source = [place for place, fill in enumerate(fills) for _ in fill.rows]
        starts, counts = [len(fill.places) for fill in fills], [fill.num_new for fill in fills]
        first = self._running.count
        hidden = self.model.prefill(tokens, Prefill(self._cache, first, source, starts, counts))
        last = hidden[torch.arange(len(fills), device=device), torch.tensor(counts, device=device) - 1]
        for fill, states in zip(fills, hidden, strict=True):
            self._score_prompt([row for row in fill.rows if row.needs_scores], states)
            for number, row in enumerate(fill.rows):
                row.stamp(self.weight_version, len(row.token_ids))
                if not row.num_retractions:
                    row.cached_tokens = len(fill.tokens) - 1 if number else len(fill.places)
        self._running.add([row for fill in fills for row in fill.rows])
        return self._running.draw_next(self.model.logits(last)[torch.tensor(source, device=device)], first)

    def _score_prompt(self, rows: Sequence[CompletionRequest], hidden: Tensor) -> None:
        if not rows:
            return
        prompt = torch.tensor(rows[0].prompt, device=self.model.device)
        log_probs = torch.log_softmax(self.model.logits(hidden[: len(prompt) - 1]).float(), dim=-1)
        scores = log_probs.gather(1, prompt[1:, None])[:, 0].tolist()
        top, ids = (found.tolist() for found in log_probs.topk(max(row.num_top for row in rows)))
        for row in rows:
            row.prompt_log_probs = scores
            places = zip(top, ids, strict=True)
            row.prompt_top = [
                [[x, i, None] for x, i in zip(*(side[: row.num_top] for side in place), strict=True)]
                for place in (places if row.num_top else ())
            ]

    def _step(self) -> None:
        """One token for every running request."""
        time.sleep(self.decode_sleep_s)
        self.num_decoded += self._running.count
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

    def _take(self, places: Sequence[int], *, keep_kv: bool = True) -> list[CompletionRequest]:
        """Remove requests from the running batch; returns them with their tokens so far."""
        if not places:
            return []
        chosen, used = torch.tensor(places, device=self.model.device), self._used_positions()
        rows = self._running.collect(chosen)
        for row, slot in zip(rows, places, strict=True):
            if row.reports:
                row.routes.append(self._cache.routes(slot, sum(map(len, row.routes)), len(row.sequence) - 1))
        if keep_kv:  # of all tokens but the last, which no pass has read
            written = zip(rows, places, strict=True)
            self._left = [(row.salt, slot, len(row.sequence), row.sequence[:-1]) for row, slot in written]
            if len(rows) < self._running.count:  # the others move, and continue
                self._keep_left()
        self._cache.move(*self._running.remove(chosen), used)
        return rows

    def _keep_left(self) -> None:
        """Copy to the prefix cache what is left in slots of rows that ended: a push that flushes it comes before."""
        if self._left:
            self._prefixes.store(self._cache, self._left)
            self._left = []

    def _retract(self) -> None:
        rows = self._take(range(self._running.count), keep_kv=False)
        for row in rows:
            row.num_retractions += 1
        self._waiting.extendleft(reversed(rows))

    def _report(self, rows: Iterable[CompletionRequest]) -> None:
        calls = {id(row.call): row.call for row in rows if row.call.pending == 0}
        if calls:
            self._on_done(list(calls.values()))


def _run(order: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(order())
    except ValueError as error:  # a refusal is returned to the caller; any other error ends the engine
        future.set_exception(error)


def _right_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """-> [S, longest]"""
    longest = max(map(len, sequences))
    return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=device)
