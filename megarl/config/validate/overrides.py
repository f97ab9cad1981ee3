"""Checks the fields of Megatron's configuration classes that a run gives by their own names."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.megatron_fields import OVERRIDES, fault


def invalid_overrides(config: Config, role: str) -> Iterator[str]:
    """One sentence for each field of Megatron's that a role cannot set, or not so; none for those of the actor's."""
    for group in OVERRIDES:
        given = getattr(config.role(role).megatron, group)
        if role != "actor" and given == getattr(config.actor.megatron, group):
            continue
        for field, value in given.items():
            if why := fault(group, field, value, role):
                yield f"{role}.megatron.{group}.{field}={show(value)}: {why}"
