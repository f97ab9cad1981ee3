"""Agents that are ordinary functions and programs: their processes, and that nothing of them is left."""

import asyncio
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import time

import psutil
import pytest
from agent_episodes import HTTP, PARAMS, stage_of
from pools import until

from megarl.agents.process import _END, AgentProgram, fields_of
from megarl.agents.process import _main as process_main
from megarl.io.environment import start_fork_server
from megarl.io.job_signals import ASKS
from megarl.rewards.surroundings import Surroundings
from megarl.samples.sample import LostRollout, Prompt


def pids_of(file):
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def wait_until_gone(pids):
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"{alive} are still there"
        time.sleep(0.05)


async def test_a_plain_function_runs_in_a_process_without_secrets(monkeypatch):
    start_fork_server("megarl.agents.process")  # as a collector does, which begins without secrets
    monkeypatch.setenv("MY_SECRET", "s3cret")
    monkeypatch.setenv("WANTED", "w")
    code = """
        import os

        def episode(base_url, prompt):
            assert os.environ["OPENAI_BASE_URL"] == base_url
            with open(f"/proc/{os.getpid()}/environ") as file:
                assert "s3cret" not in file.read()
            say(base_url, prompt.text, os.environ["OPENAI_API_KEY"])
            has = {name.lower(): name in os.environ for name in ("MY_SECRET", "WANTED")}
            return {"score": 1.0, "pid": os.getpid(), **has}
    """
    async with stage_of(code, "yes", surroundings=Surroundings(environment={"WANTED": "w"})) as stage:
        group = await stage.group(2)
        assert [sample.reward for sample in group] == [1.0, 1.0]
        pids = {sample.reward_extra["pid"] for sample in group}
        assert len(pids) == 2 and os.getpid() not in pids
        assert {(s.reward_extra["my_secret"], s.reward_extra["wanted"]) for s in group} == {(0.0, 1.0)}


FAULTS = {
    "raise BaseException('odd')": "BaseException: odd",
    "raise KeyError('tool')": "KeyError: 'tool'",
    "os._exit(7)": "exit code 7",
    "os.kill(os.getpid(), 9)": "exit code -9",
    "return 'much'": "returned 'much'",
}


async def test_a_process_that_fails_costs_its_own_episode_only(caplog):
    faults = "".join(f"\n    if said == '{number}': {fault}" for number, fault in enumerate(FAULTS))
    code = (
        f"import os\n\ndef episode(base_url, prompt):\n    said = say(base_url, prompt.text){faults}\n    return 1.0\n"
    )
    async with stage_of(code, "good", *map(str, range(len(FAULTS))), "good") as stage:
        assert [sample.reward for sample in await stage.group(2 + len(FAULTS))] == [1.0, 1.0]
        counts = stage.episodes.counters()
        assert (counts["agent/errors"], counts["agent/timeouts"]) == (len(FAULTS), 0)
    for words in FAULTS.values():
        assert words in caplog.text


async def test_a_process_at_its_limit_is_told_from_one_with_a_fault_behind_it(caplog):
    code = """
        def episode(base_url, prompt):
            said = say(base_url, prompt.text)
            try:
                while said != "short":
                    say(base_url, prompt.text)
            except Exception:
                if said == "fault":
                    raise KeyError("its own")
                raise
            return -1.0
    """
    async with stage_of(code, "limit", "fault", "short", "short", max_turns=1) as stage:
        assert [sample.reward for sample in await stage.group(4)] == [-1.0, -1.0]
        counts = stage.episodes.counters()
        assert (counts["agent/unrewarded"], counts["agent/errors"]) == (1, 1)
    assert "its own" in caplog.text and stage.scored.seen == []


async def test_a_process_that_takes_too_long_ends_with_what_it_started_and_says_where_it_was(tmp_path):
    code = f"""
        import subprocess, sys, time

        def episode(base_url, prompt):
            sys.stderr = open("{tmp_path}/said", "w")
            away = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open("{tmp_path}/pids", "w") as file:
                print(away.pid, file=file)
            time.sleep(600)
    """
    async with stage_of(code, "0", timeout_s=2.0) as stage:
        lost = await stage.group()
        assert isinstance(lost, LostRollout) and "no end within" in lost.reason
        assert stage.episodes.counters()["agent/timeouts"] == 1
    (away,) = pids_of(tmp_path / "pids")
    wait_until_gone([away])
    assert re.search(r"episode \S+: here the collector ended it \(\S+agent\.py:\d+\)", (tmp_path / "said").read_text())


