"""Episodes of every kind: what becomes of their turns, rewards, limits and faults."""

import asyncio
from collections import Counter
from dataclasses import replace
from urllib.error import HTTPError

import aiohttp
import pytest
from agent_endpoint import CALL, Scripted
from agent_episodes import PARAMS, stage_of
from chat_templates import tokenizer_of
from fake_servers import Writer, broken
from pools import until
from states import held, trusted

from megarl.agents.conversation import RenderedPrompt
from megarl.agents.episodes import EpisodeError
from megarl.agents.process import is_refusal
from megarl.agents.refusals import OverLimit
from megarl.agents.session import Session
from megarl.rewards.surroundings import Surroundings
from megarl.rollout.collect import for_completion
from megarl.rollout.pool.slots import Slots
from megarl.samples.sample import REWARD_ERROR, Completion, LostRollout, Sample, VersionSpan

ONE_TURN = "async def episode(chat, prompt):\n    await chat(chat.messages)\n    return 1.0\n"
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


def check_exact(sample, bodies):
    """Each request's ids begin a row of the sample, and what the server wrote is learnt once."""
    rows = [row.token_ids for row in sample.rows]
    for body in bodies:
        assert any(row[: len(body["input_ids"])] == body["input_ids"] for row in rows)
    assert sorted(span.turn for row in sample.rows for span in row.learnt) == list(range(len(bodies)))


async def test_an_episode_with_a_tool_is_one_row():
    async with stage_of(CALCULATOR, CALL, "It is 15.") as stage:
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


async def test_variables_of_the_chat_template_are_those_of_the_run():
    async with stage_of(ONE_TURN, "yes", template={"enable_thinking": False}) as stage:
        await stage.group()
        asked = tokenizer_of("qwen3").decode(stage.bodies[0]["input_ids"])
        assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("ends", "reward", "of_rows", "scored"),
    [
        ("return {'score': 0.5, 'calls': 2}", 0.5, (), []),
        ("chat.reward(1.0, first), chat.reward(0.25)", 1.25, (1.0, 0.25), []),
        ("chat.reward(1.0, first); return 2.0", 3.0, (1.0, 0.0), []),
        ("return None", 3.0, (), ["no!"]),
    ],
    ids=["dict", "turns", "both", "none"],
)
async def test_rewards_come_from_the_episode_its_turns_or_the_last_answer(ends, reward, of_rows, scored):
    code = f"""
        async def episode(chat, prompt):
            first = await chat(chat.messages)
            second = await chat([*chat.messages, first.message, {{"role": "user", "content": "sure?"}}])
            {ends}
    """
    async with stage_of(code, "yes", "no!") as stage:
        (sample,) = await stage.group()
        assert (sample.reward, [row.rewards for row in sample.rows]) == (reward, [of_rows])
        assert stage.scored.seen == scored
        assert sample.reward_extra.get("calls") == (2.0 if "calls" in ends else None)


@pytest.mark.parametrize(
    ("tries", "limit"),
    [
        ("await chat(chat.messages)", 100.0),
        ("try: await chat(chat.messages)\n        except OverLimit: return", 100.0),
        ("try: await chat(chat.messages)\n        except Exception: continue", 100.0),
        # With a pause of its own its time is over first.
        ("try: await chat(chat.messages)\n        except Exception: await asyncio.sleep(0.2)", 0.8),
    ],
    ids=["it_raises", "caught", "asks_on", "asks_on_slowly"],
)
async def test_an_episode_that_has_used_up_its_turns_is_ended_and_scored_as_it_stands(tries, limit):
    code = f"""
import asyncio
from megarl.agents.chat import OverLimit

async def episode(chat, prompt):
    while True:
        {tries}
"""
    async with stage_of(code, "yes", "maybe", max_turns=3, timeout_s=limit) as stage:
        (sample,) = await asyncio.wait_for(stage.group(), 20)
        assert (sample.reward, sample.num_turns, len(sample.rows)) == (len("maybe"), 3, 3)
        assert sample.reward_extra["agent/over_limit"] == 1.0 and sample.truncated
        counts = stage.episodes.counters()
        assert (counts["agent/errors"], counts["agent/timeouts"]) == (0, 0)


