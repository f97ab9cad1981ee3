"""What runs on the ranks in test_engine.py: a few optimizer steps under a layout and an engine."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from chunks import gradients, weights
from late_copies import late_copies
from parity_cases import LOSSES, make_step

from megarl.algo.spikes import Limits
from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.lora import LoraSettings, apply_lora
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, device_for, make_groups
from megarl.mcore.training import optimizer as optimizer_module
from megarl.mcore.training.offload import OffloadBuffer, synchronized
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, Step, backward, forward_only, train_step
from megarl.samples.batch import Batch, MicroBatch
from megarl.weights.hf.load import load_hf

NEVER = 1e9  # a norm at which nothing is clipped: it is summed in an order that depends on buckets
CLIP = 0.1  # in every step
OPTIMIZERS = {
    "adamw": OptimSettings("adamw", lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=NEVER),
    "clipped": OptimSettings("adamw", lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=CLIP),
    "muon": OptimSettings("muon", lr=1e-2, eps=1e-3, momentum=0.9, weight_decay=0.1, max_grad_norm=NEVER),
}


@dataclass(frozen=True)
class Case:
    """Whole runs of `num_steps`; `saved_under`: the first two of them under this layout, then through a checkpoint."""

    folder: str
    layout: Layout = Layout()
    engine: ExecutionOptions = ExecutionOptions()
    optim: str = "adamw"
    dtype: str = "float32"
    num_steps: int = 3
    saved_under: Layout | None = None
    with_gradients: bool = False
    with_adapters: bool = False
    frees_outputs: bool = False  # a pipeline stage frees them once they are sent, as on a GPU
    comes_late: bool = False  # what is onloaded, as late as it may


class Trained:
    """A model and its optimizer, with buckets so small that there are several."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.where, self.layout, self.device = make_groups(layout), layout, device_for("auto")
        self.hf = read_hf_config(case.folder)
        engine = replace(case.engine, transformer_impl="local")  # Transformer-Engine's attention takes no float32
        model = build_model(self.hf, layout, dtype=case.dtype, engine=engine)
        unwrap(model[0]).config.deallocate_pipeline_outputs |= case.frees_outputs
        load_hf(model, case.folder, self.hf)
        if case.with_adapters:
            apply_lora(model, LoraSettings(rank=2, alpha=4.0))
        small = partial(optimizer_module.DistributedDataParallelConfig, bucket_size=4000)
        with mock.patch.object(optimizer_module, "DistributedDataParallelConfig", small):
            self.model = wrap_for_training(model, layout, engine)
        self.optimizer = Optimizer(self.model, OPTIMIZERS[case.optim])
        offload = case.engine.param_offload
        self.buffer = OffloadBuffer(self.model, None, parameters=offload)
        self.gradients = OffloadBuffer(self.model, None, gradients=offload)
        self.moments = OffloadBuffer(self.model, self.optimizer, moments=case.engine.optimizer_offload)
        self.gathers_late = case.engine.overlap_param_gather
        self.moved: list[Any] = []
        self.copied: list[tuple[int, int]] = []

    def step(self) -> dict[str, Any]:
        """A night, a look at log-probs without gradient buffers, a nap, and a step on the same batch."""
        night = [buffer.offload() for buffer in (self.buffer, self.gradients, self.moments)]
        self.moved.append(tuple(map(sum, zip(*night, strict=True)))[:3])
        self.moments.onload(to_read=True, beside=True)
        self.buffer.onload(to_read=True)
        if self.gathers_late:
            self.buffer.written()
        batch = make_step(self.hf["vocab_size"])
        seen = forward_only(self.model, self.micros(batch), self.outputs, self.device)
        nap = [buffer.offload() for buffer in (self.buffer, self.moments)]
        self.copied.append((sum(moved.copied for moved in night), sum(moved.copied for moved in nap)))
        self.moments.onload(to_read=True, beside=True)
        self.buffer.onload(to_read=True)
        self.buffer.written()
        self.gradients.onload()
        return {"norm": self.train(batch).grad_norm, "seen": [x["log_probs"] for x in seen]}

    @property
    def outputs(self) -> Outputs:
        return Outputs(self.layout, self.hf["vocab_size"], names=("log_probs", "entropy"))

    def micros(self, batch: Batch) -> list[MicroBatch]:
        """This rank's share of a batch."""
        part = plan(batch.lengths.tolist(), self.where.num_replicas, max_tokens=40)[self.where.replica]
        return micro_batches(batch.select(part.indices).keep_columns(*LOSSES["actor"].columns), part.micro_sizes)

    def train(self, batch: Batch, limits: Limits | None = None) -> Step:
        how = {"num_tokens": batch.num_tokens, "device": self.device}
        gradient = partial(backward, self.model, self.micros(batch), self.outputs, LOSSES["actor"], **how)
        return train_step(self.optimizer, gradient, limits=limits, before_step=self.moments.wait)

    def weights(self) -> dict[str, torch.Tensor]:
        with synchronized(self.model):
            return weights(self.model, self.hf, "actor")


