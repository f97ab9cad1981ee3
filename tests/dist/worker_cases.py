"""What the ranks of test_worker_columns.py run: a worker as the driver's calls drive it, pipeline over two ranks."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megarl.algo.loss import ActorLoss
from megarl.mcore.logprobs.logprobs import NAMES
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.execution import ExecutionOptions
from megarl.mcore.training.optimizer import OptimSettings
from megarl.mcore.training.step import train_step
from megarl.roles.worker import Worker

LAYOUT = {"tp": 1, "pp": 2}
LENGTHS = torch.tensor([5, 9, 4])
G = torch.Generator().manual_seed(0)
TOKENS = torch.randint(4, 40, (18,), generator=G)
MASK = torch.ones(18).index_fill(0, torch.tensor([0, 5, 14]), 0.0)
LIKELY, NEAR = ActorLoss("reinforce"), ActorLoss("reinforce", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="full")


def follow_the_kl(folder: str, engine: ExecutionOptions) -> dict[str, Any]:
    """The columns at the start; then the mean full KL after a step that makes the tokens likelier, and after steps
    that do nothing but bring the policy back; for each but the first of these whether it had the loss of the one
    before.  In the end, which beds are slept in: of the actor's and reference's parameters and of the moments."""
    worker = Worker()
    worker.setup({"layout": LAYOUT, "device": "cpu", "seed": 0, "timeout_s": 60.0}, {})
    try:
        optim = asdict(OptimSettings("sgd", lr=0.3, max_grad_norm=1e9))
        for role, settings in (("actor", optim), ("ref", None)):
            loaded = {"role": role, "folder": folder, "kind": "actor", "dtype": "float32", "engine": asdict(engine)}
            rest: dict[str, Any] = {"lora": None, "plugins": [], "reads_weights": True, "router_replay": False}
            worker.load({**loaded, "optim": settings, **rest}, {})
        first = _columns(worker, list(NAMES), "ref")
        only = _columns(worker, ["entropy"], None)
        losses = [_update(worker, LIKELY, torch.ones(18))]
        kls = [_mean_kl(worker)]
        for _ in range(3):
            losses.append(_update(worker, NEAR, torch.zeros(18)))
            kls.append(_mean_kl(worker))
        same = [one is other for one, other in pairwise(losses)]
        found = {
            "first": first,
            "only": list(only),
            "kls": kls,
            "same": same,
            "is_reporter": worker.rank_info.is_reporter,
        }
        found["offloaded"] = [_offloaded(worker)]
        for method in (worker.offload, worker.onload):
            found[method.__name__] = method({"role": "actor", "by_default": False, "moments": None}, {})[0]
            kls.append(_mean_kl(worker))
            found["offloaded"].append(_offloaded(worker))
        return found
    finally:
        destroy_groups()


def _offloaded(worker: Worker) -> list[bool]:
    actor, ref = worker.roles["actor"], worker.roles["ref"]
    return [buffer.is_offloaded for buffer in (actor.parameters, ref.parameters, actor.moments)]


def _payload(**columns: Tensor) -> dict[str, Tensor]:
    frame = {"tokens": TOKENS, "lengths": LENGTHS, "rows": torch.ones_like(LENGTHS)}
    return {**frame, "micro_sizes": torch.tensor([2, 1]), **columns}


def _columns(worker: Worker, names: list[str], reference: str | None) -> dict[str, Tensor]:
    arguments = {"role": "actor", "temperature": 0.9, "names": names, "reference": reference, "shares_prefixes": False}
    return worker.columns(arguments, _payload())[1]


def _mean_kl(worker: Worker) -> float:
    found = _columns(worker, ["full_kl"], "ref")
    return float((found["full_kl"] * MASK).sum() / MASK.sum()) if found else 0.0


def _update(worker: Worker, loss: ActorLoss, advantages: Tensor) -> Any:
    """The loss that the rank trained with."""
    arguments = {"role": "actor", "temperature": 0.9, "loss": asdict(loss), "num_tokens": 18, "limits": None}
    arguments |= {"shares_prefixes": False, "notes": []}
    arguments |= {"names": list(loss.outputs), "reference": "ref" if "full_kl" in loss.outputs else None}
    every = {"response_mask": MASK, "weight": MASK / MASK.sum(), "old_log_probs": torch.zeros(18)}
    with mock.patch("megarl.roles.worker.train_step", side_effect=train_step) as step:
        worker.update(arguments, _payload(**every, advantages=advantages))
    return step.call_args.args[4]