PLAYER = """
    from megarl.agents.chat import OverLimit

    async def episode(chat, prompt):
        first = await chat(chat.messages)
        if first.text == "short":
            return -1.0
        while True:
            try:
                await chat(chat.messages)
            except OverLimit as limit:
                WHAT
"""


@pytest.mark.parametrize("what", ["raise", "return"])
async def test_a_limit_never_pays_the_number_of_reward_fn_where_episodes_have_rewards_of_their_own(what, caplog):
    code = PLAYER.replace("WHAT", what)
    async with stage_of(code, "longer", "short", "short", max_turns=3) as stage:  # the limit is met last, or first
        group = await stage.group(3)
        assert [sample.reward for sample in group] == [-1.0, -1.0]
        assert stage.scored.seen == [] and not caplog.text
        counts = stage.episodes.counters()
        assert (counts["agent/unrewarded"], counts["agent/errors"], counts["agent/timeouts"]) == (1, 0, 0)
        assert stage.pool.counters()["wasted_unscored"] > 0


async def test_an_episode_over_its_limit_gets_the_reward_of_the_setting():
    code = PLAYER.replace("WHAT", "raise")
    async with stage_of(code, "longer", "short", "short", max_turns=3, over_limit_reward=-2.0) as stage:
        assert sorted(sample.reward for sample in await stage.group(3)) == [-2.0, -1.0, -1.0]
        assert stage.episodes.counters()["agent/unrewarded"] == 0 and stage.scored.seen == []


async def test_what_a_turn_was_given_before_the_limit_stays_its_reward():
    code = PLAYER.replace("WHAT", "raise").replace("while True", "chat.reward(0.5, first)\n        while True")
    async with stage_of(code, "longer", "short", max_turns=3, over_limit_reward=-2.0) as stage:
        assert sorted(sample.reward for sample in await stage.group(2)) == [-1.0, 0.5]


async def test_reward_fn_says_so_once_where_it_scores_an_episode_over_its_limit(caplog):
    async with stage_of(PLAYER.replace("WHAT", "raise"), "longer", "maybe", max_turns=2) as stage:
        assert [sample.reward for sample in await stage.group(2)] == [len("maybe")] * 2
        assert caplog.text.count("reward.fn scores its last answer") == 1


@pytest.mark.parametrize(("worth", "rewards"), [("unscored", [-1.0]), ("reward.fn", [-1.0, 5.0]), (0.25, [-1.0, 0.25])])
async def test_one_key_says_what_an_episode_at_a_limit_is_worth(worth, rewards):
    code = PLAYER.replace("WHAT", "raise")
    async with stage_of(code, "short", "longer", "maybe", max_turns=2, over_limit_reward=worth) as stage:
        group = await stage.group(3 if worth == "unscored" else 2)
        found = [] if isinstance(group, LostRollout) else sorted(sample.reward for sample in group)
        assert found == (rewards if worth != "unscored" else [])
        assert stage.episodes.counters()["agent/unrewarded"] == (2 if worth == "unscored" else 0)


@pytest.mark.parametrize("what", ["{}['missing']", "return 'x'"])
async def test_a_fault_behind_the_limit_is_an_error_of_the_agent(what, caplog):
    async with stage_of(PLAYER.replace("WHAT", what), "longer", "short", "short", max_turns=3) as stage:
        assert [sample.reward for sample in await stage.group(3)] == [-1.0, -1.0]
        counts = stage.episodes.counters()
        assert (counts["agent/errors"], counts["agent/unrewarded"]) == (1, 0) and stage.scored.seen == []
        assert "it leaves its group" in caplog.text


