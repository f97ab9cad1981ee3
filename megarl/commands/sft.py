"""`megarl sft`: supervised fine-tuning, after a warning where the memory of this machine may not be enough."""

from __future__ import annotations

from megarl.config import Config
from megarl.metrics.trackers.console import warn
from megarl.plan.predictions import lacks_memory, memory_on_cpu
from megarl.trainer.build import make_mini_model
from megarl.trainer.resumable import report_results
from megarl.trainer.servers.colocation import uses_gpus
from megarl.trainer.sft import sft


def main(config: Config) -> int:
    """Make the model of a very small preset, train, and print where the results are."""
    make_mini_model(config)
    if not uses_gpus(config) and (sentence := lacks_memory(memory_on_cpu(config, "sft"))):
        warn(sentence)
    sft(config)
    return report_results(config)
