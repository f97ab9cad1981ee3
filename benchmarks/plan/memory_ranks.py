"""What a rank's tensors take while it trains, beside what the planner says of that rank.

`measure` runs on every rank of a world.  bench_plan_memory.py starts this module with CASE RANK STORE for each
rank; STORE is a file by which they meet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from benchmarks.common.tensor_memory import watched
from megarl.algo.loss import ActorLoss
from megarl.arch.layout import Layout
from megarl.mcore import cpu
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import Model, build_model
from megarl.mcore.setup import backend_of, destroy_groups, device_for, make_groups
from megarl.mcore.training.offload import OffloadBuffer
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.step import Outputs, backward, train_step
from megarl.plan.job import Role
from megarl.plan.memory import Memory, of_stage_bytes
from megarl.samples.batch import Batch, MicroBatch

PARTS = ("weights", "gradients", "optimizer", "activations")
ADAMW = OptimSettings("adamw", lr=1e-3)


@dataclass(frozen=True)
class Case:
    """Some steps of one model."""

    name: str
    hf: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    recompute: bool = False
    sequences: int = 4  # of a micro-batch
    length: int = 128
    micro_batches: int = 1
    fsdp: bool = False
    dtype: str = "float32"
    device: str = "cpu"  # | cuda
    local: bool = True  # without Transformer-Engine's layers
    offloads: bool = False  # moments come beside the passes of the measured step

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


def measure(case: Case) -> dict[str, dict[str, int]]:
    """Bytes of this rank by part, predicted and measured; activations are all that a step takes beside the others."""
    layout = Layout(**case.layout)
    make_groups(layout)
    of_planner = _parts(predicted(case, layout, ps.get_pipeline_model_parallel_rank()))
    with watched(case.device) as memory:
        engine = ExecutionOptions(
            "fsdp" if case.fsdp else "megatron",
            transformer_impl="local" if case.local else "transformer_engine",
        )
        engine = recomputed(engine) if case.recompute else engine
        model = wrap_for_training(build_model(case.hf, layout, dtype=case.dtype, engine=engine), layout, engine)
        optimizer = Optimizer(model, ADAMW)
        moments = OffloadBuffer(model, optimizer, moments=case.offloads)
        step = _stepper(case, layout, model, optimizer, moments)
        step()  # makes the optimizer's state
        stays = memory.now_bytes
        moments.offload()
        memory.forget_peak()
        moments.onload(beside=True)
        step()
    measured = {part: _bytes(tensors) for part, tensors in _held(case, model, optimizer).items()} | {
        "activations": memory.peak_bytes - stays,
        "total": memory.peak_bytes,
    }
    destroy_groups()
    return {"predicted": of_planner, "measured": measured}


def recomputed(engine: ExecutionOptions) -> ExecutionOptions:
    """The engine that computes every layer again in the backward pass."""
    return replace(engine, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def predicted(case: Case, layout: Layout, stage: int) -> Memory:
    """As the planner has it, with its reserve."""
    role = Role(
        "actor",
        case.hf,
        layout,
        case.num_ranks,
        max_tokens=case.tokens,
        recompute="full" if case.recompute else "none",
        dtype=case.dtype,
        fsdp=case.fsdp,
        local=case.local,
    )
    return of_stage_bytes(role, stage)


def _parts(memory: Memory) -> dict[str, int]:
    parts = {name: int(getattr(memory, name)) for name in PARTS}
    parts["activations"] += memory.gathered
    return parts | {"total": sum(parts.values())}


def gradients(case: Case, layout: Layout, model: Model) -> None:
    """One forward and backward pass."""
    outputs, loss = Outputs(layout, case.hf["vocab_size"]), ActorLoss("ppo")
    backward(model, micros_of(case), outputs, loss, num_tokens=_count(case), device=device_for(case.device))


def _stepper(case: Case, layout: Layout, model: Model, optimizer: Optimizer, moments: OffloadBuffer) -> Any:
    outputs, loss, micros = Outputs(layout, case.hf["vocab_size"]), ActorLoss("ppo"), micros_of(case)
    num_tokens, device = _count(case), device_for(case.device)
    gradient = partial(backward, model, micros, outputs, loss, num_tokens=num_tokens, device=device)
    return lambda: train_step(optimizer, gradient, before_step=moments.wait)


def micros_of(case: Case) -> list[MicroBatch]:
    return [_micro(case, seed) for seed in range(case.micro_batches)]


def _count(case: Case) -> int:
    return case.tokens * case.micro_batches


def _micro(case: Case, seed: int) -> MicroBatch:
    """Equally long sequences, of which all but the first token is trained."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.full((case.sequences,), case.length)
    mask = torch.ones(case.tokens)
    mask[:: case.length] = 0.0
    columns = {name: torch.randn(case.tokens, generator=draw) for name in ("advantages", "old_log_probs")}
    columns |= {"response_mask": mask, "weight": mask / mask.sum()}
    tokens = torch.randint(0, case.hf["vocab_size"], (case.tokens,), generator=draw)
    return MicroBatch(Batch(tokens, lengths, columns))


def _held(case: Case, model: list[Any], optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What stays between two steps, in what Megatron's wrappers add to the model.

    Megatron-FSDP steps a copy of its weights, in float32 too.
    """
    if not case.fsdp:
        parameters = [param for chunk in model for param in chunk.parameters()]
        gradients = [param.main_grad for param in parameters if param.requires_grad]
        return {
            "weights": parameters,
            "gradients": gradients,
            "optimizer": [*_copies(optimizer, parameters), *_state(optimizer)],
        }
    groups = [group for chunk in model for group in chunk.param_and_grad_buffer.parameter_groups]
    weights, copies, gradients = (
        [getattr(group, name).data for group in groups]
        for name in ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer")
    )
    return {"weights": weights, "gradients": gradients, "optimizer": [*copies, *_state(optimizer)]}


def _copies(optimizer: Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    """The float32 copies that it steps in place of bf16 weights."""
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    groups = (group for part in optimizer.parts for group in part.optimizer.param_groups)
    stepped = (tensor for group in groups for tensor in group["params"])
    return [tensor for tensor in stepped if tensor.untyped_storage()._cdata not in own]


def _state(optimizer: Optimizer) -> list[Tensor]:
    states = (state for part in optimizer.parts for state in part.optimizer.state.values())
    kept = (value for state in states for value in state.values() if isinstance(value, Tensor))
    return [getattr(value, "_local_tensor", value) for value in kept]  # of fsdp's this rank's part


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def main(case: Case, rank: int, store: str) -> None:
    """Every rank's numbers on rank 0's standard output, one line of JSON."""
    cpu.activate()
    torch.set_num_threads(1)
    if case.device == "cuda":
        torch.cuda.set_device(device_for("cuda"))
    backend = backend_of(case.device)
    dist.init_process_group(backend, store=dist.FileStore(store, case.num_ranks), rank=rank, world_size=case.num_ranks)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, measure(case))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
