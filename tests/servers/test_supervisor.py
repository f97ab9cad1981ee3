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
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny_server import TOKEN

from megarl.hf_server import main
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.servers.engines import ENGINES
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch, ServerCommand, hf_command
from megarl.servers.server_process import ServerProcess
from megarl.servers.supervisor import ServerDied, Servers, State, Supervision, free_ports

PARAMS = SamplingParams(max_new_tokens=200, ignore_eos=True)


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


ENDS, SLEEPS = "import sys; sys.exit('no model here')", "import time; time.sleep(600)"


def healthy_command(launch, folder):
    """A server that can do nothing but start at once."""
    return ServerCommand([sys.executable, "-c", HEALTHY, str(launch.port)], dict(os.environ))


def python_command(code):
    """A server that runs this and never serves."""
    return lambda launch, folder: ServerCommand([sys.executable, "-c", code], dict(os.environ))


def alive(pid):
    """Whether the process runs; a zombie, whom nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "waited four minutes in vain"
        time.sleep(0.02)


def events_until(servers, count):
    """The next so many events of a supervisor."""
    events = []

    def enough():
        events.extend(servers.poll())
        return len(events) >= count

    wait_for(enough)
    return events


def test_the_token_is_in_the_environment_and_not_on_the_command_line():
    command = hf_command(EngineLaunch("hf", "/m", port=5, max_total_tokens=9, random_seed=3), Path("/f")).argv
    assert command[1:3] == ["-m", "megarl.hf_server.main"]
    assert "--max-total-tokens 9" in " ".join(command)
    assert not any("token" in part and "tokens" not in part for part in command)


def test_a_server_is_told_whether_to_note_the_experts_of_tokens():
    for notes in (False, True):
        command = hf_command(EngineLaunch("hf", "/m", port=5, returns_routes=notes), Path("/f"))
        assert ("--enable-return-routed-experts" in command.argv) is notes


def test_the_hf_engine_has_no_tensor_parallelism():
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
        hf_command(EngineLaunch("hf", "/m", port=5, tensor_parallel_size=2), Path("/f"))


def test_the_hf_engine_takes_one_gpu_where_there_is_one(monkeypatch):
    def options(**fields):
        return " ".join(hf_command(EngineLaunch("hf", "/m", port=5, memory_fraction=0.3, **fields), Path("/f")).argv)

    assert "--device cpu" in options(device="cpu") and "--memory-fraction" not in options(device="cpu")
    assert "--device cuda:6 --memory-fraction 0.3" in options(device="cuda", first_gpu=6)
    assert "--device cuda:2" in options(device="cuda", index=2)
    for has_gpu, wanted in ((True, "--device cuda:0"), (False, "--device cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert wanted in options()


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="rollout.engine='hff': expected one of hf, sglang"):
        Servers([EngineLaunch("hff", "/m")], TOKEN, "/tmp")


def test_free_ports_differ_and_can_be_bound():
    ports = free_ports(["127.0.0.1"] * 20)
    assert all(20_000 <= port < 32_768 for port in ports), "not of those that any connection may get"
    assert len(set(ports)) == 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", python_command(ENDS))
    servers = Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path / "logs")
    with pytest.raises(ServerDied, match=r"server 0 .*exit code 1.*server_0\.log(?s:.*)no model here"):
        servers.start()
    assert servers.pids[0] is not None and not alive(servers.pids[0])


def test_a_server_that_refuses_its_model_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    program = "import sys; print('Traceback:\\nerror: /m holds nothing', file=sys.stderr); sys.exit({code})"
    monkeypatch.setitem(ENGINES, "hf", python_command(program.format(code=2)))
    with pytest.raises(ValueError, match=r"^/m holds nothing$"):
        Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path / "refused").start()
    monkeypatch.setitem(ENGINES, "hf", python_command(program.format(code=1)))
    with pytest.raises(ServerDied, match="exit code 1"):
        Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path / "failed").start()


def test_a_server_that_never_serves_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", python_command(SLEEPS))
    servers = Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, Supervision(start_timeout_s=0.5))
    with pytest.raises(ServerDied, match=r"server 0 did not serve within 0\.5 s"):
        servers.start()
    assert servers.pids[0] is not None and not alive(servers.pids[0])


# Stock SGLang, which cannot have its port, goes on to ask itself something, and tells at length that it failed.
WORDY = f"""
import sys
try:
    exec({HEALTHY!r})
