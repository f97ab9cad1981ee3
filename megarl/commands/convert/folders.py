"""Describes model folders on disk, and creates new ones under a temporary name until they are complete.

A Megatron folder made here describes itself.  In addition to the shards (`checkpoint.json`, `rank_*`) it has `hf/`,
with config.json and the tokenizer's files, and `manifest.json`, written last, with role, type and layout.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megarl.arch.hf_config import read_hf_config
from megarl.config import read_yaml
from megarl.io.durable_files import faults_of_sums, inside
from megarl.io.rank_files import ABOUT, facts_under
from megarl.mcore.checkpoint.checkpoint import adapters_in, weights_in
from megarl.mcore.checkpoint.torch_dist import METADATA, sizes_in
from megarl.trainer.build import model_folder
from megarl.trainer.checkpoint.checkpoint import FILES_OF_RANKS, MANIFEST, faults_in, read_manifest, write_manifest
from megarl.weights.hf.folder import CONFIG, copy_tokenizer, write_tensors
from megarl.weights.hf.named import open_for, untrained_in
from megarl.weights.mapping.blocks import Role
from megarl.weights.mapping.mtp import MTP_PREFIX
from megarl.weights.mapping.names import num_bytes

Format = Literal["hf", "megatron", "torch_dist"]
HF_PART = "hf"
DIST_CKPT, HUGGINGFACE = "dist_ckpt", "huggingface"  # in a role's folder of verl's global_step_N


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk."""

    path: Path
    format: Format
    role: Role
    hf_folder: Path  # with its config.json and tokenizer; for adapters also with the base weights
    dtype: str  # of most of its bytes
    has_adapters: bool = False  # it holds only LoRA adapters

    @property
    def mtp(self) -> str:
        """Whether MTP layers are in its shards, which then are a part of its model: joint | off."""
        names = weights_in(self.path) if self.format == "megatron" else ()
        return "joint" if any(name.startswith(MTP_PREFIX) for name in names) else "off"

    def __str__(self) -> str:
        return f"{self.path} ({self.format}, {self.role}, {self.dtype}{', adapters' if self.has_adapters else ''})"


def describe(path: Path, model: Path | None = None) -> ModelFolder:
    """The model at `path`; `model`: the HF folder that a checkpoint's run began with (None: from the run's config).

    Raises a ValueError of one sentence if there is no model or it is not finished.
    """
    if (path / ABOUT).is_file():
        return _of_shards(path, model)
    for shards in (path, path / DIST_CKPT):
        if (shards / METADATA).is_file():
            return _of_torch_dist(path, shards, model)
    if model is not None:
        raise ValueError(f"model={model}: {path} is not a checkpoint of a run; expected no model=")
    if (path / CONFIG).is_file():
        _refuse(faults_of_sums(path))
        return ModelFolder(path, "hf", _hf_role(path), path, _hf_dtype(path))
    if roles := sorted(child.parent.name for child in path.glob(f"*/{HUGGINGFACE}")):
        raise ValueError(f"{path}: verl's checkpoint with {', '.join(roles)}; expected {path / roles[0]}")
    if (path / MANIFEST).is_file():
        roles = [child.parent.name for child in sorted(path.glob(f"*/{ABOUT}"))]
        raise ValueError(f"{path}: a checkpoint with {', '.join(roles)}; expected {path / (roles or ['actor'])[0]}")
    raise ValueError(
        f"{path}: neither a Hugging Face folder (no {CONFIG}) nor a finished Megatron checkpoint (no {ABOUT})"
    )


def _of_torch_dist(path: Path, shards: Path, model: Path | None) -> ModelFolder:
    """A folder of Megatron's `dist_checkpointing`, or a role's folder of verl's, with the model's config beside it.

    With a bridge verl writes the weights into that folder, and only the optimizer into the other one.
    """
    hf = model or path / HUGGINGFACE
    if not (hf / CONFIG).is_file():
        raise ValueError(f"{shards}: Megatron's checkpoint says no architecture; expected model=FOLDER with {CONFIG}")
    sizes = sizes_in(shards)
    if not sizes:
        return ModelFolder(hf, "hf", _hf_role(hf), hf, _hf_dtype(hf))
    role: Role = "critic" if path.name == "critic" else _hf_role(hf)
    return ModelFolder(shards, "torch_dist", role, hf, _most([(d, num_bytes(shape, d)) for shape, d in sizes]))


