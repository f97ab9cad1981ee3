"""FlexAttention on CPUs: torch's own definition of it, forwards and backwards, by the calls that are made on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex

from megarl.mcore.models import flex_tree
from megarl.mcore.models.flex_tree import FlexPlan
from megarl.mcore.training import packed_rows


@contextmanager
def on_cpus() -> Iterator[None]:
    """Rows that share prefixes are attended to as on GPUs.

    torch refuses gradients on CPUs because there is no kernel for them; its definition has them.
    """
    with ExitStack() as patches:
        patches.enter_context(counted("aot_eager"))
        patches.enter_context(mock.patch.object(flex, "_validate_device", lambda *_: None))
        patches.enter_context(mock.patch.dict(packed_rows.PLANS, cpu=FlexPlan))
        yield


@contextmanager
def counted(backend: Any) -> Iterator[None]:
    """Calls of FlexAttention are traced as on GPUs, and what is traced goes to this backend of torch.compile."""
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=backend)
    with mock.patch.object(flex_tree, "fused", lambda: compiled):
        yield
