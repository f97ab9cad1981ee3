"""A conversion's ranks in processes that are there already, and what else the pool does for test_convert.py."""

from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from lora_cases import Lora
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from shards_cases import Trained
from spawn import Ranks
from torch import Tensor

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.group import GroupSettings, RankError, Reply
from megarl.group.message import Message, Setup
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.models.lora import LoraSettings, adapted
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.roles.worker import Worker
from megarl.weights.hf.load import load_hf

held: dict[str, Worker] = {}  # of this process


def call_worker(message: Message) -> tuple[str, Any]:
    """("ok", result), or the error as its name and words."""
    worker = held.setdefault("worker", Worker())
    try:
        return "ok", worker.handlers()[type(message)](message, {})[0]
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def forget_worker() -> None:
    if held.pop("worker", None):
        destroy_groups()


class PoolGroup:
    """What a conversion needs of `group.Group`, over the ranks of the pool: two, whatever it asks for."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.asked: list[tuple[int, Layout]] = []

    def __call__(self, name: str, num_ranks: int, layout: Layout, settings: GroupSettings, **_: Any) -> Self:
        assert (name, settings.device) == ("ranks", "cpu")
        self.asked.append((num_ranks, layout))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.run(forget_worker)

    def start(self) -> None:
        self.call(Setup(self.asked[-1][1], "cpu", 0, 60.0))

    def call(self, message: Message) -> list[Reply]:
        answers = self.ranks.run(call_worker, message, timeout_s=180)
        for rank, (kind, found) in enumerate(answers):
            if kind == "ValueError":
                raise ValueError(found)
            if kind != "ok":
                raise RankError(f"rank {rank}: {kind}: {found}", "all of it")
        return [Reply(found, {}) for _, found in answers]

    def call_each(self, message: Message) -> list[dict[str, Any]]:
        return [reply.result for reply in self.call(message)]

    def call_leader(self, message: Message) -> Reply:
        return self.call(message)[0]


def save_checkpoint(hf_folder: str, folder: str, layout: Layout, role: str) -> dict[str, Tensor]:
    """As a run saves a role after a step: weights, and the optimizer's part.  Rank 0 returns the weights."""
    trained = Trained(hf_folder, layout, "adamw", "float32", role)
    trained.step()
    checkpoint.save(Path(folder), trained.model, trained.optimizer)
    weights = trained.weights()
    trained.close()
    return weights if dist.get_rank() == 0 else {}


def save_adapters(hf_folder: str, folder: str, layout: Layout) -> dict[str, Tensor]:
    """As a run with LoRA saves its actor.  Rank 0 returns the merged weights."""
    lora = Lora(hf_folder, LoraSettings(4, 8.0), layout)
    with torch.no_grad():
        for _, linear in adapted(lora.model):
            for part in linear.lora.projections.values():
                part.B.add_(torch.linspace(-0.1, 0.1, part.B.shape[1]))
    checkpoint.save(Path(folder), lora.model, None)
    merged = lora.merged()
    destroy_groups()
    return merged if dist.get_rank() == 0 else {}


def save_torch_dist(hf_folder: str, folder: str, layout: Layout, with_weights: bool) -> None:
    """As Megatron and verl save a model: weights, optimizer state by another name, and plain objects."""
    make_groups(layout)
    hf = read_hf_config(hf_folder)
    model = build_model(hf, layout)
    load_hf(model, hf_folder, hf)
    state = {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(model) if with_weights}
    moment = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.x", torch.ones(4), (0, dist.get_rank(), dist.get_world_size())
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({**state, "optimizer": {"x": moment}, "iteration": 7, "args": layout}, folder)
    if queue := filesystem_async._results_queue:  # of a process that would outlive this one
        queue._manager.shutdown()
        filesystem_async._results_queue = None
    destroy_groups()
