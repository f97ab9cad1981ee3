"""Pushes from two ranks into two real servers on loopback, by each transport, with and without faults."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from push_cases import K_PROJ, O_PROJ, HFServer, build, connect, count_requests, push, ranks_that_go_on, record_order
from spawn import Ranks
from tiny_models import write_model

from megarl.arch.layout import Layout

pytestmark = pytest.mark.dist

TRANSPORTS = ("gathered", "mapped", "shared", "sharded")
SLICES = ("shared", "sharded")
THEN = {"shared": "mapped", "mapped": "gathered", "sharded": "gathered"}  # which transport follows one that fails
PHASES = {"join", "pause", "convert", "send", "load", "verify", "resume"}
LIMIT_S = 3.0  # of one wait, where it runs out
Push = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[HFServer]]:
    with HFServer(folder) as first, HFServer(folder) as second:
        yield [first.wait(), second.wait()]


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        ranks.run(build, str(folder), Layout(tp=2), timeout_s=240)
        yield ranks


@pytest.fixture
def connected(ranks: Ranks, servers: list[HFServer]) -> Callable[..., Push]:
    """Have the ranks push by a transport to both servers: the function that pushes, and returns what rank 0 knows."""

    def make(transport: str, **settings: Any) -> Push:
        urls = settings.pop("urls", [server.url for server in servers])
        ranks.run(connect, urls, transport, settings, timeout_s=120)

        def go(fault: str = "", **how: Any) -> dict[str, Any]:
            found = ranks.run(push, next(versions), fault, how, timeout_s=240)
            assert found[1]["report"] is None and not found[1]["error"]
            return found[0]

        return go

    return make


versions = count(1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_servers_get_exactly_the_trainers_weights(transport, connected, servers) -> None:
    go, urls = connected(transport), [server.url for server in servers]
    first = go()
    assert first["report"].compared == (sorted(urls) if transport in SLICES else []), "with what whole tensors leave"
    found = [go(), go(pause_mode="in_place", canary_off_by=0.0)]
    for one in [first, *found]:
        report = one["report"]
        assert report.transports == dict.fromkeys(urls, transport)
        assert (report.failed, report.fallbacks, report.unverified) == ({}, {}, [])
        assert report.num_tensors == len(one["expected"]) == 4 * 11 + 2
        assert report.num_bytes == sum(4 * size for size in one["sizes"])
        assert report.num_verified >= 2 * report.num_tensors
    phases = PHASES if transport in SLICES else PHASES | {"gather"}
    assert [set(one["report"].timings) for one in found] == [phases, phases | {"canary"}]
    for server in servers:
        assert server.engine.checksums() == found[1]["expected"] != found[0]["expected"]
        assert server.engine.model_info()["weight_version"] == str(found[1]["report"].version)
        assert not server.is_paused


def test_the_way_that_is_fastest_here_is_chosen(connected, servers) -> None:
    assert set(connected("auto")()["report"].transports.values()) == {"sharded"}


def test_slices_are_compared_with_whole_tensors_again_from_time_to_time_without_a_file(connected, servers) -> None:
    go, urls = connected("sharded", check_every=2), sorted(server.url for server in servers)
    go()
    assert [go("full-disk")["report"].compared for _ in range(3)] == [urls, [], urls]


@pytest.mark.parametrize("transport", SLICES)
def test_a_push_of_slices_takes_as_many_requests_whatever_the_number_of_messages(transport, connected, ranks) -> None:
    counts = []
    for bucket_bytes in (4096, 1 << 20):
        go = connected(transport, bucket_bytes=bucket_bytes)
        go()
        counts.append(ranks.run(count_requests, next(versions), timeout_s=240))
    assert counts[0] == counts[1] and counts[0][1] == 0, "rank 0 alone asks"


def test_all_ranks_use_their_groups_in_one_order(connected, servers, ranks: Ranks) -> None:
    go = connected("sharded")
    go()
    orders = ranks.run(record_order, next(versions), timeout_s=240)
    groups = list(dict.fromkeys(group for _, group in orders[0]))
    assert len(groups) == len(servers)
    for order in orders:
        kinds = [kind for kind, _ in order]
        assert [group for kind, group in order if kind == "collective"] == groups
        assert [group for kind, group in order if kind == "check"] == groups
        assert kinds == sorted(kinds, key=["collective", "message", "check"].index), "one phase after another"
    turns = [[groups.index(group) for kind, group in order if kind == "message"] for order in orders]
    assert len(turns[0]) == len(turns[1]) > 20
    # In every turn one rank sends to one server, and the other rank to the other one.
    assert all(one == 1 - other for one, other in zip(*turns, strict=True)), turns


@pytest.mark.parametrize(("fault", "name"), [("corrupt-in-flight", K_PROJ), ("drop-bucket", O_PROJ)])
def test_what_is_corrupted_or_dropped_is_named_its_server_left_out_and_the_next_push_heals_it(
    fault, name, connected, servers
) -> None:
    go, (good, bad) = connected("gathered"), servers
    report = go(f"{fault} {bad.url}")["report"]
    assert report.transports == {good.url: "gathered"}
    assert list(report.failed) == [bad.url]
    assert report.failed[bad.url].startswith(
        f"{bad.url} does not hold the weights that the trainer sent (differ: {name}"
    )
    assert (good.is_paused, bad.is_paused) == (False, True)
    assert set(go()["report"].transports) == {good.url, bad.url}
    assert not bad.is_paused


@pytest.mark.parametrize("transport", SLICES)
def test_slices_corrupted_under_way_are_named_and_sent_again_by_a_slower_way(transport, connected, servers) -> None:
    found = connected(transport)("corrupt-in-flight x")
    report = found["report"]
    assert report.transports == {server.url: THEN[transport] for server in servers}
    for server in servers:
        (sentence,) = report.fallbacks[server.url]
        assert sentence.startswith(f"{transport}: ") and "(differ: model." in sentence and "] on rank 0" in sentence
        assert server.engine.checksums() == found["expected"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_element_corrupted_in_a_server_is_caught(transport, connected, servers) -> None:
    go, (good, bad) = connected(transport), servers
    go()
    found = go(f"corrupt-in-server {bad.url}")
    report = found["report"]
    if transport == "gathered":  # there is no other transport
        assert (set(report.transports), K_PROJ in report.failed[bad.url]) == ({good.url}, True)
        return
    assert set(report.transports) == {good.url, bad.url} and report.transports[bad.url] == THEN[transport]
    words = K_PROJ if transport == "mapped" else "its replicas answer with different checksums"
    assert words in report.fallbacks[bad.url][0]
    assert bad.engine.checksums() == found["expected"]


def test_a_change_of_one_server_alone_is_caught_where_the_slices_are_right(connected, servers) -> None:
    """What is not sent is not digested by the sender: a server's checksums must not change but with the weights."""
    go = connected("sharded", urls=[servers[0].url])
    go()
    found = go(f"corrupt-in-server {servers[0].url}", bare=True)["report"]
    (sentence,) = found.fallbacks[servers[0].url]
    assert "the weights are those of the last push, and its checksums did" in sentence
    assert found.transports == {servers[0].url: "gathered"}


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        ("mapped", "drop-mapped 3"),
        ("shared", "close-memory x"),
        ("shared", "drop-message x"),
        pytest.param("sharded", "drop-message x", marks=pytest.mark.full),
    ],
)
def test_what_is_dropped_on_a_faster_way_is_sent_again_by_a_slower_one(transport, fault, connected, servers) -> None:
    go = connected(transport, timeout_s=LIMIT_S)
    go()
    found = go(fault)
    for server in servers:
        assert found["report"].transports[server.url] == THEN[transport]
        assert found["report"].fallbacks[server.url][0].startswith(f"{transport}: ")
        assert server.engine.checksums() == found["expected"]


