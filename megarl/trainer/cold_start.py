"""The cold start of an example: its data, a tiny model with random weights, and the model's supervised training.

The data are written again each time, the model once; a training that was interrupted begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.config import Config, load_config
from megarl.data.tiny import write_tiny_model
from megarl.trainer.sft import sft


def cold_start(
    config: Config, words: Sequence[str], *, write_data: Callable[[Path], object], model: Mapping[str, Any]
) -> None:
    """Make the folder `model.path` of `config`, by a training on the same ranks in the same layout.

    Args:
        words: what would follow `megarl sft`.
        write_data: called with the folder of sft.train_files.
        model: arguments of write_tiny_model.
    Raises: ValueError if model.path is not the folder that this training writes.
    """
    layout = config.actor.megatron
    same = [
        f"trainer.n_gpus_per_node={config.trainer.num_ranks}",  # all on this machine
        f"actor.megatron.tensor_model_parallel_size={layout.tensor_model_parallel_size}",
        f"actor.megatron.pipeline_model_parallel_size={layout.pipeline_model_parallel_size}",
    ]
    training, _ = load_config([*words, *same], command="sft")
    made = training.trainer.run_dir / "hf"
    if Path(config.model.path) != made:
        raise ValueError(f"model.path={config.model.path}: there is no model; the recipe's own is {made}")
    console = Console()
    data, start = Path(training.sft.train_files[0]).parent, Path(training.model.path)
    console.print(f"the task: {data}", highlight=False)
    write_data(data)
    if not (start / "config.json").exists():
        console.print(f"a tiny model with random weights: {start}", highlight=False)
        write_tiny_model(start, **model)
    console.print(f"its cold start: {training.trainer.run_dir}", highlight=False)
    sft(training)