def test_an_error_of_a_client_or_one_raised_from_it_is_told_from_a_fault_behind_it():
    def raised(error, cause=None):
        error.__cause__ = cause
        return error

    limit, wrapped = OverLimit("it may have no more"), RuntimeError("no answer")
    plain = HTTPError("http://x", 400, "Bad Request", {}, None)
    with_status = type("BadRequestError", (Exception,), {"status_code": 400})("the prompt is long")
    for error in (
        *(limit, plain, with_status, raised(wrapped, limit), ExceptionGroup("both", [limit, plain])),
        RuntimeError("litellm.BadRequestError: prompt is too long: the episode has 6 turns, and may have 6"),
        RuntimeError("agent.sh ended with exit code 22; the last that it said: The requested URL returned error: 400"),
        RuntimeError("Error code: 400 - {'error': {'message': 'it may have no more'}}"),
        RuntimeError("400 Client Error: Bad Request for url: http://x/v1/chat/completions"),
        RuntimeError("Client error '400 Bad Request' for url 'http://x/v1/chat/completions'"),
        RuntimeError("prompt is too long: the prompt has 9 tokens, and the episode 4 of its 20 left: it is over"),
        RuntimeError("claude ended with exit code 1; the last that it said: Prompt is too long"),
        RuntimeError('{"error":{"message":"Codex ran out of room in the model\'s context window."}}'),
    ):
        assert is_refusal(error), error
    for sentence in ("expected 400 rows, got 3", "HTTP 400 from search tool", "the game? it is over", "line 400: x"):
        assert not is_refusal(ValueError(sentence)), sentence
    for error in (KeyError("missing"), RuntimeError("no answer"), ExceptionGroup("both", [limit, KeyError("missing")])):
        error.__context__ = limit  # raised while it was handled
        assert not is_refusal(error), error


async def test_many_sub_agents_that_meet_the_limit_at_once_end_no_episode():
    code = """
        import asyncio

        async def episode(chat, prompt):
            await chat(chat.messages)
            await asyncio.gather(*(chat(chat.messages) for _ in range(100)), return_exceptions=True)
            await asyncio.sleep(0.1)
            return 0.5
    """
    async with stage_of(code, "yes", max_turns=1) as stage:
        assert (await stage.group())[0].reward == 0.5


@pytest.mark.parametrize(("max_tokens", "truncated"), [(None, True), (3, False)])
async def test_an_answer_that_the_agent_itself_keeps_short_was_not_cut_by_the_run(max_tokens, truncated):
    code = f"async def episode(chat, prompt):\n    await chat(chat.messages, max_tokens={max_tokens})\n    return 1.0\n"
    async with stage_of(code, "a" * 500) as stage:
        (sample,) = await stage.group()
        assert (sample.finish_reason, sample.truncated) == ("length", truncated)
        assert (sample.num_learnt == 3) is not truncated


async def test_all_rows_of_an_episode_fit_its_tokens():
    """Edited histories begin new rows, several answers at once too; together they never have more tokens."""
    code = """
        import asyncio

        async def episode(chat, prompt):
            for i in range(99):
                question = [{"role": "user", "content": f"{i}?"}]
                answers = await asyncio.gather(*(chat(question) for _ in range(2)))
                await chat([*question, answers[0].message, {"role": "user", "content": "go on"}])
    """
    for limit in (80, 173, 300):
        async with stage_of(code, "a" * 30, max_turns=99, max_tokens=limit) as stage:
            (sample,) = await stage.group()
            assert sum(len(row.token_ids) for row in sample.rows) <= limit
            assert sample.reward_extra["agent/over_limit"] == 1.0
            check_exact(sample, stage.bodies)