except OSError as error:
    print(error, *["more"] * 100, sep="\\n", file=sys.stderr)
    sys.exit(3)
"""


@pytest.mark.parametrize("code", [HEALTHY, WORDY], ids=["brief", "wordy"])
def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path, monkeypatch, code):
    def command(launch, folder):
        return ServerCommand([sys.executable, "-c", code, str(launch.port)], dict(os.environ))

    monkeypatch.setitem(ENGINES, "hf", command)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        with Servers([EngineLaunch("hf", "/m", port=busy)], TOKEN, tmp_path) as servers:
            servers.start()
            assert servers.urls != [f"http://127.0.0.1:{busy}"]


def test_a_restarted_server_keeps_its_url_and_the_others_their_process(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    progress = []
    with Servers([EngineLaunch("hf", "/m")] * 2, TOKEN, tmp_path) as servers:
        servers.start(lambda ready, total: progress.append((ready, total)))
        assert progress == [(1, 2), (2, 2)]
        urls, (first, second) = servers.urls, servers.pids
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerDied, match=rf"server 0 \(pid {first}\) ended with exit code -9"):
            servers.check()
        died, serving = events_until(servers, 2)
        servers.check()
        assert servers.urls == urls
        assert servers.pids[1] == second and servers.pids[0] != first
    assert (died.index, died.url, died.state, died.incarnation) == (0, urls[0], State.RESTING, 1)
    assert f"server 0 (pid {first}) ended with exit code -9; its log: {tmp_path}/server_0.log" in died.reason
    assert (serving.index, serving.url, serving.state, serving.incarnation) == (0, urls[0], State.SERVING, 2)
    assert not any(alive(pid) for pid in servers.pids)


def test_a_server_that_hangs_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    patience = Supervision(answer_within_s=0.5, ask_every_s=0, rest_s=0.01)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, patience) as servers:
        servers.start()
        (hung,) = servers.pids
        os.kill(hung, signal.SIGSTOP)
        died, serving = events_until(servers, 2)
        assert "server 0 did not answer within 0.5 s" in died.reason
        assert not alive(hung)
        assert serving.incarnation == 2 and servers.states == [State.SERVING]


def test_polling_a_healthy_server_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, Supervision(ask_every_s=0)) as servers:
        servers.start()
        for _ in range(50):
            assert servers.poll() == []
            time.sleep(0.01)


def test_a_server_told_to_start_again_does_so(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, Supervision(rest_s=0.01)) as servers:
        servers.start()
        (stopped,) = servers.restart(0, "it failed two pushes")
        assert stopped.state is State.RESTING
        assert "server 0 is to start again: it failed two pushes; its log" in stopped.reason
        assert servers.restart(0, "again") == []
        time.sleep(0.02)
        assert servers.poll(starts=False) == [], "its rest is over, and it may not start yet"
        assert servers.states == [State.RESTING]
        (serving,) = events_until(servers, 1)
        assert (serving.state, serving.incarnation) == (State.SERVING, 2)


def test_a_server_that_dies_too_often_is_given_up_and_the_others_serve_on(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    patience = Supervision(max_restarts=2, rest_s=0.01)
    with Servers([EngineLaunch("hf", "/m")] * 2, TOKEN, tmp_path, patience) as servers:
        servers.start()
        monkeypatch.setitem(ENGINES, "hf", python_command(ENDS))
        os.kill(servers.pids[0], signal.SIGKILL)
        died, gone = events_until(servers, 2)
        assert (died.state, gone.state) == (State.RESTING, State.OUT)
        assert gone.incarnation == 3
        assert gone.reason.startswith("after 2 restarts, server 0 (pid ") and "no model here" in gone.reason
        assert servers.states == [State.OUT, State.SERVING]
        assert servers.poll() == []


def test_a_server_that_served_long_has_all_its_restarts_again(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, Supervision(rest_s=0, settled_after_s=0)) as servers:
        servers.start()
        for incarnation in range(2, 7):
            os.kill(servers.pids[0], signal.SIGKILL)
            assert [event.incarnation for event in events_until(servers, 2)] == [incarnation - 1, incarnation]


def test_a_server_that_was_of_no_use_has_no_restart_forgiven(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    patience = Supervision(rest_s=0, settled_after_s=0, max_restarts=1)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, patience) as servers:
        servers.start()
        assert [event.state for event in servers.restart(0, "its weights are wrong")] == [State.RESTING]
        events_until(servers, 1)
        assert [event.state for event in servers.restart(0, "again")] == [State.OUT]


def test_a_server_that_cannot_even_be_spawned_is_out_and_the_others_serve_on(tmp_path, monkeypatch):
    def no_room(launch, folder):
        raise OSError("no space left on device")

    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    with Servers([EngineLaunch("hf", "/m")] * 2, TOKEN, tmp_path, Supervision(max_restarts=1, rest_s=0)) as servers:
        servers.start()
        monkeypatch.setitem(ENGINES, "hf", no_room)
        os.kill(servers.pids[0], signal.SIGKILL)
        died, gone = events_until(servers, 2)
        assert (died.state, gone.state) == (State.RESTING, State.OUT)
        assert "server 0 did not start: no space left on device" in gone.reason
        assert servers.states == [State.OUT, State.SERVING]


def test_the_folder_of_a_server_goes_with_it(tmp_path, monkeypatch):
    folders = []

    def command(launch, folder):
        folders.append(folder)
        (folder / "socket").touch()
        return healthy_command(launch, folder)

    monkeypatch.setitem(ENGINES, "hf", command)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, Supervision(rest_s=0)) as servers:
        servers.start()
        servers.restart(0, "a test")
        events_until(servers, 1)
        assert [folder.exists() for folder in folders] == [False, True]
    assert not any(folder.exists() for folder in folders)


def test_children_of_a_server_end_with_it(tmp_path, monkeypatch):
    code = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    )
    monkeypatch.setitem(ENGINES, "hf", python_command(code))
    server = ServerProcess(EngineLaunch("hf", "/m", port=1), TOKEN, tmp_path / "log", name="server")
    server.spawn()
    wait_for(lambda: server.log.read_text().endswith("\n"))
    child = int(server.log.read_text())
    assert alive(child)
    server.end()
    wait_for(lambda: not alive(child))


def test_a_server_does_not_bind_to_the_world_without_a_token(monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["hf", "--model-path", "/m", "--port", "1", "--host", "0.0.0.0"])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert TOKEN_VARIABLE in capsys.readouterr().err


def is_writing(engine):
    return engine.server_info()["internal_states"][0]["num_running_reqs"] > 0


def test_one_of_two_servers_is_killed_and_the_work_goes_on(server, model_path, tmp_path):
    with Servers([EngineLaunch("hf", model_path)], TOKEN, tmp_path) as servers:
        servers.start()
        (victim,) = servers.pids

        async def work(engine):
            async with EnginePool([server.url, *servers.urls], TOKEN, timeout_s=240) as pool:
                tasks = [asyncio.create_task(pool.generate([5, 6 + i % 12], PARAMS)) for i in range(24)]
                while not await asyncio.to_thread(is_writing, engine):
                    assert not all(task.done() for task in tasks)
                os.kill(victim, signal.SIGKILL)
                return await asyncio.gather(*tasks)

        with closing(ServerClient(servers.urls[0], TOKEN)) as engine:
            answers = asyncio.run(work(engine))
        assert all(len(piece.completion.token_ids) == 200 for piece in answers)
        with pytest.raises(ServerDied, match=rf"server 0 \(pid {victim}\) ended with exit code -9.*server_0\.log"):
            servers.check()


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    child = """
        import sys, time
        from megarl.processes.lifetime import die_with_parent
        die_with_parent(int(sys.argv[1]))
        open(sys.argv[2], "w").write("ready")
        time.sleep(600)
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
    with pytest.raises(ServerError, match=rf"^{server.url}/model_info answered 401: Unauthorized$") as caught:
        ServerClient(server.url, "wrong").model_info()
    assert (caught.value.route, caught.value.status) == ("/model_info", 401)
    (port,) = free_ports(["127.0.0.1"])
    with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port}/health failed: ConnectError"):
        ServerClient(f"http://127.0.0.1:{port}", "").health()


