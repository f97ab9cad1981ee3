"""Stub of SGLang's compiled kernels for machines without an accelerator.

SGLang imports names from here at its start and calls few of them with `torch_native`: those of `mamba`.  A call of
another one raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel: this machine has no accelerator")

    return kernel