def _of_shards(path: Path, model: Path | None) -> ModelFolder:
    """A folder made here, or a role's folder in the checkpoint of a run."""
    if (path / MANIFEST).is_file():
        if model is not None:
            raise ValueError(f"model={model}: {path} has a {CONFIG} of its own; expected no model=")
        _refuse(faults_in(path, reads=True, skip=FILES_OF_RANKS))
        manifest = read_manifest(path)
        return ModelFolder(path, "megatron", manifest["role"], path / HF_PART, _shards_dtype(path))
    if not (path.parent / MANIFEST).is_file():
        raise ValueError(
            f"{path}: an unfinished checkpoint (no {MANIFEST} in it or beside it); expected a finished one"
        )
    _refuse(faults_in(path.parent, reads=True, skip=FILES_OF_RANKS))
    role: Role = "critic" if path.name == "critic" else "actor"
    model, base_dtype = (model, None) if model else _base_of_run(path, role)
    if not (model / CONFIG).is_file():
        raise ValueError(
            f"model={model}: there is no {CONFIG}; expected the Hugging Face folder that the run began with"
        )
    if adapters_in(path) is not None:
        return ModelFolder(path, "megatron", role, model, base_dtype or _hf_dtype(model), has_adapters=True)
    return ModelFolder(path, "megatron", role, model, _shards_dtype(path))


def _refuse(faults: list[str]) -> None:
    """The ranks check the files that they read."""
    if faults:
        raise ValueError(f"{'; '.join(faults)}; expected an unchanged folder")


def _base_of_run(path: Path, role: Role) -> tuple[Path, str]:
    """The HF folder that a run's role began with, and the dtype of its training, from the run's config.yaml."""
    settings = path.absolute().parents[2] / "config.yaml"
    if not settings.is_file():
        raise ValueError(f"{path}: there is no {settings} to say whose weights these are; expected model=FOLDER")
    config = read_yaml(settings)
    return Path(model_folder(config.critic.model.path if role == "critic" else config.model.path)), config.model.dtype


def _hf_role(path: Path) -> Role:
    inside(path, CONFIG)
    kinds = read_hf_config(path).get("architectures") or [""]
    return "critic" if kinds[0].endswith("ForSequenceClassification") else "actor"


def _hf_dtype(path: Path) -> str:
    return _most([(dtype, num_bytes(shape, dtype)) for shape, dtype in hf_sizes(path).values()])


def hf_sizes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor of a Hugging Face folder, as it is read; no weights are read."""
    with open_for(path, read_hf_config(path)) as folder:
        return {name: (shape, folder.dtype(name)) for name, shape in folder.hub_shapes.items()}


def _shards_dtype(path: Path) -> str:
    found = [(shape, getattr(torch, dtype)) for shape, dtype in weights_in(path).values()]
    return _most([(dtype, num_bytes(shape, dtype)) for shape, dtype in found])


def _most(sizes: list[tuple[torch.dtype, int]]) -> str:
    count: Counter[torch.dtype] = Counter()
    for dtype, size in sizes:
        count[dtype] += size
    return str(count.most_common(1)[0][0]).removeprefix("torch.")


def check_target(target: Path, source: Path) -> None:
    """ValueError unless `target` is a new name or an empty folder: nothing is ever overwritten."""
    if target.resolve() == source.resolve():
        raise ValueError(f"to={target}: the same folder as from={source}; expected a new one")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"to={target}: there is something already, and nothing is overwritten; expected a new folder")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder to write into, TARGET.partial, which is renamed to `target` at the end.

    An exception inside removes it; a folder left by a killed process is removed at the next call.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, target)  # also replaces an empty folder
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish_megatron(folder: Path, hf_folder: Path, manifest: dict[str, Any]) -> None:
    """Add config, tokenizer, what is not trained, and the manifest to a folder of shards; the manifest comes last."""
    part = folder / HF_PART
    part.mkdir()
    shutil.copyfile(hf_folder / CONFIG, part / CONFIG)
    copy_tokenizer(hf_folder, part)
    with untrained_in(hf_folder, read_hf_config(hf_folder), manifest["role"]) as rest:
        write_tensors(part, {}, (), rest)
    write_manifest(folder, {**manifest, "files": facts_under(folder, "")})


def bytes_under(folder: Path) -> int:
    """Bytes of all files under `folder`; files that disappear meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # renamed by its writer
                continue
    return total
