"""Runs the tests of a row on a program in the sandbox, so that the program sees no expected value.

stdin and stdout: the program gets an input, and its output is compared outside.

asserts: `assert f(2) == 4` is taken apart. The program's process evaluates the calls of the program's own functions,
`f(2)`, and sends the values as plain data. A second process, in which no code of the model runs, evaluates the whole
assert with these values in place of the calls. What the program sends is data: the most it can do is to answer.

Helpers that compare belong into the row's `setup`, which both processes run: so the program can read `setup`, and no
expected value may be in it.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import megarl_sandbox
from megarl_sandbox import Limits, SandboxError

_LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_JUDGE_S = 1.0  # of a processor's time to compare values, at least
_JUDGE_WAIT_S = 60.0  # by the clock, for a loaded machine
_VALUE = "_value_of_call_"

_PLAIN = '''
import json, sys

def _pack(value):
    """Plain data as JSON that keeps the type; of a subclass its base class."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[_pack(key), _pack(item)] for key, item in dict.items(value)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_pack(item) for item in kind.__iter__(value)]}
    raise TypeError(f"a call returned a {type(value).__name__}; only plain data can be compared")

def _unpack(value):
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {_unpack(key): _unpack(item) for key, item in content}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_unpack, content))
'''

# Reads {"program", "setup", "calls"}; prints a line [number, value] for each call that returned.
_CALLER = (
    _PLAIN
    + """
import io, os
order = json.loads(sys.stdin.read())
sys.stdin = io.StringIO()
out = os.fdopen(os.dup(1), "w")
sys.stdout = open(os.devnull, "w")  # what the program prints is not looked at
space = {"__name__": "program"}
sys.modules["program"] = type(sys)("program")  # dataclasses look their module up
exec(compile(order["setup"], "setup", "exec"), space)
exec(compile(order["program"], "program.py", "exec"), space)
if (name := order["name"]) and name not in space and "Solution" in space:
    space[name] = getattr(space["Solution"](), name)
for number, call in enumerate(order["calls"]):
    try:
        line = json.dumps([number, _pack(eval(compile(call, "test", "eval"), space))])
    except Exception as error:
        print(f"{call}: {type(error).__name__}: {error}", file=sys.stderr)
        continue
    out.write("\\n" + line + "\\n")
    out.flush()
os._exit(0)
"""
)

# Reads {"setup", "tests": [[source, numbers]], "sent": {number: line}}; prints a list of true and false.
_JUDGE = (
    _PLAIN
    + '''
order = json.loads(sys.stdin.read())
space = {}

def _lists(value):
    """Tuples as lists, and keys as texts: JSON has no others."""
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return {str(key): _lists(item) for key, item in value.items()} if isinstance(value, dict) else value

space["_lists"] = _lists
exec(compile(order["setup"], "setup", "exec"), space)
verdicts = []
for source, needed in order["tests"]:
    try:
        for number in needed:
            space[order["prefix"] + str(number)] = _unpack(json.loads(order["sent"][str(number)])[1])
        exec(compile(source, "test", "exec"), space)
        verdicts.append(True)
    except Exception:
        verdicts.append(False)
