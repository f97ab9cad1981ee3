"""Runs inside a server's processes and receives the slices that the trainer's ranks send to them.

SGLang calls `load` in each of its ranks as a custom weight loader of /update_weights_from_tensor, and `setup` as a
plug-in when a process starts; the HF server calls `load` too.  Instead of named tensors `load` gets a text: the
rendezvous with the trainer, and the layout of the model on both sides.  From that this rank derives which slices it
will receive from which rank, writes them into the parameters as they arrive, reads them again, and sends each sender
the digests of what it now holds.

Imports only packages that every server's environment has.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.processes.channels.store import keep
from megarl.servers.nccl import check_one_environment, paired_variables
from megarl.servers.weight_group import KEY_VARIABLE, join_store, join_weight_group, leave_weight_group
from megarl.weights.reshard.describe import from_json
from megarl.weights.reshard.exchange import Link, agree, answer, check_messages, check_params, receive
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.transfers import Message, MessageSchedule
from megarl.weights.verify.digests import Kind

logger = logging.getLogger("megarl.receiver")

_UNLIKE = "0" * 64  # not a real fingerprint: the others learn from it that this rank cannot take part

_RENDEZVOUS_S = 600.0  # of a group that SGLang makes
_ERROR_BYTES = 1024  # of an error that the ranks of a server exchange

_groups: dict[str, dist.ProcessGroup] = {}  # name -> group; only the group in use
_mapped: list[Tensor] = []  # the memory in which the next transfer comes, if a rank of the trainer shares it


def setup() -> None:
    """Make SGLang report weights that it cannot open or load as refused, instead of ending the server."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    for function, hook in _HOOKS.items():
        registry.HookRegistry.register(f"sglang.srt.{function}", hook, registry.HookType.AROUND)


class _Unopened:
    """Takes the place of tensors whose handle could not be opened: using it raises, where an error can be caught."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getitem__(self, _: object) -> Any:
        raise RuntimeError(self._why)


def _open(deserialize: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return deserialize(*arguments)
    except Exception as error:
        return _Unopened(f"cannot open what was sent: {type(error).__name__}: {error}")


def _agreed(error: str) -> str:
    """The error of the first rank of this server that has one, with its rank; an empty string: no rank has one.

    A collective of the server's ranks: SGLang hears only the first rank of each attention group.  Gathers tensors, so
    that nothing is unpickled.
    """
    group = import_module("sglang.srt.distributed").get_tp_group().cpu_group
    mine = torch.frombuffer(bytearray(error.encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES)), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, mine, group=group)
    errors = [bytes(each.tolist()).decode(errors="replace").rstrip() for each in texts]
    return next((f"rank {rank}: {each}" for rank, each in enumerate(errors) if each), "")


def _refuse(update: Callable[..., tuple[bool, str]], *arguments: Any, **named: Any) -> tuple[bool, str]:
    try:
        is_done, text = update(*arguments, **named)
    except Exception as error:  # nothing else catches it: SGLang's event loop would end
        logger.exception("an update of the weights failed")
        is_done, text = False, f"{type(error).__name__}: {error}"
    agreed = _agreed("" if is_done else text or "it was refused")
    return not agreed, agreed or text


def _refuse_adapter(load: Callable[..., Any], worker: Any, request: Any) -> Any:
    """The ranks whose own payload is empty read that of the first rank."""
    result = None
    try:
        first, *others = request.serialized_named_tensors
        request.serialized_named_tensors = [first, *(other or first for other in others)]
        result = load(worker, request)
        failure = "" if result.success else str(result.error_message)
    except Exception as error:
        logger.exception("an adapter was not loaded")
        failure = f"{type(error).__name__}: {error}"
    if not (agreed := _agreed(failure)):
        return result
    if not failure:  # another rank lacks it, and the first request for it would end the server
        worker.model_runner.unload_lora_adapter(request.to_ref())
    reply = import_module("sglang.srt.managers.io_struct").LoRAUpdateOutput
    return reply(success=False, error_message=agreed)


def _join(join: Callable[..., Any], *, init_method: str, group_name: str, world_size: int, **options: Any) -> Any:
    """SGLang's own group, whose members meet in the trainer's store in place of torch's, which is open to all.

    A server that was started without the key gets a trainer's store of torch's kind.
    """
    if (key := os.environ.get(KEY_VARIABLE)) is None:
        return join(init_method=init_method, group_name=group_name, world_size=world_size, **options)
    address, _, port = init_method.removeprefix("tcp://").rpartition(":")
    store = join_store(address.strip("[]"), int(port), group_name, world_size, _RENDEZVOUS_S, key)
    group = join(store=dist.PrefixStore(group_name, store), group_name=group_name, world_size=world_size, **options)
    keep(group, store)
    return group


_WEIGHT_UPDATER = "model_executor.model_runner_components.weight_updater"
_HOOKS: dict[str, Callable[..., Any]] = {
    "utils.common.MultiprocessingSerializer.deserialize": _open,
    f"{_WEIGHT_UPDATER}.WeightUpdater.update_weights_from_tensor": _refuse,
    f"{_WEIGHT_UPDATER}.init_custom_process_group": _join,
    "managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors": _refuse_adapter,
}


@torch.inference_mode()
def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Take part in one transfer; RuntimeError or ValueError says why it failed.

    `model`: anything with named_parameters().  `named_tensors`: one pair, whose name is the JSON text that
    `ShardedSender` made; with a greeting may come memory that the trainer shares.  Peak extra memory: the bytes of two
    messages.
    """
    ((text, memory),) = named_tensors
    invitation = json.loads(text)
    mapped = _mapped.pop() if _mapped else None  # closed at the end of the transfer
    if "nccl" in invitation:  # a greeting, before any rank waits for this one in a group
        if invitation["nccl"]:  # it will be a group over NCCL
            check_one_environment("the server", paired_variables("nccl"), "the trainer", invitation["nccl"])
        if memory.numel():
            _mapped.append(memory)
        return
    params = dict(model.named_parameters())
    device = next(iter(params.values())).device
    is_first = invitation["meeting"]["name"] not in _groups
    group = _meet(invitation["meeting"], invitation["group_rank"])
    senders = {int(rank): member for rank, member in invitation["senders"].items()}
    hashes: Kind = "words" if device.type == "cuda" else "sha256"
    control = device if mapped is None else torch.device("cpu")
    link = Link(group, senders, control, invitation["meeting"]["timeout_s"], hashes)
    try:
        messages, num_bytes = _prepare(invitation, params, link)
        if is_first:  # rows of padding get no slice; a server that started without weights has random ones there
            for name in _plan(invitation["trainer"], invitation["server"]).receiver.shapes(invitation["rank"]):
                params[name].zero_()
        if (written := receive(messages, params, link, mapped)) != num_bytes:
            raise RuntimeError(
                f"rank {invitation['rank']} of the server was sent {written} bytes, expected {num_bytes}"
            )
        if (derive := getattr(model, "post_load_weights", None)) is not None:
            derive()  # as SGLang's own loading does at its end: compute what it derives from the weights
        for norm in getattr(model, "modules", tuple)():
            if (derive := getattr(norm, "refresh_gemma_weight", None)) is not None:
                derive()  # as the loader of each of its weights does
        answer(messages, params, link)
    except BaseException:
        leave_weight_group(_groups.pop(invitation["meeting"]["name"]))
        raise


