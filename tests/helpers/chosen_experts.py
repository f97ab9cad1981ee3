"""What transformers' routers choose for a sequence, in one pass or in several with different weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.arch.routed_experts import ROUTED_EXPERTS
from megarl.samples.sample import Completion

ROUNDING = 5e-7  # of scores: engines round probabilities of a quarter or a half by up to 6e-8


class Reference:
    """Example: Reference(folder).read([5, 6, 7]) -> (scores of experts [3, layers, E], logits [3, V], KV cache)."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._noted: list[Tensor] = []
        for module in self._model.modules():
            if hasattr(module, "gate") and hasattr(module, "experts"):
                module.gate.register_forward_hook(lambda *call: self._noted.append(call[2][0]))

    @torch.no_grad()
    def read(self, tokens: Sequence[int], cache: Any = None) -> tuple[Tensor, Tensor, Any]:
        """`cache`: of the tokens before these, perhaps by a model with other weights."""
        self._noted.clear()
        output = self._model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        scores = torch.stack([each.view(-1, each.size(-1)) for each in self._noted], dim=1)
        return scores, output.logits[0], output.past_key_values


def worse_by(scores: Tensor, completion: Completion) -> Tensor:
    """[tokens - 1]: by how much the experts that a completion reports of a token score less than the best ones.

    `scores` [tokens - 1, layers, E]: of the passes that predicted the tokens behind the first one.
    """
    column = completion.columns[ROUTED_EXPERTS]
    assert not column[0].any(), "nothing predicted the first token"
    experts = torch.from_numpy(column[1:].astype(np.int64))
    best = scores.topk(experts.size(-1)).values
    return (scores.gather(-1, experts).sort(-1, descending=True).values - best).abs().amax((1, 2))
