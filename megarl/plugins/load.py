"""Loads a user's code: plug-ins, whose `register_*` decorators fill tables, and functions that a key names."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from os.path import expanduser, isfile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# Modules of verl that files for it import -> what they find here.
_COMPAT = "megarl.algo.verl_compat"
DOCUMENTED = {
    "verl.trainer.ppo.core_algos": f"{_COMPAT}.core_algos",
    "verl.utils": f"{_COMPAT}.utils",
    "verl.utils.torch_functional": f"{_COMPAT}.torch_functional",
    "verl.trainer.config": "megarl.algo.documented.configs",
    "verl.workers.config": "megarl.algo.documented.configs",
}

# A user's file is a module below this one, with its path in its name: so a process that the user's code starts, by any
# start method, can import it, as it must to call a function of that file.
__path__: list[str] = []
FILE_MODULE = f"{__name__}.file_"


class _UserFiles:
    """Finds these modules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(FILE_MODULE):
            return None
        return importlib.util.spec_from_file_location(name, bytes.fromhex(name.removeprefix(FILE_MODULE)).decode())


sys.meta_path.append(_UserFiles)


def load_plugins(specs: Sequence[str]) -> None:
    """Import each module ("my_package.losses") or file ("my/losses.py"), whose decorators fill the tables.

    A file is loaded only once.  In a file, `from verl.trainer.ppo.core_algos import register_policy_loss` means
    `from megarl.algo import register_policy_loss`, and verl's configuration classes are ours, whether verl is
    installed or not.  If it is not, the modules of DOCUMENTED can be imported while plug-ins are loaded.
    Raises: ValueError of one sentence for a file or module that does not exist, or that raises an exception.
    """
    for spec in specs:
        load = _loader(spec)
        try:
            with _verl_for_plugins():
                load()
        except ImportError as error:
            raise ValueError(f"algorithm.plugins has {spec!r}, whose imports fail: {_line(error)}") from error
        except (Exception, SystemExit) as error:
            raise ValueError(f"algorithm.plugins has {spec!r}, which fails: {describe(error)}") from error


@contextmanager
def _verl_for_plugins() -> Iterator[None]:
    """The modules of DOCUMENTED under verl's names, unless verl is installed."""
    if importlib.util.find_spec("verl") is not None:
        yield
        return
    added: dict[str, ModuleType] = {}
    for name, ours in DOCUMENTED.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            package = ".".join(parts[:depth])
            if package not in added and package not in DOCUMENTED:
                added[package] = ModuleType(package)
                added[package].__path__ = []  # a package, in which nothing more is found
        added[name] = importlib.import_module(ours)
    for name, module in added.items():
        package, _, last = name.rpartition(".")
        if package:
            setattr(added[package], last, module)
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


# Beginnings of the files of code that is not the user's.
_OURS = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen ")
_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))


def describe(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """An error as a part of a sentence.  Example: "KeyError: 'gone' (mine.py:12)".

    The place is the last one in the user's own code, not in packages that it calls; without any of it, the last one in
    packages.  If only code of ours is part of it, the place is that of `function`, whose value was wrong.
    """
    return f"{type(error).__name__}: {_line(error)}{place_of(error, in_packages=True) or _place_of(function)}"


def place_of(error: BaseException, *, in_packages: bool = False) -> str:
    """The last place in the user's own code: " (mine.py:12)"; else in packages, or nothing."""
    others = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OURS)]
    frames = [each for each in others if not each.filename.startswith(_INSTALLED)] or others * in_packages
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _place_of(function: Callable[..., Any] | None) -> str:
    """Where a function of the user begins; empty for one of ours, and for one that was not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code is None or code.co_filename.startswith((*_OURS, *_INSTALLED)):
        return ""
    return f" ({code.co_filename}:{code.co_firstlineno})"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _loader(spec: str) -> Callable[[], object]:
    """What loads it.  Raises ValueError for a file or module that does not exist."""
    if spec.endswith(".py"):
        path = Path(expanduser(spec))
        if not isfile(path):
            raise ValueError(f"algorithm.plugins has {spec!r}: no such file")
        return partial(_load_file, path.resolve())
    try:
        is_there = importlib.util.find_spec(spec.partition(".")[0]) is not None
    except ValueError:  # no name of a module
        is_there = False
    if not is_there:
        raise ValueError(f"algorithm.plugins has {spec!r}: no such module; expected a module or a path ending in .py")
    return partial(importlib.import_module, spec)


def _load_file(path: Path) -> None:
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
    """The file's code with its line numbers; verl's tables and configuration classes are ours, where verl is, too.

    For a decorator must fill our tables, and a function asks of which class its `config` is.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in DOCUMENTED and "utils" not in node.module:
            node.module = DOCUMENTED[node.module]
    return compile(tree, str(path), "exec", dont_inherit=True)


def user_function(setting: str, address: str) -> Callable[..., Any]:
    """The function, or class, at "path/file.py:function" or "package.module:function".

    `setting`: key and value, for errors.  Raises ValueError of one sentence: missing file, failing import, no such
    function.
    """
    place, _, name = address.rpartition(":")
    module = _module(setting, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{setting}: {place} has no function {name!r}; it has {_functions(module)}")
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function, or of the object with __call__, must be awaited."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def absolute(address: str) -> str:
    """The address with an absolute file path, which is valid in any working directory."""
    place, colon, name = address.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if colon and place.endswith(".py") else address


def _module(setting: str, place: str) -> ModuleType:
    path = Path(expanduser(place))
    if place.endswith(".py") and not isfile(path):
        raise ValueError(f"{setting}: there is no file {path.absolute()}")
    try:
        name = f"{FILE_MODULE}{os.fsencode(path.resolve()).hex()}" if place.endswith(".py") else place
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{setting}: importing {place} failed with {type(error).__name__}: {_line(error)}") from error


def _functions(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    return ", ".join(names) or "none"