def _prepare(invitation: dict[str, Any], params: dict[str, Tensor], link: Link) -> tuple[list[Message], int]:
    """The messages that this rank will receive, and the bytes of the parameters that they fill.

    If this rank and the trainer do not match, all members of the group learn it at once.
    """
    rank, message_bytes = invitation["rank"], invitation["message_bytes"]
    try:
        plan = _plan(invitation["trainer"], invitation["server"])
        check_params(plan.receiver, rank, params)
        derived, fingerprint = _derive(plan, rank, message_bytes)
        check_messages(plan, rank, derived, link)
    except ValueError:
        try:
            agree(_UNLIKE, link)
        except ValueError:
            logger.info("the trainer knows now that this rank does not fit")
        raise
    agree(fingerprint, link)
    schedule = MessageSchedule(**invitation["schedule"])
    return sorted(derived, key=lambda message: schedule.place(message, message.peer, rank)), plan.num_bytes(rank)


@lru_cache(maxsize=1)
def _plan(trainer: str, server: str) -> Plan:
    return Plan(from_json(trainer), from_json(server))


@lru_cache(maxsize=1)
def _derive(plan: Plan, rank: int, message_bytes: int) -> tuple[list[Message], str]:
    """Messages and fingerprint, which are the same in every push; for large models they take seconds."""
    return plan.messages_in(rank, message_bytes), plan.fingerprint(message_bytes)


def _meet(meeting: dict[str, Any], rank: int) -> dist.ProcessGroup:
    """The group of this name, joined if it is new; groups of other names belong to old trainers and are left."""
    name = meeting["name"]
    if name not in _groups:
        for old in list(_groups):
            leave_weight_group(_groups.pop(old))
        size, limit_s = meeting["world_size"], meeting["timeout_s"]
        store = join_store(meeting["address"], meeting["port"], name, size, limit_s, os.environ[KEY_VARIABLE])
        _groups[name] = join_weight_group(store, rank, size, name, meeting["backend"], limit_s)
    return _groups[name]
