"""Reads the columns that travel with the tokens from a reply's meta_info: an array with an entry for each token.

"columns": {"NAME": {"dtype": "uint8", "shape": [7, 2], "data": "base64 of the entries, row-major, little-endian"}}

A request of P tokens and a completion of T give P + T entries.  Nothing here knows what a column means.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

COLUMN_DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
# Columns that an engine reports in its own way: a field of meta_info -> the column's name, and the function that makes
# the array of the field, P and T.  It raises ValueError for a field that it cannot read.
ENGINE_COLUMNS: dict[str, tuple[str, Callable[[Any, int, int], np.ndarray]]] = {}


def read_columns(meta: Mapping[str, Any], num_asked: int | None, num_new: int) -> dict[str, np.ndarray]:
    """The columns of a completion of `num_new` tokens.  Raises ValueError, one sentence, for one that is not as above.

    `num_asked`: tokens of the request; a caller that gets columns has to know it.
    """
    sent = meta.get("columns") or {}
    fields = [field for field in ENGINE_COLUMNS if field in meta]
    if not sent and not fields:
        return {}
    assert num_asked is not None, "a caller that gets columns has to say how many tokens it asked with"
    if not isinstance(sent, Mapping):
        raise ValueError(f"the columns of a completion are a {type(sent).__name__}: expected an object")
    found = {name: _column(name, value) for name, value in sent.items()}
    for field in fields:
        name, read = ENGINE_COLUMNS[field]
        found[name] = read(meta[field], num_asked, num_new)
    for name, column in found.items():
        if column.shape[:1] != (num_asked + num_new,):
            raise ValueError(
                f"column {name} of a completion has the shape {list(column.shape)}: expected {num_asked + num_new} "
                f"entries, for {num_asked} tokens of the request and {num_new} of the completion"
            )
    return found


def _column(name: str, value: Any) -> np.ndarray:
    try:
        dtype, shape, data = str(value["dtype"]), value["shape"], b64decode(value["data"], validate=True)
        sizes = [size for size in shape if isinstance(size, int) and size >= 0]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"column {name} of a completion cannot be read: {error!r}") from error
    if dtype not in COLUMN_DTYPES:
        raise ValueError(
            f"column {name} of a completion has dtype {dtype}: expected one of {', '.join(sorted(COLUMN_DTYPES))}"
        )
    if len(sizes) != len(shape) or math.prod(sizes) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"column {name} of a completion has {len(data)} bytes: expected {dtype} of shape {shape}")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(sizes)
