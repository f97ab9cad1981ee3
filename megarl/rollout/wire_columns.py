"""Reads the columns that travel with the tokens from a reply's meta_info: an array with an entry for each token.

"columns": {"NAME": {"dtype": "uint8", "shape": [7, 2], "data": "base64 of the entries, row-major, little-endian"}}

A request of P tokens and a completion of T give P + T entries.  The first of them may be left out where the caller said
that it knows them; "start" says how many (not there: 0), and they are zeros then.  Nothing here knows what a column
means.  A run asks for the columns that it wants, each by an `EngineColumn`, which also reads what an engine reports in
its own way.
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
    """A reply lacks columns of its new tokens; another attempt of the same request may bring them."""

    def __init__(self, num_tokens: int, why: str) -> None:
        super().__init__(why)
        self.num_tokens = num_tokens


class EngineColumn(Protocol):
    """A column that a run wants of its completions; collectors get it pickled."""

    @property
    def name(self) -> str: ...

    @property
    def most_bytes(self) -> int:
        """What its entry of one token may take of a reply."""
        ...

    def is_of(self, temperature: float, top_p: float, top_k: int) -> bool:
        """Whether completions that are sampled with these have it."""
        ...

    def request(self, num_known: int) -> dict[str, Any]:
        """Fields of a request's body; of its first `num_known` tokens the caller has the entries already."""
        ...

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int, num_known: int) -> Any:
        """The column, an array or Ragged, from an engine's own field of meta_info; what the caller has already may be
        zeros, or empty lists.

        Raises ValueError, one sentence, if it is not there or cannot be read.
        """
        ...

    def check(self, column: Any, num_known: int) -> None:
        """Raises ValueError, one sentence, for entries behind the known ones that cannot be the run's.

        The column has an entry for each token.
        """
        ...


def read_columns(
    meta: Mapping[str, Any],
    num_asked: int | None,
    num_new: int,
    wanted: Sequence[EngineColumn] = (),
    num_known: int = 0,
) -> dict[str, np.ndarray]:
    """The columns of a completion of `num_new` tokens.  Raises ValueError, one sentence, for one that is not as above.

    `num_asked`: tokens of the request; a caller that gets columns has to know it.  `wanted`: each of them is there, if
    the completion has a token; of the first `num_known` tokens the caller has its entries already.
    """
    sent = meta.get("columns") or {}
    if not isinstance(sent, Mapping):
        raise ValueError(f"the columns of a completion are a {type(sent).__name__}: expected an object")
    names = [column.name for column in wanted]
    if unasked := [name for name in sent if name not in names]:
        raise ValueError(f"a completion has the column {unasked[0]!r}, which was not requested: expected {names}")
    found: dict[str, Any] = {}
    for column in wanted if num_new else ():
        name = column.name
        assert num_asked is not None, "a caller that gets columns has to say how many tokens it asked with"
        if name in sent:
            entries = _column(name, sent[name], num_known)
        else:
            entries = column.read(meta, num_asked, num_new, num_known)
        if entries.shape[:1] != (num_asked + num_new,):
            raise ValueError(
                f"column {name} of a completion has the shape {list(entries.shape)}: expected {num_asked + num_new} "
                f"entries, for {num_asked} tokens of the request and {num_new} of the completion"
            )
        column.check(entries, num_known)
        found[name] = entries
    return found


def column_to_json(column: np.ndarray, start: int = 0) -> dict[str, Any]:
    """What a reply says of a column: see above.  `start`: entries that are left out."""
    sent = column[start:]
    little = sent.astype(column.dtype.newbyteorder("<"), copy=False)
    said = {"dtype": column.dtype.name, "shape": list(sent.shape), "data": b64encode(little.tobytes()).decode()}
    return {**said, "start": start} if start else said


def _column(name: str, value: Any, num_known: int) -> np.ndarray:
    try:
        start = value.get("start", 0)
        dtype, shape, data = str(value["dtype"]), value["shape"], b64decode(value["data"], validate=True)
        sizes = [size for size in shape if isinstance(size, int) and size >= 0]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"column {name} of a completion cannot be read: {error!r}") from error
    if dtype not in COLUMN_DTYPES:
        raise ValueError(
            f"column {name} of a completion has dtype {dtype}: expected one of {', '.join(sorted(COLUMN_DTYPES))}"
        )
    if len(sizes) != len(shape) or math.prod(sizes) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"column {name} of a completion has {len(data)} bytes: expected {dtype} of shape {shape}")
    column = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(sizes)
    if start == 0:
        return column
    if type(start) is not int or not 0 < start <= num_known or not sizes or not column.size:
        raise ValueError(
            f"column {name} of a completion has the shape {shape} and starts at {start!r}: expected a start of at most "
            f"{num_known}, the tokens that the caller knows"
        )
    return np.concatenate([np.zeros((start, *sizes[1:]), dtype), column])
