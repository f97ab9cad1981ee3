"""Routing replay: in a pass the experts of every token are given, or noted for later passes.

Routers of the trainer and of the servers choose other experts for tokens whose scores nearly tie, and their log-probs
of these tokens then differ far more than by rounding.  "rollout" replays what the servers chose (R3: Ma et al. 2025,
arXiv 2510.11370), "old" what the pass of the old log-probs chose (Zheng et al. 2025, arXiv 2507.18071, section 5.3).
Given are only the experts: their weights are the router's own scores, so it has a gradient, as in Megatron's replay.

What is given is the column of `megarl.arch.routed_experts`, and with "rollout" that of the keys too, if the model has
indexers, for whose scores the same is true.  The tokens of a rank are those of its row's slice, with sequence
parallelism its part of them; the layers are those of the chunk that runs.  Each row's last token, padding and dummies
predict nothing: they go to the first experts.
Megatron's losses for balanced routers, which no family here has, would still count the experts of the router's choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megarl.arch.routed_experts import INDEXED_KEYS, ROUTED_EXPERTS
from megarl.mcore.models.layers import layers_with_experts
from megarl.mcore.models.model import Model, unwrap
from megarl.mcore.training.packed_rows import PackedRow, on_device
from megarl.samples.batch import MicroBatch


class RouterReplay:
    """What a router asks for the experts of its tokens, in the place of Megatron's class of this name.

    Megatron's (moe/router_replay.py) has one list of the routers of all models in a process, and must know before
    each backward pass, which its pipeline schedules begin themselves, that a recomputation comes.  Here a call outside
    a forward step is one.  Schedules run the backward passes of a chunk in the order of its forward passes.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer  # its number among the layers with experts
        self.reset()

    def reset(self, *, notes: bool = False, trains: bool = False) -> None:
        """Before a pass.  `notes`: keep what the router chooses.  `trains`: layers may be computed again."""
        self.notes, self.trains = notes, trains
        self.given: Tensor | None = None  # of the forward step that runs: [tokens, experts of a token]
        self.chosen: Tensor | None = None  # the same, by the router
        self.again: deque[Tensor] = deque()  # what was given to forward steps that will be computed again

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> those of the experts of each token, and these experts, both [tokens, topk]."""
        if self.given is None and not self.again:
            values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.chosen = experts if self.notes else None
            return values, experts
        if self.given is None:
            narrow = self.again.popleft()
        else:
            narrow = self.given
            if self.trains and not torch.is_grad_enabled():  # a checkpoint's first pass
                self.again.append(narrow)
        assert narrow.shape == (len(scores), topk), f"experts {tuple(narrow.shape)} given for {len(scores)} tokens"
        experts = narrow.long()
        return scores.gather(1, experts), experts


def add_router_replay(model: Model) -> None:
    """Let the experts of decoder layers be given and noted, not of MTP layers; before it is wrapped for training."""
    chunk: Any
    for chunk in map(unwrap, model):
        sparse = [layer for layer, has_experts in enumerate(layers_with_experts(chunk.config)) if has_experts]
        router: Any
        for router in (module for module in chunk.decoder.modules() if isinstance(module, TopKRouter)):
            router.router_replay = RouterReplay(sparse.index(router.layer_number - 1))


class Routing:
    """The experts of all tokens in one pass over micro-batches.

    They are given if the micro-batches have the column and `add_router_replay` has prepared the model.
    """

    def __init__(
        self,
        model: Model,
        micros: Sequence[MicroBatch],
        rows: Sequence[PackedRow],
        *,
        notes: bool = False,
        trains: bool = False,
    ) -> None:
        """`notes`: the router chooses, and `columns` returns what it chose.  `trains`: a backward pass follows."""
        self._config = unwrap(model[0]).config
        self._micros = micros
        self._rows = rows
        self._notes = notes
        self._routers = {id(chunk): list(_replays_of(chunk)) for chunk in model}
        gives_keys = INDEXED_KEYS in micros[0].batch.columns
        self._indexers = {id(chunk): _indexers_of(chunk) if gives_keys else [] for chunk in model}
        self._gives = not notes and ROUTED_EXPERTS in micros[0].batch.columns
        self._chosen: list[dict[int, Tensor]] = [{} for _ in micros]  # of each micro-batch, by layer, on the CPU
        for replay in (replay for replays in self._routers.values() for replay in replays):
            replay.reset(notes=notes, trains=trains)

    @contextmanager
    def step(self, index: int, chunk: nn.Module) -> Iterator[None]:
        """Around the forward pass of a chunk over a row."""
        replays = self._routers[id(chunk)]
        given = self._given(index, [replay.layer for replay in replays]) if self._gives and replays else None
        for place, replay in enumerate(replays):
            replay.given = None if given is None else given[:, place]
        if indexers := self._indexers[id(chunk)]:
            self._rows[index].packed.keys.update(self._keys(index, indexers))
        yield
        noted = {replay.layer: replay.chosen.to(self._narrow) for replay in replays if replay.chosen is not None}
        if noted:  # to the CPU in one copy: a device has room for those of the rows under way, not of a whole batch
            self._chosen[index] |= zip(noted, torch.stack([*noted.values()]).cpu(), strict=True)
        for replay in replays:
            replay.given = replay.chosen = None

    @property
    def _narrow(self) -> torch.dtype:
        """Of the experts on a device: torch has few operations for uint16."""
        count = self._config.num_moe_experts
        assert count is not None, "a model with routers has experts"
        return torch.uint8 if count <= 256 else torch.int16

    def _given(self, index: int, layers: list[int]) -> Tensor:
        """[this rank's tokens, layers, experts of a token] on the device."""
        micro, row = self._micros[index], self._rows[index]
        experts = row.slice(micro.batch.columns[ROUTED_EXPERTS][:, layers]).to(self._narrow)
        unknown = (row.targets < 0) | micro.is_dummy
        experts[unknown] = torch.arange(experts.size(2), dtype=self._narrow)
        return on_device([self._own_part(experts)], row.tokens.device)[0]

    def _keys(self, index: int, indexers: list[tuple[int, int]]) -> dict[int, Tensor]:
        """As PackedParams has them: of a token with fewer tokens before it than are chosen all, and of one whose next
        token is none the first ones."""
        micro, row = self._micros[index], self._rows[index]
        places = [place for _, place in indexers]
        keys = row.slice(micro.batch.columns[INDEXED_KEYS][:, places]).to(torch.int32)  # [tokens, layers, keys]
        num_keys, inside = keys.size(2), row.inside[:, None, None]
        keys[(row.targets < 0) | micro.is_dummy | (row.inside < num_keys)] = torch.arange(num_keys, dtype=torch.int32)
        keys = torch.where(keys > inside, -1, keys + row.starts.int()[:, None, None])
        return {layer: keys[:, at] for at, (layer, _) in enumerate(indexers)}

    def _own_part(self, of_slice: Tensor) -> Tensor:
        """Of the entries of a context-parallel slice those that come to the routers of this rank."""
        if not self._config.sequence_parallel:
            return of_slice
        return of_slice.chunk(ps.get_tensor_model_parallel_world_size())[ps.get_tensor_model_parallel_rank()]

    def columns(self) -> list[Tensor]:
        """Of each micro-batch without dummies the column of what the routers chose: [N, layers, experts of a token]
        uint8 or uint16 on the CPU, on every rank of the replica.  A collective."""
        return [self._column(index) for index, micro in enumerate(self._micros) if not micro.is_dummy]

    def _column(self, index: int) -> Tensor:
        row, config, narrow = self._rows[index], self._config, self._narrow
        num_layers = sum(layers_with_experts(config))
        shape = (row.num_tokens, num_layers, config.moe_router_topk)
        column = torch.zeros(shape, dtype=narrow)
        if config.sequence_parallel or ps.get_tensor_model_parallel_rank() == 0:  # else all have the same tokens
            targets = self._own_part(row.targets)
            for layer, chosen in self._chosen[index].items():
                column[targets[targets >= 0], layer] = chosen[targets >= 0]
        column = column.to(row.tokens.device)
        # Each entry is of one rank and 0 on the others: the sum of the bytes is the entry.
        for group in (ps.get_tensor_and_context_parallel_group(), ps.get_pipeline_model_parallel_group()):
            dist.all_reduce(column.view(torch.uint8), group=group)
        return column.cpu() if narrow is torch.uint8 else column.cpu().view(torch.uint16)


def _indexers_of(chunk: nn.Module) -> list[tuple[int, int]]:
    """(number of the layer, from 1, its place among the layers with indexers of the whole model) in this chunk."""
    config: Any = unwrap(chunk).config
    offset, every = config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
    modules: list[Any] = list(chunk.modules())
    own = [module.layer_number for module in modules if isinstance(getattr(module, "indexer", None), nn.Module)]
    return [(layer, sum(n <= offset or (n - offset) % every == 0 for n in range(1, layer))) for layer in own]


def _replays_of(chunk: nn.Module) -> Iterator[RouterReplay]:
    for module in unwrap(chunk).modules():
        if isinstance(module, TopKRouter) and isinstance(module.router_replay, RouterReplay):
            yield module.router_replay
