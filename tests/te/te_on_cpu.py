"""Transformer-Engine's own Python on a CPU, with a stand-in for its compiled extension.

`import te_on_cpu` before megatron.core is imported: then Megatron finds Transformer-Engine, from .venv-te.  No file of
it is changed; what is replaced at run time is said here, line by line.  `activate()` once per process, after
`cpu.activate()`, lets its code take tensors on the CPU for tensors on an H100.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import te_attention
import te_kernels
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[2]
PACKAGES = next(iter(ROOT.glob(".venv-te/lib/python3*/site-packages")), ROOT / ".venv-te")
_stock_is_available = torch.cuda.is_available
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _Numbered(type):
    """A class of the extension that is only named: each attribute is a number with a name, as in an enum."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        number = _Number(sum(isinstance(value, _Number) for value in vars(cls).values()))
        number.name = name
        setattr(cls, name, number)
        return number


class _Number(int):
    name: str


class _Extension(ModuleType):
    """`transformer_engine_torch`; what it does not have is a class that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(cls: Any, *_: Any, **__: Any) -> None:
            raise NotImplementedError(f"transformer_engine_torch.{name} is not in the stand-in")

        made = _Numbered(name, (), {"__new__": called})
        setattr(self, name, made)
        return made


class _Nothing(ModuleType):
    """A package that is named when Transformer-Engine is imported, and never used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def _module(kind: type[ModuleType], name: str) -> Any:
    made = sys.modules[name] = kind(name)
    made.__spec__ = ModuleSpec(name, None)
    return made


def _is_of_te(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("transformer_engine")


def _is_available() -> bool:
    """torch.cuda.is_available: true for Transformer-Engine's code alone."""
    return _is_of_te(sys._getframe(1)) or _stock_is_available()


def _install() -> None:
    assert "megatron.core" not in sys.modules, "Megatron looks for Transformer-Engine when it is imported"
    assert PACKAGES.is_dir(), f"{ROOT / '.venv-te'} is missing: bash launch/test.sh makes it"
    sys.path.append(str(PACKAGES))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no search for CUDA's libraries
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiler would ask more of the device
    extension = _module(_Extension, "transformer_engine_torch")
    kernels: tuple[Any, ...] = (te_kernels.DType, *te_kernels.KERNELS, *te_attention.KERNELS)
    vars(extension).update({kernel.__name__: kernel for kernel in kernels})
    extension.__all__ = [kernel.__name__ for kernel in kernels]
    extension.get_num_cublas_streams = lambda: 1
    extension.get_stream_priority_range = lambda *_: (0, -1)
    extension.get_cublasLt_version = lambda: 130000
    for name in (
        "onnx",
        "onnx.defs",
        "onnxscript",
        "onnxscript.onnx_opset",
        "onnxscript.onnx_types",
        "onnxscript.values",
    ):
        _module(_Nothing, name)
    cuda: Any = torch.cuda
    h100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100")
    cuda.get_device_properties = lambda *_: h100
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.is_available = _is_available
    cuda.is_current_stream_capturing = torch.cuda.graphs.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    with warnings.catch_warnings(action="ignore"):
        import transformer_engine.common as common  # looks for the compiled extension, in vain
    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch import utils
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel, softmax

    utils._empty_tensor = torch.Tensor  # .cuda() of a new tensor
    softmax.FusedScaleMaskSoftmax.is_kernel_available = lambda self, *_: False
    context_parallel.flash_attn_p2p_communicate = _exchanged


def _exchanged(rank: int, sent: Tensor, to: int, received: Tensor, source: int, group: Any, batched: bool) -> list[Any]:
    """A step of the ring by gathering: gloo's pairs of sends and receives wait for each other in backward."""
    ranks = dist.get_process_group_ranks(group)
    parts = [torch.empty_like(sent).contiguous() for _ in ranks]
    dist.all_gather(parts, sent.contiguous(), group=group)
    received.copy_(parts[ranks.index(source)].view_as(received))
    return []


class _OnGpu(TorchFunctionMode):
    """Tensors are on the GPU for Transformer-Engine's code, and on the CPU for all other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA and _is_of_te(sys._getframe(1)):
            return True
        return func(*args, **(kwargs or {}))


_active = False


def activate() -> None:
    """For the life of this thread, after `cpu.activate()`; safe to call again."""
    from megarl.mcore import cpu  # not before Transformer-Engine is there: it imports Megatron

    global _active
    if not _active:
        _OnGpu().__enter__()
        backward: Any = torch.autograd
        backward._engine_run_backward = _in_backward_too(backward._engine_run_backward, cpu._CudaIsCpu)
        _active = True


def _in_backward_too(run: Any, other_mode: Any) -> Any:
    """torch.autograd.backward is a call that modes handle themselves, and inside one of its calls a mode is off."""

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with other_mode(), _OnGpu():
            return run(*args, **kwargs)

    return run_backward


class _Float32IsHalf(ModuleType):
    """torch, where Transformer-Engine asks for the types that fused attention takes."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def fused_in_float32() -> Iterator[None]:
    """Fused attention takes float32 too: the choice of kernels is that of a GPU, and results can be compared."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils

    with (
        mock.patch.object(backends, "torch", _Float32IsHalf("torch")),
        mock.patch.object(utils, "torch", _Float32IsHalf("torch")),
    ):
        yield


_install()
