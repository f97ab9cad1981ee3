"""What runs on the ranks of test_lora_dist.py: gradients, steps, checkpoints and exports of a model with adapters."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chunks import named_parameters, parameters
from parity_cases import make_step
from peft_folder import load_peft, peft_settings
from torch import Tensor

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.checkpoint.checkpoint import adapter_identity
from megarl.mcore.models.lora import LoraSettings, adapted, apply_lora
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Gradient, Outputs, backward, forward_only, train_step
from megarl.samples.batch import Batch, LossOutput
from megarl.weights.hf.adapter import adapter_tensors, save_peft
from megarl.weights.hf.export import hf_sizes, hf_tensors, save_hf
from megarl.weights.hf.load import load_hf

CPU = torch.device("cpu")
# With eps=1 the update is smooth in the gradient: the rounding of a small one is not divided by its size.
OPTIM = OptimSettings("adamw", lr=0.1, eps=1.0, weight_decay=0.1, lr_decay_style="linear", lr_decay_steps=20)


def likelihood_loss(batch: Batch, columns: dict[str, Tensor]) -> LossOutput:
    return LossOutput(-(batch.columns["weight"] * columns["log_probs"]).sum())


class Lora:
    """A model with adapters and their optimizer under a layout."""

    def __init__(
        self, folder: str, settings: LoraSettings, layout: Layout, *, dtype: str = "float32", seed: int = 0
    ) -> None:
        self.where, self.layout = make_groups(layout), layout
        self.hf = read_hf_config(folder)
        self.model = build_model(self.hf, layout, dtype=dtype)
        load_hf(self.model, folder, self.hf)
        apply_lora(self.model, settings, seed=seed)
        self.batch = make_step(self.hf["vocab_size"])
        self.outputs = Outputs(layout, self.hf["vocab_size"])
        part = plan(self.batch.lengths.tolist(), self.where.num_replicas, max_tokens=24)[self.where.replica]
        self.indices = part.indices
        own = self.batch.select(part.indices).keep_columns("weight")
        self.micros = micro_batches(own, part.micro_sizes)

    def trainable(self) -> None:
        """Load adapters before: the optimizer starts with float32 copies of bf16 weights, and with none of these."""
        self.wrapped = wrap_for_training(self.model, self.layout)
        self.optimizer = Optimizer(self.wrapped, OPTIM)

    def columns(self, name: str) -> dict[str, Tensor]:
        """Log-probs as they are now, by this name, on those ranks that have them."""
        found = forward_only(self.model, self.micros, self.outputs, CPU)
        return {name: torch.cat([c["log_probs"] for c in found])} if self.where.is_reporter else {}

    def step(self) -> float:
        return train_step(self.optimizer, self._backward).grad_norm

    def _backward(self) -> Gradient:
        how = {"num_tokens": self.batch.num_tokens, "device": CPU}
        return backward(self.wrapped, self.micros, self.outputs, likelihood_loss, **how)

    def gradients(self) -> dict[str, Tensor]:
        """PEFT's name -> whole gradient."""
        self.optimizer.zero_grad()
        self._backward()
        held = {p: p.data for _, linear in adapted(self.model) for p in linear.lora.parameters()}
        for param in held:
            param.data = param.main_grad.clone()
        whole = self.adapters()
        for param, data in held.items():
            param.data = data
        return whole

    def adapters(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in adapter_tensors(self.model, self.hf)}

    def merged(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in hf_tensors(self.model, self.hf, buffer_bytes=20_000)}

    def base(self) -> dict[str, Tensor]:
        base = [p for p in named_parameters([unwrap(chunk) for chunk in self.model]) if ".lora." not in p[0]]
        return {f"{i} {name}": param.detach().clone() for i, (name, param) in enumerate(base)}


def run_layouts(root: str, out: str, cases: dict[str, Layout]) -> dict[str, Any]:
    """Everything about each model under a layout, by "model/layout"; of every model there is an adapter."""
    return {case: one_layout(f"{root}/{case.split('/')[0]}", f"{out}/{case}", layout) for case, layout in cases.items()}


