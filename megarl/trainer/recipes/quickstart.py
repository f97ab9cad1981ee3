"""Prepares recipe=quickstart: writes the task's files and a tiny model, and runs its cold start (SFT)."""

from __future__ import annotations

from functools import partial

from megarl.config import Config
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tasks import Sums, write_task
from megarl.trainer.recipes.cold_start import cold_start

# 75 % of the problems have a carry, and 60 % of the demonstrations forget it: after SFT the model's answers have the
# right format and are mostly wrong.  Each problem has two demonstrations, so that the model does not memorize one.
TASK = Sums(num_sft=3200, num_test=256, careless=0.6, demonstrations=2, carrying=0.75)
MODEL = TinySizes(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=256)


def prepare(config: Config) -> None:
    """Make the files of `data.*` and the folder `model.path` (the cold start's export).

    Reinforcement learning sees neither the prompts of the cold start nor those of the evaluation.
    """
    cold_start(config, ["recipe=quickstart_sft"], write_data=partial(write_task, sums=TASK), model=MODEL)
