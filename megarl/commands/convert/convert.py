"""The driver of a conversion: check source and target, start ranks, read, write, verify, rename the folder."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

import megarl
from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout, misfits, numbers_of
from megarl.arch.settings.families import settings_of
from megarl.commands.convert.folders import (
    Format,
    ModelFolder,
    bytes_under,
    check_target,
    describe,
    finish_megatron,
    hf_sizes,
    staged,
)
from megarl.commands.convert.request import AXES, DTYPES, Request
from megarl.group import Group, GroupSettings
from megarl.io.durable_files import StorageError, named, number_of
from megarl.io.terminal import say, sentences
from megarl.roles import messages
from megarl.roles.handles import Critic, Role, SaveError
from megarl.roles.settings import LoadSettings, Packing
from megarl.weights.hf.named import check_folder
from megarl.weights.mapping.blocks import Role as Kind
from megarl.weights.mapping.names import num_bytes, some_names

EXIT_FAILED = 1
REPORT = "failure.txt"
MODEL = "model"  # the role of a conversion
CALL_TIMEOUT_S = 7 * 24 * 3600.0  # to read, write or digest a whole model; a rank that dies or hangs is found at once


class Mismatch(RuntimeError):
    """Two folders that should hold the same tensors differ."""


@dataclass(frozen=True)
class Ranks:
    """The model of a conversion on its ranks: what they read, write and digest, with the progress on a terminal."""

    group: Group
    console: Console
    model: Role
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]  # HF name -> shape, type

    @classmethod
    @contextmanager
    def started(cls, group: Group, console: Console, source: ModelFolder, dtype: str) -> Iterator[Ranks]:
        """Rank processes with a model of the source's shapes, all of it zero."""
        with group:
            with console.status("starting ranks"):
                group.start()
                model = (Critic if source.role == "critic" else Role)(MODEL, group, Packing())
                model.load(str(source.hf_folder), LoadSettings(dtype, reads_weights=False, mtp=source.mtp))
            found = group.call_leader(messages.Sizes(model.name)).result["tensors"].items()
            yield cls(group, console, model, {n: (tuple(shape), getattr(torch, kind)) for n, (shape, kind) in found})

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(*size) for size in self.tensors.values())

    def read(self, folder: ModelFolder, title: str) -> None:
        with self._timed(title):
            self.group.call(messages.Read(MODEL, folder.format, str(folder.path), str(folder.hf_folder)))

    def write(self, folder: ModelFolder) -> None:
        """Write the model; OSError if storage does not take it.  The tokenizer is the source's."""
        with self._timed("write", folder.path):
            if folder.format == "hf":
                self.model.export(folder.path)
                return
            self.model.save(folder.path)
            try:
                self.model.is_saved()
            except SaveError as error:
                if number := number_of(error):
                    raise StorageError(number, str(error)) from error
                raise

    def digests(self, folder: ModelFolder, title: str) -> dict[str, str]:
        """HF name -> digest of each tensor in a folder, read from disk again."""
        is_hf = folder.format == "hf"
        if not is_hf:
            self.read(folder, f"{title}: reading")
        with self._timed(title):
            message = messages.Digests(MODEL, str(folder.path) if is_hf else None)
            found: dict[str, str] = self.group.call_leader(message).result["digests"]
        return found

    @contextmanager
    def _timed(self, title: str, grows: Path | None = None) -> Iterator[None]:
        """Say what is done, meanwhile only on a terminal, and then how long it took.  `grows`: the folder of a bar."""
        begun = time.monotonic()
        with self._bar(title, grows) if grows and self.console.is_terminal else self.console.status(title):
            yield
        size, seconds = decimal(self.num_bytes), time.monotonic() - begun
        self.console.print(f"{title}: {len(self.tensors)} tensors, {size}, {seconds:.1f} s", highlight=False)

    @contextmanager
    def _bar(self, title: str, folder: Path) -> Iterator[None]:
        """A bar as long as the part of the model that is in the folder."""
        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task, ends = bar.add_task(title, total=self.num_bytes), threading.Event()

            def look() -> None:
                while not ends.wait(0.2):
                    bar.update(task, completed=min(bytes_under(folder), self.num_bytes))

            thread = threading.Thread(target=look, daemon=True)
            thread.start()
            try:
                yield
            finally:
                ends.set()
                thread.join()


def main(request: Request) -> int:
    """`megarl convert`: 0 done, 1 if ranks fail or tensors differ.  Raises ValueError for an invalid request."""
    console = sentences()
    source = describe(request.source, request.model)
    target = describe(request.target) if request.verify_only else _planned(request, source)
    if target.dtype not in DTYPES:
        raise ValueError(f"{source.path}: its tensors are {target.dtype}; expected dtype={' or dtype='.join(DTYPES)}")
    sizes: dict[str, Any] = dict(request.layout)
    layout = Layout(**sizes)
    if source.format == "hf":
        check_folder(source.path, source.role)
    check_fits(source.hf_folder, source.role, layout)
    num_ranks = ranks_of(layout)
    axes = " ".join(f"{axis}={size}" for axis, size in _sizes(layout).items())
    heading = f"from {source}\nto   {target}\nover {num_ranks} ranks: {axes}"
    console.print(heading)
    logs = Path(tempfile.mkdtemp(prefix="megarl_convert_"))
    settings = GroupSettings(device=request.device, call_timeout_s=CALL_TIMEOUT_S)
    group = Group("ranks", num_ranks, layout, settings, log_dir=logs)
    started = Ranks.started(group, console, source, target.dtype)
    try:
        if request.verify_only:
            with started as ranks:
                verify(ranks, source, target)
        else:
            # The ranks end before the unfinished folder is removed.
            with staged(target.path) as partial, started as ranks:
                _convert(ranks, source, replace(target, path=partial), layout, verified=request.verify)
    except RuntimeError as error:
        return _stopped(error, logs)
    finally:
        if not (logs / REPORT).exists():
            shutil.rmtree(logs)
    console.print("equal" if request.verify_only else f"done: {target.path}")
    return 0


def check_fits(hf_folder: Path, role: Kind, layout: Layout) -> None:
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
    ranks.read(source, "read")
    with named(target.path):
        ranks.write(target)
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
    words = [f"not equal: {error}"]
    if not isinstance(error, Mismatch):
        words = [f"the conversion stopped: {error}", f"all of it: {logs / REPORT}"]
        (logs / REPORT).write_text("".join(traceback.format_exception(error)) + getattr(error, "report", ""))
    say(*words)
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