def one_layout(folder: str, out: str, layout: Layout) -> dict[str, Any]:
    adapter = f"{folder} adapter"
    lora = Lora(folder, peft_settings(adapter, read_hf_config(folder)), layout)
    try:
        found: dict[str, Any] = {"initial": lora.adapters(), "identity": adapter_identity(lora.model)}
        load_peft(lora.model, lora.hf, adapter)
        lora.trainable()
        found |= {"loaded": lora.adapters(), "columns": lora.columns("before"), "indices": lora.indices}
        before, merged = lora.base(), lora.merged()
        assert {n: (tuple(t.shape), t.dtype) for n, t in merged.items()} == hf_sizes(lora.model, lora.hf)
        found |= {"merged": merged, "gradients": lora.gradients(), "grad_norm": lora.step()}
        found["base is the same"] = all(torch.equal(t, before[n]) for n, t in lora.base().items())
        found["optimized"] = {id(p) for p in parameters(lora.wrapped) if hasattr(p, "main_grad")} == {
            id(p) for _, linear in adapted(lora.model) for p in linear.lora.parameters()
        }
        found["moved"] = not any(torch.equal(t, found["loaded"][n]) for n, t in lora.adapters().items())
        found["columns"] |= lora.columns("after")
        save_peft(lora.model, lora.hf, Path(out) / "adapter", base_model=folder)
        save_hf(lora.model, lora.hf, Path(out) / "merged", source_folder=folder)
        return found if dist.get_rank() == 0 else {n: found[n] for n in ("columns", "indices", "grad_norm")}
    finally:
        destroy_groups()


def resumed(folder: str, root: str, first: Layout, then: Layout, dtype: str) -> dict[str, Any]:
    """Train two steps, save, and load under `then` into adapters of another seed; then one more step of both."""
    settings, where = LoraSettings(4, 8.0), Path(root)
    lora = Lora(folder, settings, first, dtype=dtype)
    lora.trainable()
    lora.step(), lora.step()
    checkpoint.save(where, lora.wrapped, lora.optimizer)
    found: dict[str, Any] = {"saved": lora.adapters()}
    lora.step()
    found["saved after"] = lora.adapters()
    destroy_groups()

    again = Lora(folder, settings, then, dtype=dtype, seed=1)
    found["other seed"] = again.adapters()
    again.trainable()
    checkpoint.load(where, again.wrapped, again.optimizer)
    found |= {"loaded": again.adapters(), "step_index": again.optimizer.step_index}
    again.step()
    found["loaded after"] = again.adapters()
    destroy_groups()
    return found if dist.get_rank() == 0 else {}


def refusals(folder: str, other: str, root: str) -> dict[str, str]:
    """The sentences about a checkpoint of other adapters, of another base, and of no adapters."""
    found = {}
    for what, base, settings in (
        ("rank", folder, LoraSettings(2, 8.0)),
        ("targets", folder, LoraSettings(4, 8.0, ("q_proj",))),
        ("base", other, LoraSettings(4, 8.0)),
        ("none", folder, None),
    ):
        make_groups(Layout())
        hf = read_hf_config(base)
        model = build_model(hf, Layout())
        load_hf(model, base, hf)
        if settings is not None:
            apply_lora(model, settings)
        try:
            checkpoint.load(Path(root), model, None)
        except ValueError as error:
            found[what] = str(error)
        destroy_groups()
    return found


def run_checkpoints(root: str, out: str, cases: dict[str, tuple[str, Layout, Layout, str]]) -> dict[str, Any]:
    """Resumed runs: (the model, the layout that saves, the layout that loads, dtype); and what is refused."""
    found: dict[str, Any] = {
        name: resumed(f"{root}/{model}", f"{out}/{name}", first, then, dtype)
        for name, (model, first, then, dtype) in cases.items()
    }
    return found | {"refused": refusals(f"{root}/qwen3", f"{root}/other", f"{out}/{next(iter(cases))}")}