async def test_a_row_that_another_answer_extends_first_leaves_no_room_twice():
    """Two answers under way go on from one turn; the one that did not reserve the row is done first and takes it."""
    async with stage_of(ONE_TURN) as stage:
        session = Session("0-17/0", replace(stage.episodes._policy, params=PARAMS, max_tokens=100))
        conversation = session.conversation

        def add(prompt_ids, num):
            completion = Completion([7] * num, [-1.0] * num, "stop", (VersionSpan(0, 0, num),))
            return conversation.add(RenderedPrompt(prompt_ids), completion)

        add([5] * 10, 20)
        shared = [5] * 10 + [7] * 20
        first, _ = session._room([*shared, 1], 1, 4)
        session._pending[first] += 1
        other, _ = session._room([*shared, 2], 1, 4)
        session._pending[other] += 1
        assert (first.row, other.row) == (0, None)
        add([*shared, 2], 4)
        session._pending -= Counter([other])
        _, room = session._room([3], 1, None)
        session._pending -= Counter([first])
        add([*shared, 1], 4)
        add([3], room)
        assert conversation.num_tokens == sum(len(row.token_ids) for row in conversation.rows()) <= 100
        session.close()


# ---- faults

FAULTY = """
    import asyncio

    async def episode(chat, prompt):
        how = (await chat(chat.messages)).text
        if how == "raise":
            raise KeyError("no such tool")
        if how == "exit":
            raise SystemExit(3)
        if how == "odd":
            raise BaseException("of an odd package")
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "hang":
            await asyncio.Event().wait()
        if how == "stubborn":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()
        return float(how)
"""


async def test_a_fault_costs_its_own_episode_only(monkeypatch, caplog):
    monkeypatch.setattr("megarl.agents.episodes._GRACE_S", 0.1)
    faults = ["raise", "exit", "odd", "cancelled", "hang", "stubborn"]
    async with stage_of(FAULTY, "1", *faults, "2", timeout_s=1.5) as stage:
        group = await stage.group(8)
        assert sorted(sample.reward for sample in group) == [1.0, 2.0]
        counts = stage.episodes.counters()
        assert (counts["agent/timeouts"], counts["agent/errors"]) == (2, 4)
        assert stage.pool.counters()["wasted_unscored"] == sum(len(stage.server.ids(how)) for how in faults)
    for words in (
        "no such tool",
        "SystemExit: 3",
        "of an odd package",
        "cancelled, by the agent itself",
        "no end within 1.5 s (",  # and the place
    ):
        assert words in caplog.text


async def test_a_fault_counts_as_its_setting_says():
    async with stage_of(FAULTY, "1", "raise", on_error="zero") as stage:
        group = await stage.group(2)
        found = sorted((sample.reward, REWARD_ERROR in sample.reward_extra) for sample in group)
        assert found == [(0.0, True), (1.0, False)]
    async with stage_of(FAULTY, "1", "raise", on_error="stop") as stage:
        with pytest.raises(ExceptionGroup) as raised:
            await stage.group(2)
        assert raised.group_contains(EpisodeError, match="episode 0-17/")
    async with stage_of(FAULTY, "1", "raise") as stage:
        lost = await stage.group(2)
        assert isinstance(lost, LostRollout) and lost.unscored == 1, "one alone has nothing to compare with"


async def test_an_episode_that_wrote_nothing_leaves_its_group():
    code = """
        made = []

        async def episode(chat, prompt):
            made.append(prompt)
            if len(made) != 2:
                await chat(chat.messages)
            return 1.0
    """
    async with stage_of(code, "1") as stage:
        assert len(await stage.group(3)) == 2
        assert stage.episodes.counters()["agent/empty"] == 1


