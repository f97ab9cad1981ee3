"""A group that only takes notes, with batches and an actor for it."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.group import Reply
from megarl.group.message import Message, decoded
from megarl.roles import messages
from megarl.roles.handles import Actor
from megarl.roles.settings import Packing, Update
from megarl.samples.batch import Batch, Stat, Stats

Payload = dict[str, Tensor]
Answer = Callable[[Any, Payload, int], Reply]  # to a message


class NotingGroup:
    """Stands for a Group of some replicas: remembers what ranks get, and answers with what `answer` makes of it."""

    def __init__(self, num_replicas: int, answer: Answer) -> None:
        self.num_replicas, self.answer = num_replicas, answer
        self.calls: list[tuple[Any, list[Payload]]] = []  # message, payloads

    def call(self, message: Message, payloads: Sequence[Payload] | None = None) -> list[Reply]:
        assert payloads is None or len(payloads) == self.num_replicas
        got = decoded(type(message), json.loads(json.dumps(asdict(message))))
        self.calls.append((got, list(payloads or [])))
        given = payloads or [{}] * self.num_replicas
        return [self.answer(got, payload, replica) for replica, payload in enumerate(given)]

    def call_leader(self, message: Message) -> Reply:
        return self.call(message)[0]

    @property
    def methods(self) -> list[str]:
        return [message.method() for message, _ in self.calls]

    def sent(self, name: str, call: int = 0) -> Tensor:
        """What all replicas got under this name in a call."""
        return torch.cat([payload[name] for payload in self.calls[call][1]])


def trained(kl_of_step: Sequence[float] = ()) -> Answer:
    """Answers of calls to two replicas: each reports its tokens' share of the statistics of an `update`.

    Columns of a pass are the tokens themselves, one more for each further name; noted log-probs are minus the tokens.
    """
    seen = {"replies": 0}

    def answer(message: Message, payload: Payload, replica: int) -> Reply:
        if not isinstance(message, messages.Update):
            names = message.names if isinstance(message, messages.Columns) and len(payload["tokens"]) else ()
            return Reply({}, {name: payload["tokens"].float() + at for at, name in enumerate(names)})
        step, seen["replies"] = seen["replies"] // 2, seen["replies"] + 1
        weight = float(payload["weight"].sum())
        kind = "critic" if isinstance(message.loss, CriticLoss) else "actor"
        stats = {f"{kind}/loss": Stat("mean", weight * (1.0 + replica), weight)}
        stats[f"{kind}/largest"] = Stat("max", float(payload["lengths"].max()) if len(payload["lengths"]) else 0.0)
        if kl_of_step:
            stats["actor/ppo_kl"] = Stat("mean", weight * kl_of_step[step], weight)
        notes = message.notes and len(payload["tokens"])
        noted = {"log_probs": -payload["tokens"].float()} if notes else {}
        return Reply(asdict(messages.Updated(stats, 2.0 + step, 0.5, -1.0, True, None, [])), noted)

    return answer


def not_made(norm: float = math.nan, **more: Any) -> Reply:
    """The answer of an update whose step was not made."""
    return Reply(asdict(replace(messages.Updated({}, norm, 0.5, 0.0, False, None, []), **more)), {})


def make_batch(num_groups: int = 4) -> Batch:
    """Groups of two sequences of 3 and 5 tokens; the last 2 and 3 of them are the response."""
    lengths = torch.tensor([3, 5] * num_groups)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1] * num_groups, dtype=torch.float32)
    n = int(lengths.sum())
    columns = {name: torch.arange(n) + 0.5 for name in ("old_log_probs", "advantages", "values", "returns", "other")}
    rows = {"group": torch.arange(num_groups).repeat_interleave(2), "score": torch.zeros(2 * num_groups)}
    return Batch(torch.arange(n), lengths, {"response_mask": mask, **columns}, rows)


def in_rows(num_groups: int = 4) -> Batch:
    """`make_batch` with the second sample of each group cut into rows of 3 and 2 tokens."""
    lengths, rows = torch.tensor([3, 3, 2] * num_groups), torch.tensor([1, 2] * num_groups)
    return replace(make_batch(num_groups), lengths=lengths, rows=rows)


def without_old(num_groups: int) -> Batch:
    batch = make_batch(num_groups)
    return replace(batch, columns={name: c for name, c in batch.columns.items() if name != "old_log_probs"})


def make_actor(group: Any, **how: Any) -> Actor:
    update = Update(**{"loss": ActorLoss("ppo"), "prompts_per_step": 2, **how})
    return Actor("actor", group, Packing(max_tokens=10), temperature=0.7, update_settings=update)


def updated(batch: Batch, answer: Answer | None = None, *, seed: int = 0, **how: Any) -> tuple[NotingGroup, Stats]:
    """An update of an actor on two replicas, in steps of two prompts unless `how` says otherwise."""
    group = NotingGroup(2, answer or trained())
    return group, make_actor(group, **how).update(batch, seed=seed)[1]


def sequences(payload: Payload) -> list[list[int]]:
    return [part.tolist() for part in payload["tokens"].split(payload["lengths"].tolist())]
