"""What a Prometheus gets from a run, over a real socket."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest

from megarl.metrics.trackers.prometheus import PrometheusTracker
from megarl.metrics.trackers.run import Run
from megarl.metrics.trackers.trackers import make_trackers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def settings(port: int) -> dict[str, dict[str, int]]:
    return {"trainer": {"prometheus_port": port}}


def asked(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_every_metric_has_its_last_value_and_the_stage_its_seconds(tmp_path: Path):
    port = free_port()
    tracker = PrometheusTracker(Run(tmp_path, "megarl", 'a "b"', settings(port), 60))
    tracker.stage("gen", 1, 8)
    tracker.log(1, {"val/score": 0.25, "actor/pg_loss": float("nan")})
    tracker.log(2, {"actor/pg_loss": -0.5, "actor_pg/loss": float("inf")})
    status, page = asked(port)
    tracker.close()
    assert status == 200
    lines = page.splitlines()
    name, _, seconds = lines.pop(5).rpartition(" ")
    run = 'run="a \\"b\\""'
    assert lines == [
        "# TYPE megarl_step gauge",
        f"megarl_step{{{run}}} 2",
        "# TYPE megarl_total_steps gauge",
        f"megarl_total_steps{{{run}}} 60",
        "# TYPE megarl_stage_seconds gauge",
        "# TYPE megarl_actor_pg_loss gauge",
        f'megarl_actor_pg_loss{{{run},metric="actor/pg_loss"}} -0.5',
        f'megarl_actor_pg_loss{{{run},metric="actor_pg/loss"}} +Inf',
        "# TYPE megarl_val_score gauge",
        f'megarl_val_score{{{run},metric="val/score"}} 0.25',
    ]
    assert name == f'megarl_stage_seconds{{{run},stage="gen"}}'
    assert float(seconds) >= 0


def test_only_metrics_are_given_and_only_to_this_machine(tmp_path: Path):
    port = free_port()
    tracker = PrometheusTracker(Run(tmp_path, "megarl", "try", settings(port), 60))
    assert asked(port, "/")[0] == 404
    assert asked(port, Host="a.page.in.a.browser")[0] == 404
    assert asked(port, Host=f"localhost:{port}")[0] == 200
    assert tracker._server.server_address[0] == "127.0.0.1"
    tracker.close()
    with pytest.raises(OSError):
        asked(port)


def test_a_taken_port_stops_the_run_in_a_sentence(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        sentence = (
            "trainer.logger has 'prometheus', which did not start: ValueError: "
            f"trainer.prometheus_port={port}: Address already in use; expected a free port of 127.0.0.1"
        )
        with pytest.raises(ValueError) as refusal:
            make_trackers(["prometheus"], tmp_path / "run", "megarl", "try", settings(port), 10)
    assert str(refusal.value) == sentence


@pytest.mark.sglang
def test_the_reader_of_prometheus_own_client_takes_the_page(tmp_path: Path):
    """Of the package prometheus_client, which SGLang's environment has."""
    import subprocess

    from megarl.servers.sglang_environment import sglang_python

    port = free_port()
    tracker = PrometheusTracker(Run(tmp_path, "megarl", 'a "b"\\', settings(port), 60))
    tracker.log(1, {"val/score": 0.25, "actor/pg_loss": float("nan"), "actor_pg/loss": float("-inf")})
    code = "import sys; from prometheus_client.parser import text_string_to_metric_families as read\n"
    code += "print(sorted((s.name, s.labels.get('metric'), s.labels['run'], s.value) "
    code += "for f in read(sys.stdin.read()) for s in f.samples if 'metric' in s.labels))"
    page = tracker.page()
    tracker.close()
    said = subprocess.run(
        [str(sglang_python(None)), "-c", code], input=page, capture_output=True, text=True, check=True
    ).stdout
    run = 'a "b"\\'
    assert said.strip() == str(
        [
            ("megarl_actor_pg_loss", "actor/pg_loss", run, float("nan")),
            ("megarl_actor_pg_loss", "actor_pg/loss", run, float("-inf")),
            ("megarl_val_score", "val/score", run, 0.25),
        ]
    )
