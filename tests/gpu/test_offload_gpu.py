"""On a real GPU: moments that come beside the passes of a step are there before it, and take no more memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megarl.mcore.training.offload import OffloadBuffer

pytestmark = pytest.mark.gpu
SIZE, LAYERS = 4096, 4  # moments of 512 MiB, whose way takes about as long as the passes


class Trained:
    """Linear layers and AdamW, without sums in no fixed order: each run has the same bits."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))).cuda()
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        optimizer: Any = SimpleNamespace(parts=[SimpleNamespace(is_stub_optimizer=False, optimizer=self.adamw)])
        self.moments = OffloadBuffer([self.model], optimizer, moments=True)
        self.inputs = torch.randn(SIZE, SIZE, device="cuda")

    def step(self) -> float:
        loss = self.model(self.inputs).square().mean()
        self.adamw.zero_grad()
        loss.backward()
        self.moments.wait()
        self.adamw.step()
        return float(loss)

    def tensors(self) -> list[Tensor]:
        state = [x for of_one in self.adamw.state.values() for x in of_one.values()]
        return [x.cpu() for x in (*self.model.parameters(), *state)]


def trained(*, offloads: bool, beside: bool = False) -> tuple[list[float], list[Tensor], int]:
    """Losses of three steps; weights and moments after them; the most bytes from the second step on."""
    own = Trained()
    losses = [own.step()]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        if offloads:
            before = torch.cuda.memory_allocated()
            moved = own.moments.offload()
            assert before - torch.cuda.memory_allocated() == moved.optimizer == 2 * LAYERS * SIZE**2 * 4
            torch.full((moved.optimizer // 4,), torch.nan, device="cuda")  # what the memory may have when it comes back
            own.moments.onload(to_read=True, beside=beside)
        if beside:
            arrived: Any = own.moments._arrive
            assert not arrived.__self__.query(), "the copy goes on while the host does"
        losses.append(own.step())
    return losses, own.tensors(), torch.cuda.max_memory_allocated()


def test_three_steps_end_with_the_same_bits_and_the_same_peak() -> None:
    losses, tensors, peak = trained(offloads=False)
    for beside in (False, True):
        own_losses, own_tensors, own_peak = trained(offloads=True, beside=beside)
        assert own_losses == losses
        assert all(torch.equal(own, other) for own, other in zip(own_tensors, tensors, strict=True))
        assert own_peak == peak