async def test_signal_tree_an_episode_goes_on_and_its_programs_have_the_usual_effects(tmp_path):
    code = f"""
        import os, subprocess, time

        def episode(base_url, prompt):
            say(base_url, "hi")
            with open("{tmp_path}/pids", "w") as file:
                print(os.getpid(), file=file)
            while not os.path.exists("{tmp_path}/go"):
                time.sleep(0.02)
            program = subprocess.Popen(["sleep", "600"])
            program.terminate()
            return {{"score": 1.0, "code": program.wait()}}
    """
    async with stage_of(code, "yes") as stage:
        task = asyncio.create_task(stage.group())
        await until(lambda: pids_of(tmp_path / "pids"))
        for number in ASKS:
            os.kill(pids_of(tmp_path / "pids")[0], number)
        (tmp_path / "go").touch()
        (sample,) = await task
        assert (sample.reward, sample.reward_extra["code"]) == (1.0, -signal.SIGTERM)


PROGRAM = """
import os, subprocess, sys, time

own = subprocess.Popen(["sleep", "600"])
away = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), own.pid, away.pid, file=file)
base = os.environ["OPENAI_BASE_URL"]
say(base, sys.argv[2], os.environ["OPENAI_API_KEY"])
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == base and sys.stdin.read() == sys.argv[2]
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("end", ["ends", "is cancelled"])
async def test_everything_that_a_command_started_ends_with_it(tmp_path, end):
    script, pids = tmp_path / "agent.py", tmp_path / "pids"
    script.write_text(HTTP + PROGRAM)
    command = [sys.executable, str(script), str(pids), "{prompt}", "0" if end == "ends" else "600"]
    async with stage_of(command, "answer") as stage:
        task = asyncio.create_task(stage.group(text="say {this} & {that}"))
        if end == "ends":
            assert (await task)[0].reward == len("answer") and stage.scored.seen == ["answer"]
        else:
            await until(lambda: stage.bodies)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
    found = pids_of(pids)
    assert len(found) == 3
    wait_until_gone(found)


async def test_a_command_reports_its_reward_and_its_failure_is_told(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, sys\n"
        + HTTP
        + 'base, key = sys.argv[1:]\nsay(base, "hi", key)\nask(base, "/reward", key, reward=0.75)\n'
        + 'ask(base, "/reward", key, reward=0.5, turn=1)\nprint("x" * 100000)\nprint("last words")\n'
        + 'sys.exit(3 if os.environ.get("FAILS") else 0)\n'
    )
    command = [sys.executable, str(script), "{base_url}", "{api_key}"]
    async with stage_of(command, "yes") as stage:
        (sample,) = await stage.group()
        assert sample.reward == 1.25 and sample.rows[0].rewards == (0.5,)
    async with stage_of(command, "yes", surroundings=Surroundings(environment={"FAILS": "1"})) as stage:
        lost = await stage.group()
        assert lost.reason.endswith("ended with exit code 3; the last that it said: last words")
    async with stage_of(["/no/such/program"]) as stage:
        assert "/no/such/program cannot be started" in (await stage.group()).reason


async def test_so_many_processes_run_at_a_time_and_an_urgent_episode_takes_the_next(tmp_path):
    code = f"""
        import os, time

        def episode(base_url, prompt):
            with open("{tmp_path}/order", "a") as file:
                print(prompt.text, file=file)
            say(base_url, "hi")
            while prompt.text == "first" and not os.path.exists("{tmp_path}/go"):
                time.sleep(0.02)
            return 1.0
    """
    async with stage_of(code, "yes", num_processes=1) as stage:
        begun = [asyncio.create_task(stage.group(text="first"))]
        await until(lambda: stage.bodies)
        begun += [asyncio.create_task(stage.group(text="train")) for _ in range(2)]
        await asyncio.sleep(0)
        begun.append(asyncio.create_task(stage.group(text="urgent", urgent=True)))
        await asyncio.sleep(0.2)
        (tmp_path / "go").touch()
        await asyncio.gather(*begun)
        assert (tmp_path / "order").read_text().split() == ["first", "urgent", "train", "train"]


def end_late(connection, job, folder):
    """The signal comes just when the episode is over and its process would ignore it."""
    set_handler = signal.signal

    def late(number, handler):
        if number == _END and handler is signal.SIG_IGN:
            signal.signal = set_handler
            os.kill(os.getpid(), _END)
        return set_handler(number, handler)

    signal.signal = late
    process_main(connection, job, Prompt("0", [5], "hi", "", ""), (str(folder), "", ""), Surroundings())


def test_a_signal_at_the_end_of_an_episode_keeps_no_process_of_it(tmp_path):
    code = """
        import subprocess

        def episode(base_url, prompt):
            away = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open(f"{base_url}/pids", "w") as file:
                print(away.pid, file=file)
            return 1.0
    """
    (tmp_path / "agent.py").write_text(textwrap.dedent(code))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    job = AgentProgram(f"{tmp_path}/agent.py:episode")
    process = multiprocessing.get_context("fork").Process(target=end_late, args=(theirs, job, tmp_path))
    process.start()
    process.join(60)
    ours.close()
    (away,) = pids_of(tmp_path / "pids")
    try:
        assert process.exitcode == 0 and not psutil.pid_exists(away)
    finally:
        if psutil.pid_exists(away):
            os.kill(away, signal.SIGKILL)


async def test_exit_0_is_an_end_and_other_codes_are_faults(caplog):
    code = """
        import sys

        def episode(base_url, prompt):
            sys.exit({"none": None, "zero": 0, "two": 2}[say(base_url, prompt.text)])
    """
    async with stage_of(code, "none", "zero", "two") as stage:
        assert sorted(sample.reward for sample in await stage.group(3)) == [4.0, 4.0]
        assert stage.episodes.counters()["agent/errors"] == 1 and "SystemExit: 2" in caplog.text


async def test_a_proxy_of_the_machine_gets_no_request_of_an_agent(monkeypatch):
    """urllib asks a proxy for addresses of the machine, too, as the clients of OpenAI and Anthropic do."""
    monkeypatch.setenv("NO_PROXY", "inner.example")
    code = """
        import os

        def episode(base_url, prompt):
            say(base_url, prompt.text)
            assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "inner.example,127.0.0.1,localhost"
            return 1.0
    """
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    async with stage_of(code, "yes", surroundings=Surroundings(environment=proxies)) as stage:
        assert (await stage.group())[0].reward == 1.0


COMMAND = """
import json, os, sys

