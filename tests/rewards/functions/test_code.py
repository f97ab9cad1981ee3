"""The rewards `code` and `code_strict`: programs of models in the sandbox, right, wrong and malicious ones."""

import json

import pytest
from answers import completion

from megarl.rewards.functions.code import _tests, code, code_strict, last_block
from megarl.samples.sample import Prompt
from megarl_sandbox import SandboxError

SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 5"], "outputs": ["3\n", "7\n", "10"]})
ONE_SUM = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
ADD = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add([1], [2]) == [1, 2]"]})


def score(program, truth):
    return code(Prompt("0-0", [1], "x", truth), completion(f"Here it is:\n```python\n{program}\n```\nDone."))


def test_the_share_of_passed_tests_is_the_reward():
    third = "a, b = map(int, input().split())\nprint(a * b if a == b else 10 if a == 5 else 7)"
    found = score(third, SUMS)
    assert found == {"score": pytest.approx(1 / 3), "tests": 3.0, "tests_passed": 1.0, "timed_out": 0.0}


# (part of the program, its asserts); all are one program, for which two processes start
KINDS = [
    ("def third(x): return x / 3", "import math\nassert math.isclose(third(1), 0.333333, rel_tol=1e-3)"),
    ("def once(x): return set(x)", "assert once([1, 1, 2]) == {1, 2}\nassert sorted(once([3, 1])) == [1, 3]"),
    ("def many(x): return (x, [None, True, 'a', b'b', 1j, {1: (2,)}])", "assert many(10**30)[0] == 10**30"),
    ("def above(x): return x > 0", "assert above(above(1))\nassert above(sum(y for y in [1]))"),
    ("def call(g):\n    print('noise')\n    return g(1)", "assert call(lambda y: y)\nassert call(abs)"),
    ("def back(x): return x[::-1]\ndef twice(x): return back(x)", "assert back(twice([1, 2])) == [1, 2]"),
    ("", "assert above(1)\nassert not above(-1)\nassert above(1) is True"),
    ("class Solution:\n    def double(self, x): return 2 * x", "assert Solution().double(4) == 8"),
    ("import collections\ndef count(x): return collections.Counter(x)", "assert count('aab') == {'a': 2, 'b': 1}"),
    (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\ndef one(): return P().x",
        "assert one() == 1, 'message'",
    ),
]


def test_many_kinds_of_asserts_and_values():
    program, asserts = ("\n".join(parts) for parts in zip(*KINDS, strict=True))
    assert score(program, asserts) == {"score": 1.0, "tests": 15.0, "tests_passed": 15.0, "timed_out": 0.0}


def test_functions_with_arguments_and_results_as_data_sets_have_them():
    truth = json.dumps({"fn_name": "twice", "inputs": [[1, [2]], [3, []]], "outputs": [[1, [2]], [4, []]]})
    for program in ("def twice(a, b): return (a, b)", "class Solution:\n    def twice(self, a, b): return [a, b]"):
        assert score(program, truth)["score"] == 0.5


BIG = "def is_big(x): return x > 9"
SPLIT = "def split(text, parts): return [text.split(), parts]"
FORMS = [  # (program, ground truth, the score by hand)
    (BIG, {"fn_name": "is_big", "inputs": [[5], [50]], "outputs": [[False], [True]]}, 1.0),
    (BIG, {"fn_name": "is_big", "inputs": [[5], [50]], "outputs": [[True], [True]]}, 0.5),
    (BIG, {"fn_name": "is_big", "inputs": ["5", "50"], "outputs": ["false", "true"]}, 1.0),
    (BIG, {"fn_name": "is_big", "inputs": ["5", "50"], "outputs": ["true", "true"]}, 0.5),
    ("def ones(n): return [1] * n", {"fn_name": "ones", "inputs": [[1], [2]], "outputs": [[1], [1, 1]]}, 1.0),
    ("def ones(n): return 1", {"fn_name": "ones", "inputs": [[1], [2]], "outputs": [[1], [1, 1]]}, 0.0),  # not wrapped
    (SPLIT, {"fn_name": "split", "inputs": ['"a b"\n[1, 2]\n'], "outputs": ['[["a", "b"], [1, 2]]']}, 1.0),
    (SPLIT, {"fn_name": "split", "inputs": [["a b", [1, 2]]], "outputs": [[["a", "b"], [1, 2]]]}, 1.0),
    ("def tally(x): return {1: x}", {"fn_name": "tally", "inputs": [[2]], "outputs": [{"1": 2}]}, 1.0),
    (
        "print(int(input()) + 1)",
        [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "2", "output": "4"}],
        0.5,
    ),
    ("print(int(input()) + int(input()))", {"inputs": [["1", "2"]], "outputs": [["3"]]}, 1.0),
    (BIG, [{"input": "50", "output": "true", "testtype": "functional", "metadata": {"func_name": "is_big"}}], 1.0),
    (BIG, [{"input": "50", "output": "false", "testtype": "functional", "fn_name": "is_big"}], 0.0),
    ("def f(x: List[int]): return len(x)", {"asserts": ["assert f([1]) == 1"], "setup": "from typing import *"}, 1.0),
    ("Y = math.pi\ndef f(): return Y", {"asserts": ["assert f() > 3"], "setup": "import math"}, 1.0),
]


