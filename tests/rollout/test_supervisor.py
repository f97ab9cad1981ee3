"""Real server processes: started, killed, replaced, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tiny_server import TOKEN

from megarl.rollout import ENGINES, cpu
from megarl.rollout.client import Engine, EngineError
from megarl.rollout.launch import TOKEN_VARIABLE, EngineLaunch, cpu_command
from megarl.rollout.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.supervisor import ServerDied, Servers, free_ports

PARAMS = SamplingParams(max_new_tokens=200, ignore_eos=True)


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def healthy_command(launch):
    """A server that can do nothing but start at once."""
    return [sys.executable, "-c", HEALTHY, str(launch.port)]


def alive(pid):
    """Whether the process runs; a zombie, whom nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s in vain"
        time.sleep(0.02)


def test_the_token_is_in_the_environment_and_not_on_the_command_line():
    command = cpu_command(EngineLaunch("cpu", "/m", port=5, max_total_tokens=9, random_seed=3))
    assert command[1:3] == ["-m", "megarl.rollout.cpu"]
    assert "--max-total-tokens 9" in " ".join(command)
    assert not any("token" in part and "tokens" not in part for part in command)


def test_the_cpu_engine_has_no_tensor_parallelism():
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
        cpu_command(EngineLaunch("cpu", "/m", port=5, tensor_parallel_size=2))


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="rollout.engine='cpi': want one of cpu"):
        Servers([EngineLaunch("cpi", "/m")], TOKEN, "/tmp")


def test_free_ports_differ_and_can_be_bound():
    ports = free_ports(["127.0.0.1"] * 20)
    assert len(set(ports)) == 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "cpu", lambda launch: [sys.executable, "-c", "import sys; sys.exit('no model here')"])
    servers = Servers([EngineLaunch("cpu", "/m")], TOKEN, tmp_path / "logs")
    with pytest.raises(ServerDied, match=r"server 0 .*exit code 1.*server_0\.log(?s:.*)no model here"):
        servers.start()
    assert servers.pids[0] is not None and not alive(servers.pids[0])


def test_a_server_that_never_serves_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "cpu", lambda launch: [sys.executable, "-c", "import time; time.sleep(60)"])
    servers = Servers([EngineLaunch("cpu", "/m")], TOKEN, tmp_path, start_timeout_s=0.5)
    with pytest.raises(ServerDied, match=r"server 0 did not serve within 0\.5 s"):
        servers.start()
    assert servers.pids[0] is not None and not alive(servers.pids[0])


def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "cpu", healthy_command)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        with Servers([EngineLaunch("cpu", "/m", port=busy)], TOKEN, tmp_path) as servers:
            servers.start()
            assert servers.urls != [f"http://127.0.0.1:{busy}"]


def test_a_restarted_server_keeps_its_url_and_the_others_their_process(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "cpu", healthy_command)
    progress = []
    with Servers([EngineLaunch("cpu", "/m")] * 2, TOKEN, tmp_path) as servers:
        servers.start(lambda ready, total: progress.append((ready, total)))
        assert progress == [(1, 2), (2, 2)]
        urls, (first, second) = servers.urls, servers.pids
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerDied, match=rf"server 0 \(pid {first}\) ended with exit code -9"):
            servers.check()
        servers.restart(0)
        servers.check()
        assert servers.urls == urls
        assert servers.pids[1] == second and servers.pids[0] != first
    assert not any(alive(pid) for pid in servers.pids)


def test_a_server_does_not_bind_to_the_world_without_a_token(monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["cpu", "--model-path", "/m", "--port", "1", "--host", "0.0.0.0"])
    with pytest.raises(SystemExit, match="2"):
        cpu.main()
    assert TOKEN_VARIABLE in capsys.readouterr().err


def test_one_of_two_servers_is_killed_and_the_work_goes_on(server, model_path, tmp_path):
    with Servers([EngineLaunch("cpu", model_path)], TOKEN, tmp_path) as servers:
        servers.start()
        (victim,) = servers.pids

        async def work():
            async with EnginePool([server.url, *servers.urls], TOKEN, timeout_s=60) as pool:
                tasks = [asyncio.create_task(pool.generate([5, 6 + i], 2, PARAMS)) for i in range(12)]
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in tasks)
                os.kill(victim, signal.SIGKILL)
                return await asyncio.gather(*tasks)

        answers = asyncio.run(work())
        assert all(len(completion.token_ids) == 200 for answer in answers for completion in answer)
        with pytest.raises(ServerDied, match=rf"server 0 \(pid {victim}\) ended with exit code -9.*server_0\.log"):
            servers.check()


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    child = """
        import sys, time
        from megarl.rollout.lifetime import die_with_parent
        die_with_parent(int(sys.argv[1]))
        open(sys.argv[2], "w").write("ready")
        time.sleep(60)
    """
    parent = f"""
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(child)!r}, str(os.getpid()), sys.argv[1]])
        print(child.pid, flush=True)
        child.wait()
    """
    ready = tmp_path / "ready"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent), str(ready)], stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        wait_for(ready.exists)
        assert alive(pid)
        process.kill()
    wait_for(lambda: not alive(pid))


def test_engine_errors_are_one_sentence_with_url_route_and_status(server):
    with pytest.raises(EngineError, match=rf"^{server.url}/health answered 401: Unauthorized$") as caught:
        Engine(server.url, "wrong").health()
    assert (caught.value.route, caught.value.status) == ("/health", 401)
    (port,) = free_ports(["127.0.0.1"])
    with pytest.raises(EngineError, match=rf"127\.0\.0\.1:{port}/health failed: ConnectError"):
        Engine(f"http://127.0.0.1:{port}", "").health()
