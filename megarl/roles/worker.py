"""A rank of a group: builds the models of its roles and runs the calls of `handles.py`.

Run on each rank as `python -m megarl.roles.worker`.  It reads no configuration: every call has all plain values.
"""

from __future__ import annotations

import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megarl.algo.divergences import make_divergence
from megarl.arch.layout import Layout, can_share_prefixes
from megarl.arch.routed_experts import ROUTED_EXPERTS
from megarl.group.follow import Answer, follow
from megarl.mcore import cpu
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.checkpoint.files import faults_of_share
from megarl.mcore.setup import RankInfo, backend_of, device_for, make_groups, replica_group
from megarl.mcore.training.gradient_check import Limits, first_bad_gradient, first_bad_weight
from megarl.mcore.training.offload import synchronized
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, backward, forward_only, train_step
from megarl.plugins.load import load_plugins
from megarl.processes.channels.connection import Tensors
from megarl.processes.channels.store import join_world
from megarl.roles.formats import digests_in, digests_of, read_weights
from megarl.roles.profiler import RankProfiler
from megarl.roles.role import Role, build_on, build_role
from megarl.samples.batch import Batch
from megarl.weights.hf.adapter import save_peft
from megarl.weights.hf.export import hf_sizes, save_hf
from megarl.weights.hf.load import read_heads
from megarl.weights.push.adapter_push import AdapterPusher
from megarl.weights.push.agreement import gather_json
from megarl.weights.push.gpu_handles import check_can_be_mapped
from megarl.weights.push.push import Canary, Pusher, PushError
from megarl.weights.push.settings import PushSettings


