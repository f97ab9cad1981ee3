"""The table that decides which servers may generate publishes every change, and nothing else."""

from states import fenced, held, trusted

from megarl.rollout.server_states import Phase, ServerState, ServerTable


def test_every_change_is_published_and_a_fenced_server_is_not_held() -> None:
    published: list[ServerState] = []
    table = ServerTable(published.append)
    table.hold("a")  # not known: it generates nothing
    table.trust("a", 7, "adapter_7")
    table.hold("a")
    table.fence("a")
    table.hold("a")
    assert published == [trusted("a", 7, "adapter_7"), ServerState("a", Phase.HELD, 7, "adapter_7"), fenced("a")]


def test_a_server_holds_a_version_until_a_push_a_fence_or_its_leave() -> None:
    table = ServerTable(lambda state: None)
    for url in ("a", "b", "c", "d"):
        table.trust(url, 3)
    table.hold("a")
    table.hold("b", for_push=True)
    table.fence("c")
    table.forget("d")
    assert table.holding(3) == {"a"} and table.holding(4) == set()
    table.trust("b", 3)
    assert table.holding(3) == {"a", "b"}


def test_a_push_takes_the_version_from_a_server() -> None:
    published: list[ServerState] = []
    table = ServerTable(published.append)
    table.trust("a", 3)
    table.hold("a", for_push=True)
    assert published[-1] == held("a")