@pytest.mark.parametrize("swallows", ["return 0.0", "pass", "sys.exit(0)", "await asyncio.sleep(600)"])
async def test_a_failure_of_the_servers_that_the_agent_swallows_is_not_learnt(swallows):
    code = f"""
        import asyncio, sys

        async def episode(chat, prompt):
            answer = await chat(chat.messages)
            try:
                await chat([*chat.messages, answer.message, {{"role": "user", "content": "more"}}])
            except Exception:
                {swallows}
    """
    async with stage_of(code, server=FailsAt(1, 2), timeout_s=1.0, on_error="stop") as stage:
        lost = await stage.group()
        assert isinstance(lost, LostRollout) and "attempts failed" in lost.reason and lost.unscored == 0
        counts = stage.episodes.counters()
        assert (counts["agent/errors"], counts["agent/timeouts"], counts["agent/empty"]) == (0, 0, 0)
        assert stage.pool.counters()["wasted_unscored"] == 0 < stage.pool.counters()["wasted_lost"]


@pytest.mark.parametrize("then", ["return 2.0", "raise KeyError('its own')"])
async def test_an_agent_may_try_again_what_the_servers_failed_at(then):
    code = f"""
        async def episode(chat, prompt):
            try:
                await chat(chat.messages)
            except Exception:
                await chat(chat.messages)
            {then}
    """
    async with stage_of(code, server=FailsAt(0, 1)) as stage:
        found = await stage.group()
        assert stage.episodes.counters()["agent/errors"] == ("raise" in then)
        if "raise" in then:
            assert "its own" in found.reason and found.unscored == 1
        else:
            assert found[0].reward == 2.0


async def test_servers_that_fail_a_part_of_a_group_leave_the_others():
    for n in (3, 2):
        async with stage_of(ONE_TURN, server=FailsAt(0, 1)) as stage:
            stage.pool.slots = Slots(1)  # one after the other
            found = await stage.group(n)
            if n == 3:
                assert len(found) == 2
            else:
                assert found.unscored == 0, "no reward failed"
                assert stage.pool.counters()["wasted_unscored"] == 0


async def test_a_cancelled_order_ends_its_requests_and_counts_what_was_written():
    async with stage_of(CALCULATOR, server=Writer(stops_after=2)) as stage:
        task = asyncio.create_task(stage.group(2))
        await until(lambda: len(stage.server.ended) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not stage.server.ended)
        stage.server.go.set()
        assert len(await stage.group(2)) == 2
        seeds = [body["sampling_params"]["sampling_seed"] for body in stage.server.bodies]
        assert set(seeds[:2]) <= set(seeds[2:]), "a visit that is asked again draws the same"


async def test_a_greedy_episode_is_the_base_of_its_group():
    async with stage_of(CALCULATOR, "It is 15.") as stage:
        group = await stage.group(2, greedy=True)
        assert [sample.greedy_reward for sample in group] == [1.0, 1.0]
        temperatures = sorted(body["sampling_params"]["temperature"] for body in stage.bodies)
        assert temperatures[0] == 0.0 and len(temperatures) == 3 and temperatures[1] == PARAMS.temperature


async def test_time_without_servers_and_without_a_slot_is_not_the_agents():
    async def waits(holds, gives_back):
        async with stage_of(CALCULATOR, CALL, "It is 15.", timeout_s=1.0) as stage:
            await holds(stage)
            task = asyncio.create_task(stage.group())
            await asyncio.sleep(1.3)
            gives_back(stage)
            assert [sample.reward for sample in await task] == [1.0]
            assert stage.episodes.counters()["agent/timeouts"] == 0

    async def hold(stage):
        stage.pool.update(held(stage.url))

    async def take_the_only_slot(stage):
        stage.pool.slots = Slots(1)
        await stage.pool.slots.take()

    async with asyncio.TaskGroup() as both:
        both.create_task(waits(hold, lambda stage: stage.pool.update(trusted(stage.url, 7))))
        both.create_task(waits(take_the_only_slot, lambda stage: stage.pool.slots.give_back()))


async def test_an_agent_that_is_left_behind_changes_nothing_any_more():
    code = """
        kept = []

        async def episode(chat, prompt):
            await chat(chat.messages)
            chat.reward(1.0)
            if kept:
                with __import__("pytest").raises(Exception, match="is closed"):
                    kept[0].reward(5.0)
            kept.append(chat)
    """
    async with stage_of(code, "yes") as stage:
        assert [(await stage.group())[0].reward for _ in range(2)] == [1.0, 1.0]


