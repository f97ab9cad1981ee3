"""Runs in SGLang's environment: parses and resolves command lines with SGLang's own code, as if on 8 H100 of 80 GiB.

    python resolved_server_args.py < cases.json

Input: a list of {"argv": [...], "environment": {...}}.  Output: one line of JSON for each, {"args": {...},
"environment": {...}} with the resolved arguments and the variables that the resolution changed, or {"error": text}.
Nothing is started, and no kernel is called: packages of compiled kernels are imported as mocks.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo  # before the patches: it looks for functions of a CUDA build
import torch._inductor  # noqa: F401

GIB = 1024**3
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132)
KERNELS = {"sgl_kernel", "flashinfer", "deep_gemm", "triton_kernels"}  # the last comes with the first


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the packages of KERNELS as modules whose attributes are mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = name.split(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def mock(name: str) -> MagicMock:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        vars(module)["__getattr__"] = mock


def pretend() -> None:
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": (H100.major, H100.minor),
        "get_device_name": H100.name,
        "get_device_properties": H100,
        "mem_get_info": (H100.total_memory, H100.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    sys.meta_path.insert(0, Kernels())


def plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def resolve(argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(environment)
    before = dict(os.environ)
    args = prepare_server_args(argv)
    args.resolve_once()
    args.check_server_args()
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {"args": args.resolved_dict(), "environment": changed}


def main() -> None:
    cases = json.load(sys.stdin)
    pretend()
    from sglang.srt.arg_groups import pipeline  # noqa: F401  # once, and not in every child
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for case in cases:  # each in a child: the resolution sets variables and remembers answers
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                out = resolve(case["argv"], case["environment"])
            except BaseException:
                out = {"error": traceback.format_exc()}
            os.write(write, json.dumps(out, default=plain).encode())
            os._exit(0)
        os.close(write)
        with open(read) as text:
            print(text.read(), flush=True)


if __name__ == "__main__":
    main()