@pytest.mark.parametrize("case", [*FORMS[::2], *(pytest.param(case, marks=pytest.mark.full) for case in FORMS[1::2])])
def test_rows_of_each_data_set_are_read_as_they_are_and_as_json(case):
    program, truth, wanted = case
    assert score(program, truth)["score"] == wanted
    assert _tests(truth) == _tests(json.dumps(truth))


def test_a_helper_of_setup_is_no_function_of_the_program():
    asserts = ["assert near(f(2), 1.41)", "assert near(f(2), 1.5)"]
    truth = json.dumps({"asserts": asserts, "setup": "def near(a, b): return abs(a - b) < 0.01"})
    assert score("import math\ndef f(x): return math.sqrt(x)\ndef near(a, b): return True", truth)["score"] == 0.5


FORGERIES = {
    "ends well at once": "import os; os._exit(0)",
    "equals everything": """
class Any(int):
    __eq__ = lambda s, o: True
    __hash__ = int.__hash__
def add(a, b): return Any(99)
""",
    "is a strange object": """
class Any:
    __eq__ = lambda s, o: True
def add(a, b): return Any()
""",
    "replaces builtins": """
import builtins, json
json.dumps = lambda *a: '[0, true]'
builtins.AssertionError = ValueError
def add(a, b): return None
""",
    "writes verdicts": """
import os
for n in (1, *range(3, 20)):
    try: os.write(n, b'\\n[true, true, true]\\n')
    except OSError: pass
os._exit(0)
""",
    "writes malformed values": """
import os
for line in (b'[0, {"list": 3}]', b'[1, {"x": 1, "y": 2}]', b'[2, {}]', b'[7, 1]', b'[-1, 1]', b'{}', b'[[]]'):
    os.write(1, b'\\n' + line + b'\\n')
os._exit(0)
""",
    "sends deep data": """
import os
os.write(1, b'\\n[0, ' + b'[' * 100000 + b']' * 100000 + b']\\n')
os._exit(0)
""",
    "sends data that can be read and not be written again": """
import os
for n in (0, 1, 2):
    os.write(1, b'\\n[%d, ' % n + b'[' * 990 + b']' * 990 + b']\\n')
os._exit(0)
""",
    "looks at the frames above": """
import sys
frame, found = sys._getframe(), []
while frame:
    found.append(repr(frame.f_globals) + repr(frame.f_locals))
    frame = frame.f_back
def add(a, b): return 3 if '=' * 2 + ' 3' in ''.join(found) else None  # the truth as its row has it
""",
    "does not compile": "def add(a, b) return",
    "never ends": """
def add(a, b):
    while True: pass
""",
    "sends without end": "while True: print('x' * 1000)",
}


ENDLESS = ("never ends", "sends without end")


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_passes_no_test(forgery, monkeypatch):
    limit_s = 0.5 if forgery in ENDLESS else 5.0
    monkeypatch.setattr("megarl.rewards.functions.code.time_limit_s", lambda: limit_s)
    for truth in (ADD, ONE_SUM):
        assert score(FORGERIES[forgery], truth)["score"] == 0


def test_a_program_that_is_too_slow_keeps_what_it_passed_before(monkeypatch):
    programs = {
        "def add(a, b):\n    while a == 2: pass\n    return a + b": ADD,
        "a, b = map(int, input().split())\nwhile a == 3: pass\nprint(a + b)": SUMS,
    }
    for program, truth in programs.items():
        for limit in (1.0, 4.0, 16.0, 128.0):  # on a slow machine a start of Python takes longer than the first
            monkeypatch.setattr("megarl.rewards.functions.code.time_limit_s", lambda limit=limit: limit)
            outcome = score(program, truth)
            assert outcome["timed_out"] == 1
            if outcome["tests_passed"]:
                break
        assert outcome["tests_passed"] == 1


