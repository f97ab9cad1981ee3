"""The driver of a conversion: check source and target, start ranks, read, write, verify, rename the folder."""

from __future__ import annotations

import math
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.filesize import decimal

import megarl
from megarl.convert.folders import (
    Format,
    ModelFolder,
    check_target,
    describe,
    finish_megatron,
    hf_sizes,
    staged,
)
from megarl.convert.ranks import Ranks
from megarl.convert.request import AXES, DTYPES, Request
from megarl.group import Group
from megarl.hf_config import read_hf_config
from megarl.layout import Layout, misfits, numbers_of
from megarl.model_settings.families import settings_of
from megarl.terminal import sentences
from megarl.weights.mapping.blocks import Role
from megarl.weights.mapping.names import some_names

EXIT_FAILED = 1
REPORT = "failure.txt"
CALL_TIMEOUT_S = 24 * 3600.0  # of one step: long for slow disks; a rank that dies is detected at once


class Mismatch(RuntimeError):
    """Two folders that should hold the same tensors differ."""


def main(request: Request) -> int:
    """`megarl convert`: 0 done, 1 if ranks fail or tensors differ.  Raises ValueError for an invalid request."""
    console = sentences()
    source = describe(request.source, request.model)
    target = describe(request.target) if request.verify_only else _planned(request, source)
    if target.dtype not in DTYPES:
        raise ValueError(f"{source.path}: its tensors are {target.dtype}; expected dtype={' or dtype='.join(DTYPES)}")
    sizes: dict[str, Any] = dict(request.layout)
    layout = Layout(**sizes)
    check_fits(source.hf_folder, source.role, layout)
    num_ranks = ranks_of(layout)
    axes = " ".join(f"{axis}={size}" for axis, size in _sizes(layout).items())
    heading = f"from {source}\nto   {target}\nover {num_ranks} ranks: {axes}"
    console.print(heading)
    logs = Path(tempfile.mkdtemp(prefix="megarl_convert_"))
    limits: dict[str, Any] = {"device": request.device, "call_timeout_s": CALL_TIMEOUT_S}
    group = Group("ranks", num_ranks, layout, log_dir=logs, worker="megarl.convert.worker", **limits)
    try:
        if request.verify_only:
            with _ranks(group, console, source, target) as ranks:
                verify(ranks, source, target)
        else:
            # The ranks end before the unfinished folder is removed.
            with staged(target.path) as partial, _ranks(group, console, source, target) as ranks:
                _convert(ranks, source, replace(target, path=partial), layout, verified=request.verify)
    except RuntimeError as error:
        return _stopped(error, logs)
    finally:
        if not (logs / REPORT).exists():
            shutil.rmtree(logs)
    console.print("equal" if request.verify_only else f"done: {target.path}")
    return 0


@contextmanager
def _ranks(group: Group, console: Console, source: ModelFolder, target: ModelFolder) -> Iterator[Ranks]:
    """Rank processes with a model of the source's shapes and the target's dtype."""
    with group:
        ranks = Ranks(group, console)
        with console.status("starting ranks"):
            ranks.build(source.hf_folder, source.role, target.dtype)
        yield ranks


def check_fits(hf_folder: Path, role: Role, layout: Layout) -> None:
    """ValueError, before any rank starts, for a model that cannot be built, or sizes that do not divide."""
    config = read_hf_config(hf_folder)
    settings_of(config)
    for misfit in misfits(numbers_of(config), layout):
        raise ValueError(misfit.sentence)


def ranks_of(layout: Layout) -> int:
    """The smallest number of ranks that hold a model: experts may be sharded over several replicas of dense weights."""
    return layout.pp * math.lcm(layout.tp, layout.ep * layout.expert_tp)


def verify(ranks: Ranks, source: ModelFolder, target: ModelFolder) -> None:
    """Read both folders and compare every tensor; Mismatch names those that differ."""
    expected, got = ranks.digests(source, "verify from"), ranks.digests(target, "verify to")
    parts = [
        ("differ", [n for n in expected if n in got and got[n] != expected[n]]),
        ("are missing", [n for n in expected if n not in got]),
        ("are too many", [n for n in got if n not in expected]),
    ]
    faults = [f"{len(names)} tensors {what}: {some_names(names)}" for what, names in parts if names]
    if faults:
        raise Mismatch(f"{target.path} does not hold what {source.path} does: {'; '.join(faults)}")


def _convert(ranks: Ranks, source: ModelFolder, target: ModelFolder, layout: Layout, *, verified: bool) -> None:
    free = shutil.disk_usage(target.path).free
    if free < ranks.num_bytes:
        raise ValueError(f"to: the model takes {decimal(ranks.num_bytes)}, the disk has {decimal(free)} free")
    _say_what_changes(ranks, source)
    ranks.load(source, "read")
    ranks.write(target, source)
    if verified:
        verify(ranks, source, target)
    if target.format == "megatron":
        finish_megatron(target.path, source.hf_folder, _manifest(ranks, source, target, layout, verified))


def _say_what_changes(ranks: Ranks, source: ModelFolder) -> None:
    """Print which tensors change their dtype; for a checkpoint the first two lines of output show the dtypes."""
    stored = hf_sizes(source.path) if source.format == "hf" else {}
    changed = [name for name, (_, dtype) in stored.items() if name in ranks.tensors and ranks.tensors[name][1] != dtype]
    if changed:
        ranks.console.print(f"{len(changed)} tensors change their type: {some_names(changed, 3)}")


def _manifest(ranks: Ranks, source: ModelFolder, target: ModelFolder, layout: Layout, verified: bool) -> dict[str, Any]:
    return {
        "format": "megatron",
        "megarl": megarl.__version__,
        "role": target.role,
        "dtype": target.dtype,
        "layout": _sizes(layout),
        "num_tensors": len(ranks.tensors),  # as Hugging Face counts them
        "num_bytes": ranks.num_bytes,
        "source": str(source.path.resolve()),
        "verified": verified,
    }


def _sizes(layout: Layout) -> dict[str, int]:
    """The axes of a conversion that are set, and their sizes."""
    sizes = {axis: getattr(layout, axis) for axis in AXES} | {"etp": layout.expert_tp}
    return {axis: size for axis, size in sizes.items() if size is not None}


def _stopped(error: RuntimeError, logs: Path) -> int:
    """Print one sentence; if ranks failed, also write the full report to a file that is kept."""
    words = f"not equal: {error}"
    if not isinstance(error, Mismatch):
        words = f"the conversion stopped: {error}\nall of it: {logs / REPORT}"
        (logs / REPORT).write_text("".join(traceback.format_exception(error)) + getattr(error, "report", ""))
    sentences(stderr=True).print(words)
    return EXIT_FAILED


def _planned(request: Request, source: ModelFolder) -> ModelFolder:
    """The folder to write; ValueError if it must not be written."""
    check_target(request.target, request.source)
    if source.has_adapters and request.dtype not in (None, source.dtype):
        raise ValueError(
            f"dtype={request.dtype}: the adapters in {source.path} were trained on {source.dtype}; expected that "
            "first, and then another type of what came out"
        )
    form = cast(Format, request.format or ("megatron" if source.format == "hf" else "hf"))
    return ModelFolder(request.target, form, source.role, source.hf_folder, request.dtype or source.dtype)
