"""Which part of a model's vocabulary a pass on the ranks counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.layout import Layout
from megarl.roles.worker import Worker


@pytest.mark.parametrize(("asked", "counted"), [({}, 48), ({"vocab_size": 40}, 40), ({"vocab_size": 64}, 48)])
def test_no_more_tokens_are_counted_than_the_model_has(asked: dict[str, int], counted: int) -> None:
    """The policy's vocabulary may have more padding than its teacher's."""
    worker = Worker()
    worker.layout = Layout()
    role: Any = SimpleNamespace(hf={"vocab_size": 48}, heads=[])
    found = worker._outputs(role, {"names": ["top_ids", "top_log_probs"], "temperature": 1.0, "top_k": 4, **asked})
    assert found.vocab_size == counted


def test_heads_of_teachers_are_on_the_device_for_a_divergence_over_the_vocabulary() -> None:
    worker = Worker()
    worker.layout, worker.device = Layout(), torch.device("meta")
    role: Any = SimpleNamespace(hf={"vocab_size": 48}, heads=[torch.zeros(48, 3), torch.zeros(48, 5)])
    words = {"names": ["divergence"], "temperature": 1.0}
    found = worker._outputs(role, {**words, "divergence": ("reverse_kl", 0.5)})
    assert [head.device.type for head in found.heads] == ["meta", "meta"]
    assert [head.device.type for head in role.heads] == ["cpu", "cpu"], "between the calls they wait in host memory"
    assert not worker._outputs(role, words).heads
