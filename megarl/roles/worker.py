"""A rank of a group: builds the models of its roles and runs the calls of `handles.py`.

Run on each rank as `python -m megarl.roles.worker`.  It reads no configuration: every call has all values.
"""

from __future__ import annotations

import math
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megarl.algo.loss import ActorLoss
from megarl.arch.layout import Layout, can_share_prefixes
from megarl.arch.mtp import TRAINED_MTP
from megarl.arch.routed_experts import ROUTED_EXPERTS
from megarl.group.follow import Answer, Handler, follow
from megarl.group.message import Message, Place, Setup
from megarl.mcore import cpu
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.checkpoint.files import faults_of_share
from megarl.mcore.setup import RankInfo, backend_of, device_for, make_groups, replica_group
from megarl.mcore.training.gradient_check import first_bad_gradient, first_bad_weight
from megarl.mcore.training.offload import synchronized
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, backward, forward_only, train_step
from megarl.plugins.load import load_plugins
from megarl.processes.channels.connection import Tensors
from megarl.processes.channels.store import join_world
from megarl.roles import messages
from megarl.roles.formats import digests_in, digests_of, read_weights
from megarl.roles.profiler import RankProfiler
from megarl.roles.role import Role, build_on, build_role
from megarl.samples.batch import Batch, Stat, Stats
from megarl.weights.hf.adapter import save_peft
from megarl.weights.hf.export import hf_sizes, save_hf
from megarl.weights.hf.load import read_heads
from megarl.weights.push.adapter_push import AdapterPusher
from megarl.weights.push.agreement import gather_json
from megarl.weights.push.gpu_handles import check_can_be_mapped
from megarl.weights.push.push import Pusher, PushError


