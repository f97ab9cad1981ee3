"""Versions of the packages in both environments, the trainer's and SGLang's, and those that were tested together.

Read from the packages' metadata: nothing of SGLang's environment is imported.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megarl.commands.doctor.machine import FAIL, NOTE, OK, Finding
from megarl.config import Config

# The tested versions.  Another version is a note; another megatron-core is a failure, because its internals are used.
TESTED = {
    "torch": "2.13.0",
    "megatron-core": "0.19.2" if sys.version_info >= (3, 12) else "0.16.1",
    "transformers": "5.23.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "hydra-core": "1.3.8",
    "omegaconf": "2.3.1",
    "psutil": "7.2.2",
    "pyyaml": "6.0.3",
    "einops": "0.8.2",
    "numpy": "2.4.6",
    "jinja2": "3.1.6",
    "datasets": "5.2.0",
    "math-verify": "0.9.0",
    "aiohttp": "3.14.5",
    "cryptography": "50.0.2",
    "orjson": "3.13.0",
    "filelock": "4.3.1",
    "pebble": "5.2.3",
    "pandas": "3.1.1",
    "cloudpickle": "3.1.3",
    "plotly": "7.1.0",
    "rich": "15.0.0",
}
PYTHONS = ((3, 11), (3, 12))


class Kernels(NamedTuple):
    """A package of others' kernels for GPUs."""

    otherwise: str  # what computes without it
    install: str  # the command that brings it
    module: str | None = None  # its compiled part, where another package has the same name


_BUILD = f"{sys.executable} -m pip install --no-deps --no-build-isolation"
KERNELS = {
    "transformer-engine": Kernels(
        "Megatron's local layers and torch's attention", "bash launch/gpu/install.sh transformer_engine"
    ),
    "apex": Kernels(  # NVIDIA's is not on PyPI: `apex` there is a package for web pages
        "a product and an addition for the head's weight gradient",
        f"APEX_CPP_EXT=1 APEX_CUDA_EXT=1 {_BUILD} git+https://github.com/NVIDIA/apex",
        "fused_weight_gradient_mlp_cuda",
    ),
    "flash-attn": Kernels("Transformer Engine's own attention, or torch's", f"{_BUILD} flash-attn"),
}
KERNELS_OF_SERVERS = ("sglang-kernel", "sgl-kernel", "flashinfer-python")  # the first two are one package, renamed


class Together(NamedTuple):
    """Versions of one set of lock files."""

    torch: str
    sglang: str
    torch_of_servers: str
    nccl: str | None  # one for both; None: for machines without a GPU
    install: str  # the command that makes the environments

    def __str__(self) -> str:
        nccl = f", NCCL {self.nccl} in both" if self.nccl else ""
        return f"torch {self.torch} with SGLang {self.sglang} on torch {self.torch_of_servers}{nccl}"


TOGETHER = (
    Together("2.13.0", "0.5.23", "2.13.0", None, "bash launch/sglang_cpu.sh"),
    Together("2.13.0", "0.5.17", "2.13.0", None, "bash launch/sglang_cpu.sh 0.5.17"),
    Together("2.14.1", "0.5.23", "2.14.1", "2.30.7", "bash launch/gpu/install.sh"),
)
TORCHES = tuple(dict.fromkeys(row.torch for row in TOGETHER))


def trainer_findings(*, has_gpu: bool) -> list[Finding]:
    """Python and the packages of this environment."""
    packages = [_package(name, tested) for name, tested in TESTED.items()]
    return [_python(), *packages, *(_kernels(name, has_gpu=has_gpu) for name in KERNELS)]


