"""Episodes of every kind: what becomes of their turns, rewards, limits and faults."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace

import aiohttp
import psutil
import pytest
from agent_endpoint import CALL, Scripted
from agent_episodes import PARAMS, stage_of
from chat_templates import tokenizer_of
from fake_servers import Writer, broken

from megarl.agents.conversation import Asked
from megarl.agents.episodes import EpisodeError
from megarl.agents.process import Job
from megarl.agents.process import _main as process_main
from megarl.agents.session import Session
from megarl.rewards.surroundings import Surroundings
from megarl.rollout.collect import for_completion
from megarl.rollout.pool.slots import Slots
from megarl.sample import REWARD_ERROR, Completion, LostRollout, Prompt, Sample, VersionSpan
from megarl.sandbox.environment import start_fork_server

CALCULATOR = """
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

async def episode(chat, prompt):
    messages = chat.messages
    while True:
        answer = await chat(messages, tools=TOOLS)
        messages.append(answer.message)
        if not answer.tool_calls:
            return float(answer.text == f"It is {prompt.ground_truth}.")
        messages += [call.response(sum(call.arguments.values())) for call in answer.tool_calls]
"""


class FailsAt(Scripted):
    """Answers "yes", but fails at these requests."""

    def __init__(self, *numbers):
        super().__init__("qwen3", ["yes"])
        self.numbers, self.count = numbers, 0

    async def __call__(self, request):
        self.count += 1
        return await (broken if self.count - 1 in self.numbers else super().__call__)(request)


def run(test, limit_s=120):
    asyncio.run(asyncio.wait_for(test(), limit_s))


def source(code):
    return textwrap.dedent(code)


def check_exact(sample, bodies):
    """Each request's ids begin a row of the sample, and what the server wrote is learnt once."""
    rows = [row.token_ids for row in sample.rows]
    for body in bodies:
        assert any(row[: len(body["input_ids"])] == body["input_ids"] for row in rows)
    assert sorted(span.turn for row in sample.rows for span in row.learnt) == list(range(len(bodies)))


def test_an_episode_with_a_tool_is_one_row(tmp_path):
    async def test():
        async with stage_of(CALCULATOR, CALL, "It is 15.", folder=tmp_path) as stage:
            (sample,) = await stage.group()
            assert isinstance(sample, Sample) and sample.reward == 1.0
            (row,) = sample.rows
            assert [span.turn for span in row.learnt] == [0, 1] and row.rewards == ()
            check_exact(sample, stage.bodies)
            extra = sample.reward_extra
            assert (extra["agent/turns"], extra["agent/tool_calls"], extra["agent/branches"]) == (2, 1, 1)
            assert extra["agent/malformed_tool_calls"] == 0
            assert (extra["agent/appended"], extra["agent/rendered"], extra["agent/over_limit"]) == (1, 1, 0)
            assert "12 + 3?" in sample.text and "15" in sample.text and "<|im_start|>user" in sample.text
            assert stage.scored.seen == [], "the episode has said its reward"
            seeds = [body["sampling_params"]["sampling_seed"] for body in stage.bodies]
            assert seeds == [for_completion(PARAMS, "0-17/0", turn).sampling_seed for turn in (0, 1)]

    run(test)


def test_variables_of_the_chat_template_are_those_of_the_run(tmp_path):
    code = "async def episode(chat, prompt):\n    await chat(chat.messages)\n"

    async def test():
        async with stage_of(code, "yes", folder=tmp_path, template={"enable_thinking": False}) as stage:
            await stage.group()
            asked = tokenizer_of("qwen3").decode(stage.bodies[0]["input_ids"])
            assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")

    run(test)