def kill_and_wait(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_all_servers_are_waited_for_at_once(tmp_path, monkeypatch):
    """The first one serves only after the second one did; then the first one never serves, and the second one ends."""
    go = tmp_path / "go"
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[2]):\n    time.sleep(0.02)\n"

    def command(launch, folder):
        code = HEALTHY if launch.index else waits + HEALTHY
        return ServerCommand([sys.executable, "-c", code, str(launch.port), str(go)], dict(os.environ))

    monkeypatch.setitem(ENGINES, "hf", command)
    with Servers([EngineLaunch("hf", "/m")] * 2, TOKEN, tmp_path) as servers:
        servers.start(lambda ready, total: go.touch())
        assert servers.states == [State.SERVING] * 2
    codes = [SLEEPS, ENDS]
    monkeypatch.setitem(ENGINES, "hf", lambda launch, folder: python_command(codes[launch.index])(launch, folder))
    with pytest.raises(ServerDied, match=r"server 1 .* ended with exit code 1"):
        Servers([EngineLaunch("hf", "/m")] * 2, TOKEN, tmp_path).start()


def test_servers_that_ended_are_revived_and_one_that_cannot_start_rests(tmp_path, monkeypatch):
    def command(launch, folder):
        return (python_command(ENDS) if launch.index == 1 else healthy_command)(launch, folder)

    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    with Servers([EngineLaunch("hf", "/m")] * 4, TOKEN, tmp_path, Supervision(rest_s=600)) as servers:
        servers.start()
        urls, before = servers.urls, servers.pids
        for pid in before[:3]:
            kill_and_wait(pid)
        monkeypatch.setitem(ENGINES, "hf", command)
        (reason,) = servers.revive()
        assert reason.startswith("server 1 (pid ") and "ended with exit code 1" in reason and "no model here" in reason
        assert servers.states == [State.SERVING, State.RESTING, State.SERVING, State.SERVING]
        assert servers.serving == [urls[0], urls[2], urls[3]]
        assert servers.pids[3] == before[3] and not set(servers.pids[:3]) & set(before)


