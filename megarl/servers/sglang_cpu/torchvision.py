"""Stub of torchvision, which SGLang imports for its image models; these are not used here.

It has only the names that SGLang needs at import. Every function raises NotImplementedError.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"
__path__: list[str] = []  # makes this module a package: its submodules are added to sys.modules below


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


class _Part(types.ModuleType):
    """A module from which any function can be imported; a call of it raises NotImplementedError."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        where = f"{self.__name__}.{name}"

        def function(*args: Any, **options: Any) -> NoReturn:
            raise NotImplementedError(f"{where}: there is no torchvision here, only its names")

        return function


def _add_part(name: str, **members: type) -> None:
    part = _Part(f"{__name__}.{name}")
    part.__dict__.update(members)
    parent, _, last = part.__name__.rpartition(".")
    setattr(sys.modules[parent], last, part)
    sys.modules[part.__name__] = part


_add_part("io", ImageReadMode=ImageReadMode)
_add_part("transforms", InterpolationMode=InterpolationMode)
_add_part("transforms.functional", InterpolationMode=InterpolationMode)
_add_part("transforms.v2", InterpolationMode=InterpolationMode)
_add_part("transforms.v2.functional", InterpolationMode=InterpolationMode)
