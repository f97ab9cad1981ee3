"""A trainer's rank in bench_push.py: builds a model in a layout, changes its weights, pushes them, times it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.push.orders import Build, PushAll
from benchmarks.push.traffic import counted
from megarl.arch.hf_config import read_hf_config
from megarl.group.follow import Answer, follow
from megarl.group.message import Setup
from megarl.mcore.models.model import Model, build_model
from megarl.mcore.setup import RankInfo, destroy_groups, make_groups, rank_info
from megarl.processes.channels.connection import Tensors
from megarl.roles.worker import Worker
from megarl.weights.hf.load import load_hf
from megarl.weights.push.agreement import gather_json
from megarl.weights.push.push import Pusher, PushError


class Bench:
    """The methods that the driver calls."""

    def __init__(self) -> None:
        self.rank_info: RankInfo
        self.model: Model
        self.hf: dict[str, Any]

    def setup(self, message: Setup, tensors: Tensors) -> Answer:
        """Join the other ranks, as a rank of a run does."""
        worker = Worker()
        answer = worker.setup(message, tensors)
        self.rank_info = worker.rank_info
        return answer

    def build(self, message: Build, _: Tensors) -> Answer:
        destroy_groups()
        make_groups(message.layout)
        self.rank_info, self.hf = rank_info(), read_hf_config(message.folder)
        self.model = build_model(self.hf, message.layout, dtype=message.dtype)
        load_hf(self.model, message.folder, self.hf)
        return {}, {}

    def push_all(self, message: PushAll, _: Tensors) -> Answer:
        pusher = Pusher(message.settings, self.hf)
        told = [self._push_once(pusher, message.first_version + i) for i in range(message.pushes)]
        pusher.close()
        return {"pushes": told}, {}

    def _push_once(self, pusher: Pusher, version: int) -> dict[str, Any]:
        with torch.no_grad():
            for param in (param for chunk in self.model for param in chunk.parameters()):
                param.mul_(1.0 + 2.0**-6)  # changes every weight that is not 0, in float32 and in bfloat16
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the barrier does not wait for this rank's own GPU
        begun, error = time.perf_counter(), ""
        with counted() as traffic:
            try:
                report = pusher.push(self.model, version)
            except PushError as failure:
                report, error = failure.report, str(failure)
            seconds = time.perf_counter() - begun
        by_rank = gather_json(traffic)
        most = {name: max(each[name] for each in by_rank) for name in traffic}
        return {"seconds": seconds, "error": error, **most, **(asdict(report) if report else {})}


def main() -> None:
    bench = Bench()
    follow(
        {Setup: bench.setup, Build: bench.build, PushAll: bench.push_all},
        lambda: None,
        lambda: bench.rank_info.is_first,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