def test_rewards_come_from_the_episode_its_turns_or_the_last_answer(tmp_path):
    code = """
        async def episode(chat, prompt, how):
            first = await chat(chat.messages)
            second = await chat([*chat.messages, first.message, {"role": "user", "content": "sure?"}])
            if how == "dict":
                return {"score": 0.5, "calls": 2}
            if how == "turns":
                chat.reward(1.0, first)
                chat.reward(0.25)
            if how == "both":
                chat.reward(1.0, first)
                return 2.0
    """

    async def test():
        found = {}
        for how in ("dict", "turns", "both", "none"):
            async with stage_of(source(code), "yes", "no!", folder=tmp_path, args={"how": how}) as stage:
                (sample,) = await stage.group()
                found[how] = sample.reward, [row.rewards for row in sample.rows], stage.scored.seen
                assert sample.reward_extra.get("calls") == (2.0 if how == "dict" else None)
        assert found == {
            "dict": (0.5, [()], []),
            "turns": (1.25, [(1.0, 0.25)], []),
            "both": (3.0, [(1.0, 0.0)], []),
            "none": (3.0, [()], ["no!"]),
        }

    run(test)


@pytest.mark.parametrize(
    "caught",
    [
        "        while True:\n            await chat(chat.messages)\n",
        "        try:\n            while True:\n                await chat(chat.messages)\n"
        "        except OverLimit:\n            return None\n",
    ],
)
def test_an_episode_that_has_used_up_its_turns_is_scored_as_it_stands(tmp_path, caught):
    code = f"    from megarl.agents.chat import OverLimit\n\n    async def episode(chat, prompt):\n{caught}"

    async def test():
        async with stage_of(source(code), "yes", "maybe", folder=tmp_path, max_turns=3) as stage:
            (sample,) = await stage.group()
            assert (sample.reward, sample.num_turns, len(sample.rows)) == (len("maybe"), 3, 3)
            assert sample.reward_extra["agent/over_limit"] == 1.0 and sample.truncated
            assert stage.episodes.counters()["agent/errors"] == 0

    run(test)


@pytest.mark.parametrize(("max_tokens", "truncated"), [("None", True), ("3", False)])
def test_an_answer_that_the_agent_itself_keeps_short_was_not_cut_by_the_run(tmp_path, max_tokens, truncated):
    code = f"async def episode(chat, prompt):\n    await chat(chat.messages, max_tokens={max_tokens})\n    return 1.0\n"

    async def test():
        async with stage_of(code, "a" * 500, folder=tmp_path) as stage:
            (sample,) = await stage.group()
            assert (sample.finish_reason, sample.truncated) == ("length", truncated)
            assert (sample.num_learnt == 3) is not truncated

    run(test)


def test_all_rows_of_an_episode_fit_its_tokens(tmp_path):
    """Edited histories begin new rows, several answers at once too; together they never have more tokens."""
    code = """
        import asyncio

        async def episode(chat, prompt):
            for i in range(99):
                question = [{"role": "user", "content": f"{i}?"}]
                answers = await asyncio.gather(*(chat(question) for _ in range(2)))
                await chat([*question, answers[0].message, {"role": "user", "content": "go on"}])
    """

    async def test():
        for limit in (80, 173, 300):
            async with stage_of(source(code), "a" * 30, folder=tmp_path, max_turns=99, max_tokens=limit) as stage:
                (sample,) = await stage.group()
                assert sum(len(row.token_ids) for row in sample.rows) <= limit
                assert sample.reward_extra["agent/over_limit"] == 1.0
                check_exact(sample, stage.bodies)

    run(test)


def test_a_row_that_another_answer_extends_first_leaves_no_room_twice(tmp_path):
    """Two answers under way go on from one turn; the one that did not reserve the row is done first and takes it."""

    async def test():
        async with stage_of(source("    async def episode(chat, prompt): ..."), folder=tmp_path) as stage:
            session = Session("0-17/0", replace(stage.episodes._policy, params=PARAMS, max_tokens=100))
            conversation = session.conversation

            def add(prompt_ids, num):
                completion = Completion([7] * num, [-1.0] * num, "stop", (VersionSpan(0, 0, num),))
                return conversation.add(Asked(prompt_ids), completion)

            add([5] * 10, 20)
            shared = [5] * 10 + [7] * 20
            first, _ = session._room([*shared, 1], 1, 4)
            session._asked[first] += 1
            other, _ = session._room([*shared, 2], 1, 4)
            session._asked[other] += 1
            assert (first.row, other.row) == (0, None)
            add([*shared, 2], 4)
            session._asked -= Counter([other])
            _, room = session._room([3], 1, None)
            session._asked -= Counter([first])
            add([*shared, 1], 4)
            add([3], room)
            assert conversation.num_tokens == sum(len(row.token_ids) for row in conversation.rows()) <= 100
            session.close()

    run(test)


