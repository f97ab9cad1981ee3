"""Stock SGLang as this project runs it: its log-probs, its processes, its secrets."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from config_helpers import load
from tiny_server import CURRENT, ROOT, TOKEN, against, sglang_of
from wire import parse_completions

from megarl.io.job_signals import ASKS
from megarl.rollout.client import ServerClient
from megarl.rollout.protocol import Route, SamplingParams, generate_body
from megarl.servers.launch import EngineLaunch
from megarl.servers.nccl import PAIRED, VARIABLES
from megarl.servers.supervisor import Servers, State, Supervision
from megarl.trainer.build import make_group

pytestmark = pytest.mark.sglang

# Both sides compute in float32, in another order: each of the two layers rounds numbers of about 10 to one part in 1e7,
# which comes to 1e-6 here. A wrong position, mask or temperature is off by more than 1e-2.
TOLERANCE = 1e-5


@against("sglang", "sglang_old", "sglang_tp2")
def test_log_probs_are_those_of_transformers_at_the_temperature(any_server, reference):
    for temperature in (0.7, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=64, ignore_eos=True)
        worst = 0.0
        for prompt in ([5], [6, 7, 8], list(range(2, 32)) * 4):
            reply = any_server.ask(Route.GENERATE, generate_body(prompt, 4, params, "r"))
            for completion in parse_completions(reply.json(), 4):
                ids = torch.tensor([prompt + completion.token_ids])
                with torch.no_grad():
                    log_probs = torch.log_softmax(reference(ids).logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
                expected = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
                worst = max(worst, (expected - torch.tensor(completion.log_probs)).abs().max().item())
        assert 0 < worst < TOLERANCE


@against("sglang", "sglang_old")
def test_environ_of_a_server_has_the_ranks_variables_of_nccl(any_server):
    """As Linux has it.  Schedulers inherit it, and write their title over it."""
    config = load("rollout.engine=sglang")
    given = os.environ | dict(make_group(config, config.actor, "ranks_0", serves=True).settings.environment)
    port, module = any_server.url.rpartition(":")[2], "megarl.servers.sglang_server"
    children = psutil.Process().children(recursive=True)
    (server,) = [child for child in children if {port, module} <= set(child.cmdline())]
    environ = server.environ()
    assert {name: environ.get(name) for name in PAIRED} == {name: given.get(name) for name in PAIRED}
    assert VARIABLES.items() <= environ.items()


@against("sglang", "sglang_old", "sglang_tp2")
def test_signal_tree_a_server_serves_on(any_server):
    """None of its processes gets a signal to all processes of a job: SGLang's own handler ends it some time later.

    Python's resource tracker ignores SIGTERM itself.
    """
    port, module = any_server.url.rpartition(":")[2], "megarl.servers.sglang_server"
    children = psutil.Process().children(recursive=True)
    (server,) = [child for child in children if {port, module} <= set(child.cmdline())]
    processes = [server, *server.children(recursive=True)]
    assert len(processes) > 3, "schedulers, a detokenizer, a resource tracker"
    for number in ASKS:
        for process in processes:
            process.send_signal(number)
    reply = any_server.ask(Route.GENERATE, generate_body([5, 6], 1, SamplingParams(max_new_tokens=64), "r"))
    assert len(parse_completions(reply.json(), 1)[0].token_ids) > 0
    for process in processes:
        status = dict(line.split(":\t") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        kept = int(status["SigBlk"], 16) | int(status["SigIgn"], 16)
        assert all(kept >> (number - 1) & 1 for number in ASKS), process.cmdline()


def family(pid):
    """A process and what it started, that lives."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_until_gone(processes):
    deadline = time.monotonic() + 30
    while [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still there: {processes}"
        time.sleep(0.05)


def launch_of(model_path):
    return EngineLaunch(
        "sglang", model_path, max_running_requests=8, python=sglang_of(CURRENT), device="cpu", random_seed=7
    )


def events_until(servers, count):
    events, deadline = [], time.monotonic() + 200
    while len(events) < count:
        events += servers.poll()
        assert time.monotonic() < deadline, f"only {events}"
        time.sleep(0.05)
    return events


def test_a_server_whose_scheduler_dies_is_started_again_with_the_folders_weights(model_path, other_path, tmp_path):
    with Servers([launch_of(model_path)], TOKEN, tmp_path, Supervision(rest_s=0.1)) as servers:
        servers.start()
        engine = ServerClient(servers.urls[0], TOKEN)
        first = engine.checksums()
        engine.update_from_disk(other_path, version=4)
        processes = family(servers.pids[0])
        assert not any(TOKEN in " ".join(process.cmdline()) for process in processes)
        (scheduler,) = [process for process in processes if "scheduler" in " ".join(process.cmdline())]
        scheduler.send_signal(signal.SIGKILL)
        died, serving = events_until(servers, 2)
        assert (died.state, died.incarnation) == (State.RESTING, 1)
        assert (serving.state, serving.incarnation) == (State.SERVING, 2)
        assert "server 0 (pid" in died.reason and "server_0.log" in died.reason
        wait_until_gone(processes)
        assert engine.checksums() == first
        assert engine.model_info()["weight_version"] == "0"
        processes = family(servers.pids[0])
    wait_until_gone(processes)
    assert TOKEN not in (tmp_path / "server_0.log").read_text()


DRIVER = """
import sys, time
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

model, python, folder = sys.argv[1:]
with Servers([EngineLaunch("sglang", model, python=python, device="cpu")], "a token", folder) as servers:
    servers.start()
    print(servers.pids[0], flush=True)
    time.sleep(600)
"""


def test_everything_of_a_server_ends_with_a_driver_that_is_killed(model_path, tmp_path):
    command = [sys.executable, "-c", DRIVER, model_path, sglang_of(CURRENT), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        processes = family(int(driver.stdout.readline()))
        assert len(processes) >= 3  # the server, its scheduler, its detokenizer
        driver.kill()
    wait_until_gone(processes)
