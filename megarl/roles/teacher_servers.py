"""The driver's handle on a teacher behind servers of its own, which give its log-probs of given tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event

import torch
from torch import Tensor

from megarl.algo.distillation import NO_LOG_PROB
from megarl.processes import watchdog
from megarl.processes.restarts import Restarts
from megarl.rollout.client import Scores, ServerClient, ServerError
from megarl.samples.batch import Batch

_LOOK_S = 0.5  # between two looks after the servers


@dataclass
class TeacherServers:
    """Columns of a batch from servers, at temperature 1, on the tokens that are learnt; each row is one request."""

    urls: Callable[[], Sequence[str]]  # known once the servers run
    token: str = field(repr=False)
    concurrency: int = 64  # requests at a time, to all servers
    timeout_s: float = 120.0
    tries: int = 5
    look_after: Callable[[], None] = lambda: None  # restarts the run's own that died; raises if they may not
    comes_back_s: float = 0.0  # how long requests wait for one that does not answer, before a try counts
    _clients: list[ServerClient] = field(default_factory=list, init=False)

    def require_room(self, longest: int, keys: str) -> None:
        """Raises ValueError for a server that refuses a row of `longest` tokens, which `keys` allow."""
        for client in self._connected():
            refused = client.server_info().get("max_req_input_len")
            if refused is not None and longest >= refused:
                raise ValueError(
                    f"{keys}={longest}: the teacher's server {client.url} refuses rows of {refused} tokens and more; "
                    f"expected at most {refused - 1}"
                )

    def log_probs(self, batch: Batch) -> Tensor:
        """[N] log-probs of the learnt tokens; 0 elsewhere."""
        found = torch.zeros(batch.num_tokens)
        for first, scores in self._scored(batch, 0):
            found[first : first + len(scores.log_probs)] = torch.tensor(scores.log_probs)
        return found

    def top_log_probs(self, batch: Batch, k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """ids [N, k] int32 and log-probs [N, k] of the most likely tokens where one is learnt; -1 and NO_LOG_PROB else.

        So also for tokens beyond the first `vocab_size`, which stand in the padding of a larger vocabulary.
        """
        ids = torch.full((batch.num_tokens, k), -1, dtype=torch.int32)
        log_probs = torch.full((batch.num_tokens, k), NO_LOG_PROB)
        for first, scores in self._scored(batch, k):
            there = slice(first, first + len(scores.log_probs))
            ids[there] = torch.tensor(scores.top_ids, dtype=torch.int32)
            log_probs[there] = torch.tensor(scores.top_log_probs)
        beyond = ids >= vocab_size
        return ids.masked_fill(beyond, -1), log_probs.masked_fill(beyond, NO_LOG_PROB)

    def _scored(self, batch: Batch, top_k: int) -> list[tuple[int, Scores]]:
        """(place in the batch of a row's first learnt token, scores from it on) for each row that learns something."""
        contexts = batch.context_lengths(batch.columns["response_mask"] != 0).tolist()
        rows = zip(batch.tokens.split(batch.lengths.tolist()), batch.row_starts.tolist(), contexts, strict=True)
        asked = [(begin + context, row.tolist(), context) for row, begin, context in rows if context < len(row)]
        self._connected()
        ended = Event()
        with ThreadPoolExecutor(self.concurrency) as threads:
            jobs = [
                threads.submit(self._ask, number, ids, context, top_k, ended)
                for number, (_, ids, context) in enumerate(asked)
            ]
            try:
                waiting = set(jobs)
                while waiting:
                    watchdog.heartbeat()
                    done, waiting = wait(waiting, _LOOK_S, FIRST_EXCEPTION)
                    for job in done:
                        job.result()  # raises what it failed with
                    if waiting:
                        self.look_after()  # in this thread, which started them and lives as long
                return [(first, job.result()) for (first, _, _), job in zip(asked, jobs, strict=True)]
            finally:
                ended.set()
                threads.shutdown(wait=False, cancel_futures=True)

    def _connected(self) -> list[ServerClient]:
        if not self._clients:
            self._clients = [ServerClient(url, self.token, timeout_s=self.timeout_s) for url in self.urls()]
        return self._clients

    def _ask(self, number: int, token_ids: list[int], start: int, top_k: int, ended: Event) -> Scores:
        """From one of the servers; after a failure that may pass from the next.  Raises ServerError at the end.

        `ended`: nobody waits for it any more.
        """
        failures, back_by = Restarts(self.tries), time.monotonic() + self.comes_back_s
        while True:
            client = self._clients[(number + failures.count) % len(self._clients)]
            try:
                return client.scores(token_ids, start, top_k)
            except ServerError as error:
                rest_s = failures.next_rest_s
                failures.count += error.status != 0 or time.monotonic() >= back_by
                may_pass = error.status in (0, 429) or error.status >= 500
                if failures.are_used_up or not may_pass or ended.is_set():
                    raise
                time.sleep(rest_s)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()
        self._clients = []
