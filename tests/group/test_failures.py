"""Which of several ranks' failures is the one that a run stops with."""

from pathlib import Path
from typing import Any

import pytest

from megarl.group.failures import GONE, Places, PortsBlocked, may_follow
from megarl.processes.ranks import Share

PLACES = Places("ranks_0", [Share(0, 0, 0, 2), Share(1, 0, 2, 2)], Path("/logs"), lambda share: "")


def said(kind: str, lost: str = "") -> dict[str, Any]:
    return {"type": kind, "message": f"a {kind}", "traceback": "", "lost": lost}


@pytest.mark.parametrize("following", ["RuntimeError", "DistBackendError", "DistNetworkError"])
def test_the_end_of_a_rank_explains_what_collectives_say_and_another_exception_explains_both(following: str) -> None:
    errors = {0: said(following), 2: said(GONE, "the connection was closed")}
    assert may_follow([errors[0]]) and not may_follow(errors.values())
    lost = "group ranks_0: machine 1 is lost in update with ranks 2 to 3: the connection was closed"
    assert str(PLACES.failed("update", errors)) == lost
    errors[3] = said("OutOfMemoryError")
    out_of_memory = "group ranks_0: rank 3 failed in update: OutOfMemoryError: a OutOfMemoryError"
    assert str(PLACES.failed("update", errors)) == out_of_memory
    assert str(PLACES.failed("update", {1: said(following)})).startswith(
        f"group ranks_0: rank 1 failed in update: {following}"
    )


def test_blocked_ports_have_an_error_of_their_own() -> None:
    assert isinstance(PLACES.failed("setup", {0: said("Unreachable"), 1: said("DistStoreError")}), PortsBlocked)
    assert not isinstance(PLACES.failed("setup", {0: said("OSError")}), PortsBlocked)