def test_a_machine_too_slow_to_compare_is_an_error_and_no_wrong_answer(monkeypatch):
    monkeypatch.setattr("megarl.rewards.functions.code_tests._JUDGE_WAIT_S", 0.0)
    with pytest.raises(SandboxError, match="values could not be compared within 0 seconds"):
        score("def add(a, b): return a + b", ADD)


@pytest.mark.full
def test_a_value_that_takes_too_long_to_compare_is_a_wrong_answer():
    truth = "assert sum(range(f())) == 1"
    assert score("def f(): return 10**15", truth)["score"] == 0


def test_the_last_block_counts():
    assert last_block("```\na\n```\nthen\n```py\nb\nc\n```") == "b\nc\n"
    assert last_block("no block, but `code`") is None
    assert last_block("```python\nnever closed") is None
    assert last_block("```py\na\n``` \n```not`one\nb\n```\nc") == "a\n"
    assert last_block("```py\na\n```py\nb\n```") == "a\n```py\nb\n"
    assert last_block("```\n```") == ""
    program = "print(1 + 2)\n"
    for block in (
        f"```python\n{program}```",
        f"```\n{program}```",
        f"````py\n{program}````",
        f"1. So\n   ```py\n   {program}   ```",
    ):
        for after in (
            "",
            "\nOutput:\n```\n3\n```",
            "\nThis prints:\n\n```text\n3\n```",
            "\n**Output**\n```\nx = 3\n```",
        ):
            assert last_block(f"Here:\n{block}{after}\nDone.") == program, (block, after)
    for between in ("This prints", "Better:", "With this input"):
        assert last_block(f"```python\na = 1\n```\n{between}\n```\na = 2\n```") == "a = 1\n", "a marked one is it"
    assert last_block("```\na = 1\n```\nBetter:\n```\na = 2\n```") == "a = 2\n"
    assert last_block("- item\n  ```\n  if a:\n    b()\n  ```") == "if a:\n  b()\n"
    assert last_block("```text\nno program\n```") == "no program\n"
    prompt = Prompt("0-0", [1], "x", ADD)
    assert code(prompt, completion("def add(a, b): return a + b"))["score"] == 0
    assert code(prompt, completion("none"))["tests"] == 3


def test_a_draft_in_the_reasoning_is_no_program():
    prompt, block = Prompt("0-0", [1], "x", ADD), "```python\ndef add(a, b): return a + b\n```"
    assert code_strict(prompt, completion(f"<think>So?</think>{block}"))["score"] == 1
    for text in (f"<think>{block}</think>It adds.", f"<think>{block}", f"{block}</think>\n```python\nx = 3\n```"):
        assert code_strict(prompt, completion(text))["score"] == 0


def test_livecodebenchs_metadata_may_be_json_of_a_case_or_of_the_row():
    case = {"input": "1\n2", "output": "3", "testtype": "functional"}
    metadata = json.dumps({"func_name": "add"})
    of_row = Prompt("0-0", [1], "x", json.dumps([case]), extra={"metadata": metadata})
    answer = completion("```python\ndef add(a, b): return a + b\n```")
    for prompt in (of_row, Prompt("0-0", [1], "x", [case | {"metadata": metadata}])):
        assert code_strict(prompt, answer)["score"] == 1
    with pytest.raises(ValueError, match="expected func_name in their metadata or the row's"):
        code_strict(Prompt("0-0", [1], "x", [case | {"metadata": "add"}]), answer)


@pytest.mark.parametrize(
    ("truth", "sentence"),
    [
        ("42 is the answer", "invalid syntax"),
        ("", "expected inputs and outputs, or asserts"),
        ("{}", "expected inputs and outputs, or asserts"),
        ([{"input": "1"}], "a test has the keys input; expected 'input' and 'output'"),
        (
            [{"input": "1", "output": "1", "testtype": "functional"}],
            "func_name in their metadata or the row's, or fn",
        ),
        (json.dumps({"inputs": ["1"], "outputs": []}), "has 1 inputs and 0 outputs; expected as many"),
        ("x = f(1)", "a test is 'x = f\\(1\\)'; expected imports and asserts"),
        ("assert 1 == 1", "calls no function of the program"),
        ("assert near(f(2), 1.41)", "leaves its verdict to 'near', .* expected a helper that `setup` defines"),
        ("assert check(f)", "leaves its verdict to 'check'"),
        ("assert f(1) and not far(1, b=f(2))", "leaves its verdict to 'far'"),
        ("assert all(f(x) for x in [1])", "calls the program in a loop; expected single calls"),
    ],
)
def test_a_truth_without_tests_is_an_error(truth, sentence):
    with pytest.raises((ValueError, SyntaxError), match=sentence):
        score("print(1)", truth)
