"""A process world of its own, seen from the driver: call a method on every rank, get an answer from every replica.

The driver writes an ordinary program; `Group` carries its calls to the ranks that torchrun started.  A call is a small
header to every rank.  Tensors go once to the first rank of each data-parallel replica, which shares them inside the
replica; results come only from each replica's reporter (its last pipeline stage).  Every rank ends every call with a
status, so an exception anywhere reaches the driver with its rank, and a dead or silent rank is noticed in seconds.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.group.wire import Tensors, Wire, WireClosed, accept
from megarl.mcore.setup import Layout

ADDRESS, TOKEN = "MEGARL_GROUP_ADDRESS", "MEGARL_GROUP_TOKEN"
HEARTBEAT_S = 2.0  # how often a rank that works says so
SILENCE_S = 60.0  # without a sign for so long, a rank counts as lost
GRACE_S = 1.0  # after a first error, how long to listen for the others': the root cause is often not the first


class RankError(RuntimeError):
    """An exception on a rank, or its death.

    `report` holds the remote traceback, `kind` the name of the remote exception's class, and `details` its attribute of
    that name, plain values, where it has one.
    """

    def __init__(self, message: str, report: str = "", kind: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report, self.kind, self.details = report, kind, details or {}


@dataclass(frozen=True)
class Reply:
    """What a replica's reporter returned."""

    result: dict[str, Any]
    tensors: Tensors


