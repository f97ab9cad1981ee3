"""The trainer's side of `sharded` pushes: every rank sends the slices that it holds to the server ranks that need them.

Rank 0 makes a server's ranks run `receiver.load`.  They join one process group for each server, with the trainer's
ranks that have something to send.  The sender of each part compares its digest with the digest of what the server now
holds there, so nothing is gathered, neither to send nor to check.

A rank uses its groups in one order, which is the same on all ranks: first a collective with each server, in the order
of the offers; then the messages to all servers in the order of `Turns`; then the check of each server.  `exchange` says
why.
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
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.models.model import Model
from megarl.rollout.client import ServerError
from megarl.servers.weight_group import leave_weight_group
from megarl.weights.hf.gather import local_parameters
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.names import some_names
from megarl.weights.push.agreement import gather_json
from megarl.weights.push.buckets import Sizes
from megarl.weights.push.channel import Meeting, backend, own_address
from megarl.weights.push.report import Clock, one_line
from megarl.weights.push.routes import Layout, Route, Routes
from megarl.weights.push.servers import Server
from megarl.weights.push.shared import message
from megarl.weights.push.targets import Lead
from megarl.weights.reshard.exchange import Link, agree, compare, send
from megarl.weights.reshard.transfers import Message, Turns

# Timeouts that a server waits for the trainer, if there are several servers: a rank that waits for a server that hangs
# sends nothing to the others meanwhile.
_PATIENCE = 3


@dataclass
class _Outcome:
    """Outcome of the transfer to one server on one rank."""

    error: str = ""  # why the transfer failed
    wrong: list[str] = field(default_factory=list)  # parts that on the server differ from what was sent
    num_parts: int = 0
    sent: str = ""  # 64 hex digits of the digests of all parts


class ShardedSender:
    """Exists on every rank; keeps the groups with servers until a transfer fails or a server was restarted.

    Peak extra memory: two messages on each rank.  A model with adapters also needs up to four merged weights.
    """

    def __init__(self, hf_config: HFConfig, message_bytes: int, timeout_s: float, threads: Executor) -> None:
        self._message_bytes, self._timeout_s, self._threads = message_bytes, timeout_s, threads
        self._routes = Routes(hf_config)
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
            ready = targets.attempt(lambda server: server.greet(backend()), new)
        for url in ready:
            self._forget_listener(url)
            try:
                meeting, self._listeners[url] = Meeting.host(url, 0, backend(), self._timeout_s, _address(url))
            except OSError as error:
                targets.fall_back(url, one_line(error))
                continue
            self._meetings[url] = (targets.left[url].nature.started, meeting)
        waiting = targets.waiting()
        return [self._offer(targets.left[url], url) for url in urls if waiting.get(url) == "sharded"]

    def _offer(self, server: Server, url: str) -> dict[str, Any]:
        nature = server.nature
        first = nature.coordinates[0]
        layout = Layout(nature.engine, first.tp, first.ep, first.tp // first.attn)
        return {"url": url, "layout": layout, "hashes": nature.hashes, "meeting": asdict(self._meetings[url][1])}

    def _invite(self, offer: Mapping[str, Any], turns: Turns, patience: int, lead: Lead, server: Server) -> None:
        layout = Layout(*offer["layout"])
        route = self._routes[layout]
        meeting = offer["meeting"] | {"world_size": len(route.members) + layout.tp}
        meeting["timeout_s"] *= patience
        common = {"trainer": route.trainer, "server": route.server, "message_bytes": self._message_bytes}
        common |= {"senders": route.members, "turns": asdict(turns), "meeting": _join_arguments(meeting)}
        texts = [json.dumps({**common, "rank": r, "group_rank": len(route.members) + r}) for r in range(layout.tp)]
        server.open()
        server.take_part([message(text) for text in texts], lead.version, lead.flush_cache)

    # ---- on every rank

    def send(self, model: Model, offers: Sequence[Mapping[str, Any]], sizes: Sizes, lead: Lead | None) -> None:
        """Send to all of these servers.  A server that fails is skipped from then on."""
        offers = self._possible(offers, model, sizes, lead)
        start = time.perf_counter()
        turns = _turns([Layout(*offer["layout"]).tp for offer in offers])
        answers: dict[str, Future[None]] = {}
        if lead:
            patience = _PATIENCE if len(offers) > 1 else 1
            for offer, of_server in zip(offers, turns, strict=True):
                order = partial(self._invite, offer, of_server, patience, lead)
                answers |= lead.targets.start(order, [offer["url"]])
        clock = Clock()
        mine = self._send_to_all(offers, turns, _Recent(local_parameters(model)), clock)
        gathered = gather_json([[asdict(one) for one in mine], clock.seconds])
        outcomes = [[_Outcome(**one) for one in of_rank] for of_rank, _ in gathered]
        for i, offer in enumerate(offers):
            if any(of_rank[i].error or of_rank[i].wrong for of_rank in outcomes):
                self._forget(offer["url"])
        if lead:
            by_url = {offer["url"]: [of_rank[i] for of_rank in outcomes] for i, offer in enumerate(offers)}
            _conclude(lead, by_url, answers, self._timeout_s)
            _charge(lead.targets.clock, [seconds for _, seconds in gathered], time.perf_counter() - start)

    def _possible(
        self, offers: Sequence[Mapping[str, Any]], model: Model, sizes: Sizes, lead: Lead | None
    ) -> list[Mapping[str, Any]]:
        """The offers of servers that hold the same model as the trainer; the result is the same on all ranks."""
        faults = {Layout(*offer["layout"]): "" for offer in offers}
        for layout in faults:
            try:
                self._routes.prepare(layout, model, sizes, self._message_bytes)
            except ValueError as error:
                faults[layout] = one_line(error)
        for offer in offers:
            if lead and (reason := faults[Layout(*offer["layout"])]):
                lead.targets.fall_back(offer["url"], reason)
        return [offer for offer in offers if not faults[Layout(*offer["layout"])]]

    def _send_to_all(
        self, offers: Sequence[Mapping[str, Any]], turns: Sequence[Turns], params: _Recent, clock: Clock
    ) -> list[_Outcome]:
        """The outcome of each offer on this rank; uses one group at a time, in the order that the module names."""
        rank, outcomes = dist.get_rank(), [_Outcome() for _ in offers]
        with clock("join"):
            links = self._links(offers, outcomes)
            for i, link in list(links.items()):
                try:
                    agree(self._route(offers[i]).fingerprint, link)
                except (RuntimeError, ValueError) as error:  # a peer is gone (torch); fingerprints differ
                    outcomes[i].error = one_line(error)
                    del links[i]
        places: list[tuple[tuple[int, int], Link, Message]] = []
        for i, link in links.items():
            messages = self._route(offers[i]).messages
            places += [(turns[i].place(each, rank, each.peer), link, each) for each in messages]
        queue = [(link, each) for _, link, each in sorted(places, key=lambda entry: entry[0])]
        with clock("send"):
            sent = send(queue, params, clock)
        with clock("verify"):
            texts = {each: each.hexdigest() for each in set(chain.from_iterable(sent.hashes.values()))}
            for i, link in links.items():
                try:
                    if link in sent.errors:
                        raise sent.errors[link]
                    digests = [texts[each] for each in sent.hashes.get(link, ())]
                    outcomes[i].wrong = compare([each for to, each in queue if to is link], digests, link)
                except RuntimeError as error:  # a peer is gone or does not answer
                    outcomes[i].error = one_line(error)
                else:
                    outcomes[i].num_parts = len(digests)
                    outcomes[i].sent = hashlib.sha256("".join(digests).encode()).hexdigest()
        return outcomes

    def _links(self, offers: Sequence[Mapping[str, Any]], outcomes: Sequence[_Outcome]) -> dict[int, Link]:
        """Index of an offer -> this rank's link to the server; they are joined in parallel, which uses no GPU."""
        joining = {
            i: self._threads.submit(self._link, offer)
            for i, offer in enumerate(offers)
            if dist.get_rank() in self._route(offer).members
        }
        links: dict[int, Link] = {}
        for i, one in joining.items():
            try:
                links[i] = one.result()
            except (RuntimeError, ValueError) as error:
                outcomes[i].error = one_line(error)
        return links

    def _route(self, offer: Mapping[str, Any]) -> Route:
        return self._routes[Layout(*offer["layout"])]

    def _link(self, offer: Mapping[str, Any]) -> Link:
        url, layout, route = offer["url"], Layout(*offer["layout"]), self._route(offer)
        meeting = Meeting(**{**offer["meeting"], "world_size": len(route.members) + layout.tp})
        known = self._groups.get(url)
        if known is None or known[0] != meeting.name:
            if known is not None:  # the old group of a server that was restarted
                self._threads.submit(_leave, known[1])
            group = meeting.join(route.members[dist.get_rank()], self._listeners.pop(url, None))
            known = self._groups[url] = (meeting.name, group)
        ranks = {rank: len(route.members) + rank for rank in range(layout.tp)}
        return Link(known[1], ranks, _device(), self._timeout_s, offer["hashes"])

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


