"""What a rung of the ladder for eight GPUs would build of Transformer-Engine's layers, with a GPU pretended."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from chunks import named_parameters
from parity_cases import Case
from te_backends import fake_world
from te_cases import run_te_cases

from megarl.arch.layout import Layout
from megarl.mcore.models import model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.transformer_engine import local_name

Shapes = dict[str, tuple[int, ...]]  # of a rank's parameters, by the names of local layers
TE = ExecutionOptions(transformer_impl="transformer_engine")
LOCAL = ExecutionOptions(transformer_impl="local")


@contextmanager
def _gpu() -> Iterator[None]:
    import te_on_cpu

    te_on_cpu.activate()
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.backends.cudnn, "version", lambda: 92400),
    ):
        yield


def configured(layouts: Mapping[str, tuple[dict[str, Any], Layout, ExecutionOptions]]) -> dict[str, str]:
    """Name -> (config.json, layout, how it is computed) -> the layers of its configuration, or why it has none."""
    found = {}
    with _gpu():
        for name, (hf, layout, engine) in layouts.items():
            try:
                te = replace(engine, transformer_impl="transformer_engine")
                found[name] = str(model.transformer_config(hf, layout, torch.bfloat16, te).transformer_impl)
            except Exception as error:  # each layout is tried
                found[name] = f"{type(error).__name__}: {error}"
    return found


def built(layouts: Mapping[str, tuple[dict[str, Any], Layout, int]]) -> dict[str, list[tuple[Shapes, Shapes]]]:
    """Name -> (config.json, layout, number of ranks) -> of each rank its shapes, by Transformer-Engine and local."""
    dist.destroy_process_group()
    found: dict[str, list[tuple[Shapes, Shapes]]] = {}
    for name, (hf, layout, num_ranks) in layouts.items():
        found[name] = []
        for rank in range(num_ranks):
            with fake_world(layout, num_ranks, rank), _gpu():
                found[name].append((_shapes(hf, layout, TE), _shapes(hf, layout, LOCAL)))
    return found


def _shapes(hf: dict[str, Any], layout: Layout, engine: ExecutionOptions) -> Shapes:
    chunks = model.build_model(hf, layout, dtype="bfloat16", engine=engine)
    assert (model.unwrap(chunks[0]).config.transformer_impl == "local") is (engine == LOCAL)
    return {
        f"{i} {local_name(name)}": tuple(param.shape)
        for i, chunk in enumerate(chunks)
        for name, param in named_parameters([chunk])
    }


def run_without_marks(cases: Mapping[str, tuple[str, Case]]) -> dict[str, Any]:
    """As `run_te_cases`, by experts of which Megatron does not know that they are cut."""
    with mock.patch.object(model, "mark_shards", lambda gpt: None):
        return run_te_cases(cases)