def test_sub_agents_are_rows_of_the_sample(tmp_path):
    code = """
        import asyncio

        async def episode(chat, prompt):
            asked = [{"role": "system", "content": "You are a helper."}, {"role": "user", "content": "Check."}]
            main, helper = await asyncio.gather(chat(chat.messages), chat(asked))
            await chat([*chat.messages, main.message, {"role": "user", "content": helper.text}])
            return 1.0
    """

    async def test():
        async with stage_of(source(code), "one", "two", "three", folder=tmp_path) as stage:
            (sample,) = await stage.group()
            assert sorted(len(row.learnt) for row in sample.rows) == [1, 2]
            check_exact(sample, stage.bodies)

    run(test)


FAULTY = """
    import asyncio

    async def episode(chat, prompt, how):
        number = int((await chat(chat.messages)).text)
        if number == 0 and how == "raise":
            raise KeyError("no such tool")
        if number == 0 and how == "exit":
            raise SystemExit(3)
        if number == 0 and how == "odd":
            raise BaseException("of an odd package")
        if number == 0 and how == "hang":
            await asyncio.Event().wait()
        if number == 0 and how == "stubborn":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()
        if number == 0 and how == "cancelled":
            raise asyncio.CancelledError
        return float(number)
"""


@pytest.mark.parametrize("how", ["raise", "exit", "odd", "hang", "stubborn", "cancelled"])
def test_a_fault_costs_its_own_episode_only(tmp_path, how, monkeypatch):
    monkeypatch.setattr("megarl.agents.episodes._GRACE_S", 0.1)

    async def test():
        timeout_s = 20.0 if how in ("raise", "exit", "odd", "cancelled") else 1.0
        options = {"folder": tmp_path, "args": {"how": how}, "timeout_s": timeout_s}
        async with stage_of(source(FAULTY), "1", "0", "2", **options) as stage:
            group = await stage.group(3)
            assert sorted(sample.reward for sample in group) == [1.0, 2.0]
            counts = stage.episodes.counters()
            timed_out = how in ("hang", "stubborn")
            assert (counts["agent/timeouts"], counts["agent/errors"]) == (timed_out, not timed_out)
            assert stage.pool.counters()["wasted_unscored"] == len(stage.server.ids("0"))
        async with stage_of(source(FAULTY), "1", "0", on_error="zero", **options) as stage:
            group = await stage.group(2)
            assert sorted((sample.reward, REWARD_ERROR in sample.reward_extra) for sample in group) == [
                (0.0, True),
                (1.0, False),
            ]
        async with stage_of(source(FAULTY), "1", "0", on_error="stop", **options) as stage:
            with pytest.raises(ExceptionGroup) as raised:
                await stage.group(2)
            assert raised.group_contains(EpisodeError, match="episode 0-17/")
        async with stage_of(source(FAULTY), "1", "0", **options) as stage:
            lost = await stage.group(2)
            assert isinstance(lost, LostRollout) and lost.unscored == 1, "one alone has nothing to compare with"

    run(test)


def test_an_episode_that_wrote_nothing_leaves_its_group(tmp_path):
    code = """
        made = []

        async def episode(chat, prompt):
            made.append(prompt)
            if len(made) != 2:
                await chat(chat.messages)
            return 1.0
    """

    async def test():
        async with stage_of(source(code), "1", folder=tmp_path) as stage:
            assert len(await stage.group(3)) == 2
            assert stage.episodes.counters()["agent/empty"] == 1

    run(test)


def test_what_the_servers_fail_at_is_no_fault_of_the_agent(tmp_path):
    async def test():
        async with stage_of(CALCULATOR, folder=tmp_path, server=broken, on_error="stop") as stage:
            lost = await stage.group(2)
            assert isinstance(lost, LostRollout) and "attempts failed" in lost.reason
            assert stage.episodes.counters()["agent/errors"] == 0

    run(test)