def test_a_run_whose_servers_cannot_be_revived_stops_when_none_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    patience = Supervision(max_restarts=1, rest_s=0.01)
    with Servers([EngineLaunch("hf", "/m")] * 2, TOKEN, tmp_path, patience) as servers:
        servers.start()
        for pid in servers.pids:
            kill_and_wait(pid)
        monkeypatch.setitem(ENGINES, "hf", python_command(ENDS))
        with pytest.raises(ServerDied, match=r"^no server is left; after 1 restarts, server [01] (?s:.*)no model here"):
            servers.revive()
        assert servers.states == [State.OUT, State.OUT]


def test_a_run_waits_for_a_server_that_is_revived_at_its_second_start(tmp_path, monkeypatch):
    starts = []

    def command(launch, folder):
        starts.append(launch.index)
        if len(starts) == 1:
            raise OSError("no space left on device")
        return healthy_command(launch, folder)

    monkeypatch.setitem(ENGINES, "hf", healthy_command)
    with Servers([EngineLaunch("hf", "/m")], TOKEN, tmp_path, Supervision(rest_s=0.01)) as servers:
        servers.start()
        kill_and_wait(servers.pids[0])
        monkeypatch.setitem(ENGINES, "hf", command)
        assert servers.revive() == ["server 0 did not start: no space left on device"]
        assert servers.states == [State.SERVING] and len(starts) == 2
