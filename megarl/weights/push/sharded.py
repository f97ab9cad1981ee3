"""The trainer's side of pushes of slices: every rank sends those that it holds to the server ranks that need them.

Rank 0 makes a server's ranks run `receiver.load`.  They join one process group for each server, with the trainer's
ranks that have something to send.  The sender of each part compares its digest with the digest of what the server now
holds there, so nothing is gathered, neither to send nor to check.

This is `sharded`.  With `shared` a rank of the trainer beside each rank of the server, its host, receives the slices
and compares the digests; it has the server's rank map the memory in which they come.  See `relay`.

A rank uses its groups in one order, which is the same on all ranks: first a collective with each server, in the order
of the offers; then the messages to all servers in the order of `MessageSchedule`; then the check of each server.
`exchange` says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megarl.io.sockets import is_loopback
from megarl.mcore.models.model import Model
from megarl.processes.ranks import OWN_ADDRESS
from megarl.rollout.client import ServerError
from megarl.servers.weight_group import leave_weight_group
from megarl.weights.clock import Clock
from megarl.weights.hf.gather import local_parameters
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.names import Sizes, some_names
from megarl.weights.push.agreement import broadcast_json, gather_json
from megarl.weights.push.channel import Host, Meeting, backend, own_address
from megarl.weights.push.gpu_handles import gpus_of
from megarl.weights.push.report import one_line
from megarl.weights.push.routes import Routes
from megarl.weights.push.servers import TRANSFER_S, Server, ServerLayout
from megarl.weights.push.shared import forget, message, shared_buffer
from megarl.weights.push.state import PushState
from megarl.weights.reshard.exchange import Link, ParamOf, agree, compare, send
from megarl.weights.reshard.relay import Guest, Seat, compare_at_hosts, relay
from megarl.weights.reshard.transfers import Message, MessageSchedule

# Timeouts that a server waits for the trainer, if there are several servers: a rank that waits for a server that hangs
# sends nothing to the others meanwhile.
_PATIENCE = 3
_GREETING = json.dumps({"nccl": {}})  # memory comes with it


@dataclass
class _Outcome:
    """Outcome of the transfer to one server on one rank."""

    error: str = ""  # why the transfer failed
    wrong: list[str] = field(default_factory=list)  # parts that on the server differ from what was sent
    num_parts: int = 0
    sent: str = ""  # 64 hex digits of the digests of all parts


@dataclass(frozen=True)
class Offer:
    """A server that gets slices, as rank 0 describes it to all ranks.

    `hosts`: the trainer's rank beside each rank of the server, which receives for it; (): it receives itself.
    """

    url: str
    layout: ServerLayout
    meeting: Meeting
    hosts: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Offer:
        """From its fields as JSON has them."""
        url, layout, meeting = fields["url"], ServerLayout(*fields["layout"]), Meeting(**fields["meeting"])
        return cls(url, layout, meeting, tuple(fields["hosts"]))


class ShardedSender:
    """Exists on every rank; keeps the groups with servers until a transfer fails or a server was restarted.

    Peak extra memory: two messages on each rank.  A model with adapters also needs up to four merged weights.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        message_bytes: int,
        timeout_s: float,
        threads: Executor,
        key: str,
        seats: Sequence[str],
    ) -> None:
        """`key`: of the stores of weight groups.  `seats`: `own_seat` of each rank."""
        self._message_bytes = message_bytes
        self._timeout_s = timeout_s
        self._threads = threads
        self._key = key
        self._seats = seats
        self._routes = Routes(hf_config)
        self._groups: dict[str, tuple[str, dist.ProcessGroup]] = {}  # url -> name, group
        # On rank 0: url -> server's start and transport, rendezvous, its store.
        self._meetings: dict[str, tuple[tuple[str, str], Meeting, Host]] = {}

    # ---- on rank 0

    def offers(self, state: PushState, urls: Sequence[str], transport: str) -> list[dict[str, Any]]:
        """The fields of an Offer for each of these servers; servers without a working receiver fall back."""
        servers = {url: state.targets[url].server for url in urls}
        started = {url: (server.capabilities.started, transport) for url, server in servers.items()}
        new = [url for url in urls if url not in self._meetings or self._meetings[url][0] != started[url]]
        kind = "gloo" if transport == "shared" else backend()
        if transport == "sharded":  # the others are greeted with the memory that they are to map
            with state.clock("join"):
                state.attempt(lambda server: server.ping_receiver(kind), new)
        hosts: dict[str, tuple[int, ...]] = {}
        for url in [url for url, each in state.waiting().items() if each == transport]:
            try:
                if url in new:
                    self._forget_meeting(url)
                    hosted = Meeting.host(url, 0, kind, self._timeout_s, self._key, _address(url))
                    self._meetings[url] = (started[url], *hosted)
                hosts[url] = self._hosts(servers[url], sum(map(len, hosts.values()))) if transport == "shared" else ()
            except (OSError, ValueError) as error:
                state.fall_back(url, one_line(error))
        waiting = state.waiting()
        return [
            asdict(Offer(url, servers[url].capabilities.layout, self._meetings[url][1], hosts[url]))
            for url in urls
            if waiting.get(url) == transport
        ]

    def _hosts(self, server: Server, first: int) -> tuple[int, ...]:
        """The trainer's rank beside each rank of the server: on its GPU; without GPUs in turns, on rank 0's machine.

        `first`: the number of the server's rank 0 among those of all servers.
        """
        here = [rank for rank, seat in enumerate(self._seats) if seat == self._seats[0]]
        if not (gpus := gpus_of(server)):
            return tuple(here[(first + rank) % len(here)] for rank in range(server.capabilities.layout.tp))
        if lacking := [gpu for gpu in gpus if gpu not in self._seats]:
            raise ValueError(f"no rank of the trainer uses {some_names(lacking)}, where {server.url} has a rank")
        return tuple(self._seats.index(gpu) for gpu in gpus)

    def _invite(self, offer: Offer, schedule: MessageSchedule, patience: int, state: PushState, server: Server) -> None:
        route, members = self._routes[offer.layout], self._members(offer)
        meeting = asdict(self._meeting(offer))
        meeting["timeout_s"] *= patience
        common = {"trainer": route.trainer, "server": route.server, "message_bytes": self._message_bytes}
        common |= {"senders": members, "schedule": asdict(schedule), "meeting": meeting}
        each = [{**common, "rank": rank, "group_rank": len(members) + rank} for rank in range(offer.layout.tp)]
        for fields, host in zip(each, offer.hosts, strict=False):
            fields["senders"] = dict.fromkeys(range(dist.get_world_size()), members[host])
        texts = [json.dumps(fields) for fields in each]
        server.open()
        server.receive_slices([message(text) for text in texts], state.version, state.flush_cache)

    # ---- on every rank

    def send(
        self, model: Model, offered: Sequence[Mapping[str, Any]], sizes: Sizes, state: PushState | None
    ) -> dict[str, str]:
        """Send to all of these servers.  A server that fails is skipped from then on.

        On rank 0, which has a `state`: url of each server that holds its slices -> a text that identifies them.
        """
        offers = self._possible([Offer.of(fields) for fields in offered], model, sizes, state)
        with (state.clock if state else Clock())("join"):
            offers, guests = self._welcome(offers, state)
        start = time.perf_counter()
        schedules = _schedules([offer.layout.tp for offer in offers])
        answers: dict[str, Future[None]] = {}
        if state:
            patience = _PATIENCE if len(offers) > 1 else 1
            for offer, schedule in zip(offers, schedules, strict=True):
                answers |= state.start(partial(self._invite, offer, schedule, patience, state), [offer.url])
        clock = Clock()
        recent = lru_cache(maxsize=4)(local_parameters(model).__getitem__)  # with adapters each look-up merges them
        try:
            mine = self._send_to_all(offers, schedules, guests, recent, clock)
        finally:
            for guest in guests.values():
                _release(guest)
        gathered = gather_json([[asdict(one) for one in mine], clock.seconds])
        outcomes = [[_Outcome(**one) for one in of_rank] for of_rank, _ in gathered]
        for i, offer in enumerate(offers):
            if any(of_rank[i].error or of_rank[i].wrong for of_rank in outcomes):
                self._forget(offer.url)
        if state is None:
            return {}
        by_url = {offer.url: [of_rank[i] for of_rank in outcomes] for i, offer in enumerate(offers)}
        sent = _conclude(state, by_url, answers, self._timeout_s)
        _charge(state.clock, [seconds for _, seconds in gathered], time.perf_counter() - start)
        return sent

    def _possible(self, offers: Sequence[Offer], model: Model, sizes: Sizes, state: PushState | None) -> list[Offer]:
        """The offers of servers that hold the same model as the trainer; the result is the same on all ranks."""
        faults = {offer.layout: "" for offer in offers}
        for layout in faults:
            try:
                self._routes.prepare(layout, model, sizes, self._message_bytes)
            except ValueError as error:
                faults[layout] = one_line(error)
        for offer in offers:
            if state and faults[offer.layout]:
                state.fall_back(offer.url, faults[offer.layout])
        return [offer for offer in offers if not faults[offer.layout]]

    def _welcome(self, offers: list[Offer], state: PushState | None) -> tuple[list[Offer], dict[Seat, Guest]]:
        """The offers whose servers have opened the memory of all their hosts, and the guests of this rank.

        A collective if there are hosts.
        """
        if not any(offer.hosts for offer in offers):
            return offers, {}
        guests: dict[Seat, Guest] = {}
        mine: list[tuple[str, int, str, str]] = []
        for offer in offers:
            for rank in (rank for rank, host in enumerate(offer.hosts) if host == dist.get_rank()):
                messages = self._routes.incoming(offer.layout, rank, self._message_bytes)
                text = error = ""
                try:
                    guest = guests[offer.url, rank] = Guest(rank, messages, _mapped_memory)
                    text = message(_GREETING, guest.buffer)
                except (OSError, RuntimeError) as failure:
                    error = f"no memory to share with a rank of it: {one_line(failure)}"
                mine.append((offer.url, rank, text, error))
        told = sorted(tuple(each) for of_rank in gather_json(mine) for each in of_rank)
        opened: Sequence[str] = ()
        if state:
            for url, error in {url: error for url, _, _, error in told if error}.items():
                state.fall_back(url, error)
            texts = {url: [text for of, _, text, _ in told if of == url] for url in state.waiting()}
            left = [offer.url for offer in offers if texts.get(offer.url)]
            with state.clock("join"):
                orders = [state.start(partial(Server.greet, texts=texts[url]), [url]) for url in left]
                opened = [url for order in orders for url in state.finish(order)]
        opened = broadcast_json(opened)
        for offer in offers:
            if offer.url not in opened:
                self._forget(offer.url)
        for seat in [seat for seat in guests if seat[0] not in opened]:
            _release(guests.pop(seat))
        return [offer for offer in offers if offer.url in opened], guests

    def _send_to_all(
        self,
        offers: Sequence[Offer],
        schedules: Sequence[MessageSchedule],
        guests: Mapping[Seat, Guest],
        param_of: ParamOf,
        clock: Clock,
    ) -> list[_Outcome]:
        """The outcome of each offer on this rank; uses one group at a time, in the order that the module names."""
        rank, outcomes = dist.get_rank(), [_Outcome() for _ in offers]
        with clock("join"):
            links = self._links(offers, outcomes)
            for i, link in list(links.items()):
                try:
                    agree(self._routes[offers[i].layout].fingerprint, link)
                except (RuntimeError, ValueError) as error:  # a peer is gone (torch); fingerprints differ
                    outcomes[i].error = one_line(error)
                    del links[i]
        if any(offer.hosts for offer in offers):
            self._relay(offers, schedules, links, guests, outcomes, param_of, clock)
            return outcomes
        places: list[tuple[tuple[int, int], Link, Message]] = []
        for i, link in links.items():
            messages = self._routes[offers[i].layout].messages
            places += [(schedules[i].place(each, rank, each.peer), link, each) for each in messages]
        queue = [(link, each) for _, link, each in sorted(places, key=lambda entry: entry[0])]
        with clock("send"):
            sent = send(queue, param_of, clock)
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

    def _relay(
        self,
        offers: Sequence[Offer],
        schedules: Sequence[MessageSchedule],
        links: Mapping[int, Link],
        guests: Mapping[Seat, Guest],
        outcomes: Sequence[_Outcome],
        param_of: ParamOf,
        clock: Clock,
    ) -> None:
        """Send to the hosts of all these servers, and receive for this rank's guests."""
        me, ranks = dist.get_rank(), range(dist.get_world_size())
        group, device = dist.group.WORLD, _device()
        assert group is not None, "ranks have joined"
        world = Link(group, {rank: rank for rank in ranks}, device, TRANSFER_S, offers[0].layout.hashes)
        outgoing: list[tuple[tuple[int, int], Seat, Message]] = []
        incoming: list[tuple[tuple[int, int], Seat, Message]] = []
        hosts = {(offer.url, rank): host for offer in offers for rank, host in enumerate(offer.hosts)}
        for i, (offer, schedule) in enumerate(zip(offers, schedules, strict=True)):
            for each in self._routes[offer.layout].messages:
                outgoing.append((schedule.place(each, me, each.peer), (offer.url, each.peer), each))
            for seat, guest in guests.items():
                if seat[0] == offer.url:
                    incoming += [(schedule.place(each, each.peer, seat[1]), seat, each) for each in guest.messages]
                    if (link := links.get(i)) is not None:
                        guest.link = replace(link, ranks=dict.fromkeys(ranks, link.ranks[seat[1]]))
        with clock("send"):
            sent = relay(outgoing, incoming, guests, hosts, world, param_of, clock)
        with clock("verify"):
            texts = {each: each.hexdigest() for each in set(chain.from_iterable(sent.values()))}
            digests = {seat: [texts[each] for each in hashes] for seat, hashes in sent.items()}
            wrong = compare_at_hosts(digests, guests, hosts, world)
        for offer, outcome in zip(offers, outcomes, strict=True):
            mine = [each for seat in sorted(digests) if seat[0] == offer.url for each in digests[seat]]
            outcome.num_parts, outcome.sent = len(mine), hashlib.sha256("".join(mine).encode()).hexdigest()
            outcome.wrong = [part for seat, parts in wrong.items() if seat[0] == offer.url for part in parts]
            errors = [guest.error for seat, guest in guests.items() if seat[0] == offer.url and guest.error is not None]
            outcome.error = outcome.error or next(map(one_line, errors), "")

    def _links(self, offers: Sequence[Offer], outcomes: Sequence[_Outcome]) -> dict[int, Link]:
        """Index of an offer -> this rank's link to the server; they are joined in parallel, which uses no GPU."""
        joining = {
            i: self._threads.submit(self._link, offer)
            for i, offer in enumerate(offers)
            if dist.get_rank() in self._members(offer)
        }
        links: dict[int, Link] = {}
        for i, one in joining.items():
            try:
                links[i] = one.result()
            except (RuntimeError, ValueError) as error:
                outcomes[i].error = one_line(error)
        return links

    def _members(self, offer: Offer) -> dict[int, int]:
        """Rank of the trainer -> its rank in the group: those that send to the server, or its hosts; and rank 0."""
        hosts = {rank: i for i, rank in enumerate(sorted({0, *offer.hosts}))}
        return hosts if offer.hosts else self._routes[offer.layout].members

    def _meeting(self, offer: Offer) -> Meeting:
        """The rendezvous of all members: those ranks of the trainer, and the server's ranks."""
        return replace(offer.meeting, world_size=len(self._members(offer)) + offer.layout.tp)

    def _link(self, offer: Offer) -> Link:
        url = offer.url
        members = self._members(offer)
        meeting = self._meeting(offer)
        known = self._groups.get(url)
        if known is None or known[0] != meeting.name:
            if known is not None:  # the old group of a server that was restarted
                self._threads.submit(_leave, known[1])
            host = self._meetings[url][2] if url in self._meetings else self._key
            group = meeting.join(members[dist.get_rank()], host)
            known = self._groups[url] = (meeting.name, group)
        ranks = {rank: len(members) + rank for rank in range(offer.layout.tp)}
        device = torch.device("cpu") if offer.hosts else _device()
        return Link(known[1], ranks, device, self._timeout_s, offer.layout.hashes)

    def _forget(self, url: str) -> Future[None] | None:
        """Leave the group with a server; if the other side does not answer, this may last until the timeout."""
        self._forget_meeting(url)
        known = self._groups.pop(url, None)
        return None if known is None else self._threads.submit(_leave, known[1])

    def _forget_meeting(self, url: str) -> None:
        if (known := self._meetings.pop(url, None)) is not None:
            known[2].close()

    def close(self) -> None:
        wait([left for url in {*self._meetings, *self._groups} if (left := self._forget(url))])


