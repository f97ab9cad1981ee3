"""Reward for a program that passes the tests of its row; the program runs in the sandbox.

The ground truth is one of these, or its JSON, or asserts as text:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                        stdin and stdout, as in APPS
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}            arguments and results of a function, as in APPS
    {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}          results may be wrapped, as in TACO and Eurus-2
    {"inputs": ["1\\n2"], "outputs": ["3"], "fn_name": "add"}          JSON, a value a line, as in LiveCodeBench
    [{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]       its cases; functional ones name the function
    {"asserts": ["assert add(1, 2) == 3"], "setup": "import math"}    as in MBPP; setup may be left out

`setup` runs before the program, which can read it: it is for imports and helpers, and must have no expected values.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import without_reasoning
from megarl.rewards.functions.code_tests import Assertions, Outcome, assertions, run_assertions, run_outputs
from megarl.rewards.result import truth_of
from megarl.rewards.surroundings import time_limit_s
from megarl.samples.sample import Completion, Prompt
from megarl_sandbox import Limits

_SHARE = 0.7  # of a sample's time; the rest is for comparisons, and for starts of processes
_FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)")
_PYTHON = ("python", "python3", "py", "python2")
_CODE = re.compile(
    r"^[ \t]*+(?:(?:def|class|import|from|for|while|if|try|with|print)\b|@|\w[\w.,\[\] ]*=)", re.MULTILINE
)
_SHOWS = re.compile(r"\b(?:output|result|input|stdout|stdin)s?\b\W*$", re.IGNORECASE)


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
    """The content of the last block between lines with ``` that is a program, else of the last one; None without one.

    A program is marked as Python; where none is, it has no mark, looks like code, and the line before does not end
    with "output:".

    >>> last_block("So:\\n```python\\nprint(1)\\n```\\nOutput:\\n```\\n1\\n```")
    'print(1)\\n'
    """
    lines, before = text.split("\n"), ""
    fence: tuple[int, str, str] | None = None  # that is open: its line, indent and marks
    last = program = marked = is_python = None
    for number, line in enumerate(lines):
        indent, marks, language = found.groups() if (found := _FENCE.fullmatch(line)) else ("", "", "")
        if fence is None:
            if marks:
                fence, is_python = (number, indent, marks), _is_python(language)
            before = line if line.strip() and not marks else before
        elif len(marks) >= len(fence[2]) and not language.strip():
            begin, indent, _ = fence
            last = "".join(f"{_dedented(each, len(indent))}\n" for each in lines[begin + 1 : number])
            if is_python:
                marked = last
            elif is_python is None and _CODE.search(last) and not _SHOWS.search(before):
                program = last
            fence, before = None, ""
    return next((block for block in (marked, program) if block is not None), last)


def _is_python(language: str) -> bool | None:
    """None: a block without a mark may be anything."""
    words = language.split()
    return words[0].lower().strip("{.}") in _PYTHON if words else None


def _dedented(line: str, width: int) -> str:
    """Without as many spaces as the fence had, which may be that of an item of a list."""
    return line[min(width, len(line) - len(line.lstrip(" \t"))) :]


def _numbers(outcome: Outcome) -> dict[str, float]:
    return {
        "tests": float(len(outcome.passed)),
        "tests_passed": float(sum(outcome.passed)),
        "timed_out": float(outcome.timed_out),
    }


def _outcome(prompt: Prompt, completion: Completion) -> Outcome:
    tests = _tests(truth_of(prompt), prompt.extra.get("metadata"))
    program = last_block(without_reasoning(completion.text))
    limits = Limits(seconds=_SHARE * time_limit_s())
    if isinstance(tests, Assertions):
        return run_assertions(program, tests, limits) if program is not None else Outcome((False,) * len(tests.tests))
    inputs, outputs = tests
    return run_outputs(program, inputs, outputs, limits) if program is not None else Outcome((False,) * len(inputs))


def _tests(truth: Any, metadata: Any = None) -> Assertions | tuple[list[str], list[str]]:
    """Asserts, or inputs and outputs; `metadata`: LiveCodeBench's, of the row.  Raises ValueError if there are none."""
    tests = truth
    if isinstance(truth, str):
        with suppress(ValueError):  # else they are asserts as text
            tests = json.loads(truth)
    if isinstance(tests, list) and tests and all(isinstance(test, dict) for test in tests):
        tests = _of_cases(tests, metadata)
    fields = tests if isinstance(tests, dict) else {"asserts": tests}
    asserts, name = fields.get("asserts"), fields.get("fn_name") or ""
    inputs, outputs = fields.get("inputs") or [], fields.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs; expected as many")
    if name:
        asserts = _calls(name, inputs, outputs)
    if asserts:
        found = assertions([asserts] if isinstance(asserts, str) else asserts, fields.get("setup") or "", name)
        if found.tests:
            return found
    if not inputs:
        raise ValueError(f"the ground truth is {str(truth)[:100]!r}; expected inputs and outputs, or asserts")
    return list(map(_text, inputs)), list(map(_text, outputs))


def _of_cases(cases: list[dict[str, Any]], metadata: Any) -> dict[str, Any]:
    """LiveCodeBench's cases as one mapping.  Raises ValueError for calls of a function that is not named."""
    if not all({"input", "output"} <= case.keys() for case in cases):
        raise ValueError(f"a test has the keys {', '.join(cases[0])}; expected 'input' and 'output'")
    tests = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    if all(case.get("testtype") != "functional" for case in cases):
        return tests
    name = cases[0].get("fn_name") or _function_of(cases[0].get("metadata")) or _function_of(metadata)
    if not name:
        raise ValueError(
            "tests call a function that they do not name; expected func_name in their metadata or the row's, or fn_name"
        )
    return tests | {"fn_name": name}


def _function_of(metadata: Any) -> Any:
    """The function that LiveCodeBench's metadata names, which are a mapping or its JSON; None without one."""
    if isinstance(metadata, str):
        with suppress(ValueError):
            metadata = json.loads(metadata)
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _calls(name: str, inputs: list[Any], outputs: list[Any]) -> list[str]:
    """An assert for each call.  Where every result is a list of one value, that value is right as well."""
    given = [_json_lines(one) if isinstance(one, str) else one if isinstance(one, list) else [one] for one in inputs]
    is_text = all(isinstance(one, str) for one in inputs)
    wanted = [_json_lines(one)[0] if is_text and isinstance(one, str) and one else one for one in outputs]
    wrapped = not is_text and all(isinstance(one, list) and len(one) == 1 for one in wanted)
    right = [[one, one[0]] if wrapped else [one] for one in wanted]
    return [f"assert _lists({name}(*{one!r})) in {values!r}" for one, values in zip(given, right, strict=True)]


def _json_lines(text: str) -> list[Any]:
    """The values of a text with JSON in each line; without JSON the text is the value."""
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()] or [text]
    except ValueError:
        return [text]


def _text(value: Any) -> str:
    """An input or output, which may be a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