def run(case: Case, root: str) -> dict[str, Any]:
    with late_copies() if case.comes_late else nullcontext():
        return _run(case, root)


def _run(case: Case, root: str) -> dict[str, Any]:
    trained = Trained(case, case.saved_under or case.layout)
    traced: list[Any] = []
    steps = []
    for _ in range(2 if case.saved_under else case.num_steps):
        before = trained.weights() if case.with_gradients else {}
        steps.append(trained.step())
        if case.with_gradients:
            traced.append((before, gradients(trained.model, trained.hf, "actor"), trained.weights()))
    if case.saved_under:
        where = Path(root) / f"{Path(case.folder).name} {case.engine.strategy} {case.optim} {case.dtype}"
        with synchronized(trained.model):
            checkpoint.save(where, trained.model, trained.optimizer)
        destroy_groups()
        trained = Trained(case, case.layout)
        with synchronized(trained.model):
            checkpoint.load(where, trained.model, trained.optimizer)
        steps += [trained.step() for _ in range(case.num_steps - 2)]
    whole = trained.weights()
    found = {
        "weights": whole if dist.get_rank() == 0 else {},
        "norms": [step["norm"] for step in steps],
        "seen": [step["seen"] for step in steps],
        "moved": trained.moved,
        "copied": trained.copied,
        "bytes": _bytes(trained),
        "traced": traced,
    }
    destroy_groups()
    return found


def _bytes(trained: Trained) -> tuple[int, int]:
    """Of parameters, and of what an optimizer that is not sharded keeps: counted tensor by tensor."""
    params = [p for chunk in trained.model for p in chunk.parameters()]
    state = [s for part in trained.optimizer.parts for s in part.optimizer.state.values()]
    moments = sum(x.nbytes for s in state for x in s.values() if isinstance(x, torch.Tensor) and x.ndim)
    return sum(p.nbytes for p in params), moments


def refusals(folder: str) -> dict[str, str]:
    """The sentences about engines that do not go with a layout."""
    found, fsdp = {}, ExecutionOptions("fsdp")
    for name, layout, engine, optim in (
        ("gather", Layout(), ExecutionOptions(overlap_param_gather=True), "adamw"),
        ("none sharded", Layout(use_distributed_optimizer=True), ExecutionOptions("none"), "adamw"),
        ("fsdp tp2", Layout(tp=2), fsdp, "adamw"),
        ("fsdp pp2", Layout(pp=2), fsdp, "adamw"),
        ("fsdp muon", Layout(), fsdp, "muon"),
        ("sharded muon", Layout(use_distributed_optimizer=True), ExecutionOptions(), "muon"),
    ):
        try:
            Trained(Case(folder, engine=engine, optim=optim), layout)
        except ValueError as error:
            found[name] = str(error)
        destroy_groups()
    return found


def all_runs(cases: dict[str, Case], root: str) -> dict[str, Any]:
    return {name: run(case, root) for name, case in cases.items()}
