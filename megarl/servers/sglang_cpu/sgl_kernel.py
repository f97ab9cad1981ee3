"""Stands where SGLang's compiled kernels would be, on a machine without an accelerator.

SGLang imports names from here when it starts and calls none of them on the `torch_native` path. A call is therefore a
mistake, and says so.
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