def test_a_server_that_computes_otherwise_than_the_trainer_fails_its_push_and_stays_paused(connected, servers) -> None:
    go = connected("shared")
    found = go(canary_off_by=0.1)
    for server in servers:
        assert "answers the canary prompt with log-probs that differ" in found["report"].failed[server.url]
        assert server.is_paused
    assert found["report"].transports == {} and found["error"]
    assert set(go(canary_off_by=0.0)["report"].transports) == {server.url for server in servers}
    assert not any(server.is_paused for server in servers)


def test_a_push_that_no_server_took_is_an_error_that_names_all(connected, servers) -> None:
    found = connected("gathered", urls=[servers[1].url])(f"corrupt-in-flight {servers[1].url}")
    assert found["error"].startswith(f"the push of weights version {found['report'].version} failed: {servers[1].url}")
    assert found["report"].transports == {}


def test_a_wrong_token_is_a_failure_at_once(connected, servers) -> None:
    found = connected("auto", token="wrong")()
    assert all("answered 401" in reason for reason in found["report"].failed.values())
    assert set(found["report"].failed) == {server.url for server in servers}


@pytest.mark.parametrize("transport", ["gathered", "sharded"])
def test_sides_that_set_nccl_otherwise_are_not_joined_and_the_variable_is_named(transport, connected, servers) -> None:
    go, urls = connected(transport), [server.url for server in servers]
    found = go("set-for-nccl NCCL_CUMEM_ENABLE=1")
    assert all("NCCL_CUMEM_ENABLE: the server has 0 and the trainer 1" in found["report"].failed[url] for url in urls)
    over_gloo = go("set NCCL_CUMEM_ENABLE=1")
    assert over_gloo["report"].transports == dict.fromkeys(urls, transport)


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_was_started_again_between_two_pushes_gets_the_next_one(transport, connected, servers) -> None:
    go = connected(transport)
    go()
    servers[1].restart()
    found = go()
    assert found["report"].transports == {server.url: transport for server in servers}
    assert servers[1].engine.checksums() == found["expected"]


