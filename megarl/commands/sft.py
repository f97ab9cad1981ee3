"""`megarl sft`, `megarl rm`, `megarl dpo`, after a warning where the memory of this machine may not be enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.config import Config
from megarl.metrics.trackers.console import warn
from megarl.plan.predictions import lacks_memory, memory_on_cpu
from megarl.trainer import pairs
from megarl.trainer.build import make_mini_model
from megarl.trainer.resumable import report_results
from megarl.trainer.servers.colocation import uses_gpus
from megarl.trainer.sft import sft


def main(config: Config) -> int:
    """Make the model of a very small preset, train, and print where the results are."""
    return _run(sft, config)


def rm(config: Config) -> int:
    """The same for a reward model."""
    return _run(pairs.rm, config)


def dpo(config: Config) -> int:
    """The same for a policy, on pairs."""
    return _run(pairs.dpo, config)


def _run(train: Callable[[Config], dict[str, Any]], config: Config) -> int:
    make_mini_model(config)
    if not uses_gpus(config) and (sentence := lacks_memory(memory_on_cpu(config, "sft"))):
        warn(sentence)
    train(config)
    return report_results(config)
