"""Shardings as text: JSON that ranks of the other side can read, and a fingerprint that all ranks compare.

The JSON describes each parameter by the kind of its mapping and that mapping's numbers and names, not by the slices of
each rank: 10^12 parameters over 1,024 ranks are about 2 MB.  So the reader must know the same kinds of mappings.  The
fingerprint checks that both sides also interpret them in the same way: it is computed from the resulting slices, and
differs if two versions of this package cut a parameter in different ways.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megarl.weights.mapping import families, server_map  # noqa: F401  (makes every kind of mapping known)
from megarl.weights.mapping.names import Op
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding, Sharding

_LAYOUTS: dict[str, type[Sharding]] = {"megatron": MegatronSharding, "server": ServerSharding}


def to_json(sharding: Sharding) -> str:
    """Text from which `from_json` makes an equal sharding.

    Parameters that differ only in numbers, such as those of all layers and experts, share one pattern: the text of the
    mapping with a `#` for each number.  Each parameter is then stored as the pattern's index and its numbers.
    """
    patterns: dict[str, int] = {}
    rows = []
    for op in sharding.table:
        text = json.dumps([type(op).__name__, {f.name: getattr(op, f.name) for f in fields(op)}], separators=(",", ":"))
        assert "#" not in text, f"{op.param}: a name with # cannot be written"
        number = patterns.setdefault(re.sub(r"\d+", "#", text), len(patterns))
        rows.append(" ".join([str(number), *re.findall(r"\d+", text)]))
    layout = next(name for name, kind in _LAYOUTS.items() if kind is type(sharding))
    sizes = {f.name: getattr(sharding, f.name) for f in fields(sharding) if f.name != "table"}
    return json.dumps({"layout": layout, **sizes, "patterns": list(patterns), "table": rows}, separators=(",", ":"))


def from_json(text: str) -> Sharding:
    """ValueError names a kind of mapping or of layout that this version does not know."""
    found = json.loads(text)
    layout, patterns, rows = found.pop("layout"), found.pop("patterns"), found.pop("table")
    if layout not in _LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; expected one of {', '.join(_LAYOUTS)}")
    kinds, split = {kind.__name__: kind for kind in _kinds(Op)}, [pattern.split("#") for pattern in patterns]
    table = tuple(_op(split[int(row.partition(" ")[0])], row.split(" ")[1:], kinds) for row in rows)
    return _LAYOUTS[layout](table, **{name: _tuples(value) for name, value in found.items()})


def fingerprint(sender: Sharding, receiver: Sharding, *rules: int) -> str:
    """64 hex digits of both shardings, including each slice of each group of ranks, and of the numbers in `rules`."""
    digest = hashlib.sha256(repr(rules).encode())
    for sharding in (sender, receiver):
        for line in _lines(sharding):
            digest.update(line.encode())
    return digest.hexdigest()


def _lines(sharding: Sharding) -> Iterator[str]:
    yield repr(
        [type(sharding).__name__, *((f.name, getattr(sharding, f.name)) for f in fields(sharding) if f.name != "table")]
    )
    for op in sharding.table:
        yield repr((op.param, op.copies, op.hf_shapes))
        for stage in range(sharding.num_stages):
            for param in sharding.params_on(op, stage):
                for coordinate, ranks in sharding.groups(op, stage):
                    pieces = [
                        (p.hf_name, p.dim, p.hf_start, p.shard_start, p.length, p.index)
                        for p in op.pieces_at(coordinate)
                    ]
                    yield repr((stage, param, len(ranks), ranks[0], op.shape_at(coordinate), pieces))


def _op(pattern: list[str], numbers: list[str], kinds: dict[str, type[Op]]) -> Op:
    text = "".join(part + number for part, number in zip(pattern, [*numbers, ""], strict=True))
    kind, values = json.loads(text)
    if kind not in kinds:
        raise ValueError(f"a parameter is described as {kind}, which is not known; expected one of {', '.join(kinds)}")
    return kinds[kind](**{name: _tuples(value) for name, value in values.items()})


def _kinds(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