class Worker:
    """The methods that a driver can call, each described by its message; each returns (plain result, tensors)."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}
        self.layout: Layout
        self.rank_info: RankInfo
        self.device = torch.device("cpu")  # until setup
        self.share: Any
        self.has_neighbours = False  # servers work on the ranks' GPUs at the same time
        self.profiler: RankProfiler
        self.life = uuid.uuid4().hex[:12]  # in the names of adapters that it pushes

    def handlers(self) -> dict[type[Message], Handler]:
        """Each method, for the messages that its annotation names."""
        methods: list[Handler] = [self.setup, self.load, self.load_heads, self.columns, self.update, self.connect]
        methods += [self.push, self.save, self.is_saved, self.faults, self.restore, self.export, self.offload]
        methods += [self.onload, self.profile, self.sizes, self.read, self.digests]
        return {get_type_hints(method)["message"]: self._freeing(method) for method in methods}

    def _freeing(self, method: Handler) -> Handler:
        """The method; after it, memory that torch keeps for later goes back to a GPU that a server needs.

        A server needs it if it works at the same time, or, with turns, once no role is on the GPU.
        """

        def run(message: Message, tensors: Tensors) -> Answer:
            try:
                with record_function(message.label):
                    return method(message, tensors)
            finally:
                is_offloaded = all(role.parameters.is_offloaded for role in self.roles.values())
                if self.device.type == "cuda" and (self.has_neighbours or is_offloaded):
                    torch.cuda.empty_cache()

        return run

    def setup(self, message: Setup, _: Tensors) -> Answer:
        self.layout, self.has_neighbours, timeout_s = message.layout, message.has_neighbours, message.timeout_s
        cpu.activate()
        self.device = device_for(message.device)
        if self.device.type == "cuda" and message.is_mapped:
            check_can_be_mapped(os.environ)  # the driver asked its own; another machine's may differ
        self.profiler = RankProfiler(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            join_world(backend_of(self.device.type), timeout_s)
        self.rank_info = make_groups(self.layout, seed=message.seed, timeout_s=timeout_s)
        self.share = replica_group(timeout_s=timeout_s)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return asdict(Place(self.rank_info.replica, self.rank_info.is_reporter, name)), {}

    def profile(self, message: messages.Profile, _: Tensors) -> Answer:
        rank = dist.get_rank()
        if rank not in message.ranks:
            return {"files": []}, {}
        if message.folder is None:
            self.profiler.start(message.tool, memory=message.memory)
            return {"files": []}, {}
        return {"files": self.profiler.stop(Path(message.folder) / f"rank_{rank}")}, {}

    def load(self, message: messages.Load, _: Tensors) -> Answer:
        settings = message.settings
        load_plugins(settings.plugins)
        if settings.base is None:
            role = build_role(message, self.layout)
        elif (owner := self.roles.get(settings.base)) is None:
            there = ", ".join(self.roles) or "none"
            raise ValueError(f"base={settings.base}: there is no such role; expected one of {there}")
        else:
            role = build_on(owner, message, self.layout)
        self.roles[message.role] = role
        role.offload(by_default=True)
        has_te, lacks_te = role.engine.uses_transformer_engine, role.engine.lacks_transformer_engine
        sharing = can_share_prefixes(
            role.hf, self.layout, router_replay=settings.router_replay, transformer_engine=has_te
        )
        return asdict(messages.Loaded(role.hf["hidden_size"], sharing, self.device.type, lacks_te)), {}

    def load_heads(self, message: messages.LoadHeads, _: Tensors) -> Answer:
        role = self.roles[message.role]
        role.heads = read_heads(message.folders, role.model, role.hf["vocab_size"])
        return {}, {}

    def offload(self, message: messages.Offload, _: Tensors) -> Answer:
        self.roles[message.role].offload(by_default=message.by_default)
        return {}, {}

    def onload(self, message: messages.Onload, _: Tensors) -> Answer:
        role, moments = self.roles[message.role], message.moments
        for buffer in role.buffers_that_stay if message.by_default else role.buffers:
            if moments is None or moments == (buffer is role.moments):
                buffer.onload(to_read=True, beside=buffer is role.moments)
        return {}, {}

    @contextmanager
    def onloaded(
        self, name: str, *others: str, writes: bool, gradients: bool = False, moments: bool = False
    ) -> Iterator[Role]:
        """Onload the weights of a role, and of others that it needs; afterwards what was offloaded is offloaded again.

        `writes`: its parameters may be others afterwards.  What is only read is not copied to the host again.
        `gradients`, `moments`: also the role's gradient buffers, its optimizer state, for which the caller waits.
        """
        roles = [self.roles[each] for each in (name, *others)]
        if shared := [other for other in others if self.roles[other].chunks is roles[0].chunks]:
            raise ValueError(
                f"role {shared[0]} has the same base as {name}, which is in use by one of them at a time; expected a "
                "model of its own for the full KL"
            )
        buffers = [buffer for role in roles for buffer in role.weights]
        buffers += [roles[0].gradients] * gradients + [roles[0].moments] * moments
        offloaded = [buffer for buffer in buffers if buffer.is_offloaded]
        for buffer in offloaded:
            buffer.onload(to_read=True, beside=buffer is roles[0].moments)
        for role in roles:  # parameters that are gathered late are written by the next pass, or by what reads them
            for buffer in role.weights if (writes and role is roles[0]) or role.engine.overlap_param_gather else []:
                buffer.written()
        try:
            with ExitStack() as complete:
                for role in roles:
                    complete.enter_context(role.complete())
                yield roles[0]
        finally:
            for buffer in offloaded:
                buffer.offload()

    @contextmanager
    def readable(self, name: str, *, writes: bool = False, moments: bool = False) -> Iterator[Role]:
        """A role with onloaded, synchronized parameters, which code other than its forward pass can read, or write."""
        with self.onloaded(name, writes=writes, moments=moments) as role, synchronized(role.model):
            if moments:
                role.moments.wait()
            yield role

    def columns(self, message: messages.Columns, tensors: Tensors) -> Answer:
        micros = micro_batches(*_unpack(tensors), shares_prefixes=message.shares_prefixes)
        notes = ROUTED_EXPERTS in message.names
        others = [message.reference] if message.reference else []
        with self.onloaded(message.role, *others, writes=False) as role:
            outputs, reference = self._outputs(role, message), self.roles[others[0]].model if others else None
            found = forward_only(role.model, micros, outputs, self.device, reference, notes_experts=notes)
        return {}, self._reported(found)

    def update(self, message: messages.Update, tensors: Tensors) -> Answer:
        others = [message.reference] if message.reference else []
        with self.onloaded(message.role, *others, writes=True, gradients=True, moments=True) as role:
            assert role.optimizer is not None, f"role {message.role} was loaded without an optimizer"
            gradient = partial(
                backward,
                role.model,
                micro_batches(*_unpack(tensors), shares_prefixes=message.shares_prefixes),
                self._outputs_of_loss(role, message),
                message.loss,
                num_tokens=message.num_tokens,
                device=self.device,
                reference=self.roles[others[0]].model if others else None,
                notes=message.notes,
            )
            step = train_step(role.optimizer, gradient, limits=message.limits, before_step=role.moments.wait)
            # Not finite on one rank is not finite on all, so all of them are here.
            where = [] if math.isfinite(step.grad_norm) else gather_json(first_bad_gradient(role.model))
        bad = step.bad.details if step.bad else None
        stats = step.stats | self._peaks()
        told = messages.Updated(stats, step.grad_norm, step.lr, step.loss, step.made, bad, where)
        return asdict(told), self._reported(step.noted)

    def _reported(self, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Columns of micro-batches, end to end; nothing from a rank of which the driver reads no columns."""
        names = found[0] if found and self.rank_info.is_reporter else {}
        return {name: _on_host([columns[name] for columns in found]) for name in names}

    def _peaks(self) -> Stats:
        """GPU memory in GiB: the most of this process since its start, and what is free now."""
        if self.device.type != "cuda":
            return {}
        sizes = {
            "max_memory_allocated": ("max", torch.cuda.max_memory_allocated(self.device)),
            "max_memory_reserved": ("max", torch.cuda.max_memory_reserved(self.device)),
            "free_memory": ("min", torch.cuda.mem_get_info(self.device)[0]),
        }
        return {f"perf/{name}_gb": Stat(kind, size / 1024**3) for name, (kind, size) in sizes.items()}

    def _outputs(self, role: Role, message: messages.Columns) -> Outputs:
        known = role.hf["vocab_size"]
        return Outputs(
            self.layout,
            min(message.vocab_size or known, known),  # a teacher's may have less padding than the policy's
            message.temperature,
            tuple(name for name in message.names if name != ROUTED_EXPERTS),
            top_k=message.top_k,
        )

    def _outputs_of_loss(self, role: Role, message: messages.Update) -> Outputs:
        taught = message.loss.distillation if isinstance(message.loss, ActorLoss) else None
        divergence = taught.function if taught and not taught.top_k else None
        return Outputs(
            self.layout,
            role.hf["vocab_size"],
            message.temperature,
            message.loss.outputs,
            divergence=divergence,
            # On the device for the whole call: each micro-batch reads each of them three times.
            heads=[head.to(self.device) for head in role.heads] if divergence else [],
        )

    def connect(self, message: messages.Connect, _: Tensors) -> Answer:
        role, settings = self.roles[message.role], message.settings
        assert role.pusher is None, f"role {message.role} is connected to its servers already"
        if settings.adapters_kept:
            role.pusher = AdapterPusher(settings, role.hf, base_model=role.source_folder, life=self.life)
        else:
            served = role.hf if settings.drafts or TRAINED_MTP not in role.hf else {**role.hf, TRAINED_MTP: ""}
            role.pusher = Pusher(settings, served, source_folder=role.source_folder)
        return {}, {}

    def push(self, message: messages.Push, _: Tensors) -> Answer:
        try:
            with self.readable(message.role) as role:
                assert role.pusher is not None, f"role {message.role} is not connected to its servers yet"
                where = gather_json(first_bad_weight(role.model))
                if any(where):
                    return {"where": where}, {}
                report = role.pusher.push(role.model, message.version, only=message.only, canary=message.canary)
        except PushError as error:  # all servers failed, not this rank: the driver handles it
            report = error.report
        return asdict(report) if report else {}, {}

    def save(self, message: messages.Save, _: Tensors) -> Answer:
        with self.readable(message.role, moments=True) as role:
            folder, in_background = Path(message.folder), message.in_background
            role.saving = checkpoint.save(folder, role.model, role.optimizer, in_background=in_background)
        return {}, {}

    def is_saved(self, message: messages.IsSaved, _: Tensors) -> Answer:
        saving = self.roles[message.role].saving
        assert saving is not None, f"role {message.role} was never saved"
        return {"is_done": saving.is_done, "error": saving.error if saving.is_done else None}, {}

    def faults(self, message: messages.Faults, _: Tensors) -> Answer:
        return {"faults": faults_of_share(Path(message.folder), dist.get_rank(), dist.get_world_size())}, {}

    def restore(self, message: messages.Restore, _: Tensors) -> Answer:
        with self.readable(message.role, writes=True, moments=True) as role:
            checkpoint.load(Path(message.folder), role.model, role.optimizer)
        return {}, {}

    def export(self, message: messages.Export, _: Tensors) -> Answer:
        with self.readable(message.role) as role:
            try:
                save_hf(role.model, role.hf, message.folder, source_folder=role.source_folder, role=role.kind)
            finally:  # after an error on rank 0 too (full disk): the other ranks wait in its collectives
                if message.adapter is not None:
                    save_peft(role.model, role.hf, message.adapter, base_model=role.source_folder)
        return {}, {}

    def sizes(self, message: messages.Sizes, _: Tensors) -> Answer:
        role = self.roles[message.role]
        found = hf_sizes(role.model, role.hf, role=role.kind)
        return {
            "tensors": {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in found.items()}
        }, {}

    def read(self, message: messages.Read, _: Tensors) -> Answer:
        with self.readable(message.role, writes=True) as role:
            read_weights(role, message.format, Path(message.folder), Path(message.base))
        return {}, {}

    def digests(self, message: messages.Digests, _: Tensors) -> Answer:
        with self.readable(message.role) as role:
            found = digests_of(role) if message.folder is None else digests_in(Path(message.folder), role)
        return {"digests": found}, {}


def _on_host(parts: list[Tensor]) -> Tensor:
    """Whole, on the CPU; a column of one number for each token as float32, others in their own type."""
    whole = torch.cat(parts)
    return (whole.float() if whole.dim() == 1 else whole).cpu()


def _unpack(tensors: Tensors) -> tuple[Batch, list[int]]:
    columns: dict[str, Tensor] = dict(tensors)
    tokens, lengths, rows, sizes = (columns.pop(name) for name in ("tokens", "lengths", "rows", "micro_sizes"))
    return Batch(tokens.long(), lengths, columns, rows=rows), sizes.tolist()


def main() -> None:
    worker = Worker()
    follow(worker.handlers(), lambda: worker.share, lambda: worker.rank_info.is_first)
    for role in worker.roles.values():
        if role.pusher is not None:
            role.pusher.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    # What is left is to free what the system frees at once; the driver waits for the end of its ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
