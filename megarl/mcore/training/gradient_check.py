"""Whether an optimizer step may be made, which all ranks decide alike; and whether weights are finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor

from megarl.mcore.models.model import Model, unwrap
from megarl.mcore.versions import counted_gradients


@contextmanager
def uncounted_included(parts: Iterable[Any]) -> Iterator[None]:
    """Inside this context a gradient that the global norm counts is NaN, if any gradient on this rank is not finite.

    Of a parameter that tensor-parallel ranks hold alike, Megatron counts the first rank's gradient only: a NaN on
    another rank would be in no norm and get into that rank's weights.  Stays on the device.

    `parts`: Megatron's optimizers, whose gradients are ready.
    """
    used = [part for part in parts if not part.is_stub_optimizer]
    own = list(_local(param.grad for part in used for param in part.get_parameters()))
    counted = next(_local(grad for part in used for grad in counted_gradients(part)), None)
    if counted is None:
        yield
        return
    place = counted.view(-1)[:1]
    before = place.clone()
    place += 0.0 * torch.stack(torch._foreach_norm(own)).sum()  # 0 * NaN and 0 * infinity are NaN
    yield
    place.copy_(before)


def _local(grads: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """What this rank has of each, if it has something."""
    for grad in grads:
        if grad is not None and (own := to_local_if_dtensor(grad)).numel():
            yield own.detach()


def agreed(grad_norm: float, loss: Tensor | None) -> tuple[float, float]:
    """The gradient norm, and the loss of the whole step, bit for bit the same on all ranks; a collective.

    `loss` [] float64: of this rank's micro-batches on its last stage; None: the rank has no last stage.  Each replica's
    loss counts once.  The norms of two model-parallel groups may differ in the last bit, so rank 0's is taken.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    both = torch.zeros(2, dtype=torch.float64, device=device)
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    if loss is not None and first:
        both[0] = loss
    if dist.get_rank() == 0:
        both[1] = grad_norm
    dist.all_reduce(both)
    whole, norm = both.tolist()
    return norm, whole


def first_bad_gradient(model: Model) -> str | None:
    """The name of a parameter whose gradient on this rank, reduced as far as the strategy does, is not finite."""
    for chunk in model:
        for name, param in unwrap(chunk).named_parameters():
            grad = getattr(param, "main_grad", None)
            for own in _local([param.grad if grad is None else grad]):
                if not bool(own.isfinite().all()):
                    return name
    return None


@torch.no_grad()
def first_bad_weight(model: Model) -> str | None:
    """The name of a parameter that is not finite on this rank, frozen ones included; reads every weight once."""
    named = [pair for chunk in model for pair in unwrap(chunk).named_parameters() if pair[1].numel()]
    if not named or bool(torch.stack([_is_finite(param) for _, param in named]).all()):
        return None
    return next(name for name, param in named if not bool(_is_finite(param)))


def _is_finite(param: Tensor) -> Tensor:
    """[] bool; without a copy of the parameter."""
    return torch.stack(param.detach().aminmax()).isfinite().all()