row = json.loads(os.environ["MEGARL_ROW"])
fields = {"seed": 7, "goal": {"a": [1]}, "ground_truth": "15", "data_source": "sums", "uid": "0-17"}
assert row == {**fields, "prompt": "{seed}?"}
assert sys.argv[1:] == ["15", "seed 7", '{"a": [1]}', "{kept}", "${HOME}", "{seed}?"], sys.argv
assert os.environ["OPENAI_DEFAULT_MODEL"] == os.environ["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "policy"
say(os.environ["OPENAI_BASE_URL"], "hi")
print("a line of its own")
"""


async def test_a_command_gets_the_row_and_fields_of_it(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(HTTP + COMMAND)
    words = ["{ground_truth}", "seed {seed}", "{goal}", "{{kept}}", "${HOME}", "{prompt}"]
    async with stage_of([sys.executable, str(script), *words], "yes") as stage:
        prompt = Prompt("0-17", [5], "{seed}?", "15", "sums", {"seed": 7, "goal": {"a": [1]}})
        group = await stage.episodes.group(prompt, 2, PARAMS)
        assert len(group) == 2, stage.episodes.first_errors
    async with stage_of([sys.executable, str(script), "{speed}"], "yes") as stage:
        lost = await stage.group()
        assert "agent.command has {speed}: expected one of ground_truth, data_source, uid, prompt, " in lost.reason


def test_what_an_episode_of_a_program_says_is_printed_where_it_is_one_of_the_first(capsys):
    program = AgentProgram(None, ("sh", "-c", "echo one; echo two >&2"))
    for is_shown, said in ((True, "--- episode 0-1: sh ended with exit code 0, and said\none\ntwo\n"), (False, "")):
        program.run(Prompt("0-1", [5], "hi"), "", "", "", is_shown=is_shown)
        assert capsys.readouterr().out == said


def test_words_that_name_fields_are_found():
    assert fields_of(["{seed}", "{prompt} {a_b}", "${HOME}", "{{kept}}", '{"x": 1}', "{}"]) == {"seed", "a_b"}
