"""Plain values that ranks tell each other without pickles."""

import ast
from pathlib import Path

import pytest
from spawn import Ranks

import megarl
from megarl.weights.push.agreement import broadcast_json, gather_json

PICKLING = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
PICKLING |= {"send_object_list", "recv_object_list"}


def each_rank() -> tuple[list[object], object, object]:
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = {"rank": rank, "words": ["\u00fc" * rank] * rank, "none": None}
    return gather_json(mine), broadcast_json({"order": [1, 2.5]} if rank == 0 else None), broadcast_json(None)


@pytest.mark.full
@pytest.mark.dist
def test_every_rank_gets_what_all_said_and_what_rank_0_said(two_ranks: Ranks) -> None:
    wanted = [{"rank": rank, "words": ["\u00fc" * rank] * rank, "none": None} for rank in range(2)]
    assert two_ranks.run(each_rank) == [(wanted, {"order": [1, 2.5]}, None)] * 2


@pytest.mark.full
def test_nothing_of_ours_sends_objects_between_ranks() -> None:
    """torch pickles them, and ranks unpickle what comes."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(megarl.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and {getattr(node, key, None) for key in ("attr", "id", "name")} & PICKLING
    ]
    assert not found
