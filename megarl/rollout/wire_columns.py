"""Reads the columns that travel with the tokens from a reply's meta_info: an array with an entry for each token.

"columns": {"NAME": {"dtype": "uint8", "shape": [7, 2], "data": "base64 of the entries, row-major, little-endian"}}

A request of P tokens and a completion of T give P + T entries.  Nothing here knows what a column means.  A run asks for
the columns that it wants, each by an `EngineColumn`, which also reads what an engine reports in its own way.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

COLUMN_DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)


class ColumnsLost(ValueError):
    """A reply does not tell what belongs to its new tokens, which the same request may get from another attempt."""

    def __init__(self, num_tokens: int, why: str) -> None:
        super().__init__(why)
        self.num_tokens = num_tokens


class EngineColumn(Protocol):
    """A column that a run wants of every completion; collectors get it pickled."""

    @property
    def name(self) -> str: ...

    def request(self, num_known: int) -> dict[str, Any]:
        """Fields of a request's body; of its first `num_known` tokens the caller has the entries already."""
        ...

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int) -> np.ndarray:
        """The column from an engine's own field of meta_info; what the caller has already may be zeros.

        Raises ValueError, one sentence, if it is not there or cannot be read.
        """
        ...

    def check(self, column: np.ndarray) -> None:
        """Raises ValueError, one sentence, for entries that cannot be the run's."""
        ...


def read_columns(
    meta: Mapping[str, Any], num_asked: int | None, num_new: int, wanted: Sequence[EngineColumn] = ()
) -> dict[str, np.ndarray]:
    """The columns of a completion of `num_new` tokens.  Raises ValueError, one sentence, for one that is not as above.

    `num_asked`: tokens of the request; a caller that gets columns has to know it.  `wanted`: each of them is there, if
    the completion has a token.
    """
    sent = meta.get("columns") or {}
    wanted = wanted if num_new else ()
    if not sent and not wanted:
        return {}
    assert num_asked is not None, "a caller that gets columns has to say how many tokens it asked with"
    if not isinstance(sent, Mapping):
        raise ValueError(f"the columns of a completion are a {type(sent).__name__}: expected an object")
    found = {name: _column(name, value) for name, value in sent.items()}
    for column in wanted:
        if column.name not in found:
            found[column.name] = column.read(meta, num_asked, num_new)
        column.check(found[column.name])
    for name, entries in found.items():
        if entries.shape[:1] != (num_asked + num_new,):
            raise ValueError(
                f"column {name} of a completion has the shape {list(entries.shape)}: expected {num_asked + num_new} "
                f"entries, for {num_asked} tokens of the request and {num_new} of the completion"
            )
    return found


def column_to_json(column: np.ndarray) -> dict[str, Any]:
    """What a reply says of a column: see above."""
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    return {"dtype": column.dtype.name, "shape": list(column.shape), "data": b64encode(little.tobytes()).decode()}


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
