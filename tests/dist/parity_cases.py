"""What runs on the ranks in test_parity.py: losses and gradients of one optimizer step under a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.data.packing import plan
from megarl.mcore import logprobs
from megarl.mcore.model import build_model, read_hf_config
from megarl.mcore.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.rows import micro_batches
from megarl.mcore.setup import Layout, destroy_groups, make_groups
from megarl.mcore.step import Outputs, backward, forward_only
from megarl.sample import Batch, LossOutput
from megarl.weights.export import hf_tensors
from megarl.weights.load import load_hf

CPU = torch.device("cpu")


class EveryColumn:
    """A loss that nobody trains with, of all the columns that an actor and its reference give."""

    columns = ("weight", "advantages", "old_log_probs")

    def __call__(self, batch: Batch, outputs: dict[str, torch.Tensor]) -> LossOutput:
        token_loss = batch.columns["advantages"] * outputs["log_probs"] + outputs["full_kl"]
        token_loss = token_loss + outputs["sum_pi_squared"] - 0.5 * outputs["entropy"]
        return LossOutput((batch.columns["weight"] * token_loss).sum(), {})


NAMES = {"actor": ("log_probs", "entropy"), "critic": ("values",), "actor with reference": logprobs.NAMES}
LOSSES: dict[str, Any] = {
    "actor": ActorLoss("ppo", entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1),
    "critic": CriticLoss(0.5),
    "actor with reference": EveryColumn(),
}


def make_step(vocab_size: int, num_sequences: int = 13) -> Batch:
    """Ragged sequences with every column a loss may ask for; the first sequence trains no token."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 14, (num_sequences,), generator=g)
    n = int(lengths.sum())
    mask = (torch.rand(n, generator=g) < 0.6).float()
    starts = lengths.cumsum(0) - lengths
    mask[starts] = 0.0
    mask[: int(lengths[0])] = 0.0
    columns = {name: torch.randn(n, generator=g) for name in ("advantages", "values", "returns")}
    columns |= {name: -2.5 + 0.3 * torch.randn(n, generator=g) for name in ("old_log_probs", "ref_log_probs")}
    columns |= {"response_mask": mask, "weight": mask / mask.sum()}
    return Batch(torch.randint(0, vocab_size, (n,), generator=g), lengths, columns)


def one_step(folder: str, role: str, layout: Layout, max_tokens: int, optim: str | None = None) -> dict[str, Any]:
    """Statistics, columns and whole gradients (or, with `optim`, whole weights after a step) on every rank."""
    where = make_groups(layout)
    try:
        hf = read_hf_config(folder)
        case, role = role, role.split()[0]
        model = build_model(hf, layout, role=role)
        load_hf(model, folder, hf, role=role)
        reference = _reference(folder, hf, layout) if "reference" in case else None
        if role == "critic":  # a zero head would hide errors in the trunk's gradient
            with torch.no_grad():
                for name, param in model.named_parameters():
                    if name.startswith("output_layer"):
                        param.copy_(torch.linspace(-0.5, 0.5, param.numel()).view_as(param))
        wrapped = wrap_for_training(model, layout)
        optimizer = Optimizer(wrapped, OptimSettings(name=optim or "sgd", lr=0.05, momentum=0.9, eps=1.0))
        batch = make_step(hf["vocab_size"])
        loss = LOSSES[case]
        part = plan(batch.lengths.tolist(), where.num_replicas, max_tokens=max_tokens)[where.replica]
        micros = micro_batches(batch.select(part.indices).keep_columns(*loss.columns), part.micro_sizes)
        outputs = Outputs(layout, hf["vocab_size"], temperature=0.8, names=NAMES[case])
        columns = forward_only(wrapped, micros, outputs, CPU, reference)
        optimizer.zero_grad()
        how = {"num_tokens": batch.num_tokens, "device": CPU, "reference": reference}
        stats = backward(wrapped, micros, outputs, loss, **how)
        grad_norm = 0.0
        if optim is None:
            held = {p: p.data for p in model.parameters()}
            for p in held:
                p.data = p.main_grad.clone()
            whole = {name: t.clone() for name, t in hf_tensors(model, hf, role=role)}
            for p, data in held.items():
                p.data = data
        else:
            grad_norm = optimizer.step()
            whole = {name: t.clone() for name, t in hf_tensors(model, hf, role=role)}
        return {
            "tensors": whole if dist.get_rank() == 0 else {},
            "grad_norm": grad_norm,
            "indices": part.indices,
            "columns": {n: torch.cat([c[n] for c in columns]) for n in columns[0]} if where.is_reporter else {},
            "stats": stats if where.is_reporter else {},
            "num_micros": len(micros),
        }
    finally:
        destroy_groups()


def _reference(folder: str, hf: dict[str, Any], layout: Layout) -> torch.nn.Module:
    """The same model with smaller weights."""
    model = build_model(hf, layout)
    load_hf(model, folder, hf)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.8)
    return model


def all_steps(folder: str, cases: list[tuple[str, str, Layout, int, str | None]]) -> dict[str, Any]:
    """Every case in one set of processes: starting them costs more than running them."""
    return {name: one_step(folder, role, replace(layout), tokens, optim) for name, role, layout, tokens, optim in cases}
