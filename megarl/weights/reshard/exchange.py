"""Executes the transfers of a plan point to point over one process group, in messages of bounded size.

`send` runs on the trainer's ranks and `receive` in the server's processes; each rank knows only its own messages and
processes them in the order of the plan.  At most two messages of a rank are in flight: peak extra memory is twice
`message_bytes` on either side.  Works on gloo, and on NCCL after a first collective: so every member must call `agree`
first.  A wait that exceeds the timeout raises torch's RuntimeError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.mapping.names import Shape, some_names
from megarl.weights.push.report import Clock
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.regions import Box
from megarl.weights.reshard.sharding import ParameterSlice, Sharding
from megarl.weights.reshard.transfers import Message, Transfer
from megarl.weights.verify.digests import as_bytes

Params = Mapping[str, Tensor]
Digest = Callable[[Tensor], str]  # of a [bytes] uint8 tensor: DIGEST_CHARS ASCII characters

DIGEST_CHARS = 16
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Link:
    """A process group with members of both sides.

    `ranks`: rank of the other side -> its rank in the group.  Messages to other ranks are skipped, so a plan for
    several servers can be executed over one group for each.
    """

    group: dist.ProcessGroup
    ranks: Mapping[int, int]
    device: torch.device
    timeout_s: float = 120.0

    def mine(self, messages: Sequence[Message]) -> list[Message]:
        return [message for message in messages if message.peer in self.ranks]


def agree(fingerprint: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """All members compare their fingerprints; ValueError on every member if any differs.  A collective."""
    mine = torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8, device=device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
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


def send(
    messages: Sequence[Message], params: Params, link: Link, *, digest: Digest | None = None, clock: Clock | None = None
) -> list[str]:
    """Send `Plan.messages_out`; with `digest`, returns the digest of each part as it was sent, for `compare`.

    A part is converted to the receiver's type before it is sent.  `params` must not change before this returns.
    `clock` counts the seconds in which parts are copied into messages (convert) and digested (verify).
    """
    clock = clock or Clock()
    mine = link.mine(messages)
    buffers, under_way = _buffers(mine, link), deque[list[dist.Work]]()
    known: dict[tuple[str, Box], str] = {}  # receivers that need the same box get the same bytes
    digests: list[str] = []
    for message, buffer in zip(mine, cycle(buffers), strict=False):
        if len(under_way) == len(buffers):
            _wait(under_way.popleft(), link)
        for part, raw in _parts(message, buffer):
            with clock("convert"):
                _as_tensor(raw, part).copy_(_view(params, part.param_slices[0], part.shape))
            if digest is not None:
                what = (part.hf_name, part.box)
                with clock("verify"):
                    known[what] = known.get(what) or digest(raw)
                digests.append(known[what])
        under_way.append(_start(dist.isend, buffer[: message.num_bytes], message.peer, link))
    for works in under_way:
        _wait(works, link)
    return digests


def receive(messages: Sequence[Message], params: Params, link: Link) -> int:
    """Receive `Plan.messages_in` into the parameters; returns how many bytes of these were written."""
    num_bytes = 0
    for message, buffer in _incoming(link.mine(messages), link):
        for part, raw in _parts(message, buffer):
            for param_slice in part.param_slices:
                _view(params, param_slice, part.shape).copy_(_as_tensor(raw, part))
                num_bytes += raw.numel()
    return num_bytes


def answer(messages: Sequence[Message], params: Params, link: Link, *, digest: Digest) -> None:
    """The receiver's side of the check: send each sender the digests of its parts, read back from the parameters."""
    for message in link.mine(messages):
        text = "".join(_digest_held(part, params, digest) for part in message.parts)
        raw = torch.tensor(list(text.encode()), dtype=torch.uint8, device=link.device)
        _wait(_start(dist.isend, raw, message.peer, link), link)


def compare(messages: Sequence[Message], sent: Sequence[str], link: Link) -> list[str]:
    """The sender's side of the check: descriptions of the parts whose digest on the receiver is not what was sent.

    Example: ["model.norm.weight[0:64] on rank 3"].
    """
    wrong, expected = [], iter(sent)
    for message in link.mine(messages):
        raw = torch.empty(DIGEST_CHARS * len(message.parts), dtype=torch.uint8, device=link.device)
        _wait(_start(dist.irecv, raw, message.peer, link), link)
        text = bytes(raw.tolist()).decode()
        for i, part in enumerate(message.parts):
            if text[i * DIGEST_CHARS : (i + 1) * DIGEST_CHARS] != next(expected):
                where = ", ".join(f"{start}:{stop}" for start, stop in part.box)
                wrong.append(f"{part.hf_name}[{where}] on rank {part.peer}")
    return wrong


def _incoming(messages: Sequence[Message], link: Link) -> Iterator[tuple[Message, Tensor]]:
    """Each message and its bytes, valid until the next one is requested; the next message is in flight meanwhile."""
    buffers = _buffers(messages, link)
    under_way: deque[tuple[Message, Tensor, list[dist.Work]]] = deque()
    for message, buffer in zip(messages, cycle(buffers), strict=False):
        if len(under_way) == len(buffers):
            yield _arrived(*under_way.popleft(), link)
        under_way.append((message, buffer, _start(dist.irecv, buffer[: message.num_bytes], message.peer, link)))
    while under_way:
        yield _arrived(*under_way.popleft(), link)


def _arrived(message: Message, buffer: Tensor, works: list[dist.Work], link: Link) -> tuple[Message, Tensor]:
    _wait(works, link)
    return message, buffer


def _buffers(messages: Sequence[Message], link: Link) -> list[Tensor]:
    largest = max((message.num_bytes for message in messages), default=0)
    count = min(_IN_FLIGHT, len(messages))
    return [torch.empty(largest, dtype=torch.uint8, device=link.device) for _ in range(count)]


def _start(op: Callable[..., Any], raw: Tensor, peer: int, link: Link) -> list[dist.Work]:
    # A batch of one: NCCL then uses the group's own communicator; a single isend would make one for every pair.
    return dist.batch_isend_irecv([dist.P2POp(op, raw, group=link.group, group_peer=link.ranks[peer])])


def _wait(works: list[dist.Work], link: Link) -> None:
    for work in works:
        work.wait(timedelta(seconds=link.timeout_s))


def _parts(message: Message, buffer: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    for part, start in zip(message.parts, message.starts, strict=True):
        yield part, buffer[start : start + part.num_bytes]


def _as_tensor(raw: Tensor, part: Transfer) -> Tensor:
    return raw.view(getattr(torch, part.dtype)).view(part.shape)


def _view(params: Params, param_slice: ParameterSlice, shape: Shape) -> Tensor:
    """The part of a parameter at `param_slice`."""
    param = params[param_slice.param].detach()
    part = param if param_slice.index is None else param[param_slice.index]
    for dim, (start, length) in enumerate(zip(param_slice.start, shape, strict=True)):
        part = part.narrow(dim, start, length)
    return part


def _digest_held(part: Transfer, params: Params, digest: Digest) -> str:
    held = {digest(as_bytes(_view(params, param_slice, part.shape))) for param_slice in part.param_slices}
    return held.pop() if len(held) == 1 else "-" * DIGEST_CHARS  # equals no digest: the places differ
