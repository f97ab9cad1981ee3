"""The store of a group over TLS: the words of torch's own, and who may say them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from megarl.io import callers
from megarl.io.sockets import listen
from megarl.processes.channels import store as store_module
from megarl.processes.channels.store import StoreHost, StorePlace, TlsStore, Unreachable


@pytest.fixture
def host() -> Iterator[StoreHost]:
    host = StoreHost("127.0.0.2")
    yield host
    host.close()


@pytest.fixture
def store(host: StoreHost) -> TlsStore:
    return TlsStore(host.place, 60.0)


def own_of_torch() -> dist.TCPStore:
    fd = listen("127.0.0.1").detach()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def said(store: Any) -> list[Any]:
    """What a store answers to a number of orders."""
    store.set("a", "1")
    store.multi_set(["b", "c"], [b"two", b""])
    answers: list[Any] = [
        store.get("a"),
        *store.multi_get(["c", "b"]),
        store.check(["a", "b"]),
        store.check(["a", "x"]),
    ]
    answers += [store.add("n", 3), store.add("n", -5), store.get("n")]
    answers += [store.compare_set("new", "", "first"), store.compare_set("new", "other", "no")]
    answers += [store.compare_set("new", "first", "second"), store.get("new"), store.compare_set("none", "some", "no")]
    store.wait(["a", "b"], timedelta(seconds=9))
    store.set("text", "\u00e9\u20ac")
    answers += [store.get("text"), store.compare_set("text", "\u00e9\u20ac", "\u00fc"), store.get("text")]
    return [*answers, store.delete_key("a"), store.delete_key("a"), store.check(["a"])]


def test_it_answers_as_torchs_own_store_does_with_and_without_a_prefix(store: TlsStore) -> None:
    expected = said(own_of_torch())
    assert said(store) == expected
    assert said(dist.PrefixStore("group", store)) == expected, "called by torch's C++"


def test_a_wait_ends_when_another_member_says_the_word(host: StoreHost, store: TlsStore) -> None:
    heard: list[bytes] = []
    waits = threading.Thread(target=lambda: heard.append(store.get("late")))
    waits.start()
    other = TlsStore(host.place)
    other.set("late", b"\0\xff")
    waits.join(60)
    assert heard == [b"\0\xff"]


def test_what_nobody_says_is_an_error_after_the_limit(store: TlsStore) -> None:
    with pytest.raises(dist.DistStoreError, match="(?i)wait timeout"):
        store.wait(["never"], timedelta(seconds=0.05))


def test_a_store_that_is_gone_ends_the_waits_of_its_members(host: StoreHost, store: TlsStore) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never")
        except dist.DistNetworkError as error:
            errors.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    time.sleep(0.05)
    host.close()
    waits.join(60)
    assert "the store of the group is gone" in str(*errors)


def test_number_and_size_of_keys_are_limited(store: TlsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "a store takes fewer than 3 keys, and at most 100 bytes in a word"
    monkeypatch.setattr(store_module, "LARGEST", 100)
    monkeypatch.setattr(store_module, "MOST_KEYS", 3)
    for long in (lambda: store.set("a", bytes(101)), lambda: store.compare_set("a", "", "b" * 101)):
        with pytest.raises(dist.DistStoreError, match=refused):
            long()
    for make in (lambda key: store.set(key, b""), lambda key: store.add(key, 1)):
        with pytest.raises(dist.DistStoreError, match=refused):
            for number in range(9):
                make(str(number))


def test_members_wait_until_all_have_come(host: StoreHost) -> None:
    with pytest.raises(dist.DistStoreError, match="(?i)wait timeout"):
        host.store(2, 0.05)
    host.close()
    host, done = StoreHost("127.0.0.1"), threading.Event()
    first = threading.Thread(target=lambda: (host.store(2, 60.0), done.set()))
    first.start()
    assert not done.wait(0.3)
    host.store(2, 60.0)
    first.join(60)
    assert done.is_set()
    host.close()


def test_a_crowd_gets_in_though_few_may_wait_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MOST", 2)
    host = StoreHost("127.0.0.1")
    with ThreadPoolExecutor(40) as threads:
        assert len({store.add("n", 1) for store in threads.map(lambda _: TlsStore(host.place), range(40))}) == 40
    host.close()


def test_it_listens_at_its_address_alone_until_it_is_shut(host: StoreHost, store: TlsStore) -> None:
    def addresses() -> set[str]:
        found = psutil.Process().net_connections("tcp")
        return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == host.port}

    assert addresses() == {"127.0.0.2"}
    host.shut()
    assert not addresses()
    with pytest.raises(Unreachable, match=rf"^{host.place.address} cannot be reached from here .*refused.*--peer "):
        TlsStore(host.place)
    store.set("a", "still")
    assert store.get("a") == b"still"
    with pytest.raises(Unreachable, match=r"^\[::1\]:9 cannot be reached .*--listen \[::1\]:9` there"):
        TlsStore(StorePlace("::1:9", "a token"))


def test_strangers_say_nothing_in_a_store(host: StoreHost, store: TlsStore) -> None:
    with pytest.raises(Unreachable, match=f"^{host.place.address} has another token$"):
        TlsStore(StorePlace(host.place.address, "another token"))
    with pytest.raises(RuntimeError):
        dist.TCPStore("127.0.0.2", host.port, is_master=False, timeout=timedelta(seconds=1))
    assert host.place.token not in repr(host)
