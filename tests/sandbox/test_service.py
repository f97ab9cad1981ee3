"""A service in place of this machine, which answers as SandboxFusion does."""

import base64
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megarl import sandbox
from megarl.sandbox import service as of_service
from megarl.sandbox.service import Service


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
    result = sandbox.run("print(3)", stdin="x", files={"a.txt": "b"}, sandbox=Service(service.url))
    assert (result.stdout, result.stderr, result.is_good) == ("3\n", "no", True)
    ((path, order),) = service.orders
    assert path == "/run_code"
    assert (order["code"], order["language"], order["stdin"]) == ("print(3)", "python", "x")
    assert order["files"] == {"a.txt": base64.b64encode(b"b").decode()}


def test_the_service_gets_the_limits_that_it_knows_and_the_program_limits_its_processor_time(service, tmp_path):
    service.answer = finished()
    limits = sandbox.Limits(seconds=60, memory_bytes=256 << 20, processor_seconds=0.5)
    source = "from __future__ import annotations\nprint(__name__, input(), flush=True)\nwhile True: pass"
    sandbox.run(source, sandbox=Service(service.url), limits=limits)
    ((_, order),) = service.orders
    assert (order["run_timeout"], order["memory_limit_MB"]) == (60, 256)
    for name, content in order["files"].items():  # as the service does, in a folder of the program's own
        (tmp_path / name).write_bytes(base64.b64decode(content))
    command = [sys.executable, "-c", order["code"]]
    ran = subprocess.run(command, input="in", capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert (ran.stdout, ran.returncode) == ("__main__ in\n", -signal.SIGKILL)


def test_the_choice_of_the_configuration_reaches_it(service):
    service.answer = finished(stdout="there")
    try:
        sandbox.use(f"url:{service.url}")
        assert sandbox.run("print()").stdout == "there"
    finally:
        sandbox.use("auto")


def test_limits_that_were_reached(service):
    service.answer = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None}}
    result = sandbox.run("while True: pass", sandbox=Service(service.url))
    assert (result.why, result.is_good) == ("time", False)
    service.answer = finished(stdout="x" * 100)
    limits = sandbox.Limits(output_bytes=10)
    result = sandbox.run("", sandbox=Service(service.url), limits=limits)
    assert (result.why, result.stdout) == ("output", "x" * 10)
    service.answer = finished(return_code=1)
    assert not sandbox.run("", sandbox=Service(service.url)).is_good


def test_a_service_that_did_not_run_the_code_is_an_error(service):
    service.answer = {"status": "SandboxError", "message": "no room", "run_result": None}
    with pytest.raises(sandbox.SandboxError, match=r"/run_code did not run the code: no room"):
        sandbox.run("", sandbox=Service(service.url))
    service.answer = [1]
    with pytest.raises(sandbox.SandboxError, match="expected a mapping"):
        sandbox.run("", sandbox=Service(service.url))


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK", "HTTP/1.1 200 OK\r\nConnection: close", "HTTP/1.0 200 OK"])
def test_a_service_that_answers_byte_by_byte_has_no_more_time_than_the_program(monkeypatch, head):
    """A limit of each read would never end this call."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection:
                connection.sendall(f"{head}\r\nContent-Length: 1000\r\n\r\n".encode())
                with contextlib.suppress(OSError):
                    while not stop.wait(0.1):
                        connection.sendall(b" ")

        monkeypatch.setattr(of_service, "_SLACK_S", 0.0)
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(sandbox.SandboxError, match="gave no answer within 0.5 s: "):
                url = f"http://127.0.0.1:{server.getsockname()[1]}"
                sandbox.run("", sandbox=Service(url), limits=sandbox.Limits(seconds=0.5))
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("status", [302, 500])
def test_another_status_is_an_error(service, status):
    service.status, service.answer = status, finished(stdout="no")
    with pytest.raises(sandbox.SandboxError, match=f"gave no answer: {status}"):
        sandbox.run("", sandbox=Service(service.url))


def test_a_service_that_is_not_there_is_an_error():
    with pytest.raises(sandbox.SandboxError, match="http://127.0.0.1:9/run_code gave no answer"):
        sandbox.run("", sandbox=Service("http://127.0.0.1:9"))
