"""Loads a user's plug-ins: modules and files whose `register_*` decorators fill the tables of losses, rewards etc."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

# The module from which files in verl's documentation import the decorators -> where they are here.
DOCUMENTED = {"verl.trainer.ppo.core_algos": "megarl.algo"}


def load_plugins(specs: Sequence[str]) -> None:
    """Import each module ("my_package.losses") or file ("my/losses.py"), whose decorators fill the tables.

    A file is loaded only once.  In a file, `from verl.trainer.ppo.core_algos import register_policy_loss` means
    `from megarl.algo import register_policy_loss`, whether verl is installed or not.
    Raises: ValueError for a file or module that does not exist, or whose imports fail; any other exception of the
        plug-in itself.
    """
    for spec in specs:
        try:
            _load(spec)
        except ImportError as error:
            raise ValueError(f"algorithm.plugins has {spec!r}, whose imports fail: {error}") from error


def _load(spec: str) -> None:
    if spec.endswith(".py"):
        _load_file(spec)
    elif importlib.util.find_spec(spec.partition(".")[0]) is None:
        raise ValueError(f"algorithm.plugins has {spec!r}: no such module; expected a module or a path ending in .py")
    else:
        importlib.import_module(spec)


def _load_file(spec: str) -> None:
    path = Path(spec).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"algorithm.plugins has {spec!r}: no such file")
    name = f"megarl_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None, f"{path} ends in .py, so it has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        exec(_code(path), module.__dict__)
    except BaseException:
        del sys.modules[name]  # so that a retry runs it again
        raise


def _code(path: Path) -> CodeType:
    """The file's code with its line numbers; imports from DOCUMENTED modules are redirected to this package."""
    tree = ast.parse(path.read_bytes(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in DOCUMENTED:
            node.module = DOCUMENTED[node.module]
    return compile(tree, str(path), "exec", dont_inherit=True)
