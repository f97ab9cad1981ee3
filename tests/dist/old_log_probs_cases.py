"""What the ranks of test_old_log_probs.py run: whole iterations of a driver that every rank plays for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from late_copies import late_copies
from torch import Tensor

from megarl.algo.segments import clean
from megarl.config import layout_of, load_config
from megarl.group import Reply
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups
from megarl.metrics.stats import finalise
from megarl.metrics.timer import Timer
from megarl.roles.worker import Worker
from megarl.sample import Completion, Prompt, Sample, VersionSpan
from megarl.train import learn
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.roles import load_roles, make_roles

NUM_STEPS, NUM_PROMPTS, N = 2, 3, 3


class EveryRank:
    """Stands for a Group: each rank makes every call, works on the payload of its replica, and gets all replies."""

    def __init__(self, layout: Any) -> None:
        self.worker = Worker()
        self.worker.setup({"layout": layout, "device": "cpu", "seed": 0, "timeout_s": 60.0}, {})
        self.num_replicas = self.worker.rank_info.num_replicas

    def call(
        self, method: str, arguments: dict[str, Any], payloads: Sequence[dict[str, Tensor]] | None = None
    ) -> list[Reply]:
        info = self.worker.rank_info
        own = getattr(self.worker, method)(arguments, payloads[info.replica] if payloads else {})
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (info.replica, info.is_reporter, own))
        told = {replica: Reply(*answer) for replica, is_reporter, answer in every if is_reporter}
        return [told[replica] for replica in range(self.num_replicas)]


def iterate(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """Two iterations: statistics, stages and old log-probs of each, and this rank's weights in the end."""
    config, _ = load_config([f"model.path={folder}", "data.train_files=[a.jsonl]", *words], command="train")
    algorithm = make_algorithm(config)
    group: Any = EveryRank(asdict(layout_of(config.actor.megatron)))
    try:
        roles = make_roles(config, algorithm, lambda _: group)
        load_roles(roles, config, NUM_STEPS, algorithm.critic_warmup, resumes=False)
        found: dict[str, Any] = {"stats": [], "stages": [], "old": []}
        for step in range(NUM_STEPS):
            timer = Timer()
            batch, stats = learn(step, answered(step), roles, algorithm, timer)
            assert batch is not None
            found["stats"].append(finalise(stats))
            found["stages"].append([name for name, *_ in timer.stages])
            found["old"].append(clean(batch.columns["old_log_probs"], batch.columns["response_mask"] != 0))
        found["weights"] = []
        for name in roles.trainable:
            with group.worker.readable(name) as role:
                found["weights"] += [p.detach().clone() for x in role.model for p in unwrap(x).parameters()]
        return found
    finally:
        destroy_groups()


def iterate_offloaded(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """The same; what is onloaded comes as late as it may."""
    with late_copies():
        return iterate(folder, [*words, *(f"actor.megatron.{part}_offload=true" for part in ("param", "optimizer"))])


def answered(step: int) -> list[list[Sample]]:
    """Groups of answers of unequal lengths, some tokens of them by the weights of the step before."""
    draw = torch.Generator().manual_seed(step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    groups = []
    for visit in range(NUM_PROMPTS):
        prompt = Prompt(f"0-{visit}", [number(4, 40) for _ in range(number(2, 9))], "")
        group = []
        for _ in range(N):
            size = number(2, 12)
            versions = (VersionSpan(max(step - 1, 0), 0, 1), VersionSpan(step, 1, size))
            ids, log_probs = [number(4, 40) for _ in range(size)], [-number(30, 40) / 10 for _ in range(size)]
            group.append(Sample.of(prompt, Completion(ids, log_probs, "stop", versions), number(0, 5) / 4))
        groups.append(group)
    return groups
