import json
import logging
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.metrics import TRACKERS, make_trackers
from megarl.metrics.jsonl import append_lines, read_lines
from megarl.metrics.trackers.trackers import Quiet

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
    trackers.log(3, {"actor/pg_loss": 9.0})
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {name: rows[0][name] for name in METRICS} == METRICS
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


def test_offline_wandb_makes_its_folder_and_keeps_its_id_when_resuming(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make(["wandb"], tmp_path)
    samples, files = tmp_path / "run" / "samples.jsonl", (tmp_path / "run" / "wandb").glob
    row = {"step": 1, "prompt": "12+34=", "completion": "46", "ground_truth": "46", "reward": 1.0, "uid": "a"}
    append_lines(samples, [row])
    trackers.log(1, METRICS)
    assert not list(files("offline-run-*/files/media/table/*.json")), "tables come with evaluations"
    trackers.log(1, {"val/score": 0.5})
    append_lines(samples, [row | {"step": 2, "reward": 0.5}])
    trackers.close()
    tables = [json.loads(file.read_text()) for file in files("offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"] for table in tables) == [
        [[1, "12+34=", "46", "46", 1.0]],
        [[2, "12+34=", "46", "46", 0.5]],
    ]
    run_id = (tmp_path / "run" / "wandb_id").read_text()
    (data,) = files("offline-run-*/*.wandb")
    assert run_id in data.name
    make(["wandb"], tmp_path, resume_step=1).close()
    assert (tmp_path / "run" / "wandb_id").read_text() == run_id


def test_wandb_shows_the_last_numbers_of_a_step_that_is_made_twice(tmp_path, monkeypatch):
    import wandb  # slow to import

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make(["wandb"], tmp_path)
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):  # after step 3 back to step 2
        trackers.log(step, {"actor/pg_loss": loss})
    trackers.log(2, {"val/score": 0.5})
    trackers.close()
    wandb.teardown()  # wandb's own process writes the files: here it comes to its end
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(file))
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
    ]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4], "it grows, so wandb drops nothing"
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert axes["*"] == "training/global_step"


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


class Broken(Quiet):
    closed = 0

    def __init__(self, run) -> None:
        self.run = run

    def log(self, step, metrics) -> None:
        raise OSError("disk full\nsecond line")

    def close(self, error: BaseException | None = None) -> None:
        Broken.closed += 1


def test_a_tracker_that_cannot_log_warns_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(TRACKERS, "broken", Broken)
    with caplog.at_level(logging.WARNING):
        trackers = make(["broken", "jsonl"], tmp_path)
        for step in (1, 2, 3):
            trackers.log(step, METRICS)
        trackers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.logger broken could not log step 1, the run goes on: OSError: disk full",
        "trainer.logger broken failed 3 times",
    ]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_cannot_start_stops_the_run_in_one_sentence_and_closes_the_others(tmp_path, monkeypatch):
    def unreachable(run):
        raise ConnectionError("no route to host\nlong trace")

    monkeypatch.setitem(TRACKERS, "broken", Broken)
    monkeypatch.setitem(TRACKERS, "unreachable", unreachable)
    before = Broken.closed
    with pytest.raises(ValueError, match=r"'unreachable', which did not start: ConnectionError: no route to host$"):
        make(["broken", "unreachable"], tmp_path)
    with pytest.raises(
        ValueError, match="trainer.logger has 'comet': expected some of console, jsonl, mlflow, prometheus, tensorboard"
    ):
        make(["broken", "comet"], tmp_path)
    assert Broken.closed == before + 2


def test_lines_are_valid_json_for_other_readers(tmp_path):
    trackers = make(["jsonl"], tmp_path)
    trackers.log(1, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)
