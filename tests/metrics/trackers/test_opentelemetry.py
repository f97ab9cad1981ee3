"""A step as a trace: what the driver and a collector send comes together, without a word between them."""

import subprocess
import sys
from pathlib import Path

import pytest
from trace_receiver import below, receiver

from megarl.cli import main
from megarl.io import traces
from megarl.io.traces import Traces, obstacle
from megarl.metrics.reading.jsonl import TIMELINE, append_lines
from megarl.metrics.trackers.opentelemetry import OpenTelemetryTracker
from megarl.metrics.trackers.tracker import Run


def test_a_step_is_a_trace_of_its_stages_calls_and_ranks_and_of_the_groups_that_collectors_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as (endpoint, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        tracker = OpenTelemetryTracker(
            Run(tmp_path, "megarl", "try", {}, 10), Traces("try:1", "driver"), lambda: 1010.0
        )
        collector = Traces("try:1", "collector")
        with collector.span("group", step=7, uid="0-17"), collector.span("generate"):
            pass
        stages = [["reward", 0.4, 0.1, 1], ["gen", 0.0, 0.5, 0], ["update_actor", 0.5, 1.5, 0]]
        calls = [["ranks_0", "update actor", 0.6, {"0": 1.25, "1": 1.0}]]
        append_lines(tmp_path / TIMELINE, [{"step": 7, "stages": stages, "calls": calls}])
        tracker.log(7, {"timing_s/step": 2.0, "critic/score/mean": 0.5, "actor/pg_loss": -0.1})
        tracker.log(7, {"val/score": 0.5})  # an evaluation has no line
        tracker.close()
        collector.close()
    (root,) = [span for span in spans if span.name == "step 7"]
    assert (root.parent_span_id, root.start_time_unix_nano, root.end_time_unix_nano) == (
        b"",
        1008 * 10**9,
        1010 * 10**9,
    )
    values = {item.key: item.value for item in root.attributes}
    assert values["critic/score/mean"].double_value == 0.5
    assert values["megarl.step"].int_value == 7
    assert {span.name for span in below(root, spans)} == {"gen", "update_actor", "group"}
    gen, update, group = (next(s for s in spans if s.name == name) for name in ("gen", "update_actor", "group"))
    assert [span.name for span in below(gen, spans)] == ["reward"]
    assert [span.name for span in below(group, spans)] == ["generate"]
    (call,) = below(update, spans)
    assert (call.name, call.end_time_unix_nano - call.start_time_unix_nano) == ("update actor", 1_250_000_000)
    assert {s.name: s.end_time_unix_nano - s.start_time_unix_nano for s in below(call, spans)} == {
        "update actor: rank 0": 1_250_000_000,
        "update actor: rank 1": 1_000_000_000,
    }
    assert len(spans) == 9


def test_traces_that_cannot_be_sent_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert obstacle({}) == obstacle(asked) == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    main(["train", "recipe=quickstart", "trainer.check_only=true"])
    said = "warning: OTEL_EXPORTER_OTLP_PROTOCOL=grpc: no traces are sent; expected http/protobuf"
    assert said in capsys.readouterr().err
    wanted = "expected the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
    for module in ("trace_exporter", "grpc.trace_exporter"):  # not there, without and with the packages around it
        monkeypatch.setattr(traces, "_EXPORTER", f"opentelemetry.exporter.otlp.proto.none.{module}")
        assert obstacle(asked).endswith(wanted)


def test_a_run_that_is_started_again_makes_other_traces_also_with_the_same_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where the driver is process 1 each time."""
    with receiver() as (endpoint, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        for start in ("first", "again"):
            for process in ("driver", "collector"):
                made = traces.begin(tmp_path, process, traces.asked()._replace(start=start))
                assert made is not None
                if process == "driver":
                    made.add("step 3", 1000.0, 1.0, step=3)
                else:
                    with traces.span(f"group of {start}", step=3):
                        pass
                made.close()
        traces.begin(tmp_path, "driver", traces.Asked("", {}))
    first, again = (span for span in spans if span.name == "step 3")
    assert first.trace_id != again.trace_id and first.span_id != again.span_id
    assert {span.name for span in below(first, spans)} == {"group of first"}
    assert {span.name for span in below(again, spans)} == {"group of again"}
    code = "import os; os.getpid = lambda: 1; from megarl.io import traces; print(traces.asked().start)"
    starts = [subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)]
    assert starts[0] != starts[1]


def test_what_a_sampler_leaves_out_is_left_out_by_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as (endpoint, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
        driver, collector = Traces("try:1", "driver"), Traces("try:1", "collector")
        for step in range(40):
            driver.add(f"step {step}", 1000.0, 1.0, step=step)
            with collector.span(f"group {step}", step=step):
                pass
        driver.close()
        collector.close()
    steps, groups = ({s.trace_id for s in spans if s.name.startswith(kind)} for kind in ("step", "group"))
    assert steps == groups and 5 < len(steps) < 35
