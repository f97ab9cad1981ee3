"""The cold start of an example: its data, a tiny model with random weights, and the model's supervised training.

The data are written again each time, the model once; a training that was interrupted begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.config import Config, load_config
from megarl.config.validate.models import group_of, model_of
from megarl.data.examples.sizes import TinySizes
from megarl.io.terminal import sentences
from megarl.trainer.sft import sft


def cold_start(
    config: Config,
    words: Sequence[str],
    *,
    write_data: Callable[[Path], object],
    model: TinySizes,
    tokens: Sequence[str] = (),
    role: str = "actor",
    family: str = "qwen3",
) -> None:
    """Make the folder of a role's model in `config`, by a training on the actor's ranks in its layout.

    Args:
        words: what would follow `megarl sft`.
        write_data: called with the folder of sft.train_files.
        model: the sizes of the model that is trained.
        tokens: words that are tokens of their own in its tokenizer.
        role: "actor", of model.path, or "teachers.NAME".
        family: the model_type of its config.json.
    Raises: ValueError if the role's path is not the folder that this training writes.
    """
    layout = config.actor.megatron
    same = [
        f"trainer.n_gpus_per_node={config.trainer.num_ranks}",  # all on this machine
        f"actor.megatron.tensor_model_parallel_size={layout.tensor_model_parallel_size}",
        f"actor.megatron.pipeline_model_parallel_size={layout.pipeline_model_parallel_size}",
    ]
    training, _ = load_config([*words, *same], command="sft")
    made = training.trainer.run_dir / "hf"
    path = model_of(config, role).path
    if Path(path) != made:
        raise ValueError(f"{group_of(role)}.path={path}: there is no model; the recipe's own is {made}")
    from megarl.data.examples.tiny import write_tiny_model  # with transformers' modelling code

    console = sentences()
    data, start = Path(training.sft.train_files[0]).parent, Path(training.model.path)
    console.print(f"the task: {data}")
    write_data(data)
    if not (start / "config.json").exists():
        console.print(f"a tiny model with random weights: {start}")
        write_tiny_model(start, model, words=tokens, family=family)
    console.print(f"its cold start: {training.trainer.run_dir}")
    sft(training)
