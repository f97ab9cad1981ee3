"""A rank in bench_scale.py: that of a run, which can also be asked to do nothing.

Run on each rank as `python -m scale_ranks`, with benchmarks/ on the path.
"""

from __future__ import annotations

import torch.distributed as dist
from scale_hollow import nothing

from megarl.group.follow import follow
from megarl.roles.worker import Worker


def main() -> None:
    worker = Worker()
    handlers = {**worker.handlers(), "nothing": nothing}
    follow(handlers, lambda: worker.share, lambda: worker.rank_info.is_first)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
