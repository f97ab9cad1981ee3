"""Runs in SGLang's environment: parses and resolves command lines with SGLang's own code, as if on a machine of 8 GPUs.

    python resolved_server_args.py H100 < cases.json        "none": on a machine without GPU

Input: a list of {"argv": [...], "environment": {...}, "builds": bool}.  Output: one line of JSON for each, {"args":
{...}, "environment": {...}, "built": {...}} with the resolved arguments, the variables that the resolution changed and,
where the case wants it, what SGLang makes of them (`build`), or {"error": text}; then a line with the `spellings`.
Nothing is started, and no kernel is called: packages of compiled kernels are imported as mocks.
"""

import argparse
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
GPUS = {
    "H100": {"name": "NVIDIA H100 80GB HBM3", "major": 9, "total_memory": 80 * GIB, "multi_processor_count": 132},
    "B200": {"name": "NVIDIA B200", "major": 10, "total_memory": 180 * GIB, "multi_processor_count": 148},
}
# triton_kernels comes with sgl_kernel.  The memory saver is enabled where it can be imported.
KERNELS = {"sgl_kernel", "flashinfer", "deep_gemm", "triton_kernels", "torch_memory_saver"}


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


def pretend(name: str) -> None:
    gpu = SimpleNamespace(minor=0, **GPUS[name])
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": (gpu.major, gpu.minor),
        "get_device_name": gpu.name,
        "get_device_properties": gpu,
        "mem_get_info": (gpu.total_memory, gpu.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    sys.meta_path.insert(0, Kernels())


def build(args: Any, resolved: dict[str, Any]) -> dict[str, Any]:
    """What servers of these arguments would make at their start, as far as that calls no kernel.

    The loader of the weights; the graphs of prefill and decode; a layer of experts, and which of its weights are laid
    out anew once they are loaded; the variables of NCCL in the server's processes.
    """
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.entrypoints import engine
    from sglang.srt.model_executor.runner_backend import utils
    from sglang.srt.model_loader.loader import get_model_loader

    runtime_context.publish(args, role="scheduler")
    settled = SimpleNamespace(**resolved)
    loader = get_model_loader(LoadConfig(load_format=settled.load_format))
    config = settled.cuda_graph_config = runtime_context.get_exec().graph.cuda_graph_config
    model_runner = SimpleNamespace(server_args=settled, device="cuda", tp_group=None)
    graph_runner = SimpleNamespace(model_runner=model_runner, device_module=None)
    graphs = {"prefill": utils.resolve_prefill_backend, "decode": utils.resolve_decode_backend}
    with runtime_context.get_parallel().override(tp_group=None):
        made = {
            phase: type(resolve(graph_runner)).__name__
            for phase, resolve in graphs.items()
            if getattr(config, phase).backend != "disabled"
        }
    engine.assert_pkg_version = lambda *_: None
    engine._set_envs_and_config(args)
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {"loader": type(loader).__name__, "graphs": made, "laid_out_anew": laid_out_anew(settled), "nccl": nccl}


def laid_out_anew(settled: SimpleNamespace) -> list[str]:
    """The weights of a layer of experts that are not what was loaded once the layer has processed them."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    utils.initialize_moe_config(*[settled][: utils.initialize_moe_config.__code__.co_argcount])
    ep, tp = settled.ep_size, settled.tp_size // settled.ep_size
    places = {"moe_ep_rank": 0, "moe_tp_rank": 0, "tp_rank": 0, "moe_ep_size": ep, "moe_tp_size": tp}
    sizes = {"hidden_size": 256, "intermediate_size": 256 * tp, "num_experts": 2 * ep, "top_k": 2}
    with runtime_context.get_parallel().override(**places), torch.no_grad():
        layer = FusedMoE(layer_id=0, params_dtype=torch.bfloat16, **sizes)
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        loaded = {name: parameter.clone() for name, parameter in layer.named_parameters()}
        layer.quant_method.process_weights_after_loading(layer)
    return [name for name, parameter in layer.named_parameters() if not torch.equal(parameter, loaded[name])]


def spellings() -> dict[str, list[str]]:
    """Each field of SGLang's arguments -> its options on the command line."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {action.dest: list(action.option_strings) for action in parser._actions}


def plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def resolve(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(case["environment"])
    before = dict(os.environ)
    args = prepare_server_args(case["argv"])
    if hasattr(args, "resolve_once"):  # SGLang 0.5.17 resolves what it parses at once
        args.resolve_once()
    args.check_server_args()
    resolved = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {"args": resolved, "environment": changed} | ({"built": build(args, resolved)} if case.get("builds") else {})


def main() -> None:
    cases = json.load(sys.stdin)
    if sys.argv[1] != "none":
        pretend(sys.argv[1])
    from sglang.srt.entrypoints import engine  # noqa: F401  # once, and not in every child
    from sglang.srt.layers.moe.fused_moe_triton import layer  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for case in cases:  # each in a child: the resolution sets variables and remembers answers
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                out = resolve(case)
            except BaseException:
                out = {"error": traceback.format_exc()}
            os.write(write, json.dumps(out, default=plain).encode())
            os._exit(0)
        os.close(write)
        with open(read) as text:
            print(text.read(), flush=True)
        os.waitpid(child, 0)
    print(json.dumps(spellings()))


if __name__ == "__main__":
    main()
