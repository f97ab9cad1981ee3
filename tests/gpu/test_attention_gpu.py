"""On a real GPU: attention of rows of 32k tokens, ours and Transformer-Engine's, against the definition in float64."""

from typing import Any

import pytest
import torch
from attention_cases import KINDS, errors
from megatron.core.extensions import transformer_engine as te

from megarl.mcore.models.attention import SDPAttention
from megarl.mcore.models.execution import has_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]
NEEDS_TE = pytest.mark.skipif(not has_transformer_engine(), reason="Transformer-Engine is not installed")
CORES = [
    pytest.param(lambda: SDPAttention, id="local"),
    pytest.param(lambda: te.TEDotProductAttention, id="transformer_engine", marks=NEEDS_TE),
]
ROWS = {"one sequence": [32_768], "several sequences": [20_000, 12_000, 768]}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("core", CORES)
def test_a_long_row_is_attended_to_as_it_is_defined(core: Any, kind: str, row: str) -> None:
    """Bfloat16 has 8 bits: each number is off by up to 0.4 %, and a gradient goes through several of them."""
    torch.cuda.empty_cache()
    found = errors(core(), KINDS[kind], ROWS[row], torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    assert found["output"] < 1e-2
    assert max(found.values()) < 2e-2, found
