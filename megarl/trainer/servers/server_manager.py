"""The servers of a run as the training loop sees them: none serves before it holds the trainer's weights, verified.

The supervisor restarts a server that died, and one that a collector found unfit.  A failed push is repeated; after two
failed pushes in a row the server is restarted.  No such server gets requests before its next verified push.  The run
stops only when no server is left.

A push to servers on the trainer's GPUs (colocation) has these steps: the servers have released all their memory; the
trainer computes the canary's log-probs; the servers resume the memory of the weights; the weights are pushed; the
servers resume the KV cache; their log-probs of the canary are compared.  No server is started on these GPUs while the
trainer uses them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from megarl.processes import watchdog
from megarl.rollout.client import of_all
from megarl.rollout.server_states import Requester, ServerTable
from megarl.servers.supervisor import ServerDied, ServerEvent, Servers, State
from megarl.trainer.servers.colocation import GENERATION, WEIGHTS, Turns
from megarl.trainer.servers.loads import ServerLoads
from megarl.trainer.servers.membership import Memberships
from megarl.weights.push.report import PushReport

Push = Callable[[Sequence[str], int], PushReport]  # of (urls, version)

_TEND_EVERY_S = 0.5
_PATIENCE = 2  # failed pushes in a row after which a server is restarted


def is_verified(report: PushReport) -> bool:
    """Whether all servers that got this push were verified, by digests or by a comparison."""
    return bool(report.num_verified or report.compared) and not report.unverified


class ServerManager:
    """Example: manager.push(7); then, while completions are awaited, manager.check_servers() at least every second."""

    def __init__(
        self,
        servers: Servers,
        requester: Requester,
        push: Push,
        warn: Callable[[str], None],
        turns: Turns | None = None,
        members: Memberships | None = None,
        check: Callable[[str], None] = lambda _: None,
        loads: ServerLoads | None = None,
    ) -> None:
        """`requester`: the collectors, or the router before them.
        `turns`: for servers that share the trainer's GPUs; None: servers have their own, and `push` sends the canary.
        `members`: lets servers join and leave.  `check`: raises ValueError for a server that is back and does not fit.
        `loads`: reads the load of the servers that it is given, and its metrics are among those of a step."""
        self._servers = servers
        self._requester = requester
        self._push = push
        self._warn = warn
        self._table = ServerTable(requester.update)  # which servers may generate, and with which weights
        self._turns = turns
        self._members = members
        self._check = check
        self._loads = loads
        self.version: int | None = None  # of the last push
        self.counts: Counter[str] = Counter(failed=0, repaired=0, servers_died=0, fallbacks=0)
        self._failures: Counter[str] = Counter()  # failed pushes in a row
        self._last_reason = ""
        self._tended = 0.0

    @property
    def holding(self) -> set[str]:
        """Servers that hold the version of the last push, verified."""
        return set() if self.version is None else self._table.holding(self.version)

    @property
    def shares_gpus(self) -> bool:
        """Whether servers and trainer share GPUs (colocation), and so use them in separate phases."""
        return self._turns is not None

    def push(self, version: int) -> PushReport:
        """Push the trainer's weights to every live server; returns the report once at least one holds them.

        Raises ServerDied when no server is left.
        """
        self._look(starts=self._turns is None)
        self.version = version
        serving = self._servers.serving
        for url in serving:  # the push pauses it: a new request, and the time limit of a running one, wait for the end
            self._table.hold(url, for_push=True)
        report = self._deliver(serving)
        while not self.holding:
            time.sleep(_TEND_EVERY_S)
            report = self._repair() or report
        return report

    def check_servers(self) -> None:
        """Restart dead servers and push to servers that lack the current version; cheap if there is nothing to do.

        Call it only while the trainer holds the weights of the last push.
        """
        if time.monotonic() - self._tended >= _TEND_EVERY_S:
            self._repair()

    def watch(self) -> bool:
        """Take dead servers out of service; returns whether any server holds the weights of the last push.

        Unlike `check_servers` it starts and pushes nothing, so the trainer may hold other weights meanwhile.
        """
        self._look(starts=False)
        return bool(self.holding)

    def release_memory(self) -> None:
        """Servers that share the trainer's GPUs release their memory; after that they need a push to serve again.

        Waits for servers that are starting: they load a model into the memory that the trainer needs.  What a
        completion has so far is kept, and another request continues it after the push.
        """
        if (turns := self._turns) is None:
            return
        while State.STARTING in self._servers.states:
            time.sleep(_TEND_EVERY_S)
            self._look(starts=False)
        serving = self._servers.serving
        for url in serving:
            self._table.hold(url)
        self._in_turn(serving, lambda url: turns.memory.release_memory(url, turns.lends))

    def _in_turn(self, urls: Sequence[str], act: Callable[[str], None]) -> list[str]:
        """Call `act` for all servers in parallel; returns those where it succeeded.

        A server that fails is restarted, which frees its memory too.
        """
        done, failed = of_all(urls, act)
        for url, error in failed.items():
            self._fence(url, str(error))
            self._note(self._servers.restart(url, str(error)))
        return list(done)

    def metrics(self, report: PushReport) -> dict[str, float]:
        """Metrics of a step whose push returned this report; counts are totals since the start."""
        out = {f"push/{name}": float(count) for name, count in self.counts.items()}
        out["push/servers"] = float(len(self.holding))
        out |= self._members.metrics() if self._members else {}
        out |= self._loads.of_step() if self._loads else {}
        out["push/compared"] = float(len(report.compared))
        return out | {"push/tensors_verified": float(report.num_verified)}

    def _repair(self) -> PushReport | None:
        """Push to servers that were restarted or whose push failed; returns the report, None if there are none."""
        self._look()
        if self._turns is not None and (self.holding or State.STARTING in self._servers.states):
            self._tended = time.monotonic()  # until the next phase the trainer has no memory for a push
            return None
        lagging = [url for url in self._servers.serving if url not in self.holding]
        report = self._deliver(lagging) if lagging and self.version is not None else None
        self.counts["repaired"] += len(set(lagging) & self.holding)
        self._tended = time.monotonic()
        return report

    def _look(self, *, starts: bool = True) -> None:
        """Take dead servers out of service, and restart them if `starts`.  Raises ServerDied if no server is left."""
        watchdog.heartbeat()
        if self._members is not None:
            for url in self._members.poll_members(self.holding):
                self._table.forget(url)
        for url, reason in self._requester.take_unfit().items():
            if url in self.holding:  # else it is being started again already
                self._note(self._servers.restart(url, reason))
        self._note(self._servers.poll(starts=starts))
        if self._loads is not None:
            self._loads.servers = tuple(self._servers.serving)
        if all(state is State.OUT for state in self._servers.states):
            raise ServerDied(f"no server is left; {self._last_reason}")

    def _note(self, events: Sequence[ServerEvent]) -> None:
        for event in events:
            if event.state is State.SERVING:
                self._welcome(event.url)
                continue
            self.counts["servers_died"] += 1
            self._fence(event.url, event.reason)
            if self._turns is not None:
                self._turns.memory.forget(event.url)

    def _welcome(self, url: str) -> None:
        """Check a server that is back before its first push: its owner may have started it with other options."""
        try:
            watchdog.heartbeat()
            self._check(url)
        except ValueError as error:
            self._note(self._servers.restart(url, str(error)))

    def _deliver(self, urls: Sequence[str]) -> PushReport:
        assert self.version is not None, "there is nothing to push before the first version"
        report = self._push(urls, self.version) if self._turns is None else self._push_in_turn(self._turns, urls)
        for url, sentences in report.fallbacks.items():
            self.counts["fallbacks"] += len(sentences)
            for sentence in sentences:
                self._warn(f"{url} fell back to a slower transport: {sentence}")
        # Failures first: the router must drop servers without this version before it hears that others hold it.
        for url in urls:
            if url in report.failed:
                self._failed(url, report.failed[url])
        for url in urls:
            if url in report.transports:
                self._failures.pop(url, None)
                self._table.trust(url, self.version, report.adapter)
        return report

    def _push_in_turn(self, turns: Turns, urls: Sequence[str]) -> PushReport:
        """A push in colocation.

        A server that failed to resume memory is in neither the transports nor the failures of the report.
        """
        assert self.version is not None, "there is nothing to push before the first version"
        self.release_memory()
        canary = turns.canary()
        serving = set(self._servers.serving)
        awake = self._in_turn(
            [url for url in urls if url in serving], lambda url: turns.memory.resume_memory(url, [WEIGHTS])
        )
        report = self._push(awake, self.version)
        began = time.monotonic()
        full = self._in_turn(list(report.transports), lambda url: turns.memory.resume_memory(url, GENERATION))
        wrong = turns.memory.examine(canary, full, report.adapter)
        able = {url: transport for url, transport in report.transports.items() if url in full and url not in wrong}
        timings = report.timings | {"canary": time.monotonic() - began}
        return replace(report, transports=able, failed=report.failed | wrong, timings=timings)

    def _failed(self, url: str, reason: str) -> None:
        self.counts["failed"] += 1
        self._failures[url] += 1
        self._fence(url, f"the push of weights version {self.version} failed: {reason}")
        if self._failures[url] >= _PATIENCE:
            del self._failures[url]
            self._note(self._servers.restart(url, reason))

    def _fence(self, url: str, reason: str) -> None:
        self._table.fence(url)
        self._last_reason = reason
        self._warn(f"{url} is out of service: {reason}")
