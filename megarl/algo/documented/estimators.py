"""Adapter for an advantage estimator in verl's documented form, on [batch, sequence] tensors.

The estimator runs on the whole batch, which is never split.  Its tensors can be read one column after the last and are
0 there, because the estimator printed in the documentation reads advantages[:, t + 1] also at the last t.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algo.documented.configs import AlgoConfig
from megarl.algo.documented.signatures import (
    PROBE_LENGTHS,
    RefusedError,
    accepted,
    adapted_signature,
    in_one_sentence,
    is_of_source,
)
from megarl.algo.segments import previous_unmasked

_BY_STD = "norm_adv_by_std_in_grpo"
ESTIMATOR_FORM = ("rewards", "values", "dones", "gamma", "gae_lambda", "response_mask")
# The names in verl's source: `index` is the prompt of each row, `config` has the settings of `algorithm`.
SOURCE_FORM = ("token_level_rewards", "values", "response_mask", "index", "gamma", "lam", "config", _BY_STD)


class Columns(Tensor):
    """A [batch, sequence] tensor that is 0 one column after its last; so is any matrix computed from it.

    Example: torch.ones(2, 3).as_subclass(Columns)[:, 3] is [0, 0]; [:, 4] is an IndexError.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As Tensor does, except for that column."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__ and _is_behind(args[1], args[0].shape):
                return args[0].new_zeros(args[0].shape[0])[args[1][0]]
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(cls) if isinstance(found, Tensor) and found.dim() == 2 else found


def _is_behind(index: Any, shape: torch.Size) -> bool:
    """Is this [rows, width] of a matrix of that width?"""
    is_pair = isinstance(index, tuple) and len(index) == len(shape) == 2
    return is_pair and isinstance(index[1], int) and index[1] == shape[1]


class DocumentedEstimator:
    """A documented estimator in the form of this layer: it gets each sequence's trainable tokens, padded on the right.

    `dones` is 1 at a sequence's last trainable token and in the padding, where rewards and values are 0; `gamma` and
    `gae_lambda` are always algorithm.gamma and algorithm.lam, not the function's defaults; `response_mask` is
    passed by name or in **kwargs.  A row without trainable tokens is left out.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function
        self._is_of_source = is_of_source(function)
        form = SOURCE_FORM if self._is_of_source else ESTIMATOR_FORM
        self._takes = accepted(f"advantage estimator {name!r}", function, form)
        asked = {"values": "values", "gamma": "gamma", "lam": "gae_lambda"}
        if self._is_of_source:
            asked |= {"lam": "lam", "group_ids": "index", _BY_STD: _BY_STD}
        parameters = inspect.signature(function).parameters
        required = inspect.Parameter.empty
        keywords = {
            ours: None if ours == "values" and parameters[theirs].default is None else required
            for ours, theirs in asked.items()
            if theirs in parameters
        }
        if self._is_of_source and "config" in parameters:
            keywords |= dict.fromkeys(("gamma", "lam", _BY_STD), required)
        self.__signature__ = adapted_signature(("rewards", "mask", "segment_ids"), keywords)
        self._rehearse()

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        segment_ids: Tensor,
        *,
        values: Tensor | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        group_ids: Tensor | None = None,
        norm_adv_by_std_in_grpo: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """advantages [N], returns [N], 0 at masked places; a reward on a masked token moves as in gae."""
        target = previous_unmasked(mask, segment_ids)
        moved = torch.zeros_like(rewards).index_add(0, target.clamp(min=0), torch.where(target >= 0, rewards, 0.0))
        live = mask.nonzero().squeeze(1)
        rows, lengths = segment_ids[live].unique_consecutive(return_counts=True)
        zeros = torch.zeros_like(rewards)
        if len(live) == 0:
            return zeros, zeros.clone()
        columns = {"rewards": moved[live]} | ({} if values is None else {"values": values[live]})
        settings = {"gamma": gamma, "lam": lam, _BY_STD: norm_adv_by_std_in_grpo}
        prompts = None if group_ids is None else group_ids[rows]
        found = self._evaluate(columns, lengths, int(lengths.max()), settings, prompts)
        advantages, returns = (zeros.index_put((live,), column.to(zeros)) for column in found)
        return advantages, returns

    def _evaluate(
        self,
        columns: Mapping[str, Tensor],
        lengths: Tensor,
        width: int,
        settings: Mapping[str, Any],
        prompts: Tensor | None = None,
    ) -> list[Tensor]:
        """[S] advantages and returns of the S trainable tokens, from [B, width] tensors; prompts: [B] or None."""
        place = torch.arange(width)
        inside = place < lengths.unsqueeze(1)
        padded = {n: torch.zeros(inside.shape, dtype=c.dtype).masked_scatter(inside, c) for n, c in columns.items()}
        dtype = columns["rewards"].dtype
        padded |= {
            "dones": (place >= lengths.unsqueeze(1) - 1).to(dtype),
            "response_mask": inside.to(dtype),
        }
        offered = {
            "values": None,
            **{n: c if self._is_of_source else c.as_subclass(Columns) for n, c in padded.items()},
            **settings,
            "gae_lambda": settings["lam"],
            "config": AlgoConfig(settings),
            "index": None if prompts is None else np.array([str(one) for one in prompts.tolist()], dtype=object),
        }
        offered["token_level_rewards"] = offered["rewards"]
        found = self._function(**{name: value for name, value in offered.items() if name in self._takes})
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in found] if isinstance(found, tuple) else []
        if shapes != [tuple(inside.shape)] * 2:
            raise RefusedError(
                f"advantage estimator {self.name}: expected it to return (advantages, returns), each a tensor of shape "
                "[batch, sequence]"
            )
        return [column.as_subclass(Tensor)[inside] for column in found]

    def _rehearse(self) -> None:
        """Raises: ValueError with the reason for a function that fails or that reads the padding."""
        g, lengths = torch.Generator().manual_seed(0), torch.tensor(PROBE_LENGTHS)
        names: list[str] = ["rewards", *(["values"] if "values" in self._takes else [])]
        columns = {name: torch.randn(sum(PROBE_LENGTHS), generator=g) for name in names}
        width = max(PROBE_LENGTHS)
        with in_one_sentence(f"advantage estimator {self.name}: on 2 sequences of {width} tokens it", self._function):
            settings, prompts = (
                {"gamma": 0.9, "lam": 0.8, _BY_STD: True},
                torch.zeros(len(PROBE_LENGTHS), dtype=torch.int64),
            )
            narrow = self._evaluate(columns, lengths, width, settings, prompts)
            wide = self._evaluate(columns, lengths, width + 2, settings, prompts)
        for a, b in zip(narrow, wide, strict=True):
            if not torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
                raise ValueError(
                    f"advantage estimator {self.name}: two more columns of padding change what it returns for the "
                    "tokens before them, expected it to leave out what lies behind `dones` or outside `response_mask`"
                )
