"""What the ranks of test_shards.py run: save under one layout, load under others, and take one more step."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from chunks import parameters, weights
from parity_cases import LOSSES, make_step
from torch import nn

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.checkpoint.held import held_optimizer, held_weights
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, backward, train_step
from megarl.weights.hf.load import load_hf

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": OptimSettings("adamw", lr=1e-2, weight_decay=0.1, lr_decay_style="linear", lr_decay_steps=10),
    # With eps=1 the update is smooth in the gradient: the rounding of a small one is not divided by its size.
    "smooth adamw": OptimSettings(
        "adamw", lr=1.0, eps=1.0, weight_decay=0.0, lr_decay_style="linear", lr_decay_steps=10
    ),
    "sgd": OptimSettings("sgd", lr=1e-2, momentum=0.9, lr_decay_style="linear", lr_decay_steps=10),
}
LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "pp2 uneven": Layout(pp=2, first_stage_layers=1),
    "pp2 vpp2 sharded": Layout(pp=2, vpp=2, use_distributed_optimizer=True),
    "tp2 sharded": Layout(tp=2, use_distributed_optimizer=True),
    "pp2 sharded": Layout(pp=2, use_distributed_optimizer=True),
    "dp2 sharded": Layout(use_distributed_optimizer=True),
    "ep2": Layout(ep=2),
    "ep2 etp1": Layout(tp=2, sequence_parallel=True, ep=2, etp=1),
    "ep2 sharded": Layout(ep=2, use_distributed_optimizer=True),
    "ep2 etp1 sharded": Layout(tp=2, sequence_parallel=True, ep=2, etp=1, use_distributed_optimizer=True),
}


class Trained:
    """A model and its optimizer under a layout."""

    def __init__(self, folder: str, layout: Layout, optim: str, dtype: str, role: str, *, scale: float = 1.0) -> None:
        self.where, self.layout, self.role = make_groups(layout), layout, role
        self.hf = read_hf_config(folder)
        model = build_model(self.hf, layout, role=role, dtype=dtype)
        load_hf(model, folder, self.hf, role=role)
        with torch.no_grad():
            for param in parameters(model):
                param.mul_(scale)
        self.model = wrap_for_training(model, layout)
        self.optimizer = Optimizer(self.model, OPTIMIZERS[optim])

    def step(self) -> float:
        """One step on the same batch everywhere; returns the learning rate that it used."""
        batch, loss = make_step(self.hf["vocab_size"]), LOSSES[self.role]
        part = plan(batch.lengths.tolist(), self.where.num_replicas, max_tokens=64)[self.where.replica]
        micros = micro_batches(batch.select(part.indices).keep_columns(*loss.columns), part.micro_sizes)
        names = ("log_probs", "entropy") if self.role == "actor" else ("values",)
        outputs = Outputs(self.layout, self.hf["vocab_size"], names=names)
        how = {"num_tokens": batch.num_tokens, "device": CPU}
        return train_step(self.optimizer, partial(backward, self.model, micros, outputs, loss, **how)).lr

    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model, self.hf, self.role)

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """kind of moment -> HF name -> whole tensor: each moment put where its weight was, and exported as one."""
        whole, *of_experts = self.optimizer.inner.chained_optimizers
        kinds = [k for k in ("exp_avg", "exp_avg_sq", "momentum_buffer") if _has(whole.optimizer, k)]
        out = {}
        for kind in kinds:
            held = {p: p.data for p in parameters(self.model)}
            for param in held:
                is_dealt = bool(of_experts) and not getattr(param, "allreduce", True)
                param.data = _whole_moment(of_experts[0] if is_dealt else whole, param, kind)
            out[kind] = self.weights()
            for param, data in held.items():
                param.data = data
        return out

    def close(self) -> None:
        destroy_groups()


def _has(optimizer: torch.optim.Optimizer, kind: str) -> bool:
    return any(kind in state for state in optimizer.state.values())


def _whole_moment(inner: Any, param: nn.Parameter, kind: str) -> torch.Tensor:
    """The moment of a parameter, put together over data parallelism where the optimizer is sharded."""
    if not hasattr(inner, "model_param_group_index_map"):
        main = getattr(param, "main_param", param)
        return inner.optimizer.state[main][kind].clone().to(param.dtype)
    whole = torch.zeros(param.numel())
    if param in inner.model_param_group_index_map:
        group, index = inner.model_param_group_index_map[param]
        own = inner.optimizer.param_groups[group]["params"][index]
        at = inner._get_model_param_range_map(param)["param"]
        whole[at.start : at.end] = inner.optimizer.state[own][kind].flatten()
    dist.all_reduce(whole, group=inner.data_parallel_group)
    return whole.view(param.shape).to(param.dtype)


def saved_and_loaded(
    folder: str, where: str, optim: str, dtype: str, role: str, first: str, then: list[str], num_steps: int
) -> dict[str, Any]:
    """Train under `first`, save, and load under each of `then` into a model of other weights."""
    trained = Trained(folder, LAYOUTS[first], optim, dtype, role)
    for _ in range(num_steps):
        trained.step()
    checkpoint.save(Path(where), trained.model, trained.optimizer)
    found = {"saved": _look(trained)}
    trained.close()
    for name in then:
        loaded = Trained(folder, LAYOUTS[name], optim, dtype, role, scale=0.5)
        checkpoint.load(Path(where), loaded.model, loaded.optimizer)
        found[name] = _look(loaded)
        loaded.close()
    return found


def _look(trained: Trained) -> dict[str, Any]:
    """What it holds, and what it holds after one more step; whole tensors from rank 0 only, to send less."""
    found: dict[str, Any] = {"step_index": trained.optimizer.step_index}
    found |= {"weights": trained.weights(), "moments": trained.moments()}
    found |= {"lr": trained.step(), "weights after": trained.weights(), "moments after": trained.moments()}
    inner = trained.optimizer.inner.chained_optimizers[0].optimizer
    found["adam steps"] = sorted({float(state["step"]) for state in inner.state.values() if "step" in state})
    return found if dist.get_rank() == 0 else {n: found[n] for n in ("step_index", "lr", "adam steps")}


def weights_only(folder: str, where: str, first: str, then: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """A frozen model, which has no optimizer to save, goes from one layout to others."""
    found = {}
    for name in (first, *then):
        model = Trained(folder, LAYOUTS[name], "adamw", "float32", "actor", scale=1.0 if name == first else 0.5)
        if name == first:
            checkpoint.save(Path(where), model.model, None)
        else:
            checkpoint.load(Path(where), model.model, None)
        found[name] = model.weights()
        model.close()
    return found


def checkpoint_peak(folder: str, root: str) -> dict[str, Any]:
    """The bytes that a rank copies to host memory for a save, the model's parameters, and the collectives it ran."""
    trained = Trained(folder, LAYOUTS["dp2 sharded"], "adamw", "bfloat16", "actor")
    trained.step()
    pieces = [*held_weights(trained.model, own=True), *held_optimizer(trained.optimizer, trained.model, own=True)]
    names = ("all_gather", "all_gather_into_tensor", "gather", "all_gather_object", "gather_object", "all_to_all")
    with ExitStack() as stack:
        watched = [stack.enter_context(mock.patch.object(dist, name)) for name in names]
        checkpoint.save(Path(root) / "peak", trained.model, trained.optimizer)
        gathers = [name for name, mocked in zip(names, watched, strict=True) if mocked.called]
    params = sum(param.numel() for param in parameters(trained.model))
    trained.close()
    return {"bytes": sum(piece.memory.nbytes for piece in pieces), "params": params, "gathers": gathers}


def refusals(folder: str, root: str, by_adamw: str) -> dict[str, str]:
    """The sentences about a folder that holds nothing, and about the checkpoint of another optimizer."""
    trained = Trained(folder, LAYOUTS["dp2"], "sgd", "float32", "actor")
    found = {}
    for name, where in {"empty": root, "other": by_adamw}.items():
        with pytest.raises(ValueError) as caught:
            checkpoint.load(Path(where), trained.model, trained.optimizer)
        found[name] = str(caught.value)
    trained.close()
    return found


def run_cases(folders: dict[str, str], root: str, cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """`folders`: of the models of the cases whose names begin with theirs; of the others it is "dense"."""
    found = {}
    for name, case in cases.items():
        folder = folders.get(name.split()[0], folders["dense"])
        found[name] = saved_and_loaded(folder, f"{root}/{name}", *case)
    return found


def run_others(folder: str, experts: str, root: str, by_adamw: str) -> dict[str, Any]:
    """All that is no case."""
    found: dict[str, Any] = {"frozen": weights_only(experts, f"{root}/frozen", "ep2", ["pp2", "ep2 etp1"])}
    found |= {"peak": checkpoint_peak(folder, root), **refusals(folder, root, by_adamw)}
    found["children"] = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    return found