class Worker:
    """The methods that a driver can call; each returns (plain result, tensors)."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}
        self.layout: Layout
        self.rank_info: RankInfo
        self.device = torch.device("cpu")  # until setup
        self.share: Any
        self.has_neighbours = False  # servers work on the ranks' GPUs at the same time
        self.profiler: RankProfiler
        self.life = uuid.uuid4().hex[:12]  # in the names of adapters that it pushes

    def handlers(self) -> dict[str, Callable[[dict[str, Any], Tensors], Answer]]:
        methods = [self.setup, self.load, self.load_heads, self.columns, self.update, self.connect, self.push]
        methods += [self.save, self.is_saved, self.faults, self.restore, self.export, self.offload, self.onload]
        methods += [self.profile, self.sizes, self.read, self.digests]
        return {method.__name__: self._freeing(method) for method in methods}

    def _freeing(self, method: Callable[[dict[str, Any], Tensors], Answer]) -> Callable[..., Answer]:
        """The method; after it, memory that torch keeps for later goes back to a GPU that a server needs.

        A server needs it if it works at the same time, or, with turns, once no role is on the GPU.
        """

        def run(arguments: dict[str, Any], tensors: Tensors) -> Answer:
            try:
                with record_function(f"{method.__name__} {arguments.get('role', '')}".strip()):
                    return method(arguments, tensors)
            finally:
                is_offloaded = all(role.parameters.is_offloaded for role in self.roles.values())
                if self.device.type == "cuda" and (self.has_neighbours or is_offloaded):
                    torch.cuda.empty_cache()

        return run

    def setup(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        self.layout = Layout(**arguments["layout"])
        timeout_s = arguments["timeout_s"]
        cpu.activate()
        self.device = device_for(arguments["device"])
        if self.device.type == "cuda" and arguments.get("is_mapped"):
            check_can_be_mapped(os.environ)  # the driver asked its own; another machine's may differ
        self.profiler = RankProfiler(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            join_world(backend_of(self.device.type), timeout_s)
        self.rank_info = make_groups(self.layout, seed=arguments["seed"], timeout_s=timeout_s)
        self.share = replica_group(timeout_s=timeout_s)
        self.has_neighbours = arguments.get("has_neighbours", False)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        place = {"replica": self.rank_info.replica, "is_reporter": self.rank_info.is_reporter, "device_name": name}
        return place, {}

    def profile(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Start or stop to profile, if this is one of `ranks`; "files": what was written."""
        rank = dist.get_rank()
        if rank not in arguments["ranks"]:
            return {"files": []}, {}
        if arguments["begins"]:
            self.profiler.start(arguments["tool"], memory=arguments["memory"])
            return {"files": []}, {}
        return {"files": self.profiler.stop(Path(arguments["folder"]) / f"rank_{rank}")}, {}

    def load(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Build a role's model from an HF folder, or on the base of the role that `base` names.

        `optim` None: no training, `lora` None: no adapters.  Parts that the options offload are on the device only
        during calls that need them.
        """
        load_plugins(arguments["plugins"])
        if (base := arguments.get("base")) is None:
            role = build_role(arguments, self.layout)
        elif (owner := self.roles.get(base)) is None:
            raise ValueError(f"base={base}: there is no such role; expected one of {', '.join(self.roles) or 'none'}")
        else:
            role = build_on(owner, arguments, self.layout)
        self.roles[arguments["role"]] = role
        role.offload(by_default=True)
        sharing = can_share_prefixes(
            self.layout,
            router_replay=arguments["router_replay"],
            transformer_engine=role.engine.uses_transformer_engine,
        )
        found = {"hidden_size": role.hf["hidden_size"], "can_share": sharing, "device": self.device.type}
        return found | {"lacks_transformer_engine": role.engine.lacks_transformer_engine}, {}

    def load_heads(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Read the heads of a role's teachers, cut as its own."""
        role = self.roles[arguments["role"]]
        role.heads = read_heads(arguments["folders"], role.model, role.hf["vocab_size"])
        return {}, {}

    def offload(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Offload the whole role to host memory.  Later calls onload what they need.

        `by_default`: only what the options of the role offload.
        """
        role = self.roles[arguments["role"]]
        role.offload(by_default=arguments["by_default"])
        return {}, {}

    def onload(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Onload the whole role; it stays on the device until `offload`.  Its moments come beside what is called next.

        `by_default`: only what the options of the role leave on the device.  `moments`: of that these alone, or, if
        False, all but these; None: all.
        """
        role, moments = self.roles[arguments["role"]], arguments["moments"]
        for buffer in role.buffers_that_stay if arguments["by_default"] else role.buffers:
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

    def columns(self, arguments: dict[str, Any], tensors: Tensors) -> Answer:
        """The columns `names` of every token of this replica's sequences: see `Outputs`, and ROUTED_EXPERTS."""
        micros = micro_batches(*_unpack(tensors), shares_prefixes=arguments["shares_prefixes"])
        notes = ROUTED_EXPERTS in arguments["names"]
        others = [arguments["reference"]] if arguments["reference"] else []
        with self.onloaded(arguments["role"], *others, writes=False) as role:
            outputs, reference = self._outputs(role, arguments), self.roles[others[0]].model if others else None
            found = forward_only(role.model, micros, outputs, self.device, reference, notes_experts=notes)
        return {}, self._reported(found)

    def update(self, arguments: dict[str, Any], tensors: Tensors) -> Answer:
        """One optimizer step on this replica's share of a mini-batch, or the reason why it was not made.

        `notes`: columns of its forward pass that come back, as `columns` gives them at the weights before the step.
        "bad": the first number of the replica's sequences that is not finite; "where": by rank, a parameter whose
        gradient is not, if the norm is not finite.
        """
        others = [arguments["reference"]] if arguments["reference"] else []
        with self.onloaded(arguments["role"], *others, writes=True, gradients=True, moments=True) as role:
            assert role.optimizer is not None, f"role {arguments['role']} was loaded without an optimizer"
            limits = arguments["limits"]
            gradient = partial(
                backward,
                role.model,
                micro_batches(*_unpack(tensors), shares_prefixes=arguments["shares_prefixes"]),
                self._outputs(role, arguments),
                role.loss(arguments["loss"]),
                num_tokens=arguments["num_tokens"],
                device=self.device,
                reference=self.roles[others[0]].model if others else None,
                notes=arguments["notes"],
            )
            limits = None if limits is None else Limits(**limits)
            step = train_step(role.optimizer, gradient, limits=limits, before_step=role.moments.wait)
            # Not finite on one rank is not finite on all, so all of them are here.
            where = [] if math.isfinite(step.grad_norm) else gather_json(first_bad_gradient(role.model))
        plain = {name: [stat.kind, stat.value, stat.weight] for name, stat in step.stats.items()} | self._peaks()
        numbers = {"stats": plain, "grad_norm": step.grad_norm, "lr": step.lr, "loss": step.loss}
        told = numbers | {"made": step.made, "bad": step.bad and step.bad.details, "where": where}
        return told, self._reported(step.noted)

    def _reported(self, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Columns of micro-batches, end to end; nothing from a rank of which the driver reads no columns."""
        names = found[0] if found and self.rank_info.is_reporter else {}
        return {name: _on_host([columns[name] for columns in found]) for name in names}

    def _peaks(self) -> dict[str, list[Any]]:
        """GPU memory in GiB: the most of this process since its start, and what is free now."""
        if self.device.type != "cuda":
            return {}
        sizes = {
            "max_memory_allocated": ("max", torch.cuda.max_memory_allocated(self.device)),
            "max_memory_reserved": ("max", torch.cuda.max_memory_reserved(self.device)),
            "free_memory": ("min", torch.cuda.mem_get_info(self.device)[0]),
        }
        return {f"perf/{name}_gb": [kind, size / 1024**3, 1.0] for name, (kind, size) in sizes.items()}

    def _outputs(self, role: Role, arguments: dict[str, Any]) -> Outputs:
        """`divergence`: its name and beta; `top_k`: a number of tokens; `vocab_size`: of its first tokens only."""
        chosen, known = arguments.get("divergence"), role.hf["vocab_size"]
        return Outputs(
            self.layout,
            min(arguments.get("vocab_size") or known, known),  # a teacher's may have less padding than the policy's
            arguments["temperature"],
            tuple(name for name in arguments["names"] if name != ROUTED_EXPERTS),
            divergence=make_divergence(*chosen) if chosen else None,
            # On the device for the whole call: each micro-batch reads each of them three times.
            heads=[head.to(self.device) for head in role.heads] if chosen else [],
            top_k=arguments.get("top_k", 0),
        )

    def connect(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Set how `push` reaches the servers; the driver calls this once in the life of these ranks."""
        role = self.roles[arguments["role"]]
        assert role.pusher is None, f"role {arguments['role']} is connected to its servers already"
        role.pusher = _pusher(role, arguments["settings"], self.life)
        return {}, {}

    def push(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Push the weights, or only the adapters, to the servers and verify them; rank 0 returns the report.

        Nothing is pushed if a weight is not finite: "where" has then, by rank, a parameter.
        """
        canary = Canary.from_json(arguments["canary"]) if arguments["canary"] else None
        try:
            with self.readable(arguments["role"]) as role:
                assert role.pusher is not None, f"role {arguments['role']} is not connected to its servers yet"
                where = gather_json(first_bad_weight(role.model))
                if any(where):
                    return {"where": where}, {}
                report = role.pusher.push(role.model, arguments["version"], only=arguments["only"], canary=canary)
        except PushError as error:  # all servers failed, not this rank: the driver handles it
            report = error.report
        return asdict(report) if report else {}, {}

    def save(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        with self.readable(arguments["role"], moments=True) as role:
            folder, in_background = Path(arguments["folder"]), arguments["in_background"]
            role.saving = checkpoint.save(folder, role.model, role.optimizer, in_background=in_background)
        return {}, {}

    def is_saved(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Whether this rank writes no more of the last save, and why it could not write it."""
        saving = self.roles[arguments["role"]].saving
        assert saving is not None, f"role {arguments['role']} was never saved"
        return {"is_done": saving.is_done, "error": saving.error if saving.is_done else None}, {}

    def faults(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Damaged files among this rank's share of those of a checkpoint."""
        return {"faults": faults_of_share(Path(arguments["folder"]), dist.get_rank(), dist.get_world_size())}, {}

    def restore(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        with self.readable(arguments["role"], writes=True, moments=True) as role:
            checkpoint.load(Path(arguments["folder"]), role.model, role.optimizer)
        return {}, {}

    def export(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        with self.readable(arguments["role"]) as role:
            try:
                save_hf(role.model, role.hf, arguments["folder"], source_folder=role.source_folder, role=role.kind)
            finally:  # after an error on rank 0 too (full disk): the other ranks wait in its collectives
                if arguments["adapter"] is not None:
                    save_peft(role.model, role.hf, arguments["adapter"], base_model=role.source_folder)
        return {}, {}

    def sizes(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Shape and type of each tensor of the role in an HF folder."""
        role = self.roles[arguments["role"]]
        found = hf_sizes(role.model, role.hf, role=role.kind)
        return {
            "tensors": {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in found.items()}
        }, {}

    def read(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Fill a role that is not trained from a folder: see `read_weights`."""
        with self.readable(arguments["role"], writes=True) as role:
            read_weights(role, arguments["format"], Path(arguments["folder"]), Path(arguments["base"]))
        return {}, {}

    def digests(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """The digests of the tensors of an HF folder, or, if it is None, of the role."""
        folder = arguments["folder"]
        with self.readable(arguments["role"]) as role:
            return {"digests": digests_of(role) if folder is None else digests_in(Path(folder), role)}, {}


def _pusher(role: Role, settings: dict[str, Any], life: str) -> Pusher | AdapterPusher:
    """`settings`: the fields of a PushSettings; `life`: of these ranks."""
    how = PushSettings(**settings)
    if how.adapters_kept:
        return AdapterPusher(how, role.hf, base_model=role.source_folder, life=life)
    return Pusher(how, role.hf, source_folder=role.source_folder)


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
