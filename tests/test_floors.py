"""The floors of the house: who may import whom, and what an import costs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import megarl

ROOT = Path(megarl.__file__).parent

FLOORS = {
    0: (
        "sample batch float32 ragged token_age layout model_types projections plugins declared network sandbox "
        "hf_config durable_files megatron_fields terminal options"
    ),
    1: "config model_settings algo data rewards metrics processes routed_experts rank_files",
    2: "rollout mcore report tasks",
    3: "servers plan agents",
    4: "weights machines",
    5: "group hf_server",
    6: "roles",
    7: "trainer",
    8: "convert commands doctor watch train",
    9: "cli",
    10: "__main__",
}
FLOOR_OF = {name: floor for floor, rooms in FLOORS.items() for name in rooms.split()}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its full name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imports_of(name: str) -> Iterator[tuple[str, int]]:
    """The modules of the package that `name` imports, at any depth of its code, with the line."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "megarl":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert node.level == 0, f"{name}:{node.lineno}: expected an absolute import"
            if base.split(".")[0] == "megarl":
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    yield (submodule if submodule in modules() else base), node.lineno


def room_of(name: str) -> str:
    """megarl.algo.kl -> algo; megarl itself -> ""."""
    return name.split(".")[1] if "." in name else ""


def test_every_room_has_a_floor():
    rooms = {room_of(name) for name in modules()} - {""}
    assert rooms <= FLOOR_OF.keys(), f"no floor for {sorted(rooms - FLOOR_OF.keys())}"


def test_imports_only_point_down():
    wrong = []
    for name in modules():
        own = room_of(name)
        for other, line in imports_of(name):
            target = room_of(other)
            if not target or target == own:
                continue
            here, there = FLOOR_OF.get(own, -1), FLOOR_OF[target]
            if there >= here:
                wrong.append(f"{name}:{line} (floor {here}) imports {other} (floor {there})")
    assert not wrong, "\n".join(wrong)


def test_there_are_no_circles():
    state: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert state.get(name) != "open", f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name in state:
            return
        state[name] = "open"
        for other, _ in imports_of(name):
            if other != name:
                visit(other, (*path, name))
        state[name] = "done"

    for name in modules():
        visit(name, ())


def test_no_module_of_ours_is_imported_by_a_written_out_name():
    """import_module("megarl.train") would hide an import from the tests above."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                first = node.args[0] if node.args else None
                hidden = isinstance(first, ast.Constant) and str(first.value).startswith("megarl")
                assert not hidden, f"{name}:{node.lineno} hides an import of {ast.unparse(node.args[0])}"


# What an import of a module must not load.  The last five may load torch.
LIGHT = {
    "megarl": "torch numpy hydra omegaconf rich transformers megatron",
    "megarl.config": "torch numpy transformers megatron",
    "megarl.cli": "torch numpy transformers megatron aiohttp httpx",
    "megarl.commands.checkpoint": "torch numpy transformers megatron",
    "megarl.commands.new": "torch numpy transformers megatron",
    "megarl.convert.request": "torch numpy transformers megatron",
    "megarl.report.request": "torch numpy transformers megatron plotly",
    "megarl.plan.command.report": "torch numpy transformers megatron",
    "megarl.plan.command.command": "torch numpy transformers megatron",
    "megarl.rewards": "torch megatron transformers hydra omegaconf aiohttp sympy",
    "megarl.rewards.worker": "torch megatron transformers hydra omegaconf aiohttp sympy",
    "megarl.agents.process": "torch megatron transformers hydra omegaconf aiohttp",
    "megarl.algo": "megatron transformers hydra omegaconf aiohttp httpx datasets",
    "megarl.rollout.client": "megatron transformers hydra omegaconf",
    "megarl.train": "megatron",
    # These two run in SGLang's environment.
    "megarl.weights.push.receiver": "megatron transformers hydra omegaconf aiohttp httpx",
    "megarl.servers.sglang_server": "megatron transformers hydra omegaconf aiohttp httpx",
}
IMPORTS = """
import json, os, sys
from importlib import import_module
light, found = json.loads(sys.argv[1]), {}
for module, words in sorted(light.items(), key=lambda item: "torch" not in item[1]):
    if "torch" not in words:
        import torch  # once, and not in each fork
    read, write = os.pipe()
    if os.fork() == 0:
        import_module(module)
        os.write(write, json.dumps([name for name in words.split() if name in sys.modules]).encode())
        os._exit(0)
    os.close(write)
    found[module] = json.loads(os.read(read, 1000) or '["an error"]')
    os.wait()
print(json.dumps(found))
"""


def test_imports_are_light():
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS, json.dumps(LIGHT)]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(LIGHT, []), done.stderr
