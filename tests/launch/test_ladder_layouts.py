"""Each layout of the ladder for eight GPUs is one that Megatron's configuration takes where there are GPUs.

With Transformer-Engine's layers: tests/te/test_te_on_cpu_ladder.py.
"""

from unittest import mock

import pytest
import torch
from ladder_layouts import config_of, layouts

from megarl.mcore.models.model import transformer_config

LAYOUTS = layouts()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_layout_can_be_built_where_there_are_gpus(name: str, dtype: torch.dtype) -> None:
    family, layout, engine = LAYOUTS[name]
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        config = transformer_config(config_of(family), layout, dtype, engine)
    assert config.context_parallel_size == layout.cp
