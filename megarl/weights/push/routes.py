"""What the trainer's ranks agree on before they send slices to servers of a layout: the plan, and who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from megarl.mcore.models.layers import layers_per_chunk
from megarl.mcore.models.model import Model, unwrap
from megarl.servers.nccl import check_one_environment, paired_variables
from megarl.weights.hf.gather import local_parameters
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import Sizes, some_names
from megarl.weights.mapping.server_map import server_table
from megarl.weights.push.agreement import gather_json
from megarl.weights.push.channel import backend
from megarl.weights.push.report import one_line
from megarl.weights.push.servers import ServerLayout
from megarl.weights.reshard.describe import to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.reshard.transfers import Message

_LARGEST = 64 << 20  # bytes of a message; a larger one gains nothing, and the server has to hold two of them
_SMALLEST = 1024


@dataclass(frozen=True)
class Route:
    """What the trainer and the servers of one layout must know about each other."""

    trainer: str  # the shardings as text
    server: str
    fingerprint: str
    plan: Plan
    messages: list[Message]  # what this rank sends
    members: dict[int, int]  # rank of the trainer -> its rank in the group, where the server's ranks come after them


class Claim(NamedTuple):
    """What each rank of the trainer reports before anything is sent to servers of a new layout."""

    error: str  # why it cannot take part
    fingerprint: str
    sends: bool
    variables: dict[str, str | None]  # of NCCL, see paired_variables


def message_bytes_of(bucket_bytes: int) -> int:
    """Bytes of a message: a rank holds two of them, for all servers together, which are at most `bucket_bytes`."""
    return max(_SMALLEST, min(bucket_bytes // 2, _LARGEST))


class Routes:
    """The routes to the layouts that were met so far, the same on every rank of the trainer except for `messages`."""

    def __init__(self, hf_config: HFConfig) -> None:
        self._hf_config = hf_config
        self._known: dict[ServerLayout, Route] = {}
        self._incoming: dict[tuple[ServerLayout, int], list[Message]] = {}

    def __getitem__(self, layout: ServerLayout) -> Route:
        return self._known[layout]

    def incoming(self, layout: ServerLayout, rank: int, message_bytes: int) -> list[Message]:
        """What a server's rank needs.  Kept, because for large models it takes seconds."""
        if (layout, rank) not in self._incoming:
            self._incoming[layout, rank] = self[layout].plan.messages_in(rank, message_bytes)
        return self._incoming[layout, rank]

    def prepare(self, layout: ServerLayout, model: Model, sizes: Sizes, message_bytes: int) -> None:
        """A collective of all ranks if the layout is new; ValueError on all of them if any cannot take part."""
        if layout in self._known:
            return
        route: Route | None = None
        try:
            route = self._route(layout, model, sizes, message_bytes)
            claim = Claim("", route.fingerprint, bool(route.messages), paired_variables(backend()))
        except ValueError as error:
            claim = Claim(one_line(error), "", False, {})
        members = members_of([Claim(*one) for one in gather_json(claim)])
        assert route is not None, "a rank without one has said why"
        self._known[layout] = replace(route, members=members)

    def _route(self, layout: ServerLayout, model: Model, sizes: Sizes, message_bytes: int) -> Route:
        """The route as this rank derives it, without members."""
        trainer, server = _trainer_sharding(model, self._hf_config, sizes), self._server_sharding(layout, sizes)
        rank = dist.get_rank()
        params = local_parameters(model)
        plan = Plan(trainer, server)
        if lacking := [name for name in trainer.shapes(rank) if name not in params]:
            raise ValueError(f"rank {rank} of the trainer does not have {some_names(lacking)} of its description")
        messages = plan.messages_out(rank, message_bytes)
        return Route(to_json(trainer), to_json(server), plan.fingerprint(message_bytes), plan, messages, {})

    def _server_sharding(self, layout: ServerLayout, sizes: Sizes) -> ServerSharding:
        table = tuple(server_table(layout.engine, self._hf_config))
        types = _types(table, sizes)
        return ServerSharding(table, tp=layout.tp, ep=layout.ep, attention_dp=layout.attention_dp, **types)


def members_of(claims: Sequence[Claim]) -> dict[int, int]:
    """Rank of the trainer -> rank in the group, for rank 0 and all senders; ValueError unless all claims agree."""
    if error := next((claim.error for claim in claims if claim.error), ""):
        raise ValueError(error)
    if others := [str(rank) for rank, claim in enumerate(claims) if claim.fingerprint != claims[0].fingerprint]:
        raise ValueError(
            f"rank {some_names(others)} of the trainer describes the model, its layout or the messages in another way "
            "than rank 0: expected one version of megarl and one layout on all ranks"
        )
    joining = [rank for rank, claim in enumerate(claims) if claim.sends or rank == 0]
    for rank in joining:  # other machines may have others than rank 0, whose variables the servers check
        one, other = claims[rank].variables, claims[0].variables
        check_one_environment(f"rank {rank} of the trainer", one, "rank 0", other)
    return {rank: i for i, rank in enumerate(joining)}


def _trainer_sharding(model: Model, hf_config: HFConfig, sizes: Sizes) -> MegatronSharding:
    """The sharding of this model over the ranks, which are numbered in Megatron's default order."""
    ps, table = parallel_state, tuple(table_for(hf_config))
    return MegatronSharding(
        table,
        world_size=dist.get_world_size(),
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        vpp=len(model),
        layers_per_chunk=layers_per_chunk(unwrap(model[0]).config),
        cp=ps.get_context_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        **_types(table, sizes),
    )


def _types(table: Sequence[Any], sizes: Sizes) -> dict[str, Any]:
    """`dtype` and `dtypes` of a sharding: the types in which the parameters are sent."""
    types = {op.param: op.own_dtype or str(sizes[next(iter(op.hf_shapes))][1]).removeprefix("torch.") for op in table}
    most = max(set(types.values()), key=list(types.values()).count)
    return {"dtype": most, "dtypes": tuple((param, dtype) for param, dtype in types.items() if dtype != most)}