def _turns(sizes: Sequence[int]) -> list[Turns]:
    """The turns of each server, from the numbers of their ranks."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Turns(max(dist.get_world_size(), sum(sizes)), first) for first in firsts]


def _conclude(
    lead: Lead,
    outcomes: Mapping[str, list[_Outcome]],
    answers: Mapping[str, Future[None]],
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


def _charge(clock: Clock, by_rank: Sequence[Mapping[str, float]], seconds: float) -> None:
    """Count the phases of the slowest rank, and the rest of `seconds` as load."""
    slowest = max(by_rank, key=lambda phases: sum(phases.values()))
    for phase, of_phase in slowest.items():
        clock.seconds[phase] += of_phase
    clock.seconds["load"] += max(0.0, seconds - sum(slowest.values()))


def _refusal(answer: Future[None]) -> str:
    if not answer.done():
        return "the server did not end its part of the transfer"
    error = answer.exception()
    if error is not None and not isinstance(error, ServerError | ValueError):
        raise error
    return "" if error is None else one_line(error)


def _join_arguments(meeting: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of join_weight_group, except the rank."""
    renamed = {"name": "group_name", "address": "master_address", "port": "master_port"}
    return {renamed.get(key, key): value for key, value in meeting.items()}


def _address(url: str) -> str:
    """An address of this machine that the server and all ranks of the trainer can reach."""
    address = own_address(url)
    return own_address(f"http://{os.environ['MASTER_ADDR']}") if address.startswith("127.") else address


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
