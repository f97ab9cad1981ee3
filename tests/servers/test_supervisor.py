"""Real server processes: started, killed, replaced, and never left behind."""

import os
import re
import signal
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_server import TOKEN

from megarl.hf_server import main
from megarl.processes.lifetime import MemoryEnd
from megarl.servers import server_process
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch, ServerCommand, hf_command
from megarl.servers.server_process import ENGINES, ServerProcess
from megarl.servers.supervisor import ServerDied, Servers, State, Supervision, free_ports

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


LAUNCH = EngineLaunch("hf", "/m")


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """Changes how servers are started; at first so that each serves at once."""

    def change(command):
        monkeypatch.setitem(ENGINES, "hf", command)

    change(healthy_command)
    return change


@contextmanager
def serving(folder, count=1, **patience):
    """So many servers that serve."""
    with Servers([LAUNCH] * count, TOKEN, folder, Supervision(**patience)) as servers:
        servers.start()
        yield servers


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


def kill_and_wait(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def events_until(servers, count):
    """The next so many events of a supervisor."""
    events = []

    def enough():
        events.extend(servers.poll())
        return len(events) >= count

    wait_for(enough)
    return events


def test_a_server_that_the_kernel_killed_for_memory_is_named_so(tmp_path, monkeypatch):
    """It is killed as the kernel does it, beside counters in files."""
    counter = tmp_path / "vmstat"
    counter.write_text("oom_kill 4\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(server_process, "MemoryEnd", partial(MemoryEnd, tmp_path / "none", tmp_path))
    with serving(tmp_path / "logs") as servers:
        counter.write_text("oom_kill 5\n")
        kill_and_wait(servers.pids[0])
        (died, *_) = events_until(servers, 1)
    assert "killed by SIGKILL, as the kernel does when memory ends (oom_kill of this machine 4 -> 5" in died.reason


def options(**fields):
    return " ".join(hf_command(EngineLaunch("hf", "/m", port=5, **fields), Path("/f")).argv)


def test_the_command_of_the_hf_engine_has_its_options_and_no_token():
    command = options(max_total_tokens=9, random_seed=3)
    assert " -m megarl.hf_server.main " in command and "--max-total-tokens 9" in command
    assert "token " not in command and "key" not in command
    flag = "--enable-return-routed-experts"
    assert flag in options(returns_routes=True) and flag not in command
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
        options(tensor_parallel_size=2)


def test_the_hf_engine_takes_one_gpu_where_there_is_one(monkeypatch):
    assert "--device cpu" in options(device="cpu") and "--memory-fraction" not in options(device="cpu")
    assert "--device cuda:6 --memory-fraction 0.3" in options(device="cuda", first_gpu=6, memory_fraction=0.3)
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


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path, use):
    use(python_command(ENDS))
    servers = Servers([LAUNCH], TOKEN, tmp_path / "logs")
    with pytest.raises(ServerDied, match=r"server 0 .*exit code 1.*server_0\.log(?s:.*)no model here"):
        servers.start()
    assert servers.pids[0] is not None and not alive(servers.pids[0])


@pytest.mark.parametrize(("code", "error", "said"), [(2, ValueError, r"^/m holds nothing$"), (1, ServerDied, "code 1")])
def test_a_server_that_refuses_its_model_is_a_mistake_of_the_user(tmp_path, use, code, error, said):
    use(python_command(f"import sys; print('Traceback:\\nerror: /m holds nothing', file=sys.stderr); sys.exit({code})"))
    with pytest.raises(error, match=said):
        Servers([LAUNCH], TOKEN, tmp_path).start()


def test_a_server_that_never_serves_is_given_up_and_ended(tmp_path, use):
    use(python_command(SLEEPS))
    servers = Servers([LAUNCH], TOKEN, tmp_path, Supervision(start_timeout_s=0.3))
    with pytest.raises(ServerDied, match=r"server 0 did not serve within 0\.3 s"):
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
def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path, use, code):
    use(lambda launch, folder: ServerCommand([sys.executable, "-c", code, str(launch.port)], dict(os.environ)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        with Servers([replace(LAUNCH, port=busy)], TOKEN, tmp_path) as servers:
            servers.start()
            assert servers.urls != [f"http://127.0.0.1:{busy}"]


def test_a_restarted_server_keeps_its_url_and_the_others_their_process(tmp_path):
    progress = []
    with Servers([LAUNCH] * 2, TOKEN, tmp_path) as servers:
        servers.start(lambda ready, total: progress.append((ready, total)))
        assert progress == [(1, 2), (2, 2)]
        urls, (first, second) = servers.urls, servers.pids
        kill_and_wait(first)
        died, serving = events_until(servers, 2)
        assert servers.urls == urls
        assert servers.pids[1] == second and servers.pids[0] != first
    assert (died.index, died.url, died.state, died.incarnation) == (0, urls[0], State.RESTING, 1)
    assert f"server 0 (pid {first}) ended with exit code -9; its log: {tmp_path}/server_0.log" in died.reason
    assert (serving.index, serving.url, serving.state, serving.incarnation) == (0, urls[0], State.SERVING, 2)
    assert not any(alive(pid) for pid in servers.pids)


def test_a_server_that_hangs_is_started_again(tmp_path):
    with serving(tmp_path, answer_within_s=0.5, ask_every_s=0, rest_s=0.01) as servers:
        for _ in range(20):
            assert servers.poll() == [], "of a healthy server there is nothing to say"
            time.sleep(0.005)
        (hung,) = servers.pids
        os.kill(hung, signal.SIGSTOP)
        died, again = events_until(servers, 2)
        assert "server 0 did not answer within 0.5 s" in died.reason
        assert not alive(hung)
        assert again.incarnation == 2 and servers.states == [State.SERVING]


def test_a_server_told_to_start_again_does_so(tmp_path):
    with serving(tmp_path, rest_s=0.01) as servers:
        (stopped,) = servers.restart(servers.urls[0], "it failed two pushes")
        assert stopped.state is State.RESTING
        assert "server 0 is to start again: it failed two pushes; its log" in stopped.reason
        assert servers.restart(servers.urls[0], "again") == []
        time.sleep(0.02)
        assert servers.poll(starts=False) == [], "its rest is over, and it may not start yet"
        assert servers.states == [State.RESTING]
        (again,) = events_until(servers, 1)
        assert (again.state, again.incarnation) == (State.SERVING, 2)


def no_room(launch, folder):
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("command", "max_restarts", "incarnation", "reason"),
    [
        (python_command(ENDS), 2, 3, r"after 2 restarts, server 0 \(pid (?s:.*)no model here"),
        (no_room, 1, 1, "server 0 did not start: no space left on device"),  # it cannot even be spawned
    ],
    ids=["dies", "no_room"],
)
def test_a_server_that_cannot_be_started_again_is_out_and_the_others_serve_on(
    tmp_path, use, command, max_restarts, incarnation, reason
):
    with serving(tmp_path, 2, max_restarts=max_restarts, rest_s=0.01) as servers:
        use(command)
        os.kill(servers.pids[0], signal.SIGKILL)
        died, gone = events_until(servers, 2)
        assert (died.state, gone.state) == (State.RESTING, State.OUT)
        assert gone.incarnation == incarnation
        assert re.search(reason, gone.reason)
        assert servers.states == [State.OUT, State.SERVING]
        assert servers.poll() == []


def test_a_server_that_served_long_has_all_its_restarts_again(tmp_path):
    with serving(tmp_path, rest_s=0, settled_after_s=0, max_restarts=1) as servers:
        for incarnation in range(2, 4):
            os.kill(servers.pids[0], signal.SIGKILL)
            assert [event.incarnation for event in events_until(servers, 2)] == [incarnation - 1, incarnation]


def test_a_server_that_was_of_no_use_has_no_restart_forgiven(tmp_path):
    with serving(tmp_path, rest_s=0, settled_after_s=0, max_restarts=1) as servers:
        assert [event.state for event in servers.restart(servers.urls[0], "its weights are wrong")] == [State.RESTING]
        events_until(servers, 1)
        assert [event.state for event in servers.restart(servers.urls[0], "again")] == [State.OUT]


def test_the_folder_of_a_server_goes_with_it(tmp_path, use):
    folders = []

    def command(launch, folder):
        folders.append(folder)
        (folder / "socket").touch()
        return healthy_command(launch, folder)

    use(command)
    with serving(tmp_path, rest_s=0) as servers:
        servers.restart(servers.urls[0], "a test")
        events_until(servers, 1)
        assert [folder.exists() for folder in folders] == [False, True]
    assert not any(folder.exists() for folder in folders)


def test_children_of_a_server_end_with_it(tmp_path, use):
    use(
        python_command(
            "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
        )
    )
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


def test_all_servers_are_waited_for_at_once(tmp_path, use):
    """The first one serves only after the second one did; then the first one never serves, and the second one ends."""
    go = tmp_path / "go"
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[2]):\n    time.sleep(0.02)\n"

    def command(launch, folder):
        code = HEALTHY if launch.index else waits + HEALTHY
        return ServerCommand([sys.executable, "-c", code, str(launch.port), str(go)], dict(os.environ))

    use(command)
    with Servers([LAUNCH] * 2, TOKEN, tmp_path) as servers:
        servers.start(lambda ready, total: go.touch())
        assert servers.states == [State.SERVING] * 2
    use(lambda launch, folder: python_command([SLEEPS, ENDS][launch.index])(launch, folder))
    with pytest.raises(ServerDied, match=r"server 1 .* ended with exit code 1"):
        Servers([LAUNCH] * 2, TOKEN, tmp_path).start()


