"""A service in place of this machine, which answers as SandboxFusion does."""

import base64
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from endless_servers import DRIP_S, endless

import megarl_sandbox
from megarl_sandbox import service as of_service
from megarl_sandbox.service import Service


@pytest.fixture
def service():
    """Answers with `service.answer`, and keeps the orders."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.orders.append((self.path, json.loads(body)))
            answer = json.dumps(server.answer).encode()
            self.send_response(server.status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.orders, server.status, server.url = [], 200, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def finished(**ran):
    return {
        "status": "Success",
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""} | ran,
    }


def test_the_service_gets_the_code_and_its_output_comes_back(service):
    service.answer = finished(stdout="3\n", stderr="no")
    result = megarl_sandbox.run("print(3)", stdin="x", files={"a.txt": "b"}, sandbox=Service(service.url))
    assert (result.stdout, result.stderr, result.is_good) == ("3\n", "no", True)
    ((path, order),) = service.orders
    assert path == "/run_code"
    assert (order["code"], order["language"], order["stdin"]) == ("print(3)", "python", "x")
    assert order["files"] == {"a.txt": base64.b64encode(b"b").decode()}


def test_the_service_gets_the_limits_that_it_knows_and_the_program_limits_its_processor_time(service, tmp_path):
    service.answer = finished()
    limits = megarl_sandbox.Limits(seconds=60, memory_bytes=256 << 20, processor_seconds=0.5)
    source = "from __future__ import annotations\nprint(__name__, input(), flush=True)\nwhile True: pass"
    megarl_sandbox.run(source, sandbox=Service(service.url), limits=limits)
    ((_, order),) = service.orders
    assert (order["run_timeout"], order["memory_limit_MB"]) == (60, 256)
    for name, content in order["files"].items():  # as the service does, in a folder of the program's own
        (tmp_path / name).write_bytes(base64.b64decode(content))
    command = [sys.executable, "-c", order["code"]]
    ran = subprocess.run(command, input="in", capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert (ran.stdout, ran.returncode) == ("__main__ in\n", -signal.SIGKILL)


def test_limits_that_were_reached_and_the_choice_of_the_configuration(service):
    service.answer = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None}}
    result = megarl_sandbox.run("while True: pass", sandbox=Service(service.url))
    assert (result.why, result.is_good) == ("time", False)
    service.answer = finished(return_code=1)
    assert not megarl_sandbox.run("", sandbox=Service(service.url)).is_good
    service.answer = finished(stdout="x" * 100)
    try:
        megarl_sandbox.use(f"url:{service.url}")
        result = megarl_sandbox.run("print()", limits=megarl_sandbox.Limits(output_bytes=10))
    finally:
        megarl_sandbox.use("auto")
    assert (result.why, result.stdout) == ("output", "x" * 10)


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, {"status": "SandboxError", "message": "no room", "run_result": None}, "did not run the code: no room"),
        (200, [1], "expected a mapping"),
        (302, finished(stdout="no"), "gave no answer: 302"),
        (500, finished(stdout="no"), "gave no answer: 500"),
    ],
)
def test_a_service_that_did_not_run_the_code_is_an_error(service, status, answer, words):
    service.status, service.answer = status, answer
    with pytest.raises(megarl_sandbox.SandboxError, match=words):
        megarl_sandbox.run("", sandbox=Service(service.url))


def test_a_service_that_is_not_there_is_an_error():
    with pytest.raises(megarl_sandbox.SandboxError, match="http://127.0.0.1:9/run_code gave no answer"):
        megarl_sandbox.run("", sandbox=Service("http://127.0.0.1:9"))


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK", "HTTP/1.1 200 OK\r\nConnection: close", "HTTP/1.0 200 OK"])
def test_a_service_that_answers_byte_by_byte_has_no_more_time_than_the_program(monkeypatch, head):
    """A limit of each read would never end this call."""

    def behave(connection, ended):
        connection.sendall(f"{head}\r\nContent-Length: 1000\r\n\r\n".encode())
        while not ended.wait(DRIP_S):
            connection.sendall(b" ")

    monkeypatch.setattr(of_service, "_SLACK_S", 0.0)
    with endless(behave) as url, pytest.raises(megarl_sandbox.SandboxError, match="gave no answer within 0.2 s: "):
        megarl_sandbox.run("", sandbox=Service(url), limits=megarl_sandbox.Limits(seconds=0.2))
