"""The parameters of a model with adapters as plain weights: merged at each look-up, never stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.mcore.models.lora import adapted, merged_weight
from megarl.mcore.models.model import Model


class Merged(Mapping[str, Tensor]):
    """Parameters of this rank by their names in the whole model, without those of the adapters.

    A look-up of an adapted weight makes a new tensor, base + scaling * B A rounded once to the base's type: peak extra
    memory is what the caller holds at a time.  Read only: writes into such a tensor are lost.
    """

    def __init__(self, params: Mapping[str, Tensor], model: Model) -> None:
        """`params`: all parameters, including the adapters'."""
        linears = dict(adapted(model))
        self._linears: dict[str, Any] = {f"{path}.weight": linear for path, linear in linears.items()}
        inside = tuple(f"{path}.lora." for path in linears)
        self._base = {name: param for name, param in params.items() if not name.startswith(inside)}

    def __getitem__(self, name: str) -> Tensor:
        return merged_weight(self._linears[name]) if name in self._linears else self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def dtype(self, name: str) -> torch.dtype:
        return self._base[name].dtype


def dtype_of(params: Mapping[str, Tensor], name: str) -> torch.dtype:
    """The type of a parameter, without merging it."""
    return params.dtype(name) if isinstance(params, Merged) else params[name].dtype
