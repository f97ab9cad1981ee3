"""Streams, saves and loads the adapters of a LoRA model under PEFT's names and in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megarl.arch.projections import LINEARS, chosen, projections_of
from megarl.mcore.models.lora import LoraSettings, adapted, settings_in
from megarl.mcore.models.model import Model
from megarl.weights.hf.export import BUFFER_BYTES
from megarl.weights.hf.folder import write_whole
from megarl.weights.hf.gather import ModelParallel, to_its_end, whole_tensors
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import Op, Rename

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's wrapper around the model


def adapter_table(hf_config: HFConfig, settings: LoraSettings) -> list[Op]:
    """The mappings of A and B of every adapted projection, in the order of the model."""
    targets = chosen(settings.targets, projections_of(hf_config))
    return [
        op
        for linear, projection, name in _projections(hf_config)
        if projection in targets
        for op in _pair(linear, projection, name, settings.rank)
    ]


def _projections(hf_config: HFConfig) -> Iterator[tuple[Op, str, str]]:
    """(mapping of the linear's weight, projection, HF name of the projection's weight) of everything adaptable."""
    for op in table_for(hf_config):
        linear, _, kind = op.param.rpartition(".")
        projections = LINEARS.get(linear.rpartition(".")[2], ())
        if projections and kind == "weight":
            yield from ((op, *both) for both in zip(projections, op.hf_shapes, strict=True))


def module_names(hf_config: HFConfig, settings: LoraSettings) -> dict[str, str]:
    """HF's names of the adapted modules -> the projections: the same names, but w1, w3, w2 in Mixtral's experts."""
    targets = chosen(settings.targets, projections_of(hf_config))
    named = ((name.split(".")[-2], projection) for _, projection, name in _projections(hf_config))
    return {module: projection for module, projection in named if projection in targets}


def _pair(op: Op, projection: str, name: str, rank: int) -> list[Op]:
    """B has the weight's rows and A its columns; where the weight is cut, B or A is cut in the same way."""
    rows, columns = op.hf_shapes[name]
    cut_at = op.pieces(0, 1)[0].dim  # 0: rows
    param, module = f"{op.param.removesuffix('.weight')}.lora.{projection}", name.removesuffix(".weight")
    a, b = f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"
    return [
        Rename(f"{param}.A", a, (rank, columns), 1 if cut_at == 1 else None, axis=op.axis, expert=op.expert),
        Rename(f"{param}.B", b, (rows, rank), 0 if cut_at == 0 else None, axis=op.axis, expert=op.expert),
    ]


def adapter_parameters(model: Model) -> dict[str, Tensor]:
    """The A and B that this rank holds, by their names in the whole model."""
    return {
        f"{path}.lora.{name}": param.detach()
        for path, linear in adapted(model)
        for name, param in linear.lora.named_parameters()
    }


def adapter_tensors(model: Model, hf_config: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, whole tensor) on every rank of a copy of the model; all of them must iterate to the end.

    If experts are distributed over several data-parallel replicas, these form one copy: let all ranks call it.  A
    tensor may share memory with the model: use it before you request the next one, and never write to it.
    """
    table = adapter_table(hf_config, settings_in(model))
    return whole_tensors(table, adapter_parameters(model), ModelParallel.current(), buffer_bytes=BUFFER_BYTES)


def peft_config(settings: LoraSettings, base_model: str, modules: Sequence[str]) -> dict[str, Any]:
    """The adapter_config.json that PEFT and SGLang read.

    `base_model`: folder or hub name of the base.  `modules`: names of the adapted modules; PEFT's are those of the
    folder (`module_names`), and SGLang's the projections.
    """
    whole = float(settings.alpha).is_integer()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if whole else settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_peft(model: Model, hf_config: HFConfig, folder: str | Path, *, base_model: str) -> None:
    """Write a folder that `peft` loads, from world rank 0; adapter_config.json is written last.

    Every rank of rank 0's copy of the model must call it, so let all ranks call it.  An adapter that already exists
    there is replaced.
    """
    with to_its_end(adapter_tensors(model, hf_config)) as stream:
        if dist.get_rank() == 0:
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG).unlink(missing_ok=True)
            tensors = on_cpu(stream)
            write_whole(folder / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
            settings = settings_in(model)
            modules = list(module_names(hf_config, settings))
            config = json.dumps(peft_config(settings, base_model, modules), indent=2) + "\n"
            write_whole(folder / CONFIG, lambda path: path.write_text(config))


def on_cpu(stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone().contiguous() for name, tensor in stream}
