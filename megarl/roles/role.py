"""A model on a rank: built with its optimizer and its buffers in host memory, alone or on the base of another role.

Roles that train adapters can share one base.  A set of adapters is then in the model only during the calls of its role,
and each role has its own wrapper, gradient buffers and optimizer around the same linears.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.arch.mtp import with_mtp
from megarl.mcore.checkpoint.files import Saving
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.lora import AdapterSet, LoraSettings, apply_lora, attached, detach, settings_of
from megarl.mcore.models.model import Model, build_model
from megarl.mcore.training.offload import OffloadBuffer
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.router_replay import add_router_replay
from megarl.roles.messages import Load
from megarl.roles.settings import LoadSettings
from megarl.weights.hf.load import load_hf
from megarl.weights.mapping.blocks import Role as Kind
from megarl.weights.push.adapter_push import AdapterPusher
from megarl.weights.push.push import Pusher


@dataclass
class Role:
    """A model on this rank."""

    kind: Kind  # actor (also of a reference) | critic
    model: Model
    hf: dict[str, Any]
    source_folder: str
    optimizer: Optimizer | None
    parameters: OffloadBuffer  # of the base alone, if it is shared: then the same for all its roles
    gradients: OffloadBuffer  # gradient buffers, which only an update needs
    moments: OffloadBuffer  # optimizer state
    heads: list[Tensor] = field(default_factory=list)  # of its teachers, beside its own head: see TeacherStates
    pusher: Pusher | AdapterPusher | None = None  # set by `connect`
    saving: Saving | None = None  # the last save
    engine: ExecutionOptions = ExecutionOptions()
    chunks: Model = field(default_factory=list)  # the model before it was wrapped for training
    adapters: AdapterSet | None = None  # of a role that shares its base
    own: OffloadBuffer | None = None  # the parameters of these

    @property
    def weights(self) -> list[OffloadBuffer]:
        """What every call needs."""
        return [self.parameters] if self.own is None else [self.parameters, self.own]

    @property
    def buffers(self) -> list[OffloadBuffer]:
        return [*self.weights, self.gradients, self.moments]

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Inside this context the role's adapters are in its model, whoever shares its base."""
        with attached(self.chunks, self.adapters):
            yield

    @property
    def buffers_that_stay(self) -> list[OffloadBuffer]:
        """What the options leave on the device between calls."""
        buffers = [] if self.engine.param_offload else [*self.weights, self.gradients]
        return buffers + ([] if self.engine.optimizer_offload else [self.moments])

    def offload(self, *, by_default: bool) -> None:
        """Offload all of it; `by_default`: only what the options have on the device during calls that need it."""
        stay = self.buffers_that_stay if by_default else []
        for buffer in self.buffers:
            if buffer not in stay:
                buffer.offload()


def build_role(asked: Load, layout: Layout) -> Role:
    """A role from an HF folder."""
    kind, settings = asked.kind, asked.settings
    hf = with_mtp(read_hf_config(asked.folder), settings.mtp)
    engine = ExecutionOptions(**settings.engine).for_dtype(settings.dtype)
    engine = engine if settings.lora is None else engine.for_adapters()
    engine.check_context_parallel(layout.cp)
    chunks = build_model(hf, layout, role=kind, dtype=settings.dtype, engine=engine)
    if settings.reads_weights:
        load_hf(chunks, asked.folder, hf, role=kind)
    else:  # a checkpoint of another layout may have fewer rows of padding, which are zero
        with torch.no_grad():
            for param in (param for chunk in chunks for param in chunk.parameters()):
                param.zero_()
    model, optimizer = _trained(chunks, settings, layout, engine)
    parameters, gradients = OffloadBuffer(model, None, parameters=True), OffloadBuffer(model, None, gradients=True)
    moments = OffloadBuffer(model, optimizer, moments=True)
    where = kind, model, hf, asked.folder, optimizer, parameters, gradients, moments
    return Role(*where, engine=engine, chunks=chunks)


def build_on(owner: Role, asked: Load, layout: Layout) -> Role:
    """A role on the base of another one, which it shares instead of a copy; `lora` None: the base as it is, frozen.

    ValueError if they cannot share it: see `_check_base`.  After any error the owner is as before.
    """
    _check_base(owner, asked)
    for buffer in owner.buffers:
        buffer.onload()
    if owner.adapters is None and settings_of(owner.chunks) is not None:
        _move_out(owner)
    try:
        model, optimizer = _trained(owner.chunks, asked.settings, layout, owner.engine)
        buffers = owner.parameters, OffloadBuffer([], None), OffloadBuffer([], None)
        where = owner.kind, model, owner.hf, owner.source_folder, optimizer, *buffers
        role = Role(*where, engine=owner.engine, chunks=owner.chunks)
        if asked.settings.lora is not None:
            _move_out(role)
        return role
    finally:
        if settings_of(owner.chunks) is not None:  # the adapters of a role that could not be built
            detach(owner.chunks)
        owner.offload(by_default=True)


def _check_base(owner: Role, asked: Load) -> None:
    """ValueError if such a role cannot be on the base of `owner`."""
    settings = asked.settings
    base = f"base={settings.base}"
    config: Any = owner.chunks[0].config
    options = {name: value for name, value in settings.engine.items() if value != "auto"}
    for what, own, theirs in (
        ("a model of kind", asked.kind, owner.kind),
        ("the folder", asked.folder, owner.source_folder),
        ("dtype", settings.dtype, str(config.params_dtype).removeprefix("torch.")),
        *((name, value, getattr(owner.engine, name)) for name, value in options.items()),
    ):
        if own != theirs:
            raise ValueError(f"{base}: that role has {what} {theirs}, not {own}; expected the same")
    if not settings.reads_weights:
        raise ValueError(f"{base}: its weights are shared, and no restore brings them; expected reads_weights=True")
    if owner.optimizer is not None and owner.adapters is None and settings_of(owner.chunks) is None:
        raise ValueError(f"{base}: that role trains all its weights; expected one with adapters, or a frozen one")
    if settings.lora is None and settings.optim is not None:
        raise ValueError(f"{base}: without adapters the shared weights would be trained; expected lora, or no optim")
    if settings.lora is not None and owner.engine.uses_transformer_engine:
        raise ValueError(
            f"{base}: that role has Transformer Engine's layers, which take no adapters; expected one that was loaded "
            "with transformer_impl=local"
        )


def _move_out(role: Role) -> None:
    """Take a role's adapters out of its base; from now on they are in it during the role's calls only."""
    role.adapters = detach(role.chunks)
    role.own = OffloadBuffer([role.adapters], None, parameters=True)
    role.gradients = OffloadBuffer([role.adapters], None, gradients=True)
    role.moments = OffloadBuffer([role.adapters], role.optimizer, moments=True)


def _trained(
    chunks: Model, settings: LoadSettings, layout: Layout, engine: ExecutionOptions
) -> tuple[Model, Optimizer | None]:
    """The model with what the settings ask for, adapters and routing replay, wrapped for training; its optimizer."""
    lora, optim = settings.lora, settings.optim
    if settings.router_replay:
        add_router_replay(chunks)
    if lora is not None:
        adapters = LoraSettings(lora["rank"], lora["alpha"], tuple(lora["targets"]))
        apply_lora(chunks, adapters, seed=lora["seed"])
    if optim is None:
        return chunks, None
    model = wrap_for_training(chunks, layout, engine)
    return model, Optimizer(model, OptimSettings(**{**optim, "betas": tuple(optim["betas"])}))
