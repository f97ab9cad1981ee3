"""Exports the model's shards as HF tensors: as a stream, or as a folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arch.hf_config import has_vision_part, of_transformers, text_part
from megarl.arch.layout import RANDOM_WEIGHTS
from megarl.arch.mtp import trained_mtp
from megarl.io.durable_files import WEIGHTS, write_sums
from megarl.mcore.models.model import Model
from megarl.weights.clock import Clock
from megarl.weights.hf.folder import CONFIG, SHARD_BYTES, clear_weights, copy_tokenizer, write_tensors, write_whole
from megarl.weights.hf.gather import ModelParallel, local_parameters, owner_dtypes, to_its_end, whole_tensors
from megarl.weights.hf.named import names_in, untrained_in
from megarl.weights.mapping.blocks import HFConfig, Role
from megarl.weights.mapping.families import (
    LAYERS_OF_FURTHER_TOKENS,
    name_beside_vision,
    plain_stacks,
    stacks_for,
    table_for,
)
from megarl.weights.mapping.mtp import shared_copies
from megarl.weights.mapping.names import Sizes
from megarl.weights.mapping.stacks import joined, joined_sizes

BUFFER_BYTES = 64 << 20


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
    not finished.  What the source holds and the model does not train (vision parts, layers that predict further
    tokens) is copied, and beside a vision part the names are those of the source.  A critic is written as a sequence
    classifier of text with one label, which `transformers` loads too, without these parts.
    """
    source, sizes = Path(source_folder), hf_sizes(model, hf_config, role=role, dtype=dtype)
    with to_its_end(hf_tensors(model, hf_config, role=role, dtype=dtype)) as stream:
        if dist.get_rank() > 0:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        clear_weights(Path(folder))
        is_beside_vision = role == "actor" and has_vision_part(json.loads((source / CONFIG).read_text()))
        stored = partial(name_beside_vision, hf_config) if is_beside_vision else str
        of_source = names_in(source)
        plain = plain_stacks(table_for(hf_config)) if is_beside_vision else []
        stacks = [stack for stack in plain if stored(stack.hf_name) in of_source]
        copies = [pair for pair in shared_copies(hf_config).items() if pair[0] in of_source]
        sizes = joined_sizes(sizes, stacks)
        names = {name: [stored(name), *(copy for copy, of in copies if of == name)] for name in sizes}
        own = {each: size for name, size in sizes.items() for each in names[name]}
        tensors = ((each, tensor) for name, tensor in joined(stream, stacks) for each in names[name])
        with untrained_in(source, hf_config, role) as rest:
            write_tensors(Path(folder), own, tensors, rest, shard_bytes)
        has_rest = bool(rest.shapes) or trained_mtp(hf_config) > 0
        finish_folder(Path(folder), source, role, next(d for _, d in sizes.values()), has_rest=has_rest)


def finish_folder(folder: Path, source: Path, role: Role, dtype: torch.dtype, *, has_rest: bool = False) -> None:
    """Add digests and the tokenizer's files to the weights, then config.json, which marks the folder as complete.

    `has_rest`: it has the layers of the source that predict further tokens, if there are any.
    """
    config = json.loads((source / CONFIG).read_text())
    config = dict(text_part(config)) if role == "critic" else config
    for part in (config, config.get("text_config") or {}):
        older = part.pop("torch_dtype", None)
        if part is config or older or "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    config.pop(RANDOM_WEIGHTS, None)  # now there are weights
    config.pop("quantization_config", None)  # which are not quantized
    for key in () if has_rest else LAYERS_OF_FURTHER_TOKENS:
        if config.get(key):
            config[key] = 0
    if role == "critic":
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        ends = config.get("eos_token_id")
        if config.get("pad_token_id") in (ends if isinstance(ends, list) else [ends]):
            # transformers would take the end of a text for padding, and read the score one token too early.
            config["pad_token_id"] = None
    if not has_vision_part(config):
        config = of_transformers(config, "ForSequenceClassification" if role == "critic" else "ForCausalLM")
    write_sums(folder, WEIGHTS)
    copy_tokenizer(source, folder)
    write_whole(folder / CONFIG, lambda p: p.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n"))
