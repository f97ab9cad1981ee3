"""What runs inside a server's processes when the trainer's ranks send slices straight to them.

SGLang calls `load` in each of its ranks as a custom weight loader of /update_weights_from_tensor, and `setup` as a
plug-in when a process starts; the HF server calls `load` too.  What comes in the place of named tensors is a text: how
to meet the trainer, and how the model lies on both sides.  From that this rank derives what it will get from whom,
writes it into the parameters as it comes, reads them again, and tells each sender the digests of what it now holds.

Imports nothing that the environment of a server need not have.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.servers.weight_group import join_weight_group, leave_weight_group
from megarl.weights.reshard.describe import from_json
from megarl.weights.reshard.exchange import Link, agree, answer, check_messages, check_params, receive
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.transfers import Message
from megarl.weights.verify.digests import Kind, digest

logger = logging.getLogger("megarl.receiver")

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UNLIKE = "0" * 64  # no fingerprint: says that this rank cannot take part

_groups: dict[str, dist.ProcessGroup] = {}  # the one that is in use


def setup() -> None:
    """Have SGLang refuse an update from tensors that fails, where it would end the server."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(f"{_UPDATER}.update_weights_from_tensor", _refuse, registry.HookType.AROUND)


def _refuse(update: Callable[..., tuple[bool, str]], *arguments: Any, **named: Any) -> tuple[bool, str]:
    try:
        return update(*arguments, **named)
    except Exception as error:  # nobody else looks after it: SGLang's loop would end with it
        logger.exception("an update of the weights failed")
        return False, f"{type(error).__name__}: {error}"


@torch.inference_mode()
def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Take part in one transfer; RuntimeError or ValueError says why it did not come about.

    `model`: anything with named_parameters().  `named_tensors`: one, whose name is the text that `invitation` made.
    Peak extra memory: the bytes of two messages.
    """
    ((text, _),) = named_tensors
    told = json.loads(text)
    if not told:  # a sender that only wants to know whether it can be received
        return
    params = dict(model.named_parameters())
    device = next(iter(params.values())).device
    group = _meet(told["meeting"], told["group_rank"])
    senders = {int(rank): member for rank, member in told["senders"].items()}
    link = Link(group, senders, device, told["meeting"]["timeout_s"])
    kind: Kind = "words" if device.type == "cuda" else "sha256"
    try:
        messages, num_bytes = _prepare(told, params, link)
        if (written := receive(messages, params, link)) != num_bytes:
            raise RuntimeError(f"rank {told['rank']} of the server was sent {written} bytes, expected {num_bytes}")
        if (derive := getattr(model, "post_load_weights", None)) is not None:
            derive()  # what SGLang's own loading makes of the weights at its end
        answer(messages, params, link, digest=partial(digest, kind=kind))
    except BaseException:
        leave_weight_group(_groups.pop(told["meeting"]["group_name"]))
        raise


def _prepare(told: dict[str, Any], params: dict[str, Tensor], link: Link) -> tuple[list[Message], int]:
    """The messages that will come, and the bytes of the parameters that they fill.

    All members learn at once if this rank and the trainer do not fit together.
    """
    rank, message_bytes = told["rank"], told["message_bytes"]
    try:
        plan = _plan(told["trainer"], told["server"])
        check_params(plan.receiver, rank, params)
        messages = plan.messages_in(rank, message_bytes)
        check_messages(plan, rank, messages, link)
        fingerprint = plan.fingerprint(message_bytes)
    except ValueError:
        try:
            agree(_UNLIKE, link.group, link.device)
        except ValueError:
            logger.info("the trainer has been told that this rank does not fit")
        raise
    agree(fingerprint, link.group, link.device)
    return messages, plan.num_bytes(rank)


@lru_cache(maxsize=1)
def _plan(trainer: str, server: str) -> Plan:
    return Plan(from_json(trainer), from_json(server))


def _meet(meeting: dict[str, Any], rank: int) -> dist.ProcessGroup:
    """The group of this name; one with another name is that of a trainer that is gone, or that left it."""
    name = meeting["group_name"]
    if name not in _groups:
        for old in list(_groups):
            leave_weight_group(_groups.pop(old))
        _groups[name] = join_weight_group(rank=rank, **meeting)
    return _groups[name]