# ---- through the endpoint


@pytest.mark.parametrize("begin", ["async def", "def"])
async def test_agents_without_chat_get_the_system_prompt_as_the_first_message(begin):
    code = f"""
        {begin} episode(base_url, prompt):
            system, user = prompt.text
            assert system == {{"role": "system", "content": "Be brief."}} and user["content"] == "12 + 3?"
            raise KeyError("as wanted")
    """
    async with stage_of(code, "yes", system_prompt="Be brief.") as stage:
        assert "as wanted" in (await stage.group()).reason


async def test_a_session_is_closed_with_its_episode(tmp_path):
    code = f"""
        import asyncio

        async def episode(base_url, api_key, prompt):
            text = await asyncio.to_thread(say, base_url, prompt.text, api_key)
            with open("{tmp_path}/where", "a") as file:
                print(base_url, api_key, file=file)
            return float(len(text))
    """
    async with stage_of(code, "four") as stage, aiohttp.ClientSession() as http:
        assert [sample.reward for sample in await stage.group()] == [4.0]
        base_url, key = (tmp_path / "where").read_text().split()
        body = {"model": "policy", "messages": [{"role": "user", "content": "more"}]}
        plain = base_url.partition("/s/")[0] + "/v1"
        for url, headers in ((base_url, {}), (plain, {"Authorization": f"Bearer {key}"})):
            async with http.post(url + "/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 410
        assert len(stage.bodies) == 1


CATCHES = """
    async def episode(chat, prompt):
        try:
            await chat([{"role": "boss", "content": "hi"}])
        except Exception:
            pass
        ASKS
"""


async def test_a_refused_request_that_the_agent_catches_is_counted_and_told(caplog):
    async with stage_of(CATCHES.replace("ASKS", "return float(bool(await chat(chat.messages)))"), "yes") as stage:
        assert len(await stage.group(12)) == 12
        assert stage.episodes.counters()["agent/refused"] == 12 and stage.episodes.counters()["agent/errors"] == 0
        said = "the endpoint refused 1 of its requests, the latest with: messages[0] has the role 'boss'"
        assert caplog.text.count(said) == 10
        assert stage.episodes.first_errors.keys() == {"refused"} and said in stage.episodes.first_errors["refused"]


async def test_an_agent_whose_requests_were_all_refused_is_told_so():
    async with stage_of(CATCHES.replace("ASKS", "return None"), "yes") as stage:
        lost = await stage.group()
        assert "the agent asked for no answer; the endpoint refused 1 of its requests, the latest with: " in lost.reason
        assert stage.episodes.counters()["agent/empty"] == 1


async def test_a_refusal_by_http_is_counted_and_one_at_the_limit_is_not():
    code = """
        import aiohttp

        async def episode(base_url, prompt):
            async with aiohttp.ClientSession(trust_env=True) as http:  # it would ask a proxy of the machine
                for more in ({"temperature": 0.5}, {}, {}):
                    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **more}
                    async with http.post(base_url + "/chat/completions", json=body) as reply:
                        await reply.read()
            return 1.0
    """
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    async with stage_of(code, "yes", max_turns=1, surroundings=Surroundings(environment=proxies)) as stage:
        (sample,) = await stage.group()
        assert sample.reward_extra["agent/over_limit"] == 1.0
        assert stage.episodes.counters()["agent/refused"] == 1
        assert "temperature=0.5: the run samples with" in stage.episodes.first_errors["refused"]


async def test_exit_0_of_a_coroutine_is_an_end():
    code = """
        async def episode(chat, prompt):
            await chat(chat.messages)
            raise SystemExit(0)
    """
    async with stage_of(code, "yes") as stage:
        assert (await stage.group())[0].reward == 3.0
