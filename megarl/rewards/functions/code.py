"""Reward for a program that passes the tests of its row; the program runs in the sandbox.

The ground truth is JSON, or a list of asserts as text:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                        stdin and stdout, as in APPS
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}            arguments and results of a function
    {"asserts": ["assert add(1, 2) == 3"], "setup": "import math"}    as in MBPP; setup may be left out

The program can read `setup`: it is for imports and helpers, and must have no expected values.
"""

from __future__ import annotations

import json
from typing import Any

from megarl.rewards import register_reward
from megarl.rewards.functions.code_tests import Assertions, Outcome, assertions, run_assertions, run_outputs
from megarl.rewards.result import ground_truth_of
from megarl.rewards.surroundings import time_limit_s
from megarl.sample import Completion, Prompt
from megarl.sandbox import Limits

_SHARE = 0.7  # of a sample's time; the rest is for comparisons, and for starts of processes
_FENCE = "```"


@register_reward("code")
def code(prompt: Prompt, completion: Completion) -> dict[str, float]:
    """The share of the tests that the last code block of the completion passes."""
    outcome = _outcome(prompt, completion)
    return {"score": sum(outcome.passed) / len(outcome.passed), **_numbers(outcome)}


@register_reward("code_strict")
def code_strict(prompt: Prompt, completion: Completion) -> dict[str, float]:
    """1.0 if the last code block of the completion passes all tests, else 0.0."""
    outcome = _outcome(prompt, completion)
    return {"score": float(all(outcome.passed)), **_numbers(outcome)}


def last_block(text: str) -> str | None:
    """The content of the last block between lines with ```; None without one.

    >>> last_block("So:\\n```python\\nprint(1)\\n```\\nThat is it.")
    'print(1)\\n'
    """
    lines = text.split("\n")
    begin, last = None, None
    for number, line in enumerate(lines):
        mark = line.removeprefix(_FENCE).strip(" \t") if line.startswith(_FENCE) else None
        if begin is None and mark is not None and "`" not in mark:
            begin = number + 1
        elif begin is not None and mark == "":
            begin, last = None, (begin, number)
    return "".join(f"{line}\n" for line in lines[slice(*last)]) if last else None


def _numbers(outcome: Outcome) -> dict[str, float]:
    return {
        "tests": float(len(outcome.passed)),
        "tests_passed": float(sum(outcome.passed)),
        "timed_out": float(outcome.timed_out),
    }


def _outcome(prompt: Prompt, completion: Completion) -> Outcome:
    tests = _tests(ground_truth_of(prompt))
    program = last_block(completion.text)
    limits = Limits(seconds=_SHARE * time_limit_s())
    if isinstance(tests, Assertions):
        return run_assertions(program, tests, limits) if program is not None else Outcome((False,) * len(tests.tests))
    inputs, outputs = tests
    return run_outputs(program, inputs, outputs, limits) if program is not None else Outcome((False,) * len(inputs))


def _tests(truth: str) -> Assertions | tuple[list[str], list[str]]:
    """Asserts, or inputs and outputs.  Raises ValueError if there are none."""
    try:
        tests = json.loads(truth)
    except ValueError:
        tests = truth  # asserts as text
    fields = tests if isinstance(tests, dict) else {"asserts": tests}
    asserts, name = fields.get("asserts"), fields.get("fn_name") or ""
    inputs, outputs = fields.get("inputs") or [], fields.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs; expected as many")
    if name:
        pairs = zip(inputs, outputs, strict=True)
        asserts = [f"assert _lists({name}(*{given!r})) == _lists({wanted!r})" for given, wanted in pairs]
    if asserts:
        found = assertions([asserts] if isinstance(asserts, str) else asserts, fields.get("setup") or "", name)
        if found.tests:
            return found
    if not inputs:
        raise ValueError(f"the ground truth is {truth[:100]!r}; expected inputs and outputs as JSON, or asserts")
    return list(map(_text, inputs)), list(map(_text, outputs))


def _text(value: Any) -> str:
    """An input or output, which may be a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
