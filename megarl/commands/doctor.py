"""`megarl doctor`: checks whether this machine has what a run needs; changes nothing and starts nothing.

It runs without the packages that it checks: a missing package is a row of the table.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megarl.config import Config
from megarl.config.names import REWARDS_OF_CODE
from megarl.config.validate.rewards import names_of
from megarl.sandbox.layers import URL, layers

OK, NOTE, FAIL = "ok", "note", "fail"
_COLOURS = {OK: "green", NOTE: "yellow", FAIL: "red"}

# The tested versions.  Another version is a note; another megatron-core is a failure, because its internals are used.
TESTED = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
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
    "httpcore": "1.0.9",
    "httpx": "0.28.1",
    "pebble": "5.2.3",
    "matplotlib": "3.11.2",
    "plotly": "7.1.0",
    "rich": "15.0.0",
}
PYTHONS = ((3, 11), (3, 12))
QUICKSTART_MEMORY_BYTES = 4 * 2**30
QUICKSTART_DISK_BYTES = 1 * 2**30


class Finding(NamedTuple):
    """Example: Finding("einops", "missing", "0.8.2", "fail")."""

    subject: str
    found: str
    wanted: str
    verdict: str


def main(config: Config) -> int:
    """Print a table of findings; 0 if the quickstart can run here, else 1."""
    findings = examine(config)
    table = Table("", "found", "tested or wanted", "")
    for finding in findings:
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.subject, finding.found, finding.wanted, verdict)
    console = Console()
    console.print(table)
    failed = [finding.subject for finding in findings if finding.verdict == FAIL]
    if failed:
        console.print(f"[red]A run cannot start here:[/] {', '.join(failed)}.")
        return 1
    console.print("[green]The quickstart can run here:[/] megarl train recipe=quickstart")
    return 0


def examine(config: Config) -> list[Finding]:
    """All findings, in the order of the table."""
    return [
        _python(),
        *(_package(name, tested) for name, tested in TESTED.items()),
        _accelerator(config.trainer.device),
        *_servers(config),
        *(_optional(module, use) for module, use in _OPTIONAL.items()),
        *_sandbox(config),
        _space("memory", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), QUICKSTART_MEMORY_BYTES),
        _space("disk", shutil.disk_usage(".").free, QUICKSTART_DISK_BYTES),
        _loopback(),
    ]


_OPTIONAL = {
    "transformer_engine": "faster attention and linear layers on a GPU",
    "apex": "gradients added inside the matrix product on a GPU",
}


def _python() -> Finding:
    wanted = " or ".join(".".join(map(str, pair)) for pair in PYTHONS)
    return Finding("python", platform.python_version(), wanted, OK if sys.version_info[:2] in PYTHONS else FAIL)


def _package(name: str, tested: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "missing", tested, FAIL)
    if found.partition("+")[0] == tested:  # for example torch 2.13.0+cpu
        return Finding(name, found, tested, OK)
    return Finding(name, found, tested, FAIL if name == "megatron-core" else NOTE)


def _accelerator(device: str) -> Finding:
    wanted, otherwise = ("trainer.device=cuda needs one", FAIL) if device == "cuda" else ("optional", OK)
    try:
        import torch
    except ImportError as error:
        return Finding("CUDA", f"unknown: {error}", wanted, NOTE)
    if torch.cuda.is_available():
        return Finding("CUDA", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", wanted, OK)
    return Finding("CUDA", f"none; {os.cpu_count()} CPU cores", wanted, otherwise)


def _servers(config: Config) -> list[Finding]:
    """SGLang's environment, and NCCL of both environments, which a push over NCCL joins."""
    rollout = config.rollout
    is_wanted = rollout.engine == "sglang" or rollout.sglang.python is not None
    wanted, otherwise = (
        ("rollout.engine=sglang needs it", FAIL) if is_wanted else ("optional: rollout.engine=sglang", OK)
    )
    try:
        from megarl.servers.nccl import nccl_of, versions_in
        from megarl.servers.sglang_environment import sglang_python
        from megarl.trainer.servers.colocation import uses_gpus

        python = sglang_python(rollout.sglang.python)
        found = versions_in(python, ["sglang"]).get("sglang")
        theirs, ours = nccl_of(python), nccl_of(Path(sys.executable))
    except ImportError as error:
        return [Finding("SGLang", f"unknown: {error}", wanted, NOTE)]
    except ValueError as error:
        return [Finding("SGLang", str(error) if is_wanted else "absent", wanted, otherwise)]
    differ = ours is not None and theirs is not None and ours != theirs
    verdict = OK if not differ else FAIL if uses_gpus(config) else NOTE
    both = f"trainer {ours or 'unknown'}, SGLang {theirs or 'unknown'}"
    return [
        Finding("SGLang", found or f"not in the environment of {python}", wanted, OK if found else otherwise),
        Finding("NCCL", both, "on GPUs the same version in both: bash launch/gpu/install.sh", verdict),
    ]


def _optional(module: str, use: str) -> Finding:
    return Finding(module, "present" if find_spec(module) else "absent", f"optional: {use}", OK)


def _sandbox(config: Config) -> list[Finding]:
    """The layers that confine code of a model."""
    *parts, whole = layers()
    runs_code = [fn for fn in names_of(config) if fn in REWARDS_OF_CODE]
    is_wanted = bool(runs_code) and not config.reward.sandbox.startswith(URL)
    wanted = f"the reward {runs_code[0]} needs one" if is_wanted else "optional: reward.fn=code"
    verdict = OK if whole.is_there else FAIL if is_wanted else NOTE
    return [
        *(Finding(part.name, part.found, "optional: a layer of the sandbox", OK) for part in parts),
        Finding(whole.name, whole.found, wanted, verdict),
    ]


def _space(subject: str, free: int, wanted: int) -> Finding:
    verdict = OK if free >= wanted else FAIL
    return Finding(f"free {subject}", f"{free / 2**30:.1f} GiB", f"{wanted / 2**30:.1f} GiB", verdict)


def _loopback() -> Finding:
    """Ranks and servers of one machine communicate over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding("loopback socket", str(error), "127.0.0.1 connects", FAIL)
    return Finding("loopback socket", "connects", "127.0.0.1 connects", OK)
