"""What an engine's reply looks like, written apart from the code that reads it."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.rollout.protocol import parse_replies
from megarl.samples.sample import Completion


def column_on_the_wire(column: np.ndarray) -> dict[str, Any]:
    little = column.astype(column.dtype.newbyteorder("<"))
    return {"dtype": column.dtype.name, "shape": list(column.shape), "data": b64encode(little.tobytes()).decode()}


def reply_item(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    spans: Sequence[tuple[int, int, int]],
    columns: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """One completion of a /generate reply."""
    meta: dict[str, Any] = {"finish_reason": {"type": "stop"}}
    meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(log_probs, token_ids, strict=True)]
    meta["weight_versions"] = [{"version": str(v), "start": a, "end": b} for v, a, b in spans]
    meta["columns"] = {name: column_on_the_wire(column) for name, column in columns.items()}
    return {"output_ids": list(token_ids), "meta_info": meta}


def parse_completions(reply: Any, n: int, *, num_asked: int | None = None) -> list[Completion]:
    """The completions alone of `parse_replies`."""
    return [parsed.completion for parsed in parse_replies(reply, n, num_asked=num_asked)]
