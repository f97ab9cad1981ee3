"""Stub of Triton: SGLang and torch define kernels with it at import, but launch none on a CPU.

Any name can be imported. A lower-case name is a module that can also be called, as a decorator without effect; a name
with an initial capital is an empty class. A decorated kernel stays a plain Python function: a launch,
`kernel[grid](...)`, raises TypeError.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class _Anything(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _class(name) if name[0].isupper() else _module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Handles both `@jit` and `@jit(option=1)`."""
        if len(args) == 1 and not options and callable(args[0]):
            return args[0]
        return _unchanged

    def __bool__(self) -> bool:
        return False  # checks for optional parts of Triton must find them missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets `import triton.any.thing` find the same modules that attribute access makes."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _module(name: str) -> types.ModuleType:
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = _Anything(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, _FINDER, is_package=True)
    return module


def _class(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args, **options: None})


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Constexpr:
    """`tl.constexpr`: a type in annotations, a wrapper of constants."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __class_getitem__(cls, item: Any) -> type:
        return cls


_TYPES = """void int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64
            float8e4nv float8e5 float8e4b8 dtype tensor"""

__version__ = "3.0.0"  # compared with minimal versions at import
_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
_root: Any = sys.modules[__name__]
_root.__class__ = _Anything
_root.__path__ = []
_root.language.constexpr = _Constexpr
for _name in _TYPES.split():
    setattr(_root.language, _name, _class(_name))
_root.backends.backends = {}  # torch looks here for a Triton backend to compile with: none


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1