def test_a_cancelled_order_ends_its_requests_and_counts_what_was_written(tmp_path):
    async def test():
        async with stage_of(CALCULATOR, folder=tmp_path, server=Writer(stops_after=2)) as stage:
            task = asyncio.create_task(stage.group(2))
            while len(stage.server.ended) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while stage.server.ended:
                await asyncio.sleep(0.01)
            stage.server.go.set()
            assert len(await stage.group(2)) == 2
            seeds = sorted(body["sampling_params"]["sampling_seed"] for body in stage.server.bodies[:2])
            later = {body["sampling_params"]["sampling_seed"] for body in stage.server.bodies[2:]}
            assert set(seeds) <= later, "a visit that is asked again draws the same"

    run(test)


def test_a_greedy_episode_is_the_base_of_its_group(tmp_path):
    async def test():
        async with stage_of(CALCULATOR, "It is 15.", folder=tmp_path) as stage:
            group = await stage.group(2, greedy=True)
            assert [sample.greedy_reward for sample in group] == [1.0, 1.0]
            temperatures = sorted(body["sampling_params"]["temperature"] for body in stage.bodies)
            assert temperatures[0] == 0.0 and len(temperatures) == 3 and temperatures[1] == PARAMS.temperature

    run(test)


# ---- through the endpoint

HTTP = """
    import json
    import urllib.request

    def ask(base_url, path="/chat/completions", key="-", **body):
        request = urllib.request.Request(base_url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def say(base_url, text, key="-"):
        messages = [{"role": "user", "content": text}]
        return ask(base_url, key=key, model="policy", messages=messages)["choices"][0]["message"]["content"]
"""


def test_an_async_agent_speaks_with_the_endpoint(tmp_path):
    code = (
        HTTP
        + """
    import asyncio

    async def episode(base_url, prompt):
        text = await asyncio.to_thread(say, base_url, prompt.text)
        return float(len(text))
    """
    )

    async def test():
        async with stage_of(source(code), "four", folder=tmp_path) as stage:
            assert [sample.reward for sample in await stage.group(2)] == [4.0, 4.0]

    run(test)


@pytest.mark.parametrize("begin", ["async def", "def"])
def test_agents_without_chat_get_the_system_prompt_as_the_first_message(tmp_path, begin):
    code = (
        HTTP
        + f"""
    {begin} episode(base_url, prompt):
        system, user = prompt.text
        assert system == {{"role": "system", "content": "Be brief."}} and user["content"] == "12 + 3?"
        raise KeyError("as wanted")
    """
    )

    async def test():
        async with stage_of(source(code), "yes", folder=tmp_path, system_prompt="Be brief.") as stage:
            assert "as wanted" in (await stage.group()).reason

    run(test)


