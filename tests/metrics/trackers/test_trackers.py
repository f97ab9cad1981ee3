"""What each tracker keeps or shows of a run; a Prometheus over a real socket."""

import contextlib
import http.client
import io
import json
import logging
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.io import callers
from megarl.metrics.reading.jsonl import append_lines, read_lines
from megarl.metrics.reading.status import read_status
from megarl.metrics.trackers.console import ConsoleTracker
from megarl.metrics.trackers.prometheus import PrometheusTracker
from megarl.metrics.trackers.status import StatusTracker
from megarl.metrics.trackers.tracker import Run, Tracker
from megarl.metrics.trackers.trackers import TRACKERS, make_trackers
from megarl.servers.server_process import free_ports

METRICS = {"actor/pg_loss": -0.5, "critic/score/mean": 0.25}


def make(names, tmp_path, **kwargs):
    return make_trackers(names, tmp_path / "run", "megarl", "try", {"actor": {"optim": {"lr": 1e-6}}}, 10, **kwargs)


def test_jsonl_holds_what_was_logged_and_a_resumed_run_has_no_step_twice(tmp_path):
    trackers = make(["jsonl"], tmp_path)
    for step in (1, 2, 3):
        trackers.log(step, METRICS)
    trackers.stage("gen", 1, 2)
    trackers.close()
    trackers = make(["jsonl"], tmp_path, resume_step=2)
    trackers.log(3, {"actor/pg_loss": 9.0, "timing_s/step": 1.0, "nan": float("nan"), "inf": float("inf")})
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert (rows[2]["nan"], rows[2]["inf"]) == (None, None), "which other readers take, too"
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {name: rows[0][name] for name in METRICS} == METRICS
    assert [row["kind"] for row in rows] == ["evaluation", "evaluation", "train"]
    assert rows[2]["actor/pg_loss"] == 9.0
    assert rows[0]["time"] > 1e9
    make(["jsonl"], tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_tensorboard_holds_what_was_logged(tmp_path):
    trackers = make(["tensorboard"], tmp_path)
    trackers.log(1, METRICS)
    trackers.log(2, METRICS)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(METRICS)
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, -0.5), (2, -0.5)]


def test_wandb_has_tables_of_samples_and_the_last_numbers_of_a_step_that_is_made_twice(tmp_path, monkeypatch):
    import wandb  # slow to import

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make(["wandb"], tmp_path)
    samples, files = tmp_path / "run" / "samples.jsonl", (tmp_path / "run" / "wandb").glob
    row = {"step": 1, "prompt": "12+34=", "completion": "46", "ground_truth": "46", "reward": 1.0, "uid": "a"}
    append_lines(samples, [row])
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):  # after step 3 back to step 2
        trackers.log(step, {"actor/pg_loss": loss})
    assert not list(files("offline-run-*/files/media/table/*.json")), "tables come with evaluations"
    trackers.log(2, {"val/score": 0.5})
    append_lines(samples, [row | {"step": 2, "reward": 0.5}])
    trackers.close()
    wandb.teardown()  # wandb's own process writes the files: here it comes to its end
    tables = [json.loads(file.read_text()) for file in files("offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"] for table in tables) == [
        [[1, "12+34=", "46", "46", 1.0]],
        [[2, "12+34=", "46", "46", 0.5]],
    ]
    run_id = (tmp_path / "run" / "wandb_id").read_text()
    (data,) = files("offline-run-*/*.wandb")
    assert run_id in data.name
    records = list(wandb_records(data))
    rows = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["training/global_step"], row.get("actor/pg_loss"), row.get("val/score")) for row in rows] == [
        (1, 0.1, None),
        (2, 0.2, None),
        (3, 0.3, None),
        (2, 0.4, None),
        (2, None, 0.5),
        (2, None, None),  # the last table
    ]
    assert [row["_step"] for row in rows] == list(range(6)), "it grows, so wandb drops nothing"
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert axes["*"] == "training/global_step"
    make(["wandb"], tmp_path, resume_step=1).close()
    assert (tmp_path / "run" / "wandb_id").read_text() == run_id


