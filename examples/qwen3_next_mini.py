"""The quickstart's task for a tiny Qwen3-Next.  `megarl train --config examples/qwen3_next_mini.yaml`

Its layers are gated delta nets and, every second one, gated attention, each with routed experts and a shared one.
It needs Megatron-Core 0.19.2: `PYTHON=python3.12 bash launch/environment.sh` makes such an environment.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tasks import write_task
from megarl.trainer.recipes.cold_start import cold_start
from megarl.trainer.recipes.quickstart import TASK

if TYPE_CHECKING:
    from megarl.config import Config

MODEL = TinySizes(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256)
COLD_START = (
    "recipe=quickstart_sft",
    "sft.train_files=[runs/qwen3_next_mini_data/sft.jsonl]",
    "model.path=runs/qwen3_next_mini_data/initial_model",
    "trainer.experiment_name=qwen3_next_mini_sft",
)


def prepare(config: Config) -> None:
    """Make the files of `data.*` and the folder `model.path`, as trainer.prepare asks."""
    cold_start(config, COLD_START, write_data=partial(write_task, sums=TASK), model=MODEL, family="qwen3_next")
