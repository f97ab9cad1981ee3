"""Executes the transfers of a plan point to point over one process group, in messages of bounded size.

`send` runs on the trainer's ranks and `receive` in the server's processes; each rank knows only its own messages and
processes them in the order of `MessageSchedule`.  At most two messages of a rank are in flight: peak extra memory is
twice `message_bytes` on either side.  Works on gloo, and on NCCL after a first collective: so every member must call
`agree` first.  A wait that exceeds the timeout raises torch's RuntimeError.

A trainer's rank has one communicator with each server.  NCCL allows kernels of several communicators on a GPU only if
all ranks start them in an order in which no two ranks wait for each other, because a kernel that waits for its peer can
keep the next one from starting.  So one thread sends to all servers, in the order of `MessageSchedule` over all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arch.boxes import Box
from megarl.weights.clock import Clock
from megarl.weights.mapping.names import Shape, some_names
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import ParameterSlice, Sharding
from megarl.weights.reshard.transfers import Message, Transfer
from megarl.weights.verify.digests import Hash, Kind, as_bytes, hashed

Params = Mapping[str, Tensor]
ParamOf = Callable[[str], Tensor]  # of its name
Step = tuple[Callable[..., Any], Tensor, int]  # dist.isend or dist.irecv, bytes, the peer
Known = dict[tuple[str, Box, Kind], Hash]  # receivers that need the same box get the same bytes

DIGEST_CHARS = 16
_IN_FLIGHT = 2
_POLL_S = 5e-5  # between two looks at a GPU's transfer; a message takes much longer


@dataclass(frozen=True, eq=False)
class Link:
    """A process group with members of both sides.

    `ranks`: rank of the other side -> its rank in the group.  `hashes`: the digests that both sides compare.
    """

    group: dist.ProcessGroup
    ranks: Mapping[int, int]
    device: torch.device
    timeout_s: float = 120.0
    hashes: Kind = "sha256"


@dataclass
class Sent:
    """What became of the messages to each link."""

    hashes: dict[Link, list[Hash]] = field(default_factory=dict)  # of each part as it was sent
    errors: dict[Link, RuntimeError] = field(default_factory=dict)  # why the rest of its messages was not sent


def agree(fingerprint: str, link: Link) -> None:
    """All members compare their fingerprints; ValueError on every member if any differs.  A collective."""
    mine = torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8, device=link.device)
    found = [torch.empty_like(mine) for _ in range(link.group.size())]
    finish([dist.all_gather(found, mine, group=link.group, async_op=True)], link)
    others = [str(rank) for rank, theirs in enumerate(found) if not torch.equal(theirs, found[0])]
    if others:
        raise ValueError(
            f"rank {some_names(others)} of the weight group describes the model, its layout or the messages in another "
            "way than rank 0: expected one version of megarl and one layout on all ranks"
        )


def check_params(sharding: Sharding, rank: int, params: Params) -> None:
    """ValueError with the names unless `params` match what the sharding says that this rank has."""
    expected = sharding.shapes(rank)
    have = {name: (tuple(param.shape), str(param.dtype).removeprefix("torch.")) for name, param in params.items()}
    parts = [
        ("missing", [name for name in expected if name not in have]),
        ("unknown", [name for name in have if name not in expected]),
        ("different", [f"{n} {have[n]} for {expected[n]}" for n in expected if n in have and have[n] != expected[n]]),
    ]
    faults = [f"{what}: {some_names(names)}" for what, names in parts if names]
    if faults:
        raise ValueError(f"rank {rank} does not hold the parameters of its description ({'; '.join(faults)})")


def check_messages(plan: Plan, rank: int, messages: Sequence[Message], link: Link) -> None:
    """ValueError unless the messages for receiver `rank` come from members of the group and fill its parameters."""
    if absent := sorted({message.peer for message in messages} - set(link.ranks)):
        ranks = some_names([str(peer) for peer in absent])
        raise ValueError(
            f"rank {rank} of the server needs slices of the trainer's ranks {ranks}, which have not joined"
        )
    if (coming := sum(map(_num_written, messages))) != plan.num_bytes(rank):
        raise ValueError(f"rank {rank} of the server is to be sent {coming} bytes, expected {plan.num_bytes(rank)}")


def _num_written(message: Message) -> int:
    return sum(part.num_bytes * len(part.param_slices) for part in message.parts)


def send(queue: Sequence[tuple[Link, Message]], param_of: ParamOf, clock: Clock | None = None) -> Sent:
    """Send messages of `Plan.messages_out` to one or several servers, one after another.

    A part is converted to the receiver's type before it is sent.  No parameter may change before this returns.  If a
    link fails, its remaining messages are skipped, and those of the others are sent.  `clock` counts the seconds in
    which parts are copied into messages (convert) and digested (verify).
    """
    clock, sent = clock or Clock(), Sent({link: [] for link, _ in queue})
    free = deque[Tensor](_buffers([message for _, message in queue], queue[0][0].device) if queue else ())
    under_way = deque[tuple[Link, Tensor, list[dist.Work]]]()
    known: Known = {}

    def finish_oldest() -> None:
        link, buffer, works = under_way.popleft()
        try:
            finish(works, link)
        except RuntimeError as error:
            sent.errors.setdefault(link, error)
        free.append(buffer)

    for link, message in queue:
        if not free and link not in sent.errors:
            finish_oldest()
        if link in sent.errors:
            continue
        buffer = free.popleft()
        sent.hashes[link] += fill(message, buffer, param_of, link.hashes, known, clock)
        try:
            under_way.append((link, buffer, begin([(dist.isend, buffer[: message.num_bytes], message.peer)], link)))
        except RuntimeError as error:
            sent.errors[link] = error
            free.append(buffer)
    while under_way:
        finish_oldest()
    return sent


def fill(message: Message, buffer: Tensor, param_of: ParamOf, kind: Kind, known: Known, clock: Clock) -> Iterator[Hash]:
    """Copy the parts of a message into its buffer, converted to the receiver's type; the hash of each."""
    for part, raw in _parts(message, buffer):
        with clock("convert"):
            _as_tensor(raw, part).copy_(_view(param_of, part.param_slices[0], part.shape))
        what = (part.hf_name, part.box, kind)
        with clock("verify"):
            known[what] = known.get(what) or hashed(raw, kind)
        yield known[what]


