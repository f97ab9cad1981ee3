"""What the ranks of test_adapter_sglang.py run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lora_cases import CPU, Lora

from megarl.batch import Batch, MicroBatch
from megarl.layout import Layout
from megarl.mcore.models.lora import LoraSettings, adapted
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.step import forward_only
from megarl.weights.hf.export import save_hf
from megarl.weights.push.adapter_push import AdapterPusher
from megarl.weights.verify.canary import Canary

RANK, ALPHA = 4, 10.0


def push_twice(folder: str, url: str, token: str, out: str, prompt: list[int]) -> dict[str, Any]:
    """Push two adapters; log-probs of the prompt under each, by version, and folders of the merged models."""
    lora = Lora(folder, LoraSettings(RANK, ALPHA), Layout(tp=1, pp=2))
    pusher = AdapterPusher([url], token, lora.hf, base_model=folder, keep=2, life="a life", timeout_s=60)
    micro = MicroBatch(Batch(torch.tensor(prompt), torch.tensor([len(prompt)])))
    found: dict[str, Any] = {"columns": {}, "adapters": []}
    for version in (1, 2):
        _disturb(lora)
        columns = forward_only(lora.model, [micro], lora.outputs, CPU)
        said = _of_last_stage(columns[0]["log_probs"] if columns else None, len(prompt))
        canary = Canary(tuple(prompt), tuple(said[1:].tolist()), tolerance=1e-4)
        report = pusher.push(lora.model, version, canary=canary)
        if report is not None:
            assert (report.failed, report.transports) == ({}, {url: "adapter"})
            found["bytes"] = report.num_bytes
            found["adapters"].append(report.adapter)
        found["columns"][str(version)] = said
        save_hf(lora.model, lora.hf, Path(out) / str(version), source_folder=folder)
    pusher.close()
    destroy_groups()
    return found


def _of_last_stage(log_probs: torch.Tensor | None, count: int) -> torch.Tensor:
    """What the last of two pipeline ranks has computed, on both."""
    out = torch.zeros(count) if log_probs is None else log_probs.detach().clone()
    dist.broadcast(out, src=1)
    return out


@torch.no_grad()
def _disturb(lora: Lora) -> None:
    for _, linear in adapted(lora.model):
        for low_rank in linear.lora.projections.values():
            low_rank.B.add_(0.3 * torch.randn(low_rank.B.shape))