print(json.dumps(verdicts))
'''
)


@dataclass(frozen=True)
class Outcome:
    """Example: Outcome((True, False), timed_out=False)."""

    passed: tuple[bool, ...]  # for each test
    timed_out: bool = False


@dataclass(frozen=True)
class Assertions:
    """Asserts, with the calls of the program's functions taken out.  See `assertions`."""

    setup: str  # imports, which both processes run
    calls: tuple[str, ...]
    tests: tuple[tuple[str, tuple[int, ...]], ...]  # an assert with names for the calls, and the numbers of the calls
    name: str = ""  # of the function, which may be a method of a class Solution


def run_outputs(program: str, inputs: Sequence[str], outputs: Sequence[str], limits: Limits) -> Outcome:
    """Run the program once for each input.  `limits.seconds` is for all together."""
    passed: list[bool] = []
    left, timed_out = limits.seconds, False
    for given, wanted in zip(inputs, outputs, strict=True):
        if left <= 0:  # runs that ended by themselves may have taken it all
            passed.append(False)
            timed_out = True
            continue
        result = megarl_sandbox.run(program, stdin=given, limits=replace(limits, seconds=left))
        left -= result.seconds
        timed_out |= result.why == "time"
        passed.append(result.is_good and _lines(result.stdout) == _lines(wanted))
    return Outcome(tuple(passed), timed_out)


def run_assertions(program: str, assertions: Assertions, limits: Limits) -> Outcome:
    """Evaluate the calls in one process, and the asserts in another one.

    Raises SandboxError if the machine is too slow to evaluate the asserts.
    """
    order = {"program": program, "setup": assertions.setup, "calls": assertions.calls, "name": assertions.name}
    called = megarl_sandbox.run(_CALLER, stdin=json.dumps(order), limits=limits)
    sent = dict(_sent(called.stdout, len(assertions.calls)))
    timed_out = called.why == "time"
    ready = [at for at, (_, needed) in enumerate(assertions.tests) if sent.keys() >= set(needed)]
    passed = [False] * len(assertions.tests)
    if ready:
        tests = [assertions.tests[at] for at in ready]
        judged = {"setup": assertions.setup, "tests": tests, "sent": sent, "prefix": _VALUE}
        share = max(_JUDGE_S, 0.2 * limits.seconds)
        result = megarl_sandbox.run(
            _JUDGE,
            stdin=json.dumps(judged),
            limits=replace(limits, seconds=_JUDGE_WAIT_S, processor_seconds=share),
        )
        if result.why == "time":  # the machine is too slow, for which the program is not to blame
            raise SandboxError(f"values could not be compared within {_JUDGE_WAIT_S:g} seconds")
        if result.is_good:  # else a value was made so that to compare it takes too long, or too much memory
            for at, verdict in zip(ready, json.loads(result.stdout), strict=True):
                passed[at] = verdict
    return Outcome(tuple(passed), timed_out)


def assertions(sources: Sequence[str], setup: str = "", name: str = "") -> Assertions:
    """Take asserts apart.  `sources`: Python with imports and asserts; `name`: a function of the program.

    Raises ValueError for other statements, for an assert without a call of the program, and for one whose helper is not
    defined: the program could define it so that every answer is right.
    """
    known = {*dir(builtins), "_lists"}
    imports, found = [setup] if setup else [], []
    for statement in [one for source in sources for one in ast.parse(source).body]:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(statement))
        elif isinstance(statement, ast.Assert):
            found.append(statement)
        else:
            raise ValueError(f"a test is {ast.unparse(statement)!r}; expected imports and asserts")
    for node in ast.walk(ast.parse("\n".join(imports))):
        if isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    taker = _TakesCallsOut(known)
    tests = []
    for statement in found:
        if helper := taker.undefined_helper(statement.test):
            raise ValueError(
                f"the test {ast.unparse(statement)!r} leaves its verdict to {helper!r}, which the program "
                "could define; expected a helper that `setup` defines or imports"
            )
        begin = len(taker.calls)
        source = ast.unparse(ast.Assert(taker.visit(statement.test)))
        if begin == len(taker.calls):
            raise ValueError(f"the test {ast.unparse(statement)!r} calls no function of the program")
        tests.append((source, tuple(range(begin, len(taker.calls)))))
    return Assertions("\n".join(imports), tuple(taker.calls), tuple(tests), name)


class _TakesCallsOut(ast.NodeTransformer):
    """Puts a name in place of each outermost call whose function is not known."""

    def __init__(self, known: set[str]) -> None:
        self._known = known
        self.calls: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        before = len(self.calls)
        changed = super().visit(node)
        if isinstance(node, _LOOPS) and len(self.calls) > before:
            raise ValueError(f"the test {ast.unparse(node)!r} calls the program in a loop; expected single calls")
        return changed

    def undefined_helper(self, test: ast.expr) -> str:
        """The function that alone decides a test and that is not known, if it judges other unknown ones; else ""."""
        if isinstance(test, ast.UnaryOp):
            return self.undefined_helper(test.operand)
        if isinstance(test, ast.BoolOp):
            return next(filter(None, map(self.undefined_helper, test.values)), "")
        if not isinstance(test, ast.Call) or not (name := self._unknown(test)):
            return ""
        arguments = [*test.args, *(keyword.value for keyword in test.keywords)]
        nodes = [node for one in arguments for node in ast.walk(one)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}  # of a lambda
        return name if names - own - self._known - {name} else ""

    def _unknown(self, call: ast.Call) -> str:
        """The name that a call begins with, if it is not known; else ""."""
        root: ast.AST = call.func
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        return root.id if isinstance(root, ast.Name) and root.id not in self._known else ""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self._unknown(node):
            return self.generic_visit(node)
        self.calls.append(ast.unparse(node))
        return ast.Name(f"{_VALUE}{len(self.calls) - 1}", ast.Load())


def _sent(stdout: str, count: int) -> list[tuple[int, str]]:
    """Numbers of calls, and the lines with their values; whatever else is in the output is left out.

    The lines stay text: a value may be too deep to write again.
    """
    found = []
    for line in stdout.splitlines():
        try:
            number, _ = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(number, int) and 0 <= number < count:
            found.append((number, line))
    return found


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