class Group:
    """The ranks of one world.

    Example: with Group("ranks", 2, Layout(tp=2), log_dir=logs) as group: group.start(); group.call("load", {...})
    Entering starts the processes and returns at once, `start` waits for them, leaving ends them.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        layout: Layout,
        *,
        log_dir: Path,
        device: str = "auto",
        seed: int = 0,
        call_timeout_s: float = 600.0,
        start_timeout_s: float = 180.0,
        worker: str = "megarl.roles.worker",
    ) -> None:
        self.name, self.num_ranks, self.call_timeout_s = name, num_ranks, call_timeout_s
        self._setup = {"layout": asdict(layout), "device": device, "seed": seed, "timeout_s": call_timeout_s}
        self._start_timeout_s, self._worker, self._log_dir = start_timeout_s, worker, log_dir
        self._token = secrets.token_hex(16)
        self._wires: dict[int, Wire] = {}
        self._agent: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._call_id = 0
        self.num_replicas = 0
        self._first_of_replica: dict[int, int] = {}  # replica -> the rank that takes its tensors
        self._reporters: dict[int, int] = {}  # rank -> the replica for which it reports

    def __enter__(self) -> Group:
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self) -> None:
        """Start the ranks' processes and return at once; `start` waits for them."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(1.0)
        self._agent = self._spawn(f"127.0.0.1:{self._listener.getsockname()[1]}")

    def start(self) -> None:
        """Wait until each rank has called home, and make their process groups."""
        assert self._listener is not None, "launch() comes first"
        with self._listener:
            self._welcome(self._listener)
        places = self._call_all("setup", self._setup, {})
        for rank, place in sorted(places.items()):
            where = place.result
            self._first_of_replica.setdefault(where["replica"], rank)
            if where["is_reporter"]:
                self._reporters[rank] = where["replica"]
        self.num_replicas = len(self._first_of_replica)
        assert len(self._reporters) == self.num_replicas, "each replica has exactly one reporter"

    def _spawn(self, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--master-addr=127.0.0.1"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={self.num_ranks}", "--redirects=3", f"--log-dir={self._log_dir}"]
        env = {**os.environ, ADDRESS: address, TOKEN: self._token}
        if self._setup["device"] == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""  # Megatron takes CUDA wherever torch sees it
        if self._setup["device"] != "cuda":
            env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.num_ranks)))
        with open(self._log_dir / f"{self.name}.log", "ab") as log:
            return subprocess.Popen(
                [*command, "-m", self._worker], env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the driver, which ends the ranks in order
            )  # fmt: skip

    def _welcome(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while len(self._wires) < self.num_ranks:
            self._check_agent()
            if time.monotonic() > deadline:
                raise RankError(
                    f"group {self.name}: {len(self._wires)} of {self.num_ranks} ranks came up in "
                    f"{self._start_timeout_s:.0f} s; see {self._log_dir}"
                )
            try:
                arrival = accept(listener, self._token)
            except TimeoutError:
                continue
            if arrival:
                wire, hello = arrival
                wire.sock.settimeout(SILENCE_S)  # a machine that is lost in mid-message closes no connection
                self._wires[int(hello["rank"])] = wire

    def _check_agent(self) -> None:
        if self._agent is not None and self._agent.poll() is not None:
            raise RankError(
                f"group {self.name}: its ranks ended with status {self._agent.returncode}; see {self._log_dir}"
            )

    def call(
        self,
        method: str,
        arguments: dict[str, Any] | None = None,
        payloads: Sequence[Tensors] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Reply]:
        """Run `method` on every rank; `payloads` has one entry a replica.  Returns one reply a replica, in order.

        Raises ValueError where a rank found a mistake of the user's, RankError for everything else that went wrong.
        """
        assert payloads is None or len(payloads) == self.num_replicas, "one payload a replica"
        by_rank = {self._first_of_replica[i]: tensors for i, tensors in enumerate(payloads or ())}
        answers = self._call_all(method, arguments or {}, by_rank, bool(payloads), timeout_s)
        return [answers[rank] for rank, _ in sorted(self._reporters.items(), key=lambda item: item[1])]

    def call_leader(self, method: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> Reply:
        """Run `method` on every rank and return what rank 0 said: it is the one that speaks to the outside."""
        return self._call_all(method, arguments, {}, timeout_s=timeout_s)[0]

    def _call_all(
        self,
        method: str,
        arguments: dict[str, Any],
        payloads: dict[int, Tensors],
        has_payload: bool = False,
        timeout_s: float | None = None,
    ) -> dict[int, Reply]:
        self._call_id += 1
        header = {"id": self._call_id, "method": method, "arguments": arguments, "has_payload": has_payload}
        for rank, wire in self._wires.items():
            try:
                wire.send(header, payloads.get(rank))
            except WireClosed as error:
                raise self._died(rank, method) from error
        return self._collect(method, timeout_s or self.call_timeout_s)

    def _collect(self, method: str, timeout_s: float) -> dict[int, Reply]:
        answers: dict[int, Reply] = {}
        errors: dict[int, dict[str, Any]] = {}
        begun = time.monotonic()
        last_sign = dict.fromkeys(self._wires, begun)
        deadline = begun + timeout_s
        with selectors.DefaultSelector() as ready:
            for rank, wire in self._wires.items():
                ready.register(wire.sock, selectors.EVENT_READ, rank)
            while len(answers) + len(errors) < self.num_ranks:
                for key, _ in ready.select(timeout=0.5):
                    rank = key.data
                    last_sign[rank] = time.monotonic()
                    self._take(rank, answers, errors, method)
                now = time.monotonic()
                if errors:
                    deadline = min(deadline, now + GRACE_S)
                if now > deadline:
                    break
                silent = [r for r, t in last_sign.items() if now - t > SILENCE_S and r not in answers]
                if silent:
                    raise RankError(
                        f"group {self.name}: rank {silent[0]} gave no sign for {SILENCE_S:.0f} s in {method}"
                    )
        if errors:
            raise _as_error(self.name, method, errors)
        if len(answers) < self.num_ranks:
            late = sorted(set(self._wires) - set(answers))
            raise RankError(f"group {self.name}: {method} took over {timeout_s:.0f} s on ranks {late}")
        return answers

    def _take(self, rank: int, answers: dict[int, Reply], errors: dict[int, dict[str, Any]], method: str) -> None:
        try:
            header, tensors = self._wires[rank].receive()
        except WireClosed as error:
            if errors:  # others already told why
                errors.setdefault(rank, {"type": "RankError", "message": "ended", "traceback": ""})
                return
            raise self._died(rank, method) from error
        if "beat" in header or header["id"] < self._call_id:  # or late: the answer to a call that failed elsewhere
            return
        assert header["id"] == self._call_id, f"rank {rank} answered call {header['id']}, not {self._call_id}"
        if header["ok"]:
            answers[rank] = Reply(header["result"], tensors)
        else:
            errors[rank] = header

    def _died(self, rank: int, method: str) -> RankError:
        return RankError(f"group {self.name}: rank {rank} died in {method}; see {self._log_dir}")

    def close(self) -> None:
        """End the ranks: ask, then terminate their agent, then kill it."""
        for wire in self._wires.values():
            try:
                wire.send({"method": "close"})
            except WireClosed:
                continue  # gone already, which is what we want
        if self._agent is not None:
            for end in (lambda: None, self._agent.terminate, self._agent.kill):
                end()
                try:
                    self._agent.wait(timeout=10.0)
                    break
                except subprocess.TimeoutExpired:
                    continue
        for wire in self._wires.values():
            wire.close()
        if self._listener is not None:
            self._listener.close()
        self._wires.clear()
        self._agent = None


def _as_error(name: str, method: str, errors: dict[int, dict[str, Any]]) -> Exception:
    """The most telling of the ranks' errors: one that is not merely a collective broken by another's failure."""
    rank, first = min(errors.items(), key=lambda item: (item[1]["type"] in ("RuntimeError", "RankError"), item[0]))
    report = "\n".join(f"rank {r}:\n{e['traceback']}" for r, e in sorted(errors.items()))
    if first["type"] == "ValueError":
        mistake = ValueError(first["message"])
        mistake.__cause__ = RankError(report)  # seen where a traceback is asked for
        return mistake
    what = f"group {name}: rank {rank} failed in {method}: {first['type']}: {first['message']}"
    return RankError(what, report, first["type"], first.get("details"))
