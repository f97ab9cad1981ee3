"""What a part of a Megatron layer's spec is, in either version of Megatron-Core."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def module_of(part: Any) -> Any:
    """The class of a ModuleSpec, or of a partial of a class or of one of its class methods."""
    return part.module if isinstance(part, ModuleSpec) else getattr(part.func, "__self__", part.func)
