"""Exports the model's shards as HF tensors: as a stream, or as a folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arch.hf_config import of_transformers
from megarl.arch.layout import RANDOM_WEIGHTS
from megarl.io.durable_files import WEIGHTS, write_sums
from megarl.mcore.models.model import Model
from megarl.weights.clock import Clock
from megarl.weights.hf.folder import CONFIG, HFWriter, clear_weights, copy_tokenizer, write_whole
from megarl.weights.hf.gather import ModelParallel, local_parameters, owner_dtypes, to_its_end, whole_tensors
from megarl.weights.mapping.blocks import HFConfig, Role
from megarl.weights.mapping.families import LAYERS_OF_FURTHER_TOKENS, stacks_for, table_for
from megarl.weights.mapping.names import Sizes, num_bytes
from megarl.weights.mapping.stacks import joined, joined_sizes

BUFFER_BYTES = 64 << 20
SHARD_BYTES = 4 << 30


def hf_tensors(
    model: Model,
    hf_config: HFConfig,
    *,
    role: Role = "actor",
    dtype: torch.dtype | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    clock: Clock | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) on every rank of a copy of the model, in table order; all must iterate to the end.

    If experts are distributed over several data-parallel replicas, these form one copy (see `gather`): let all ranks
    call it.  `dtype` None keeps each parameter's own type; so do mappings with `keeps_dtype`.  A tensor may share
    memory with the model: use it before you request the next one, and never write to it.  Peak extra memory: about
    twice the larger of `buffer_bytes` and the largest parameter, and a stack if folders stack experts.  `clock` counts
    the seconds of mapping and casting as `convert`.
    """
    clock = clock or Clock()
    table, where = table_for(hf_config, role=role), ModelParallel.current()
    as_they_are = {name for op in table if op.keeps_dtype for name in op.hf_shapes}
    single = whole_tensors(table, local_parameters(model), where, buffer_bytes=buffer_bytes, clock=clock)
    for name, tensor in joined(single, stacks_for(hf_config)):
        with clock("convert"):
            cast = tensor if dtype is None or name in as_they_are else tensor.to(dtype)
        yield name, cast


def hf_sizes(model: Model, hf_config: HFConfig, *, role: Role = "actor", dtype: torch.dtype | None = None) -> Sizes:
    """HF name -> shape and type of what `hf_tensors` yields, in its order; a collective of one small message."""
    table = table_for(hf_config, role=role)
    own = owner_dtypes(table, local_parameters(model), ModelParallel.current())
    types = [d if op.keeps_dtype else dtype or d for op, d in zip(table, own, strict=True)]
    single = {n: (shape, d) for op, d in zip(table, types, strict=True) for n, shape in op.hf_shapes.items()}
    return joined_sizes(single, stacks_for(hf_config))


def save_hf(
    model: Model,
    hf_config: HFConfig,
    folder: str | Path,
    *,
    source_folder: str | Path,
    role: Role = "actor",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write an HF folder from world rank 0: weights, tokenizer files of `source_folder`, and config.json last.

    Every rank of rank 0's copy of the model must call it, so let all ranks call it.  A folder without config.json is
    not finished.  A critic is written as a sequence classifier with one label, which `transformers` loads too.
    """
    sizes = hf_sizes(model, hf_config, role=role, dtype=dtype)
    with to_its_end(hf_tensors(model, hf_config, role=role, dtype=dtype)) as stream:
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            clear_weights(Path(folder))
            whole = {name: num_bytes(shape, dtype) for name, (shape, dtype) in sizes.items()}
            writer = HFWriter(Path(folder), whole, shard_bytes)
            for name, tensor in stream:
                writer.add(name, tensor)
            writer.finish()
            finish_folder(Path(folder), Path(source_folder), role, next(d for _, d in sizes.values()))


def finish_folder(folder: Path, source_folder: Path, role: Role, dtype: torch.dtype) -> None:
    """Add digests and the tokenizer's files to the weights, then config.json, which marks the folder as complete."""
    config = _config_to_write(source_folder, role, dtype)
    write_sums(folder, WEIGHTS)
    copy_tokenizer(source_folder, folder)
    write_whole(folder / CONFIG, lambda p: p.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n"))


def _config_to_write(source_folder: Path, role: Role, dtype: torch.dtype) -> dict[str, Any]:
    config = json.loads((source_folder / CONFIG).read_text())
    config.pop("torch_dtype", None)  # the older name of "dtype"
    config.pop(RANDOM_WEIGHTS, None)  # now there are weights
    config.pop("quantization_config", None)  # which are not quantized
    config["dtype"] = str(dtype).removeprefix("torch.")
    for key in LAYERS_OF_FURTHER_TOKENS:
        if config.get(key):
            config[key] = 0  # the model has none: see families.ignorable
    if role == "critic":
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return of_transformers(config, "ForSequenceClassification" if role == "critic" else "ForCausalLM")