def _leave(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):
        leave_weight_group(group)


def _schedules(sizes: Sequence[int]) -> list[MessageSchedule]:
    """The schedule of each server, from the numbers of their ranks."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [MessageSchedule(max(dist.get_world_size(), sum(sizes)), first) for first in firsts]


def _conclude(
    state: PushState,
    outcomes: Mapping[str, list[_Outcome]],
    answers: Mapping[str, Future[None]],
    timeout_s: float,
) -> dict[str, str]:
    """On rank 0: decide from the outcomes of all ranks and the servers' answers which servers are done.

    Returns url -> the digests of what was sent to it, as one text.
    """
    with state.clock("load"):
        wait(list(answers.values()), timeout=timeout_s)
    sent: dict[str, str] = {}
    for url, ranks in outcomes.items():
        reasons = [_refusal(answers[url]), *dict.fromkeys(one.error for one in ranks)]
        wrong = [part for one in ranks for part in one.wrong]
        if wrong:
            reasons.append(f"{url} does not hold the weights that the trainer sent (differ: {some_names(wrong)})")
        if reason := "; ".join(filter(None, reasons)):
            state.fall_back(url, reason)
        else:
            state.targets[url].done = state.targets[url].transports[0]
            state.targets[url].num_equal = sum(one.num_parts for one in ranks)
            sent[url] = "".join(one.sent for one in ranks)
    return sent


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


def _mapped_memory(num_bytes: int) -> torch.Tensor:
    """[bytes] uint8 that a server may map; OSError or RuntimeError if there is no room."""
    if not torch.cuda.is_available():
        return shared_buffer(num_bytes)
    torch.cuda.ipc_collect()  # returns what servers have released to torch's allocator
    return torch.empty(num_bytes, dtype=torch.uint8, device=_device())


def _release(guest: Guest) -> None:
    if not guest.buffer.is_cuda:
        forget(guest.buffer)


def _address(url: str) -> str:
    """An address of this machine that the server and all ranks of the trainer can reach."""
    address = own_address(url)
    return os.environ[OWN_ADDRESS] if is_loopback(address) else address


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
