"""To read a long text takes a built-in reward a time that grows with its length, not with the square of it or worse.

100,000 characters are 10 ** 10 steps where time grows with the square: minutes.  A limit of processor time tells that
from a linear search on any machine.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import long_texts
import pytest

from megarl.agents.answer import hermes
from megarl.rewards import REWARDS, load_reward
from megarl.rewards.functions.code import last_block
from megarl.rewards.services.judge import reader

SIZE, SECONDS = 100_000, 10
load_reward("exact")  # fills the table


def judge_all(*rewards: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, long_texts.__file__, str(SIZE), str(SECONDS), *rewards]
    return subprocess.run(command, capture_output=True, text=True)


def test_built_in_rewards_read_any_long_text_in_linear_time() -> None:
    """`auto` calls one of the others, `code` runs in a sandbox."""
    rewards = sorted(set(REWARDS) - {"auto", "code", "code_strict"})
    assert rewards == ["choice", "exact", "gsm8k", "gsm8k_strict", "math", "math_dapo"]
    done = judge_all(*rewards)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    assert len(done.stdout.splitlines()) == len(rewards) * len(list(long_texts.texts(1)))


def test_a_reward_that_does_not_is_found(tmp_path: Path) -> None:
    """Three searches for spaces in a row."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import re\n"
        "def slow(prompt, completion):\n"
        "    return float(bool(re.search(r'answer\\s*(is)?\\s*:?\\s*x', completion.text)))\n"
    )
    done = judge_all(f"{file}:slow")
    assert done.returncode == -signal.SIGXCPU
    assert done.stdout.splitlines()[-1] == rf"{file}:slow: 'answer' '\n'... ''"


@pytest.mark.parametrize(
    "read",
    [
        lambda: last_block("```python\n" * SIZE),
        lambda: last_block("```\n```" * SIZE),
        lambda: reader("json:score")('{"a":' * (SIZE // 5)),
        lambda: reader("json:score")('{"a":[{},' * (SIZE // 5)),
        lambda: reader("json:score")('{"' * SIZE),
        lambda: hermes("<tool_call>" * SIZE),
        lambda: hermes("</tool_call>" + "<tool_call>" * SIZE),
        lambda: hermes("<tool_call>" + "[" * SIZE + "</tool_call>"),
    ],
)
def test_programs_judgements_and_tool_calls_are_found_in_linear_time(read: Callable[[], object]) -> None:
    before = time.process_time()
    read()
    assert time.process_time() - before < SECONDS
