"""Replies of a server that its client has to read with care."""

from typing import Any

import pytest

from megarl.rollout.client import ServerClient


def rank(number: int, digest: str) -> dict[str, Any]:
    info = [{"role": "target", "tp_rank": number, "tp_size": 2, "dp_rank": number}]
    return {"checksums": {"w": digest}, "per_gpu_checksum": digest, "parallelism_info": info}


def checksums_of(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    client = ServerClient("http://127.0.0.1:1", "")
    monkeypatch.setattr(client, "_accepted", lambda route, body: {"ranks": ranks})
    return client.rank_checksums()


def test_groups_that_all_answer_for_all_ranks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [rank(0, "a"), rank(1, "b")]
    assert checksums_of(ranks * 2, monkeypatch) == checksums_of(ranks, monkeypatch) == [{"w": "a"}, {"w": "b"}]


def test_answers_that_contradict_each_other_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(checksums_of([rank(0, "a"), rank(1, "b"), rank(0, "x"), rank(1, "b")], monkeypatch)) == 3


def test_ranks_that_do_not_say_who_they_are_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksums_of([{"checksums": {"w": "a"}}] * 2, monkeypatch) == [{"w": "a"}, {"w": "a"}]
