"""What the ranks of the tests of routing replay run: columns and gradient with experts that are given or noted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from chunks import gradients
from torch import Tensor

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.arch.routed_experts import REPLAYED, ROUTED_EXPERTS, RoutedExperts
from megarl.data.packing import plan
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, device_for, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.router_replay import add_router_replay
from megarl.mcore.training.step import Outputs, backward, forward_only
from megarl.samples.batch import Batch, LossOutput
from megarl.weights.hf.load import load_hf

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Replayed:
    """A layout, and how a step is computed in it."""

    layout: Layout = Layout()
    engine: ExecutionOptions = ExecutionOptions()
    max_tokens: int = 24  # of a micro-batch: several of them are under way
    given: bool = True  # the experts of the batch; else those that the routers choose


def random_experts(of: RoutedExperts, num_tokens: int, seed: int = 5) -> Tensor:
    """[N, layers, experts of a token]: no router would choose these."""
    g = torch.Generator().manual_seed(seed)
    shape = (num_tokens, len(of.layers), of.num_experts)
    return torch.rand(shape, generator=g).argsort(-1)[..., : of.chosen].to(getattr(torch, of.dtype))


def make_batch(hf: Mapping[str, Any], num_sequences: int = 13) -> Batch:
    """Ragged sequences with a weight for each token, and with experts."""
    of = RoutedExperts.of(hf)
    assert of is not None, "the model has experts"
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 14, (num_sequences,), generator=g)
    n = int(lengths.sum())
    weight = torch.randn(n, generator=g) / n
    weight[lengths.cumsum(0) - lengths] = 0.0
    columns = {"weight": weight, ROUTED_EXPERTS: random_experts(of, n)}
    return Batch(torch.randint(1, hf["vocab_size"], (n,), generator=g), lengths, columns)


def weighted(batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
    return LossOutput((batch.columns["weight"] * outputs["log_probs"]).sum())


def run_replayed(folder: str, cases: Mapping[Any, Replayed], batch: Batch | None = None) -> dict[Any, Any]:
    """Case -> what this rank sees: its sequences, their log-probs and noted experts; the gradient on rank 0."""
    return {name: _run(folder, case, batch) for name, case in cases.items()}


def _run(folder: str, case: Replayed, batch: Batch | None) -> dict[str, Any]:
    where, device = make_groups(case.layout), device_for("auto")
    try:
        hf = read_hf_config(folder)
        engine = replace(case.engine, transformer_impl="local")
        model = build_model(hf, case.layout, engine=engine)
        load_hf(model, folder, hf)
        add_router_replay(model)
        model = wrap_for_training(model, case.layout, engine)
        batch = make_batch(hf) if batch is None else batch
        part = plan(batch.lengths.tolist(), where.num_replicas, max_tokens=case.max_tokens)[where.replica]
        names = ("weight", *(name for name in REPLAYED if name in batch.columns)) if case.given else ("weight",)
        micros = micro_batches(batch.select(part.indices).keep_columns(*names), part.micro_sizes)
        outputs = Outputs(case.layout, hf["vocab_size"], TEMPERATURE)
        columns = forward_only(model, micros, outputs, device, notes_experts=not case.given)
        for chunk in model:
            chunk.zero_grad_buffer()
        backward(model, micros, outputs, weighted, num_tokens=batch.num_tokens, device=device)
        gradient = gradients(model, hf, "actor")
        return {
            "indices": part.indices,
            # Arrays, because torch cannot unpickle tensors of uint16.
            "columns": {n: torch.cat([c[n] for c in columns]).numpy() for n in columns[0]} if where.is_reporter else {},
            "gradient": gradient if dist.get_rank() == 0 else {},
        }
    finally:
        destroy_groups()


def whole_column(ranks: list[dict[str, Any]], name: str, batch: Batch) -> Tensor:
    """A column in the order of the batch, of what the ranks returned for a case."""
    found: dict[int, Tensor] = {}
    for rank in ranks:
        if rank["columns"]:
            lengths = batch.lengths[rank["indices"]].tolist()
            found |= dict(zip(rank["indices"], torch.from_numpy(rank["columns"][name]).split(lengths), strict=True))
    return torch.cat([found[index] for index in range(len(batch.lengths))])
