"""The floors of the house: who may import whom, and what an import costs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megarl

ROOT = Path(megarl.__file__).parent

FLOORS = {
    0: "arch io plugins",
    1: "samples processes",
    2: "config algo data rewards",
    3: "metrics rollout mcore",
    4: "servers agents",
    5: "weights machines",
    6: "group hf_server",
    7: "roles",
    8: "trainer plan",
    9: "commands train",
    10: "cli",
    11: "__main__ notebook",
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


def test_the_files_and_folders_of_each_folder_have_an_order() -> None:
    """No circle of modules or of folders: what imports a file of a folder is imported by none of its files."""
    for folder in {name.rpartition(".")[0] for name in modules()} - {""}:
        order = TopologicalSorter[str]()
        for name in modules():
            for other, _ in imports_of(name) if f"{name}.".startswith(f"{folder}.") else ():
                here, there = (".".join(each.split(".")[: folder.count(".") + 2]) for each in (name, other))
                if other.startswith(f"{folder}.") and here != there:
                    order.add(here, there)
        order.prepare()  # raises CycleError, which names the circle


def test_no_module_of_ours_is_imported_by_a_written_out_name():
    """import_module("megarl.train") would hide an import from the tests above."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                first = node.args[0] if node.args else None
                hidden = isinstance(first, ast.Constant) and str(first.value).startswith("megarl")
                assert not hidden, f"{name}:{node.lineno} hides an import of {ast.unparse(node.args[0])}"


def test_the_sandbox_uses_only_the_standard_library():
    """It is a package of its own beside this one."""
    wrong = []
    for path in sorted((ROOT.parent / "megarl_sandbox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or "."]
                tops = {name.split(".")[0] for name in names} - {"megarl_sandbox"}
                wrong += [f"{path.name}:{node.lineno} imports {top}" for top in tops - sys.stdlib_module_names]
    assert not wrong, "\n".join(wrong)


# What an import of a module must not load.  The last five may load torch.
LIGHT = {
    "megarl": "torch numpy hydra omegaconf rich transformers megatron",
    "megarl.config": "torch numpy transformers megatron",
    "megarl.cli": "torch numpy transformers megatron aiohttp httpx",
    "megarl.commands.checkpoint": "torch numpy transformers megatron",
    "megarl.commands.new": "torch numpy transformers megatron",
    "megarl.commands.convert.request": "torch numpy transformers megatron",
    "megarl.metrics.reading.jsonl": "torch numpy transformers megatron hydra rich",
    "megarl.metrics.report.page": "torch numpy transformers megatron plotly",
    "megarl.commands.watch.command": "torch transformers megatron",
    "megarl.commands.doctor.command": "torch transformers megatron",
    "megarl.commands.plan.show": "torch numpy transformers megatron",
    "megarl.commands.plan.command": "torch numpy transformers megatron",
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


@pytest.mark.full
def test_imports_are_light():
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS, json.dumps(LIGHT)]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(LIGHT, []), done.stderr


# The packages whose `__init__` holds more than a docstring, and why.
DOORS = {
    "megarl": "its version",
    "megarl.algo": "users' losses and estimators import from it",
    "megarl.algo.advantages": "imports its files, whose decorators fill the table of estimators",
    "megarl.algo.losses": "imports its files, whose decorators fill the table of losses",
    "megarl.config": "load_config and Config, which all commands and benchmarks import",
    "megarl.config.schema": "the dataclass of a whole run, whose fields are the groups of its files",
    "megarl.group": "the driver's handle on ranks, which scripts import too",
    "megarl.mcore": "prepares the import of Megatron-Core, before any of its modules",
    "megarl.rewards": "users' rewards import register_reward from it",
    "megarl.servers.sglang_cpu.sgl_kernel": "stands in for a package of this name, from which names are imported",
}


def test_an_init_is_a_docstring():
    """What a file needs, it imports from the file that has it."""
    more = set()
    for path in ROOT.rglob("__init__.py"):
        body = ast.parse(path.read_text(), str(path)).body
        if len(body) != 1 or not isinstance(body[0], ast.Expr):
            more.add(".".join(path.parent.relative_to(ROOT.parent).parts))
    assert more == DOORS.keys()


MOST_PARAMETERS = 8
# Whose parameters others prescribe, or tell one by one: an estimator takes what verl's do.
MORE_PARAMETERS = {
    "megarl.mcore.models.attention.__init__": "as Megatron makes an attention",
    "megarl.mcore.logprobs.fused_triton._statistics_kernel": "a kernel",
    "megarl.mcore.logprobs.fused_triton._gradient_kernel": "a kernel",
    "megarl.algo.advantages.estimate.estimate": "the batch's columns, and the settings of an estimator",
    "megarl.algo.advantages.group_relative.gdpo": "as registered estimators",
    "megarl.mcore.models.hybrid.mamba_kernels.mamba_split_conv1d_scan_combined": "as Megatron calls mamba_ssm's",
    **{
        f"megarl.servers.sglang_cpu.sgl_kernel.mamba.{kernel}_cpu": "as SGLang calls its kernel"
        for kernel in ("causal_conv1d_fn", "chunk_gated_delta_rule", "fused_sigmoid_gating_delta_rule_update")
    },
}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the package by its module's name and its own."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}.{node.name}", node


def test_objects_travel_whole():
    """What belongs together is one object: no function takes it apart into a long list of parameters."""
    found = {}
    for name, function in functions():
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        found[name] = max(len(names) - (names[:1] in (["self"], ["cls"])), found.get(name, 0))
    assert {name for name, count in found.items() if count > MOST_PARAMETERS} == MORE_PARAMETERS.keys()


def test_no_dictionary_carries_the_arguments_of_a_function_of_ours():
    """Types are checked of arguments, and not of a dictionary that is written out only to be unpacked."""
    own = {
        node.name
        for tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    wrong = []
    for name, function in functions():
        made = {
            ast.unparse(target)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
                unpacked = {ast.unparse(word.value) for word in node.keywords if word.arg is None}
                wrong += [f"{name}:{node.lineno} unpacks {each}" for each in unpacked & made]
    assert not wrong, "\n".join(wrong)