def receive(messages: Sequence[Message], params: Params, link: Link, mapped: Tensor | None = None) -> int:
    """Receive `Plan.messages_in` into the parameters; returns how many bytes of these were written.

    `mapped`: memory in which they come, see `relay`; None: they come over the link.
    """
    num_bytes = 0
    for message, buffer in _incoming(messages, link) if mapped is None else _handed_over(messages, mapped, link):
        for part, raw in _parts(message, buffer):
            for param_slice in part.param_slices:
                _view(params.__getitem__, param_slice, part.shape).copy_(_as_tensor(raw, part))
                num_bytes += raw.numel()
    return num_bytes


def answer(messages: Sequence[Message], params: Params, link: Link) -> None:
    """The receiver's side of the check: send each sender the digests of its parts, read back from the parameters.

    One text for each sender, in the order of its messages.
    """
    held = [(message.peer, [_hashes_held(part, params, link.hashes) for part in message.parts]) for message in messages]
    texts: dict[int, str] = {}
    for peer, parts in held:  # only now: on a GPU, reading a digest waits for it
        texts[peer] = texts.get(peer, "") + "".join(map(_digest_held, parts))
    raw = {peer: encoded(text, link.device) for peer, text in texts.items()}
    finish(begin([(dist.isend, raw[peer], peer) for peer in sorted(raw)], link), link)


def compare(messages: Sequence[Message], sent: Sequence[str], link: Link) -> list[str]:
    """The sender's side of the check: descriptions of the parts whose digest on the receiver is not what was sent.

    `messages`: in the order in which they were sent, as the digests in `sent`.  Example: ["model.norm.weight[0:64] on
    rank 3"].
    """
    held, expected = hear(messages, link), iter(sent)
    return [
        where(part, part.peer)
        for message in messages
        for part in message.parts
        if next(held[message.peer]) != next(expected)
    ]


def hear(messages: Sequence[Message], link: Link) -> dict[int, Iterator[str]]:
    """The digests of the parts of these messages, which each of their peers tells."""
    raw = digest_buffers(messages, link)
    finish(begin([(dist.irecv, raw[peer], peer) for peer in sorted(raw)], link), link)
    return {peer: digests_in(text) for peer, text in raw.items()}


def digest_buffers(messages: Sequence[Message], link: Link) -> dict[int, Tensor]:
    """Peer -> [bytes] uint8 for the digests of its parts."""
    num_parts: dict[int, int] = {}
    for message in messages:
        num_parts[message.peer] = num_parts.get(message.peer, 0) + len(message.parts)
    return {
        peer: torch.empty(DIGEST_CHARS * count, dtype=torch.uint8, device=link.device)
        for peer, count in num_parts.items()
    }


def where(part: Transfer, rank: int) -> str:
    """A part in words, and the receiver that has it."""
    box = ", ".join(f"{start}:{stop}" for start, stop in part.box)
    return f"{part.hf_name}[{box}] on rank {rank}"


