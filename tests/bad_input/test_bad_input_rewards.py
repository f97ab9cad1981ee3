"""Rewards that are no functions, return what is no number, or do anything else: one sentence, and one sample."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answers import completion
from bad_input import Cases, examples, read_refusal
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards import load_reward
from megarl.rewards.pool import RewardPool
from megarl.rewards.result import RewardResult, to_result
from megarl.rewards.surroundings import Surroundings
from megarl.samples.sample import Prompt

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
ODD = st.sampled_from(
    [10**400, 1e39, -1e39, 1e-50, 1j, object(), set(), float, np.zeros(2), np.float64("nan"), np.int8(3), np.array(1.0)]
) | st.sampled_from([torch.tensor(1.0), torch.zeros(2), torch.tensor(float("inf")), np.array("a"), range(3), ...])
VALUES = st.recursive(
    SCALARS | ODD,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["score", "a", 1, None]), inner),
    max_leaves=4,
)


@examples(250)
@given(value=VALUES)
def test_bad_input_any_value_of_a_reward(cases: Cases, value: Any) -> None:
    cases.add()
    try:
        result = to_result(value)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("returned ")
        return
    assert np.isfinite(np.float32(result.reward))
    assert all(type(number) is float for number in result.extra.values())


# How else a file cannot be loaded: test_bad_input_plugins.py.
FILES = {
    "syntax": "def f(:\n",
    "empty": "",
    "number": "f = 3\n",
    "none": "def f(): return 1\n",
    "many": "def f(prompt, completion, third): return 1\n",
    "verl": "def f(solution_str, unknown): return 1\n",
    "keywords": "def f(*, prompt, completion): return 1\n",
}


def test_bad_input_files_without_a_reward(cases: Cases, tmp_path: Path) -> None:
    for name, content in FILES.items():
        cases.add()
        file = tmp_path / f"{name}.py"
        file.write_text(content)
        with pytest.raises(ValueError) as caught:
            load_reward(f"{file}:f")
        read_refusal(caught.value, f"reward.fn={file}:f")
    for address in (f"{tmp_path}/absent.py:f", f"{tmp_path}:f", ":f", "a:", "a.b:c", "no such", "", "os:no", "x" * 300):
        cases.add()
        with pytest.raises(ValueError) as caught:
            load_reward(address)
        read_refusal(caught.value, "reward.fn=")


ACTS = """
import os, signal, sys, threading, time

def f(prompt, completion):
    what = completion.text
    if what == "raise": raise KeyError("gone")
    if what == "exit": sys.exit(2)
    if what == "recursion": return f(prompt, completion)
    if what == "memory": return len(bytearray(1 << 40))
    if what == "die": os._exit(9)
    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        signal.setitimer(signal.ITIMER_REAL, 0.05, 1.0)  # brings the sample's own limit forward
        time.sleep(600)
    if what == "print": print("loud " * 1000); print("loud", file=sys.stderr); return 1.0
    if what == "close": os.close(1); return 1.0
    if what == "fork":
        if os.fork() == 0: os._exit(0)
        return 1.0
    if what == "thread": threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); return 1.0
    if what == "chdir": os.chdir("/"); return 1.0
    if what == "nan": return float("nan")
    if what == "text": return "1.0"
    if what == "none": return None
    if what == "lambda": return {"score": 1.0, "x": lambda: 0}
    return 1.0
"""
FINE = ("print", "close", "fork", "thread", "chdir", "lambda", "good")
FAIL = ("raise", "exit", "recursion", "memory", "die", "kill", "hang", "nan", "text", "none")


def test_bad_input_a_reward_that_does_anything_costs_its_own_sample(cases: Cases, tmp_path: Path) -> None:
    (tmp_path / "acts.py").write_text(ACTS)
    fn = f"{tmp_path}/acts.py:f"
    texts = [text for pair in zip(FAIL, (*FINE, *FINE), strict=False) for text in pair]
    pool = RewardPool([fn], surroundings=Surroundings(memory_mb=4096))

    async def score() -> list[Any]:
        answers = pool.score(fn, Prompt("0-0", [1], "x", "46"), [*map(completion, texts)])
        return await asyncio.wait_for(answers, timeout=240)

    pool.start()
    try:
        outcomes = asyncio.run(score())
    finally:
        pool.stop()
    for text, outcome in zip(texts, outcomes, strict=True):
        cases.add()
        if text in FINE:
            assert isinstance(outcome, RewardResult) and outcome.reward == 1.0, (text, outcome)
        else:
            assert isinstance(outcome, str), (text, outcome)
            assert "\n" not in outcome
            assert "Traceback" not in outcome