def wandb_records(file):
    """What wandb writes offline: seven bytes, then records in LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # slow to import

    data, at, begun = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no header fits
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        at += 7 + size
        begun += data[at - size : at]
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(begun)
            begun = b""


def test_mlflow_holds_metrics_and_configuration_and_a_resumed_run_goes_on_with_its_own(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient  # slow to import

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trackers = make(["mlflow"], tmp_path)
    trackers.log(1, METRICS | {"val-core/gsm8k/acc/mean@8": 0.5, "off": float("nan")})
    trackers.log(1, {"val/score": 0.5})
    trackers.log(2, METRICS)
    trackers.close(RuntimeError("killed"))
    client = MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    run_id = (tmp_path / "run" / "mlflow_id").read_text()
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "try", "FAILED")
    trackers = make(["mlflow"], tmp_path, resume_step=1)
    assert client.get_run(run_id).info.status == "RUNNING"
    for step in (2, 3):
        trackers.log(step, METRICS)
        trackers.log(step, {"val/score": 0.75})
    assert run.data.params == {"actor.optim.lr": "1e-06"}
    assert run.data.metrics["val-core/gsm8k/acc/mean_8"] == 0.5, "MLflow's names have no @"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "actor/pg_loss")] == [
        (1, -0.5),
        (2, -0.5),
        (3, -0.5),
    ]
    scores = client.get_metric_history(run_id, "val/score")
    assert [(m.step, m.value) for m in scores] == [(1, 0.5), (2, 0.75), (3, 0.75)], "what was there is there once"
    trackers.close(KeyboardInterrupt())
    assert client.get_run(run_id).info.status == "KILLED", "somebody stopped it"
    make(["mlflow"], tmp_path, resume_step=3).close()
    assert client.get_run(run_id).info.status == "FINISHED"
    assert "lr: 1.0e-06" in (tmp_path / "run/mlflow_artifacts" / run_id / "artifacts/config.yaml").read_text()


def test_an_mlflow_server_that_does_not_answer_stops_the_run_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match="trainer.logger has 'mlflow', which did not start: MlflowException"):
        make(["mlflow"], tmp_path)


class Broken(Tracker):
    closed = 0

    def log(self, step, metrics) -> None:
        raise OSError("disk full\nsecond line")

    def close(self, error: BaseException | None = None) -> None:
        Broken.closed += 1


def test_a_tracker_that_cannot_log_warns_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(TRACKERS, "broken", lambda run: Broken())
    with caplog.at_level(logging.WARNING):
        trackers = make(["broken", "jsonl"], tmp_path)
        for step in (1, 2, 3):
            trackers.log(step, METRICS)
        trackers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.logger broken could not log step 1, the run goes on: OSError: disk full",
    ]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_cannot_start_stops_the_run_in_one_sentence_and_closes_the_others(tmp_path, monkeypatch):
    def unreachable(run):
        raise ConnectionError("no route to host\nlong trace")

    monkeypatch.setitem(TRACKERS, "broken", lambda run: Broken())
    monkeypatch.setitem(TRACKERS, "unreachable", unreachable)
    before = Broken.closed
    with pytest.raises(ValueError, match=r"'unreachable', which did not start: ConnectionError: no route to host$"):
        make(["broken", "unreachable"], tmp_path)
    with pytest.raises(ValueError, match=f"trainer.logger has 'comet': expected some of {', '.join(TRACKERS)}$"):
        make(["broken", "comet"], tmp_path)
    assert Broken.closed == before + 2


def test_the_status_names_the_stage_its_beginning_and_the_last_finished_step(tmp_path: Path) -> None:
    times = iter([10.0, 10.5, 11.5, 12.0])
    tracker = StatusTracker(Run(tmp_path, "megarl", "try", {}, 40, resume_step=6), clock=lambda: next(times))
    assert read_status(tmp_path) is None
    tracker.stage("gen", 1, 8)
    seen = read_status(tmp_path)
    assert seen is not None and (seen["step"], seen["total_steps"], seen["stage"], seen["since"]) == (6, 40, "gen", 10)
    assert (seen["done"], seen["total"]) == (1, 8)
    tracker.stage("gen", 2, 8)  # half a second later: not written
    assert read_status(tmp_path) == seen
    tracker.stage("gen", 3, 8)
    assert read_status(tmp_path) == seen | {"done": 3}
    tracker.log(7, {})
    tracker.close()
    ended = read_status(tmp_path)
    assert ended is not None and (ended["step"], ended["stage"], ended["since"]) == (7, "ended", 12)
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


SHOWN = {"critic/score/mean": 0.5, "actor/pg_loss": -0.01234, "timing_s/step": 2.0, "unknown/thing": 7.0}


def tracker(
    tmp_path, *, terminal: bool, resume_step: int | None = None
) -> tuple[ConsoleTracker, io.StringIO, list[float]]:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=terminal, width=300)
    run = Run(tmp_path, "megarl", "try", {}, 100, resume_step, console)
    return ConsoleTracker(run, clock=lambda: now[0]), out, now


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    track, out, now = tracker(tmp_path, terminal=False)
    track.log(0, {"val/accuracy": 0.4})
    track.stage("gen", 3, 64)
    now[0] = 612.0  # ten minutes of start and evaluation, which come once
    track.log(1, SHOWN)
    now[0] = 616.0
    track.log(2, SHOWN | {"val/accuracy": 0.75})
    track.close()
    assert out.getvalue().splitlines() == [
        "step   0/100  val/accuracy 0.400",
        "step   1/100  score 0.500  pg_loss -0.0123  2.00 s  eta 3:18",  # 99 steps of 2 s
        "step   2/100  val/accuracy 0.750",
        "step   2/100  score 0.500  pg_loss -0.0123  2.00 s  eta 6:32",  # 98 of 4 s: from end to end it took so long
    ]
    assert "\x1b" not in out.getvalue()


def test_the_pace_of_a_resumed_run_counts_what_is_left(tmp_path):
    track, out, _ = tracker(tmp_path, terminal=False, resume_step=90)
    assert track.eta == "?"
    track.log(91, SHOWN | {"timing_s/step": 500.0})
    assert out.getvalue().rstrip().endswith("step  91/100  score 0.500  pg_loss -0.0123  500.00 s  eta 1:15:00")


def test_a_terminal_gets_a_bar_with_the_stage_and_how_far_it_is_which_goes_on_after_a_line(tmp_path):
    for logged, stage, expected in (
        ({}, ("update_actor", 3, 8), ("step 1/100", "update_actor", "3/8", "eta ?")),
        (SHOWN, ("gen", 5, 64), ("score", "step 2/100", "gen", "5/64", "eta 3:18")),
    ):
        track, out, _ = tracker(tmp_path, terminal=True)
        track.stage("update_actor", 3, 8)
        if logged:
            track.log(1, logged)
        track.stage(*stage)
        track.close()
        assert all(text in out.getvalue() for text in expected)


def settings(port: int, host: str = "127.0.0.1") -> dict[str, dict[str, Any]]:
    return {"trainer": {"prometheus_host": host, "prometheus_port": port}}


def asked(port: int, path: str = "/metrics", host: str = "127.0.0.1", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_every_metric_has_its_last_value_and_the_stage_its_seconds(tmp_path: Path):
    (port,) = free_ports(["127.0.0.1"])
    tracker = PrometheusTracker(Run(tmp_path, "megarl", 'a "b"\\', settings(port), 60))
    tracker.stage("gen", 1, 8)
    tracker.log(1, {"val/score": 0.25, "actor/pg_loss": -0.5})
    tracker.log(2, {"actor/pg_loss": float("nan"), "actor_pg/loss": float("inf"), "loss": float("-inf")})
    status, page = asked(port)
    tracker.close()
    assert status == 200
    lines = page.splitlines()
    name, _, seconds = lines.pop(5).rpartition(" ")
    run = 'run="a \\"b\\"\\\\"'
    assert lines == [
        "# TYPE megarl_step gauge",
        f"megarl_step{{{run}}} 2",
        "# TYPE megarl_total_steps gauge",
        f"megarl_total_steps{{{run}}} 60",
        "# TYPE megarl_stage_seconds gauge",
        "# TYPE megarl_actor_pg_loss gauge",
        f'megarl_actor_pg_loss{{{run},metric="actor/pg_loss"}} NaN',
        f'megarl_actor_pg_loss{{{run},metric="actor_pg/loss"}} +Inf',
        "# TYPE megarl_loss gauge",
        f'megarl_loss{{{run},metric="loss"}} -Inf',
        "# TYPE megarl_val_score gauge",
        f'megarl_val_score{{{run},metric="val/score"}} 0.25',
    ]
    assert name == f'megarl_stage_seconds{{{run},stage="gen"}}'
    assert float(seconds) >= 0


def test_only_metrics_are_given_and_only_to_this_machine(tmp_path: Path):
    (port,) = free_ports(["127.0.0.1"])
    tracker = PrometheusTracker(Run(tmp_path, "megarl", "try", settings(port), 60))
    assert asked(port, "/")[0] == 404
    assert asked(port, Host="a.page.in.a.browser")[0] == 404
    assert asked(port, Host="[")[0] == 404
    assert asked(port, Host=f"LOCALHOST:{port}")[0] == 200
    assert tracker._server.server_address[0] == "127.0.0.1"
    tracker.close()
    with pytest.raises(OSError):
        asked(port)


def test_silent_connections_to_prometheus_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The oldest goes, and whoever asks gets his page."""
    monkeypatch.setattr(callers, "MOST", 8)
    (port,) = free_ports(["127.0.0.1"])
    tracker = PrometheusTracker(Run(tmp_path, "megarl", "try", settings(port), 60))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)]
        assert asked(port)[0] == 200
        for sock in silent[:20]:
            sock.settimeout(60)
            assert sock.recv(1) == b""
    tracker.close()