def server_findings(config: Config, *, has_gpu: bool) -> list[Finding]:
    """SGLang's environment, its NCCL, which a push over NCCL joins with ours, and whether both were tested together."""
    rollout, install = config.rollout, "bash launch/gpu/install.sh" if has_gpu else "bash launch/sglang_cpu.sh"
    is_wanted = rollout.engine == "sglang" or rollout.sglang.python is not None
    wanted, otherwise = (
        ("rollout.engine=sglang needs it", FAIL) if is_wanted else ("optional: rollout.engine=sglang", OK)
    )
    try:
        from megarl.servers.nccl import nccl_of, versions_in
        from megarl.servers.sglang_environment import preload_faults, sglang_python
        from megarl.trainer.servers.colocation import uses_gpus

        python = sglang_python(rollout.sglang.python)
        found = versions_in(python, ["sglang", "torch", *KERNELS_OF_SERVERS])
        theirs, ours = nccl_of(python), nccl_of(Path(sys.executable))
    except ImportError as error:
        return [Finding("SGLang", f"unknown: {error}", wanted, NOTE)]
    except ValueError as error:
        return [Finding("SGLang", str(error) if is_wanted else "absent", wanted, otherwise, install)]
    if "sglang" not in found:
        return [Finding("SGLang", f"not in the environment of {python}", wanted, otherwise, install)]
    differ = ours is not None and theirs is not None and ours != theirs
    verdict = OK if not differ else FAIL if uses_gpus(config) else NOTE
    both = f"trainer {ours or 'unknown'}, SGLang {theirs or 'unknown'}"
    one = "on GPUs the same version in both: bash launch/gpu/install.sh"
    return [
        Finding("SGLang", found["sglang"], wanted, OK),
        Finding("NCCL", both, one, verdict, "bash launch/gpu/install.sh" if differ else ""),
        _together(found, has_gpu=has_gpu),
        _kernels_of_servers(found, has_gpu=has_gpu),
        *([_memory_saver(preload_faults(python), needed=config.rollout.placement == "shared")] if has_gpu else []),
    ]


def _memory_saver(lacks: Sequence[str], *, needed: bool) -> Finding:
    """Whether servers can release memory, as those do that share the trainer's GPUs (`needed`)."""
    wanted, install = "rollout.placement=shared: its library is preloaded", "bash launch/gpu/install.sh server"
    if not lacks:
        return Finding("SGLang's memory saver", "found, with all that it wants", wanted, OK)
    found = f"lacks {', '.join(lacks)}: memory would not be released"
    return Finding("SGLang's memory saver", found, wanted, FAIL if needed else NOTE, install)


def _python() -> Finding:
    wanted = " or ".join(".".join(map(str, pair)) for pair in PYTHONS)
    is_one = sys.version_info[:2] in PYTHONS
    mend = "" if is_one else "PYTHON=/path/to/python3.12 bash launch/test.sh"
    return Finding("python", platform.python_version(), wanted, OK if is_one else FAIL, mend)


def _kernels(name: str, *, has_gpu: bool) -> Finding:
    kernels, wanted = KERNELS[name], "optional, for GPUs"
    try:
        found = version(name)
    except PackageNotFoundError:
        found = ""
    if found and (kernels.module is None or find_spec(kernels.module) is not None):
        return Finding(name, found, wanted, OK)
    lacks = f"{found} without {kernels.module}" if found else "not installed"
    verdict, mend = (NOTE, kernels.install) if has_gpu else (OK, "")
    return Finding(name, f"{lacks}: {kernels.otherwise}", wanted, verdict, mend)


def _kernels_of_servers(found: Mapping[str, str], *, has_gpu: bool) -> Finding:
    """`found`: versions in SGLang's environment."""
    there = [f"{name} {found[name]}" for name in KERNELS_OF_SERVERS if name in found]
    has_all = "flashinfer-python" in found and bool(found.keys() & {"sglang-kernel", "sgl-kernel"})
    mend = "bash launch/gpu/install.sh server" if has_gpu and not has_all else ""
    text = ", ".join(there) or "not installed: torch's operations, on a CPU"
    return Finding("SGLang's kernels", text, "on GPUs sglang-kernel and flashinfer-python", NOTE if mend else OK, mend)


def _package(name: str, tested: str) -> Finding:
    choices = TORCHES if name == "torch" else (tested,)
    wanted, mend = " or ".join(choices), f'{sys.executable} -m pip install "{name}=={tested}"'
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "missing", wanted, FAIL, mend)
    if _public(found) in choices:
        return Finding(name, found, wanted, OK)
    return Finding(name, found, wanted, FAIL if name == "megatron-core" else NOTE, mend)


def _together(servers: dict[str, str], *, has_gpu: bool) -> Finding:
    """Whether trainer and servers are as one set of lock files has them."""
    try:
        own = _public(version("torch"))
    except PackageNotFoundError:
        own = "missing"
    torch = _public(servers.get("torch", "missing"))
    sets = [row for row in TOGETHER if (row.nccl is not None) == has_gpu]
    is_known = any((row.torch, row.sglang, row.torch_of_servers) == (own, servers["sglang"], torch) for row in sets)
    found = f"torch {own} with SGLang {servers['sglang']} on torch {torch}"
    wanted = "tested: " + "; or ".join(map(str, sets))
    return Finding("trainer with SGLang", found, wanted, OK if is_known else NOTE, "" if is_known else sets[0].install)


def _public(found: str) -> str:
    """2.13.0+cpu -> 2.13.0"""
    return found.partition("+")[0]