def encoded(digests: str, device: torch.device) -> Tensor:
    """[bytes] uint8, of which `digests_in` makes digests again."""
    return torch.tensor(list(digests.encode()), dtype=torch.uint8, device=device)


def digests_in(raw: Tensor) -> Iterator[str]:
    text = bytes(raw.tolist()).decode()
    for start in range(0, len(text), DIGEST_CHARS):
        yield text[start : start + DIGEST_CHARS]


def _incoming(messages: Sequence[Message], link: Link) -> Iterator[tuple[Message, Tensor]]:
    """Each message and its bytes, valid until the next one is requested; the next message is in flight meanwhile."""
    buffers = _buffers(messages, link.device)
    under_way: deque[tuple[Message, Tensor, list[dist.Work]]] = deque()
    for message, buffer in zip(messages, cycle(buffers), strict=False):
        if len(under_way) == len(buffers):
            yield _arrived(*under_way.popleft(), link)
        under_way.append((message, buffer, begin([(dist.irecv, buffer[: message.num_bytes], message.peer)], link)))
    while under_way:
        yield _arrived(*under_way.popleft(), link)


def _handed_over(messages: Sequence[Message], mapped: Tensor, link: Link) -> Iterator[tuple[Message, Tensor]]:
    """The same, where a rank of the trainer puts messages into the halves of `mapped` in turn, and waits until one is
    read before it writes there again.
    """
    for i, message in enumerate(messages):
        finish(begin([(dist.irecv, torch.empty(1, dtype=torch.uint8), message.peer)], link), link)
        yield message, halves(mapped)[i % 2]
        if mapped.is_cuda:
            torch.cuda.current_stream(mapped.device).synchronize()
        finish(begin([(dist.isend, torch.zeros(1, dtype=torch.uint8), message.peer)], link), link)


def halves(mapped: Tensor) -> Sequence[Tensor]:
    return mapped.view(2, -1).unbind()


def _arrived(message: Message, buffer: Tensor, works: list[dist.Work], link: Link) -> tuple[Message, Tensor]:
    finish(works, link)
    return message, buffer


def _buffers(messages: Sequence[Message], device: torch.device) -> list[Tensor]:
    largest = max((message.num_bytes for message in messages), default=0)
    count = min(_IN_FLIGHT, len(messages))
    return [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]


def begin(ops: Sequence[Step], link: Link) -> list[dist.Work]:
    """Start (dist.isend or dist.irecv, bytes, peer) together.

    Always as a batch: NCCL then uses the group's own communicator; a single isend would make one for every pair.
    """
    p2p = [dist.P2POp(op, raw, group=link.group, group_peer=link.ranks[peer]) for op, raw, peer in ops]
    return dist.batch_isend_irecv(p2p) if p2p else []


def finish(works: list[dist.Work], link: Link) -> None:
    """Block until all are done; RuntimeError after the timeout.

    On a GPU torch's own wait with a timeout looks only about once in a millisecond, in which a GPU sends tens of
    megabytes, and its wait without one never ends if the peer is gone.  So the transfer's event is looked at here;
    after the timeout torch's wait fails at once and aborts the communicator.
    """
    deadline = time.monotonic() + link.timeout_s
    for work in works:
        while link.device.type == "cuda" and not work.is_completed() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        work.wait(timedelta(seconds=max(1e-3, deadline - time.monotonic())))


def _parts(message: Message, buffer: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    for part, start in zip(message.parts, message.starts, strict=True):
        yield part, buffer[start : start + part.num_bytes]


def _as_tensor(raw: Tensor, part: Transfer) -> Tensor:
    return raw.view(getattr(torch, part.dtype)).view(part.shape)


def _view(param_of: ParamOf, param_slice: ParameterSlice, shape: Shape) -> Tensor:
    """The part of a parameter at `param_slice`."""
    param = param_of(param_slice.param).detach()
    part = param if param_slice.index is None else param[param_slice.index]
    for dim, (start, length) in enumerate(zip(param_slice.start, shape, strict=True)):
        part = part.narrow(dim, start, length)
    return part


def _hashes_held(part: Transfer, params: Params, kind: Kind) -> list[Hash]:
    return [
        hashed(as_bytes(_view(params.__getitem__, param_slice, part.shape)), kind) for param_slice in part.param_slices
    ]


def _digest_held(hashes: Sequence[Hash]) -> str:
    held = {each.hexdigest() for each in hashes}
    return held.pop() if len(held) == 1 else "-" * DIGEST_CHARS  # equals no digest: the places differ
