"""Notes which experts each layer of a model chooses, by hooks on transformers' modelling code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megarl.routed_experts import RoutedExperts


class ChosenExperts:
    """Example: chosen = ChosenExperts(model.base_model, of); chosen.begin(); model(...); chosen.take()  # [T, L, K]

    In all families a layer calls `experts(hidden, indices [T, K], weights [T, K])`, for all tokens of a pass at once.
    """

    def __init__(self, body: nn.Module, of: RoutedExperts) -> None:
        children = (getattr(module, "experts", None) for module in body.modules())
        found = [child for child in children if isinstance(child, nn.Module)]
        assert len(found) == len(of.layers), f"{len(found)} layers have experts, by config.json {len(of.layers)}"
        self._noted: list[Tensor] = []
        for experts in found:
            experts.register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        self._noted.append(given[1])

    def begin(self) -> None:
        """Forget what another pass chose."""
        self._noted.clear()

    def take(self) -> Tensor:
        """[tokens of the pass, layers with experts, experts of a token] int64."""
        return torch.stack(self._noted, dim=1)