def test_metrics_are_given_at_the_name_of_this_machine_in_capitals_too(tmp_path: Path):
    name = socket.gethostname().upper()
    (port,) = free_ports([name])
    tracker = PrometheusTracker(Run(tmp_path, "megarl", "try", settings(port, name), 60))
    assert asked(port, host=name)[0] == 200
    tracker.close()


@pytest.mark.parametrize("host", ["127.0.0.3", "::1"])
def test_metrics_are_given_at_another_address_if_that_is_asked_for(tmp_path: Path, host: str):
    (port,) = free_ports([host])
    tracker = PrometheusTracker(Run(tmp_path, "megarl", "try", settings(port, host), 60))
    assert asked(port, host=host)[0] == 200
    assert asked(port, host=host, Host=f"10.0.0.7:{port}")[0] == 200, "an address: what a cluster forwards"
    assert asked(port, host=host, Host="a.page.in.a.browser")[0] == 404
    with pytest.raises(OSError):
        asked(port)
    tracker.close()


def test_a_taken_port_stops_the_run_in_a_sentence(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        sentence = f"has 'prometheus', .* trainer.prometheus_port={port}: .*in use; expected an address of this machine"
        with pytest.raises(ValueError, match=sentence):
            make_trackers(["prometheus"], tmp_path / "run", "megarl", "try", settings(port), 10)
