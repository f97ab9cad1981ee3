"""Megatron-Core and the locked Transformer-Engine: what the one imports of the other is there, or has a reason."""

import ast
import re
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import megatron.core
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MEGATRON = Path(megatron.core.__file__).parent
(VERSION,) = re.findall(r"^transformer-engine==(\S+)", (ROOT / "launch/gpu/trainer.txt").read_text(), re.M)
EXTENSION = "extensions/transformer_engine.py"
LOST = {
    (EXTENSION, "transformer_engine.pytorch.attention._SplitAlongDim"): "fixes.fix_te_split puts it back",
    (EXTENSION, "transformer_engine.pytorch.module.base.get_workspace"): "fixes.fix_te_gemm does without it",
    (EXTENSION, "transformer_engine.pytorch.attention.apply_rotary_pos_emb"): "imported of versions before 2.3 only",
    ("fp8_utils.py", "transformer_engine.pytorch.cpp_extensions.cast_to_fp8"): "imported of versions before 2.0 only",
}
# Ranges that the locked version is outside of.
OUTSIDE = {
    "<2.12.0,>=2.9.0a0": "attention sinks over packed rows need 2.12; models.transformer_engine.mark_shards and "
    "fixes.TE_FIXES make up for what has changed since, and tests/te runs both together",
}


@pytest.fixture(scope="module")
def packages() -> Path:
    found = next(iter(ROOT.glob(".venv-te/lib/python3*/site-packages")), None)
    assert found is not None, "bash launch/test.sh makes .venv-te"
    return found


def imports(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]


@cache
def defined(packages: Path, module: str) -> frozenset[str] | None:
    """The names that a module of Transformer-Engine binds, and its submodules; None: there is no such module."""
    place = packages.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return None
    package = module.split(".") if place.is_dir() else module.split(".")[:-1]
    found = {child.stem for child in place.iterdir()} if place.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                above = package[: len(package) - node.level + 1] if node.level else []
                found |= defined(packages, ".".join([*above, *filter(None, [node.module])])) or set()
    return frozenset(found)


def test_each_name_that_megatron_imports_of_transformer_engine_is_there_or_known_to_be_lost(packages: Path) -> None:
    asked = set()
    for file in MEGATRON.rglob("*.py"):
        if "from transformer_engine" in (text := file.read_text()):
            for node in imports(ast.parse(text)):
                if str(node.module).split(".")[0] == "transformer_engine":
                    where = str(file.relative_to(MEGATRON))
                    asked |= {(where, str(node.module), alias.name) for alias in node.names}
    assert len(asked) > 50
    missing = {
        (where, f"{module}.{name}") for where, module, name in asked if name not in (defined(packages, module) or ())
    }
    assert missing == set(LOST)


def test_a_range_of_megatrons_extras_that_the_lock_leaves_has_a_reason() -> None:
    ranges = {
        str(one.specifier)
        for one in map(Requirement, requires("megatron-core") or [])
        if one.name == "transformer-engine" and not one.specifier.contains(VERSION)
    }
    assert ranges == set(OUTSIDE)


def test_the_python_that_is_tested_has_the_version_of_the_lock(packages: Path) -> None:
    assert [path.name for path in packages.glob("transformer_engine-*")] == [f"transformer_engine-{VERSION}.dist-info"]
