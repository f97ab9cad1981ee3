"""The trainer's side of `sharded` pushes: every rank sends the slices that it holds to the server ranks that need them.

Rank 0 makes a server's ranks run `receiver.load`.  They join one process group for each server, with the trainer's
ranks that have something to send.  The sender of each part compares its digest with the digest of what the server now
holds there, so nothing is gathered, neither to send nor to check.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.mcore.models.layers import layers_per_chunk
from megarl.mcore.models.model import Model, unwrap
from megarl.rollout.client import ServerError
from megarl.servers.weight_group import leave_weight_group
from megarl.weights.hf.gather import local_parameters
from megarl.weights.mapping.families import HFConfig, table_for
from megarl.weights.mapping.names import some_names
from megarl.weights.mapping.server_map import EngineKind, server_table
from megarl.weights.push.agreement import gather_json
from megarl.weights.push.buckets import Sizes
from megarl.weights.push.channel import Meeting, own_address
from megarl.weights.push.report import Clock, one_line
from megarl.weights.push.servers import Server
from megarl.weights.push.shared import message
from megarl.weights.push.targets import Lead
from megarl.weights.reshard.describe import to_json
from megarl.weights.reshard.exchange import Link, agree, compare, send
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.reshard.transfers import Message
from megarl.weights.verify.digests import Kind, digest

HELLO = "{}"  # a text that only tests whether the receiver can be called
_ENOUGH_BYTES = 1 << 20  # of a message: with many servers messages get smaller, but below this the time costs too much


class _Layout(NamedTuple):
    """The layout of a server."""

    engine: EngineKind
    tp: int
    ep: int


@dataclass(frozen=True)
class _Route:
    """What the trainer and the servers of one layout must know about each other."""

    trainer: str  # the shardings as text
    server: str
    fingerprint: str
    messages: list[Message]  # what this rank sends
    members: dict[int, int]  # rank of the trainer -> its rank in the group, where the server's ranks come after them


class _Claim(NamedTuple):
    """What each rank of the trainer reports before anything is sent to servers of a new layout."""

    error: str  # why it cannot take part
    fingerprint: str
    sends: bool


@dataclass
class _Outcome:
    """Outcome of the transfer to one server on one rank."""

    error: str = ""  # why the transfer failed
    wrong: list[str] = field(default_factory=list)  # parts that on the server differ from what was sent
    num_parts: int = 0
    sent: str = ""  # 64 hex digits of the digests of all parts
    seconds: dict[str, float] = field(default_factory=dict)  # join, convert, send, verify


class ShardedSender:
    """Exists on every rank; keeps the groups with servers until a transfer fails or a server was restarted.

    Peak extra memory: one bucket on each rank, or 2 MiB for each server if that is more.  A model with adapters also
    needs up to four merged weights, plus one for each server.
    """

    def __init__(
        self, hf_config: HFConfig, bucket_bytes: int, num_servers: int, timeout_s: float, threads: Executor
    ) -> None:
        self._hf_config, self._timeout_s, self._threads = hf_config, timeout_s, threads
        most = max(bucket_bytes // 2, 1024)  # two messages are under way to each server
        self._message_bytes = max(most // max(1, num_servers), min(most, _ENOUGH_BYTES))
        self._routes: dict[_Layout, _Route] = {}
        self._groups: dict[str, tuple[str, dist.ProcessGroup]] = {}  # url -> name, group
        self._meetings: dict[str, tuple[str, Meeting]] = {}  # on rank 0: url -> server's start, rendezvous
        self._listeners: dict[str, socket.socket] = {}  # on rank 0: url -> socket of a rendezvous not joined yet

    # ---- on rank 0

    def offers(self, lead: Lead, urls: Sequence[str]) -> list[dict[str, Any]]:
        """What all ranks need to know to send to these servers; servers without a working receiver fall back."""
        targets, new = lead.targets, []
        for url in urls:
            started, _ = self._meetings.get(url, ("", None))
            if started != targets.left[url].nature.started:
                new.append(url)
        with targets.clock("join"):
            ready = targets.attempt(_greet, new)
        for url in ready:
            self._forget_listener(url)
            try:
                meeting, self._listeners[url] = Meeting.host(url, 0, _backend(), self._timeout_s, _address(url))
            except OSError as error:
                targets.fall_back(url, one_line(error))
                continue
            self._meetings[url] = (targets.left[url].nature.started, meeting)
        waiting = targets.waiting()
        return [self._offer(targets.left[url], url) for url in urls if waiting.get(url) == "sharded"]

    def _offer(self, server: Server, url: str) -> dict[str, Any]:
        nature = server.nature
        layout = _Layout(nature.engine, nature.coordinates[0].tp, nature.coordinates[0].ep)
        return {"url": url, "layout": layout, "hashes": nature.hashes, "meeting": asdict(self._meetings[url][1])}

    def _invite(self, offer: Mapping[str, Any], lead: Lead, server: Server) -> None:
        route, layout = self._routes[_Layout(*offer["layout"])], _Layout(*offer["layout"])
        meeting = offer["meeting"] | {"world_size": len(route.members) + layout.tp}
        common = {"trainer": route.trainer, "server": route.server, "message_bytes": self._message_bytes}
        common |= {"senders": route.members, "meeting": _join_arguments(meeting)}
        texts = [json.dumps({**common, "rank": r, "group_rank": len(route.members) + r}) for r in range(layout.tp)]
        server.open()
        server.take_part([message(text) for text in texts], lead.version, lead.flush_cache)

    # ---- on every rank

    def send(self, model: Model, offers: Sequence[Mapping[str, Any]], sizes: Sizes, lead: Lead | None) -> None:
        """Send to all of these servers in parallel; each has its own group and thread, so none waits for another."""
        offers = self._possible(offers, model, sizes, lead)
        start = time.perf_counter()
        answers: dict[str, Future[None]] = {}
        if lead:
            for offer in offers:
                order = partial(self._invite, offer, lead)
                answers |= lead.targets.start(order, [offer["url"]])
        params = _Recent(local_parameters(model))
        here = [self._threads.submit(self._send_to, offer, params) for offer in offers]
        gathered = gather_json([asdict(one.result()) for one in here])
        outcomes = [[_Outcome(**one) for one in of_rank] for of_rank in gathered]
        for i, offer in enumerate(offers):
            if any(of_rank[i].error or of_rank[i].wrong for of_rank in outcomes):
                self._forget(offer["url"])
        if lead:
            by_url = {offer["url"]: [of_rank[i] for of_rank in outcomes] for i, offer in enumerate(offers)}
            _conclude(lead, by_url, answers, time.perf_counter() - start, self._timeout_s)

    def _possible(
        self, offers: Sequence[Mapping[str, Any]], model: Model, sizes: Sizes, lead: Lead | None
    ) -> list[Mapping[str, Any]]:
        """The offers of servers that hold the same model as the trainer; the result is the same on all ranks."""
        faults = {_Layout(*offer["layout"]): "" for offer in offers}
        for layout in faults:
            try:
                self._prepare(layout, model, sizes)
            except ValueError as error:
                faults[layout] = one_line(error)
        for offer in offers:
            if lead and (reason := faults[_Layout(*offer["layout"])]):
                lead.targets.fall_back(offer["url"], reason)
        return [offer for offer in offers if not faults[_Layout(*offer["layout"])]]

    def _prepare(self, layout: _Layout, model: Model, sizes: Sizes) -> None:
        """A collective of all ranks if the layout is new; ValueError on all of them if any cannot take part."""
        if layout in self._routes:
            return
        route: _Route | None = None
        try:
            route = self._route(layout, model, sizes)
            claim = _Claim("", route.fingerprint, bool(route.messages))
        except ValueError as error:
            claim = _Claim(one_line(error), "", False)
        members = _members([_Claim(*one) for one in gather_json(claim)])
        assert route is not None, "a rank without one has said why"
        self._routes[layout] = replace(route, members=members)

    def _route(self, layout: _Layout, model: Model, sizes: Sizes) -> _Route:
        """The route as this rank derives it, without members."""
        trainer, server = _trainer_sharding(model, self._hf_config, sizes), self._server_sharding(layout, sizes)
        rank, params, plan = dist.get_rank(), local_parameters(model), Plan(trainer, server)
        if lacking := [name for name in trainer.shapes(rank) if name not in params]:
            raise ValueError(f"rank {rank} of the trainer does not have {some_names(lacking)} of its description")
        messages = plan.messages_out(rank, self._message_bytes)
        fingerprint = plan.fingerprint(self._message_bytes)
        return _Route(to_json(trainer), to_json(server), fingerprint, messages, {})

    def _server_sharding(self, layout: _Layout, sizes: Sizes) -> ServerSharding:
        table = tuple(server_table(layout.engine, self._hf_config))
        return ServerSharding(table, tp=layout.tp, ep=layout.ep, **_types(table, sizes))

    def _send_to(self, offer: Mapping[str, Any], params: _Recent) -> _Outcome:
        route, outcome = self._routes[_Layout(*offer["layout"])], _Outcome()
        if dist.get_rank() not in route.members:
            return outcome
        hashes: Kind = offer["hashes"]
        clock = Clock()
        try:
            with clock("join"):
                link = self._link(offer, route)
                agree(route.fingerprint, link.group, link.device)
            with clock("send"):
                digests = send(route.messages, params, link, digest=partial(digest, kind=hashes), clock=clock)
            with clock("verify"):
                outcome.wrong = compare(route.messages, digests, link)
            outcome.num_parts, outcome.sent = len(digests), hashlib.sha256("".join(digests).encode()).hexdigest()
        except (RuntimeError, ValueError) as error:  # a peer is gone or does not answer (torch); fingerprints differ
            outcome.error = one_line(error)
        outcome.seconds = dict(clock.seconds)
        return outcome

    def _link(self, offer: Mapping[str, Any], route: _Route) -> Link:
        url, layout = offer["url"], _Layout(*offer["layout"])
        meeting = Meeting(**{**offer["meeting"], "world_size": len(route.members) + layout.tp})
        known = self._groups.get(url)
        if known is None or known[0] != meeting.name:
            if known is not None:  # the old group of a server that was restarted
                self._threads.submit(_leave, known[1])
            group = meeting.join(route.members[dist.get_rank()], self._listeners.pop(url, None))
            known = self._groups[url] = (meeting.name, group)
        ranks = {rank: len(route.members) + rank for rank in range(layout.tp)}
        return Link(known[1], ranks, _device(), self._timeout_s)

    def _forget(self, url: str) -> Future[None] | None:
        """Leave the group with a server; if the other side does not answer, this may last until the timeout."""
        self._meetings.pop(url, None)
        self._forget_listener(url)
        known = self._groups.pop(url, None)
        return None if known is None else self._threads.submit(_leave, known[1])

    def _forget_listener(self, url: str) -> None:
        if (listener := self._listeners.pop(url, None)) is not None:
            listener.close()

    def close(self) -> None:
        for url in list(self._listeners):
            self._forget_listener(url)
        wait([left for url in list(self._groups) if (left := self._forget(url))])


def _leave(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):
        leave_weight_group(group)


class _Recent(Mapping[str, Tensor]):
    """Parameters by name with a cache of the last four: each look-up in a model with adapters merges them again."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params, self._get = params, lru_cache(maxsize=4)(params.__getitem__)

    def __getitem__(self, name: str) -> Tensor:
        return self._get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def _members(claims: Sequence[_Claim]) -> dict[int, int]:
    """Rank of the trainer -> rank in the group, for rank 0 and all senders; ValueError unless all claims agree."""
    if error := next((claim.error for claim in claims if claim.error), ""):
        raise ValueError(error)
    if others := [str(rank) for rank, claim in enumerate(claims) if claim.fingerprint != claims[0].fingerprint]:
        raise ValueError(
            f"rank {some_names(others)} of the trainer describes the model, its layout or the messages in another way "
            "than rank 0: expected one version of megarl and one layout on all ranks"
        )
    joining = [rank for rank, claim in enumerate(claims) if claim.sends or rank == 0]
    return {rank: i for i, rank in enumerate(joining)}


