"""Spans for OpenTelemetry, by its stock SDK, of runs that have OTEL_EXPORTER_OTLP_ENDPOINT in their environment.

Each step of a run is a trace.  Its ids follow from the start of the run and the number of the step, so that every
process adds spans to it without asking another one.  All other settings are OpenTelemetry's own variables:
https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

Attributes = Mapping[str, str | int | float]


def obstacle(environment: Mapping[str, str]) -> str:
    """Why the traces that an endpoint's variable asks for are not sent; empty: they are, or nobody asks for them."""
    variable = next((name for name in ENDPOINTS if environment.get(name)), "")
    protocol = next((name for name in _PROTOCOLS if environment.get(name)), "")
    if not variable:
        return ""
    if not _has_packages():
        return f"{variable} is set, but no traces are sent: expected the packages {' and '.join(PACKAGES)}"
    if protocol and environment[protocol] != "http/protobuf":
        return f"{protocol}={environment[protocol]}: no traces are sent; expected http/protobuf"
    return ""


def _has_packages() -> bool:
    try:
        return find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


_START = secrets.token_hex(8)  # of this process; in a container each one may have the same pid


class Asked(NamedTuple):
    """What the driver's environment asks for, told to children that do not get it."""

    start: str  # of the driver: a run that goes on from a save makes steps again, as other traces
    variables: dict[str, str]  # OpenTelemetry's, of which OTEL_EXPORTER_OTLP_HEADERS may hold a key


def asked() -> Asked:
    return Asked(_START, {name: value for name, value in os.environ.items() if name.startswith("OTEL_")})


class Traces:
    """The spans of one process of a run.

    Example:
        traces = Traces("runs/try:4f2a", process="driver")
        step = traces.add("step 7", begin, seconds, step=7)             # the root of its trace
        traces.add("update_actor", begin + 0.5, 0.2, parent=step)
        with traces.span("episode", step=7, uid="0-17"): ...            # in another process
        traces.close()
    """

    def __init__(self, run: str, process: str) -> None:
        """`run`: what no other start of a run has, equal in all processes of this one."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Gives the next root the ids of its step."""

            root: tuple[int, int] | None = None

            def generate_span_id(self) -> int:
                return self.root[1] if self.root else super().generate_span_id()

            def generate_trace_id(self) -> int:
                return self.root[0] if self.root else super().generate_trace_id()

        self._run, self._ids = run, Ids()
        service = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "megarl"}
        resource = Resource.create({**service, "megarl.run": run, "megarl.process": process})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("megarl")

    def add(
        self,
        name: str,
        begin: float,
        seconds: float,
        *,
        step: int = 0,
        parent: Span | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span that has ended: below `parent`, or the root of step `step`.  `begin`: seconds since 1970."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        self._ids.root = None if parent else self._ids_of(step)
        context = set_span_in_context(parent, Context()) if parent else Context()
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=round(begin * 1e9))
        self._ids.root = None
        span.end(round((begin + seconds) * 1e9))
        return span

    @contextmanager
    def span(self, name: str, *, step: int | None = None, **attributes: str | int) -> Iterator[None]:
        """What the body does, below the span of the running task, or below step `step`."""
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        context = None
        if step is not None:
            trace, parent = self._ids_of(step)
            chosen = self._provider.sampler.should_sample(Context(), trace, f"step {step}").decision.is_sampled()
            flags = TraceFlags(TraceFlags.SAMPLED if chosen else TraceFlags.DEFAULT)
            root = SpanContext(trace, parent, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(root), Context())
        with self._tracer.start_as_current_span(name, context, attributes=attributes):
            yield

    def close(self) -> None:
        """Send what is not sent yet."""
        self._provider.shutdown()

    def _ids_of(self, step: int) -> tuple[int, int]:
        """The ids of the trace and the span of a step."""
        digest = hashlib.sha256(f"{self._run}:{step}".encode()).digest()
        return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


_traces: Traces | None = None  # of this process


def begin(run_dir: Path, process: str, wish: Asked) -> Traces | None:
    """From now on `span` makes spans, if `wish` names an endpoint."""
    global _traces  # noqa: PLW0603  # one process has one, and spans begin deep in it
    _traces, settings = None, wish.variables
    if any(settings.get(name) for name in ENDPOINTS) and not obstacle(settings):
        before = dict(os.environ)
        os.environ.update(settings)  # the SDK reads them there, once
        try:
            _traces = Traces(f"{run_dir.resolve()}:{wish.start}", process)
        finally:
            for name in settings.keys() - before.keys():
                del os.environ[name]
    return _traces


@contextmanager
def span(name: str, *, step: int | None = None, **attributes: str | int) -> Iterator[None]:
    """See Traces.span; costs nothing where no traces are sent."""
    if _traces is None:
        yield
    else:
        with _traces.span(name, step=step, **attributes):
            yield


def add_parent(headers: MutableMapping[str, str]) -> None:
    """The running span, for the server that a request goes to (W3C Trace Context: `traceparent`)."""
    if _traces is not None:
        from opentelemetry.propagate import inject

        inject(headers)