def test_servers_that_ended_are_revived_and_one_that_cannot_start_rests(tmp_path, use):
    with serving(tmp_path, 4, rest_s=600) as servers:
        urls, before = servers.urls, servers.pids
        for pid in before[:3]:
            kill_and_wait(pid)
        use(lambda launch, folder: (python_command(ENDS) if launch.index == 1 else healthy_command)(launch, folder))
        (reason,) = servers.revive()
        assert reason.startswith("server 1 (pid ") and "ended with exit code 1" in reason and "no model here" in reason
        assert servers.states == [State.SERVING, State.RESTING, State.SERVING, State.SERVING]
        assert servers.serving == [urls[0], urls[2], urls[3]]
        assert servers.pids[3] == before[3] and not set(servers.pids[:3]) & set(before)


def test_a_run_whose_servers_cannot_be_revived_stops_when_none_is_left(tmp_path, use):
    with serving(tmp_path, 2, max_restarts=1, rest_s=0.01) as servers:
        for pid in servers.pids:
            kill_and_wait(pid)
        use(python_command(ENDS))
        with pytest.raises(ServerDied, match=r"^no server is left; after 1 restarts, server [01] (?s:.*)no model here"):
            servers.revive()
        assert servers.states == [State.OUT, State.OUT]


def test_a_run_waits_for_a_server_that_is_revived_at_its_second_start(tmp_path, use):
    commands = iter([no_room, healthy_command])
    with serving(tmp_path, rest_s=0.01) as servers:
        kill_and_wait(servers.pids[0])
        use(lambda launch, folder: next(commands)(launch, folder))
        assert servers.revive() == ["server 0 did not start: no space left on device"]
        assert servers.states == [State.SERVING] and not list(commands)
