"""Serves the last value of every metric to Prometheus, at http://HOST:PORT/metrics in its text format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/.  By default it listens on loopback alone: then a
Prometheus of the same machine, or one behind a tunnel, asks for it.
"""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.io.callers import Callers, Peer
from megarl.io.sockets import address_in
from megarl.metrics.trackers.tracker import Run, Tracker, register_tracker

PATH = "/metrics"
_ASK_S = 5.0  # that a client has for its request


@register_tracker("prometheus")
class PrometheusTracker(Tracker):
    """megarl_actor_pg_loss{run="try",metric="actor/pg_loss"} -0.01, and so on; the stage has its seconds so far."""

    def __init__(self, run: Run) -> None:
        """Raises ValueError if the port cannot be had."""
        self._run, self._values = run.experiment, dict[str, float]()
        self._step, self._total = run.resume_step or 0, run.total_steps
        self._stage, self._since = "", time.time()
        host, port = (run.config["trainer"][f"prometheus_{key}"] for key in ("host", "port"))
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"trainer.prometheus_host={host} trainer.prometheus_port={port}: {error.strerror}; expected an address "
                "of this machine and a free port of it"
            ) from error
        self._server.tracker, self._server.callers = self, Callers("prometheus")
        self._server.hosts = {host.lower(), "localhost"}
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._values = step, {**self._values, **metrics}

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:  # noqa: ARG002
        if name != self._stage:
            self._stage, self._since = name, time.time()

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> str:
        """All series; a metric that a step did not have keeps its last value."""
        counts = {"step": self._step, "total_steps": self._total}
        lines = [line for name, value in counts.items() for line in _gauge(f"megarl_{name}", {"run": self._run}, value)]
        stage = {"run": self._run, "stage": self._stage}
        lines += _gauge("megarl_stage_seconds", stage, time.time() - self._since)
        families: dict[str, list[tuple[str, float]]] = {}
        for name, value in self._values.items():
            families.setdefault("megarl_" + re.sub(r"\W", "_", name, flags=re.ASCII), []).append((name, value))
        for family, members in sorted(families.items()):
            lines.append(f"# TYPE {family} gauge")
            lines += [_line(family, {"run": self._run, "metric": name}, value) for name, value in members]
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128
    tracker: PrometheusTracker
    callers: Callers  # all of them: there is no key
    hosts: set[str]

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, handler)

    def process_request(self, request: Any, client_address: Peer) -> None:
        self.callers.add(request, client_address)
        super().process_request(request, client_address)

    def is_asked_by_name(self, host: str) -> bool:
        """Whether a request is for one of our names, or for an address.  Another name is a page in a browser."""
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        return name in self.hosts or address_in(name) is not None


class _Handler(BaseHTTPRequestHandler):
    timeout = _ASK_S
    server: _Server

    def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
        if self.path != PATH or not self.server.is_asked_by_name(self.headers.get("Host", "")):
            return self.send_error(404)
        body = self.server.tracker.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Says nothing: a line for each request would hide what the run says."""


def _gauge(name: str, labels: Mapping[str, str], value: float) -> Iterator[str]:
    yield f"# TYPE {name} gauge"
    yield _line(name, labels, value)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{label}="{_escaped(words)}"' for label, words in labels.items())
    return f"{name}{{{text}}} {_number(value)}"


def _escaped(words: str) -> str:
    return words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value!r}" if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