@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        ("kill", "sharded"),
        *(pytest.param("kill", transport, marks=pytest.mark.full) for transport in TRANSPORTS[:3]),
        *(pytest.param("freeze", transport, marks=pytest.mark.full) for transport in TRANSPORTS),
    ],
)
def test_a_server_that_dies_or_falls_silent_under_way_is_left_out(transport, fault, connected, servers) -> None:
    """It holds nobody up for longer than the limit, the other one gets its push, and it the next one."""
    go, (good, bad) = connected(transport, timeout_s=LIMIT_S), servers
    go()
    began = time.monotonic()
    found = go(f"{fault} {bad.pid}")
    assert time.monotonic() - began < 60 * LIMIT_S, "many times the limit of one wait"
    assert list(found["report"].failed) == [bad.url] and found["report"].failed[bad.url]
    assert set(found["report"].transports) == {good.url}
    assert good.engine.checksums() == found["expected"]
    bad.restart()
    assert go()["report"].transports == {good.url: transport, bad.url: transport}


def test_a_push_to_some_leaves_the_others_alone(connected, servers) -> None:
    go = connected("gathered")
    go()
    before = servers[0].engine.checksums()
    report = go(only=[servers[1].url])["report"]
    assert set(report.transports) == {servers[1].url}
    assert servers[0].engine.checksums() == before
    assert set(go()["report"].transports) == {server.url for server in servers}


@pytest.mark.full
@pytest.mark.parametrize("transport", SLICES)
def test_slices_that_go_to_a_wrong_place_are_caught_by_whole_tensors(transport, connected, servers) -> None:
    """Sender and receiver believe in what they send and where it goes: only the server's own loading can tell."""
    go = connected(transport)
    for again in range(2):
        found = go("misroute")
        report = found["report"]
        assert (report.transports, report.failed, report.compared) == (
            {s.url: THEN[transport] for s in servers},
            {},
            [],
        )
        for server in servers:
            words = "it needs a server that" if again else "held other weights after slices than after whole tensors"
            if again and transport == "shared":  # whole tensors that it maps are one of its two ways
                assert report.fallbacks == {}
            else:
                (sentence,) = report.fallbacks[server.url]
                assert words in sentence
            assert server.engine.checksums() == found["expected"]
    servers[1].restart()
    told = go("misroute")["report"].fallbacks
    assert transport == "shared" or "it needs a server" in told[servers[0].url][0]
    assert "after slices" in told[servers[1].url][0], "a new process is tried anew"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("leave-out 1", "needs slices of the trainer's ranks 1, which have not joined"),
        ("describe-otherwise 1", "rank 1 of the trainer describes the model, its layout or the messages in another"),
    ],
)
def test_a_rank_that_does_not_take_part_is_noticed_before_the_first_byte(fault, words, connected, servers) -> None:
    found = connected("sharded")(fault)
    for server in servers:
        (sentence,) = found["report"].fallbacks[server.url]
        assert words in sentence
        assert found["report"].transports[server.url] == "gathered"
        assert server.engine.checksums() == found["expected"]


@pytest.mark.full
def test_servers_whose_digests_nobody_computes_are_compared_with_the_exported_folder(connected, servers) -> None:
    go, urls = connected("gathered"), sorted(server.url for server in servers)
    found = [go("not-plain")["report"] for _ in range(2)]
    assert [(sorted(report.transports), report.num_verified) for report in found] == [(urls, 0)] * 2
    assert [report.compared for report in found] == [urls, []]
    assert [sorted(report.unverified) for report in found] == [[], urls]
    for fault, settings, words in (
        ("full-disk not-plain", {}, "No space left on device"),
        ("not-plain", {"source_folder": None}, "there is none that it can read"),
    ):
        report = connected("gathered", **settings)(fault)["report"]
        assert report.transports == {}, "servers that nothing vouches for are left out"
        assert all(words in report.failed[server.url] and server.is_paused for server in servers)


def test_the_ranks_go_on_after_all_that(ranks: Ranks) -> None:
    assert ranks.run(ranks_that_go_on) == [2, 2]
