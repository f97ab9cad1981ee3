"""The engine that rollout.engine=auto is on this machine: SGLang if it and the machine can use a GPU, else hf."""

from __future__ import annotations

import torch

from megarl.config import Config, read_yaml
from megarl.config.names import AUTO
from megarl.servers.sglang_environment import sglang_gpu_python
from megarl.trainer.checkpoint import checkpoint


def chosen_engine(config: Config, command: str) -> tuple[str, str]:
    """The engine, and the reason in words.  A run that resumes keeps the engine of its config.yaml.

    Raises ValueError if trainer.resume_mode names no checkpoint.
    """
    trainer = config.trainer
    root = trainer.run_dir / "checkpoints"
    # Which saves are passed over is said when the run resumes.
    saved = checkpoint.find(trainer.resume_mode, root, lambda _: None, verify=False) if command == "train" else None
    if saved is not None:
        begun = saved.folder.parents[1] / "config.yaml"
        if begun.exists() and (engine := read_yaml(begun).rollout.engine) != AUTO:
            return engine, f"the run that resumes has it in {begun}"
    if trainer.device == "cpu":
        return "hf", "trainer.device=cpu uses no GPU"
    if not torch.cuda.is_available():
        return "hf", "torch finds no GPU here"
    try:
        python = sglang_gpu_python(config.rollout.sglang.python)
    except ValueError as error:
        return "hf", f"there is a GPU, but no SGLang ({error})"
    return "sglang", f"there is a GPU, and SGLang at {python}"
