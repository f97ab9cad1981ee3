"""The two layouts of a model that there are: a trainer's ranks and a server's."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megarl.weights.mapping.names import Op, ShardCoordinate
from megarl.weights.reshard.sharding import Sharding


@dataclass(frozen=True)
class MegatronSharding(Sharding):
    """The ranks of Megatron-Core's trainer in its default order (tp, cp, ep, dp, pp; experts: etp, ep, dp, pp).

    `etp` None: as `tp`.  `layers_per_chunk`: how many layers each of the pp * vpp chunks has, in the order of the
    model, of which chunk i lies on stage i % pp; () deals them evenly.  The embedding is on the first stage (and its
    tied copy, `Op.copies`, on the last), what belongs to no other layer on the last.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    layers_per_chunk: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what, size in (("tp*pp*cp", self.tp * self.pp * self.cp), ("etp*ep*pp", self._etp * self.ep * self.pp)):
            if self.world_size % size:
                raise ValueError(f"{what}={size} does not divide world_size={self.world_size}")
        if len(self._chunks) != self.pp * self.vpp or sum(self._chunks) != self.num_layers:
            raise ValueError(
                f"layers_per_chunk={list(self._chunks)}: expected {self.pp * self.vpp} numbers (pp*vpp) that sum to "
                f"the model's {self.num_layers} layers"
            )

    @property
    def num_ranks(self) -> int:
        return self.world_size

    @property
    def num_stages(self) -> int:
        return self.pp

    @cached_property
    def num_layers(self) -> int:
        return 1 + max((op.layer for op in self.table if op.layer is not None), default=-1)

    def coordinate(self, rank: int) -> ShardCoordinate:
        return ShardCoordinate(
            rank % self.tp, self.tp, rank // self._etp % self.ep, self.ep, rank % self._etp, self._etp
        )

    def stage(self, rank: int) -> int:
        return rank // (self.world_size // self.pp)

    def params_on(self, op: Op, stage: int) -> tuple[str, ...]:
        layer = self._layers[op.param]
        if layer is not None:
            return (op.param,) if self._stage_of_layer[layer] == stage else ()
        home = 0 if op.param.startswith("embedding.") else self.pp - 1
        if stage == home:
            return (op.param,)
        return op.copies if stage == self.pp - 1 else ()

    @property
    def _etp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @cached_property
    def _chunks(self) -> tuple[int, ...]:
        count = self.pp * self.vpp
        if not self.layers_per_chunk and self.num_layers % count:
            raise ValueError(f"{self.num_layers} layers do not divide by pp*vpp={count}; expected layers_per_chunk")
        return self.layers_per_chunk or (self.num_layers // count,) * count

    @cached_property
    def _layers(self) -> dict[str, int | None]:
        return {op.param: op.layer for op in self.table}

    @cached_property
    def _stage_of_layer(self) -> list[int]:
        ends = list(accumulate(self._chunks))
        return [bisect_right(ends, layer) % self.pp for layer in range(self.num_layers)]


@dataclass(frozen=True)
class ServerSharding(Sharding):
    """Replicas of a server one after another, each of `tp` ranks; experts are dealt to `ep` of them, as SGLang does.

    Rank r of a replica has the r // (tp/ep)-th run of the experts, and of each the (r % (tp/ep))-th part.
    """

    tp: int = 1
    ep: int = 1
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.tp % self.ep:
            raise ValueError(f"a server's ep_size={self.ep} does not divide its tp_size={self.tp}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.num_replicas

    @property
    def num_stages(self) -> int:
        return 1

    def coordinate(self, rank: int) -> ShardCoordinate:
        tp_rank, etp = rank % self.tp, self.tp // self.ep
        return ShardCoordinate(tp_rank, self.tp, tp_rank // etp, self.ep, tp_rank % etp, etp)

    def stage(self, rank: int) -> int:
        return 0

    def params_on(self, op: Op, stage: int) -> tuple[str, ...]:
        return (op.param,)