def test_a_session_is_closed_with_its_episode(tmp_path):
    code = (
        HTTP
        + f"""
    import asyncio

    async def episode(base_url, api_key, prompt):
        await asyncio.to_thread(say, base_url, prompt.text, api_key)
        with open("{tmp_path}/where", "a") as file:
            print(base_url, api_key, file=file)
        return 1.0
    """
    )

    async def test():
        async with stage_of(source(code), "yes", folder=tmp_path) as stage, aiohttp.ClientSession() as http:
            await stage.group()
            base_url, key = (tmp_path / "where").read_text().split()
            body = {"model": "policy", "messages": [{"role": "user", "content": "more"}]}
            async with http.post(base_url + "/chat/completions", json=body) as reply:
                assert reply.status == 410
            plain = base_url.partition("/s/")[0] + "/v1/chat/completions"
            async with http.post(plain, json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
                assert reply.status == 410
            assert len(stage.bodies) == 1

    run(test)


# ---- in processes


def test_a_plain_function_runs_in_a_process_without_secrets(tmp_path, monkeypatch):
    start_fork_server("megarl.agents.process")  # as a collector does, which begins without secrets
    monkeypatch.setenv("MY_SECRET", "s3cret")
    monkeypatch.setenv("WANTED", "w")
    code = (
        HTTP
        + """
    import os

    def episode(base_url, prompt):
        assert os.environ["OPENAI_BASE_URL"] == base_url
        with open(f"/proc/{os.getpid()}/environ") as file:
            assert "s3cret" not in file.read()
        say(base_url, prompt.text, os.environ["OPENAI_API_KEY"])
        return {"score": 1.0, "pid": os.getpid(), "secret": "MY_SECRET" in os.environ, "wanted": "WANTED" in os.environ}
    """
    )

    async def test():
        surroundings = Surroundings(environment={"WANTED": "w"})
        async with stage_of(source(code), "yes", folder=tmp_path, surroundings=surroundings) as stage:
            group = await stage.group(2)
            assert [sample.reward for sample in group] == [1.0, 1.0]
            pids = {sample.reward_extra["pid"] for sample in group}
            assert len(pids) == 2 and os.getpid() not in pids
            assert {sample.reward_extra["secret"] for sample in group} == {0.0}
            assert {sample.reward_extra["wanted"] for sample in group} == {1.0}

    run(test)


FAULTS = {
    "raise BaseException('odd')": "BaseException: odd",
    "raise KeyError('tool')": "KeyError: 'tool'",
    "os._exit(7)": "exit code 7",
    "os.kill(os.getpid(), 9)": "exit code -9",
    "time.sleep(600)": "no end within",
    "return 'much'": "returned 'much'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_fails_costs_its_own_episode_only(tmp_path, fault):
    code = (
        HTTP
        + f"""
    import os, time

    def episode(base_url, prompt):
        if say(base_url, prompt.text) == "0":
            {fault}
        return 1.0
    """
    )

    async def test():
        hangs = "sleep" in fault
        options = {"folder": tmp_path, "timeout_s": 2.0 if hangs else 60.0}
        if not hangs:  # on a busy machine the others would need more than a hanging one is given
            async with stage_of(source(code), "1", "0", "1", **options) as stage:
                assert [sample.reward for sample in await stage.group(3)] == [1.0, 1.0]
                assert stage.episodes.counters()["agent/timeouts"] == 0
        async with stage_of(source(code), "0", **options) as stage:
            lost = await stage.group(1)
            assert isinstance(lost, LostRollout) and FAULTS[fault] in lost.reason, lost

    run(test)


SPAWNING = """
import os, subprocess, sys, time

own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), own.pid, away.pid, file=file)
{ask}
"""
ASK = (
    source(HTTP)
    + """
base = os.environ["OPENAI_BASE_URL"]
say(base, sys.argv[2], os.environ["OPENAI_API_KEY"])
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == base and sys.stdin.read() == sys.argv[2]
"""
)


def pids_of(file):
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def wait_until_gone(pids):
    until = time.monotonic() + 30
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < until, f"{alive} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["ends", "hangs", "is cancelled"])
def test_everything_that_a_command_started_ends_with_it(tmp_path, end):
    script, pids = tmp_path / "agent.py", tmp_path / "pids"
    script.write_text(SPAWNING.format(ask=ASK + ("" if end == "ends" else "\ntime.sleep(600)\n")))
    command = [sys.executable, str(script), str(pids), "{prompt}"]

    async def test():
        timeout_s = 8.0 if end == "hangs" else 60.0
        async with stage_of(command, "answer", folder=tmp_path, timeout_s=timeout_s) as stage:
            task = asyncio.create_task(stage.group(text="say {this} & {that}"))
            if end == "is cancelled":
                while not stage.bodies:
                    await asyncio.sleep(0.02)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
            else:
                found = await task
                if end == "ends":
                    assert found[0].reward == len("answer") and stage.scored.seen == ["answer"]
                else:
                    assert isinstance(found, LostRollout) and stage.episodes.counters()["agent/timeouts"] == 1
        found = pids_of(pids)
        assert len(found) == 3
        wait_until_gone(found)

    run(test)


def test_a_command_reports_its_reward_and_its_failure_is_told(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, sys\n"
        + source(HTTP)
        + 'base, key = sys.argv[1:]\nsay(base, "hi", key)\nask(base, "/reward", key, reward=0.75)\n'
        + 'ask(base, "/reward", key, reward=0.5, turn=1)\nprint("x" * 100000)\nprint("last words")\n'
        + 'sys.exit(3 if os.environ.get("FAILS") else 0)\n'
    )
    command = [sys.executable, str(script), "{base_url}", "{api_key}"]

    async def test():
        async with stage_of(command, "yes", folder=tmp_path) as stage:
            (sample,) = await stage.group()
            assert sample.reward == 1.25 and sample.rows[0].rewards == (0.5,)
        surroundings = Surroundings(environment={"FAILS": "1"})
        async with stage_of(command, "yes", folder=tmp_path, surroundings=surroundings) as stage:
            lost = await stage.group()
            assert lost.reason.endswith("ended with exit code 3; the last that it said: last words")
        async with stage_of(["/no/such/program"], folder=tmp_path) as stage:
            assert "/no/such/program cannot be started" in (await stage.group()).reason

    run(test)


def test_so_many_processes_run_at_a_time(tmp_path):
    marks, met = tmp_path / "marks", tmp_path / "met"  # the first waits for another, so that two are seen
    marks.mkdir()
    code = (
        HTTP
        + f"""
    import os, time

    def episode(base_url, prompt):
        mine = f"{marks}/{{os.getpid()}}"
        open(mine, "w").close()
        say(base_url, "hi")
        while len(os.listdir("{marks}")) < 2 and not os.path.exists("{met}"):
            time.sleep(0.01)
        open("{met}", "w").close()
        most = len(os.listdir("{marks}"))
        os.remove(mine)
        return float(most)
    """
    )

    async def test():
        async with stage_of(source(code), "yes", folder=tmp_path, num_processes=2) as stage:
            assert max(sample.reward for sample in await stage.group(5)) == 2.0

    run(test)


def test_time_without_servers_is_not_the_agents(tmp_path):
    """Nor is the time without a slot: another request has the only one."""

    async def test():
        async with stage_of(CALCULATOR, CALL, "It is 15.", folder=tmp_path, timeout_s=3.0) as stage:
            url = stage.url
            stage.pool.hold(url)
            task = asyncio.create_task(stage.group(2))
            await asyncio.sleep(3.5)
            stage.pool.trust(url, 7)
            assert [sample.reward for sample in await task] == [1.0, 1.0]
            stage.pool.slots = Slots(1)
            await stage.pool.slots.take()
            task = asyncio.create_task(stage.group())
            await asyncio.sleep(3.5)
            stage.pool.slots.give_back()
            assert [sample.reward for sample in await task] == [1.0]
            assert stage.episodes.counters()["agent/timeouts"] == 0

    run(test)


@pytest.mark.parametrize("swallows", ["return 0.0", "pass", "sys.exit(0)", "await asyncio.sleep(600)"])
def test_a_failure_of_the_servers_that_the_agent_swallows_is_not_learnt(tmp_path, swallows):
    code = f"""
        import asyncio, sys

        async def episode(chat, prompt):
            answer = await chat(chat.messages)
            try:
                await chat([*chat.messages, answer.message, {{"role": "user", "content": "more"}}])
            except Exception:
                {swallows}
    """

    async def test():
        server = FailsAt(1, 2)
        async with stage_of(source(code), folder=tmp_path, server=server, timeout_s=2.0, on_error="stop") as stage:
            lost = await stage.group()
            assert isinstance(lost, LostRollout) and "attempts failed" in lost.reason and lost.unscored == 0
            counts = stage.episodes.counters()
            assert (counts["agent/errors"], counts["agent/timeouts"], counts["agent/empty"]) == (0, 0, 0)
            assert stage.pool.counters()["wasted_unscored"] == 0 < stage.pool.counters()["wasted_lost"]

    run(test)


def test_an_agent_may_try_again_what_the_servers_failed_at(tmp_path):
    code = """
        async def episode(chat, prompt, then):
            try:
                await chat(chat.messages)
            except Exception:
                await chat(chat.messages)
            if then == "raise":
                raise KeyError("its own")
            return 2.0
    """

    async def test():
        for then in ("return", "raise"):
            server, args = FailsAt(0, 1), {"then": then}
            async with stage_of(source(code), folder=tmp_path, server=server, args=args) as stage:
                found = await stage.group()
                assert stage.episodes.counters()["agent/errors"] == (then == "raise")
                if then == "return":
                    assert found[0].reward == 2.0
                else:
                    assert "its own" in found.reason and found.unscored == 1

    run(test)


def test_servers_that_fail_a_part_of_a_group_leave_the_others(tmp_path):
    code = "async def episode(chat, prompt):\n    await chat(chat.messages)\n    return 1.0\n"

    async def test():
        async with stage_of(code, folder=tmp_path, server=FailsAt(0, 1)) as stage:
            stage.pool.slots = Slots(1)  # one after the other
            assert len(await stage.group(3)) == 2
        async with stage_of(code, folder=tmp_path, server=FailsAt(0, 1)) as stage:
            stage.pool.slots = Slots(1)
            lost = await stage.group(2)
            assert lost.unscored == 0, "no reward failed"
            assert stage.pool.counters()["wasted_unscored"] == 0

    run(test)


@pytest.mark.parametrize("sleeps", ["", "            await asyncio.sleep(0.2)\n"])
def test_an_agent_that_asks_on_and_on_over_its_limit_is_ended_and_scored(tmp_path, sleeps):
    code = (
        "import asyncio\n\nasync def episode(chat, prompt):\n    while True:\n        try:\n"
        "            await chat(chat.messages)\n        except Exception:\n"
        f"{sleeps}            continue\n"
    )

    async def test():
        timeout_s = 1.0 if sleeps else 100.0  # with a pause of its own its time is over first
        async with stage_of(code, "yes", "maybe", folder=tmp_path, max_turns=2, timeout_s=timeout_s) as stage:
            (sample,) = await asyncio.wait_for(stage.group(), 20)
            assert (sample.reward, sample.reward_extra["agent/over_limit"]) == (len("maybe"), 1.0)
            assert stage.episodes.counters()["agent/timeouts"] == 0

    run(test)


def test_many_sub_agents_that_meet_the_limit_at_once_end_no_episode(tmp_path):
    code = """
        import asyncio

        async def episode(chat, prompt):
            await chat(chat.messages)
            await asyncio.gather(*(chat(chat.messages) for _ in range(100)), return_exceptions=True)
            await asyncio.sleep(0.1)
            return 0.5
    """

    async def test():
        async with stage_of(source(code), "yes", folder=tmp_path, max_turns=1) as stage:
            assert (await stage.group())[0].reward == 0.5

    run(test)


def test_an_agent_that_is_left_behind_changes_nothing_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr("megarl.agents.episodes._GRACE_S", 0.1)
    code = """
        import asyncio

        kept = []

        async def episode(chat, prompt):
            await chat(chat.messages)
            chat.reward(1.0)
            if kept:
                with __import__("pytest").raises(Exception, match="is closed"):
                    kept[0].reward(5.0)
            kept.append(chat)
    """

    async def test():
        async with stage_of(source(code), "yes", folder=tmp_path) as stage:
            assert [(await stage.group())[0].reward for _ in range(2)] == [1.0, 1.0]

    run(test)


def test_an_urgent_episode_takes_a_process_before_the_others(tmp_path):
    code = (
        HTTP
        + f"""
    import os, time

    def episode(base_url, prompt):
        with open("{tmp_path}/order", "a") as file:
            print(prompt.text, file=file)
        say(base_url, "hi")
        while prompt.text == "first" and not os.path.exists("{tmp_path}/go"):
            time.sleep(0.02)
        return 1.0
    """
    )

    async def test():
        async with stage_of(source(code), "yes", folder=tmp_path, num_processes=1) as stage:
            first = asyncio.create_task(stage.group(text="first"))
            while not stage.bodies:
                await asyncio.sleep(0.02)
            others = [asyncio.create_task(stage.group(text="train")), asyncio.create_task(stage.group(text="train"))]
            await asyncio.sleep(0)
            urgent = asyncio.create_task(stage.group(text="urgent", urgent=True))
            await asyncio.sleep(0.2)
            (tmp_path / "go").touch()
            await asyncio.gather(first, *others, urgent)
            assert (tmp_path / "order").read_text().split() == ["first", "urgent", "train", "train"]

    run(test)


def end_late(connection, job, folder):
    """The signal comes just when the episode is over and its process would ignore it."""
    set_handler = signal.signal

    def late(number, handler):
        if number == signal.SIGTERM and handler is signal.SIG_IGN:
            signal.signal = set_handler
            os.kill(os.getpid(), signal.SIGTERM)
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
    (tmp_path / "agent.py").write_text(source(code))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    job = Job(f"{tmp_path}/agent.py:episode")
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
