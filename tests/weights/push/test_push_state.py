"""The bookkeeping of a push, with servers that are nothing but a name and capabilities."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.client import ServerError
from megarl.weights.clock import Clock
from megarl.weights.push import checks
from megarl.weights.push.checks import ExpectedDigests, check_whole_tensors, contradictions
from megarl.weights.push.delivery import BucketDelivery
from megarl.weights.push.report import PushError
from megarl.weights.push.servers import Server, ServerLayout
from megarl.weights.push.state import PushState

HERE, THERE = "http://127.0.0.1:1", "http://192.0.2.1:1"


def server(url: str, *, there: bool = True, gpus: tuple[str, ...] = (), **capabilities: Any) -> Any:
    defaults = {"layout": ServerLayout("sglang", 1, 1, 1, "sha256")}
    defaults |= {"has_receiver": True, "is_plain": True, "is_stacked": False, "first_gpu": None, "drafts": False}
    able = defaults | capabilities
    return SimpleNamespace(
        url=url, capabilities=SimpleNamespace(**able), is_there=lambda: there, fits_slices=None, gpus=gpus
    )


@pytest.fixture
def make() -> Iterator[Any]:
    with ThreadPoolExecutor(4) as threads:
        yield lambda *servers: PushState({s.url: s for s in servers}, threads, 3, flush_cache=True, checks=False)


def refuse(_: Any) -> None:
    raise ServerError("http://a", "/x", 400, "no")


@pytest.mark.parametrize(
    ("of", "wanted", "on_gpu", "expected", "fallbacks"),
    [
        (server(HERE), "auto", False, "mapped", []),
        (server(HERE), "shared", False, "shared", []),
        (server(HERE, is_plain=False), "shared", False, "mapped", []),
        (server(THERE), "auto", False, "sharded", []),
        (server(THERE, has_receiver=False), "auto", False, "gathered", []),
        (server(THERE, is_plain=False), "auto", False, "gathered", []),
        (server(THERE, drafts=True), "auto", False, "gathered", []),
        (server(THERE, is_stacked=True), "auto", False, "gathered", []),
        (server(HERE, first_gpu=0), "auto", False, "sharded", []),  # the trainer has no GPU to share
        (server(HERE, first_gpu=0), "auto", True, "sharded", []),  # of GPUs only when asked for
        (server(HERE, first_gpu=0), "shared", True, "shared", []),
        (server(THERE), "shared", False, "gathered", ["shared: it needs a server on this machine"]),
    ],
)
def test_the_fastest_possible_way_is_tried_first(make, of, wanted, on_gpu, expected, fallbacks) -> None:
    """And a way that is wanted and impossible is noted."""
    targets = make(of)
    targets.choose(wanted, on_gpu=on_gpu, is_cut=False)
    assert targets.waiting() == {of.url: expected}
    assert targets.fallbacks == ({of.url: fallbacks} if fallbacks else {})


@pytest.mark.parametrize(
    ("wanted", "is_cut", "ways"),
    [
        ("auto", False, ["mapped", "sharded", "shared", "gathered"]),
        ("auto", True, ["sharded", "shared", "mapped", "gathered"]),
        ("shared", True, ["shared", "mapped", "gathered"]),
    ],
)
def test_a_failing_server_falls_back_way_by_way_and_is_dropped_at_last(make, wanted, is_cut, ways) -> None:
    """A model that is cut goes from rank to rank before it is gathered for shared memory."""
    targets = make(server(HERE))
    targets.choose(wanted, on_gpu=False, is_cut=is_cut)
    tried = []
    while targets.waiting():
        tried.append(targets.waiting()[HERE])
        assert targets.attempt(refuse, [HERE]) == {}
    assert tried == ways
    assert targets.failed == {HERE: "http://a/x answered 400: no"}
    assert targets.fallbacks[HERE] == [f"{way}: http://a/x answered 400: no" for way in ways[:-1]]


def test_a_new_server_that_contradicts_its_replica_has_the_replica_compared_with_a_folder(make, monkeypatch) -> None:
    """Both checksums changed with the weights, so nobody knows yet which of the two holds them."""

    def read(one: Any) -> Any:
        one.checksums = one.replies.pop(0)
        return one.checksums

    for name, method in (("read_checksums", read), ("open", lambda one: None)):
        monkeypatch.setattr(Server, name, method)
    monkeypatch.setattr(checks, "server_table", lambda *_: [])
    monkeypatch.setattr(checks, "derived_table", lambda *_: [])
    monkeypatch.setattr(checks, "tied", lambda _: {})
    known, new = server(HERE, is_plain=False), server(THERE, is_plain=False)
    for one, replies, weights in ((known, ["b", "b"], "before"), (new, ["c"], "")):
        one.baseline, one.baseline_weights, one.replies, one.join = "a", weights, replies, lambda _: None
        one.set_baseline = lambda _: None
    state = make(known, new)
    state.choose("auto", on_gpu=False, is_cut=False)
    while state.waiting():
        transports = BucketDelivery(state).transports
        layouts = [state.targets[url].server.capabilities.layout for url in transports]
        check_whole_tensors(state, transports, ExpectedDigests(layouts, {}, {}))
    assert state.done == {HERE: "gathered"} and state.failed.keys() == {THERE}
    assert state.needs_folder


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("wanted", ["auto", "shared", "sharded", "gathered"])
def test_into_a_server_on_the_trainers_gpus_leads_one_way(make, wanted, is_cut) -> None:
    """NCCL joins no two processes of one GPU; and it may stand on another machine than rank 0.  Its ranks get slices,
    or map whole tensors.
    """
    targets = make(server(THERE, first_gpu=0, gpus=("1/0", "1/1")))
    targets.choose(wanted, on_gpu=True, is_cut=is_cut, gpus=["0/0", "0/1", "1/0", "1/1"])
    first = ["shared"] if wanted in ("auto", "shared") else []
    assert targets.targets[THERE].transports == [*first, "mapped"]
    assert (THERE in targets.fallbacks) == (wanted in ("sharded", "gathered"))
    for _ in (*first, "mapped"):
        targets.attempt(refuse, [THERE])
    assert list(targets.failed) == [THERE], "nothing slower is possible"


def test_a_server_that_the_trainer_shares_some_gpus_with_cannot_be_pushed_to(make) -> None:
    targets = make(server(HERE, first_gpu=0, gpus=("0/0", "0/1")), server(THERE, first_gpu=0, gpus=("1/0", "1/1")))
    targets.choose("auto", on_gpu=True, is_cut=False, gpus=["0/1", "0/2"])
    assert list(targets.failed) == [HERE]
    assert targets.failed[HERE].startswith(f"no transport reaches {HERE}: shared needs a rank of the trainer on each")
    assert targets.waiting() == {THERE: "sharded"}, "that has GPUs of its own"


def test_a_server_that_is_gone_is_not_tried_by_another_way(make) -> None:
    targets = make(server(HERE, there=False), server(THERE))
    targets.choose("auto", on_gpu=False, is_cut=False)
    targets.attempt(refuse, [HERE])
    assert list(targets.failed) == [HERE] and targets.waiting() == {THERE: "sharded"}


def test_orders_reach_the_others_when_one_fails_but_a_bug_is_no_failure_of_a_server(make) -> None:
    targets = make(server(HERE), server(THERE))
    order = lambda s: refuse(s) if s.url == HERE else "done"  # noqa: E731
    assert targets.each(order) == {THERE: "done"}
    assert list(targets.failed) == [HERE]
    with pytest.raises(KeyError):
        targets.each(lambda s: {}["x"])


def test_a_push_that_no_server_took_is_an_error_that_carries_the_report() -> None:
    state = PushState({HERE: server(HERE)}, None, 3, flush_cache=True, checks=False)  # type: ignore[arg-type]
    state.drop(HERE, "it is gone")
    with pytest.raises(PushError, match="weights version 3 failed: it is gone") as error:
        state.report({})
    assert error.value.report is not None and error.value.report.failed == {HERE: "it is gone"}


def looked(url: str, before: str, now: str, pushed: str, **capabilities: Any) -> Any:
    of = server(url, is_plain=False, **capabilities)
    of.baseline, of.checksums, of.baseline_weights = [{"w": before}], [{"w": now}], pushed
    return of


@pytest.mark.parametrize(
    ("before", "now", "pushed", "words"),
    [
        ("1", "2", "old", None),
        ("1", "1", "new", None),
        ("1", "1", "old", "the weights changed, and its checksums did not"),
        ("1", "2", "new", "the weights are those of the last push, and its checksums did"),
        ("1", "2", "", None),  # never pushed to: nothing to compare with
    ],
)
def test_checksums_that_cannot_be_computed_change_when_the_weights_do(before, now, pushed, words) -> None:
    of = looked("a", before, now, pushed)
    found = contradictions([of], {"a": "new"})
    assert found == ({} if words is None else {"a": f"a: {words}"})
    assert of.baseline_weights == pushed, "a push becomes the one to compare with when all is well, and not before"


def test_replicas_that_differ_are_all_named_but_not_servers_of_another_layout() -> None:
    other = ServerLayout("sglang", 2, 1, 1, "sha256")
    servers = {
        "a": looked("a", "1", "2", ""),
        "b": looked("b", "1", "3", ""),
        "c": looked("c", "1", "4", "", layout=other),
    }
    assert set(contradictions([*servers.values()], dict.fromkeys(servers, "new"))) == {"a", "b"}


def test_a_clock_gives_each_second_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    with clock("outer"), clock("inner"):
        pass
    assert clock.seconds == {"outer": 1.0 + 3.0, "inner": 2.0}
    clock.split("load", of="outer", seconds=0.5)
    assert clock.seconds == {"outer": 3.5, "inner": 2.0, "load": 0.5}
    clock.split("load", of="inner", seconds=2.25)  # of a caller whose own clock ran longer
    assert clock.seconds == {"outer": 3.5, "inner": 0.0, "load": 2.5}
