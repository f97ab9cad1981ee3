"""A rank in bench_scale.py: that of a run, which can also be asked to do nothing."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.scale.hollow import Nothing, nothing
from megarl.group.follow import follow
from megarl.roles.worker import Worker


def main() -> None:
    worker = Worker()
    handlers = {**worker.handlers(), Nothing: nothing}
    follow(handlers, lambda: worker.share, lambda: worker.rank_info.is_first)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