def _greet(server: Server) -> None:
    """Test that the receiver can be loaded and called, before any rank waits for it in a group."""
    server.open()  # a failed faster transport has closed the update
    server.greet([message(HELLO)] * len(server.nature.coordinates))


def _conclude(
    lead: Lead,
    outcomes: Mapping[str, list[_Outcome]],
    answers: Mapping[str, Future[None]],
    seconds: float,
    timeout_s: float,
) -> None:
    """On rank 0: decide from the outcomes of all ranks and the servers' answers which servers are done."""
    targets = lead.targets
    with targets.clock("load"):
        wait(list(answers.values()), timeout=timeout_s)
    for url, found in outcomes.items():
        reasons = [_refusal(answers[url]), *dict.fromkeys(one.error for one in found)]
        wrong = [part for one in found for part in one.wrong]
        if wrong:
            reasons.append(f"{url} does not hold the weights that the trainer sent (differ: {some_names(wrong)})")
        if reason := "; ".join(filter(None, reasons)):
            targets.fall_back(url, reason)
        else:
            targets.done[url] = "sharded"
            lead.verified[url] = sum(one.num_parts for one in found)
            lead.sent[url] = "".join(one.sent for one in found)
    spent = [one.seconds for found in outcomes.values() for one in found]
    slowest = max(spent, key=lambda phases: sum(phases.values()), default={})
    for phase, of_phase in slowest.items():
        targets.clock.seconds[phase] += of_phase
    targets.clock.seconds["load"] += max(0.0, seconds - sum(slowest.values()))


def _refusal(answer: Future[None]) -> str:
    if not answer.done():
        return "the server did not end its part of the transfer"
    error = answer.exception()
    if error is not None and not isinstance(error, ServerError | ValueError):
        raise error
    return "" if error is None else one_line(error)


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
    types = {op.param: str(sizes[next(iter(op.hf_shapes))][1]).removeprefix("torch.") for op in table}
    most = max(set(types.values()), key=list(types.values()).count)
    return {"dtype": most, "dtypes": tuple((param, dtype) for param, dtype in types.items() if dtype != most)}


def _join_arguments(meeting: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of join_weight_group, except the rank."""
    renamed = {"name": "group_name", "address": "master_address", "port": "master_port"}
    return {renamed.get(key, key): value for key, value in meeting.items()}


def _address(url: str) -> str:
    """An address of this machine that the server and all ranks of the trainer can reach."""
    address = own_address(url)
    return own_address(f"http://{os.environ['MASTER_ADDR']}") if address.startswith("127.") else address


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
