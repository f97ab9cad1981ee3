"""Prepares recipe=quickstart: writes the task's files and a tiny model, and runs its cold start (SFT).

Each part is made once and kept; an interrupted one is made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.config import Config, load_config
from megarl.data.arithmetic import write_task
from megarl.data.tiny import write_tiny_model
from megarl.trainer.sft import sft

# 75 % of the problems have a carry, and 60 % of the demonstrations forget it: after SFT the model's answers have the
# right format and are mostly wrong.  Each problem has two demonstrations, so that the model does not memorize one.
COLD_START = Path("runs/quickstart_sft/hf")
TASK: dict[str, Any] = {"num_sft": 3200, "num_test": 256, "careless": 0.6, "demonstrations": 2, "carrying": 0.75}
MODEL: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256}


def prepare(config: Config) -> None:
    """Make the files of `data.*` and the folder `model.path` (the cold start's export).

    Reinforcement learning sees neither the prompts of the cold start nor those of the evaluation.
    """
    if Path(config.model.path) != COLD_START:
        raise ValueError(f"model.path={config.model.path}: there is no model; the recipe's own is {COLD_START}")
    console = Console()
    layout = config.actor.megatron
    cold_start, _ = load_config(
        [
            "recipe=quickstart_sft",
            f"trainer.n_gpus_per_node={config.trainer.num_ranks}",  # all on this machine
            f"actor.megatron.tensor_model_parallel_size={layout.tensor_model_parallel_size}",
            f"actor.megatron.pipeline_model_parallel_size={layout.pipeline_model_parallel_size}",
        ],
        command="sft",
    )
    data = Path(cold_start.sft.train_files[0]).parent
    console.print(f"the task: {data}", highlight=False)
    write_task(data, **TASK)
    model = Path(cold_start.model.path)
    if not (model / "config.json").exists():
        console.print(f"a tiny model with random weights: {model}", highlight=False)
        write_tiny_model(model, **MODEL)
    console.print(f"its cold start: {cold_start.trainer.run_dir}", highlight=False)
    sft(cold_start)
