"""Totals that collectors count become metrics of a step."""

import pytest

from megarl.rollout.usage import Usage

COUNTED = ("stale_prefix", "failed_requests", "collector_restarts", "slow_servers")


def test_totals_become_shares_of_the_step() -> None:
    usage = Usage({})
    first = {"tokens": 100.0, "wasted_fenced": 10.0, "wasted_failed": 0.0, "busy_s": 6.0, "servers_s": 8.0}
    first |= {"stale_prefixes": 1.0, "failed_requests": 3.0, "restarts": 1.0, "slow_servers": 2.0}
    shares = {"tokens_wasted_share": 0.1, "tokens_wasted_share/fenced": 0.1, "servers_idle_share": 0.25}
    assert usage.of_step(first) == shares | dict(zip(COUNTED, (1.0, 3.0, 1.0, 2.0), strict=True))
    found = usage.of_step(first | {"tokens": 300.0, "wasted_failed": 50.0, "busy_s": 10.0, "servers_s": 12.0})
    assert found["tokens_wasted_share"] == found["tokens_wasted_share/failed"] == 0.25
    assert found["servers_idle_share"] == 0
    assert [found[name] for name in COUNTED] == [0, 0, 1, 2], "the last two are totals"


def test_without_any_token_and_time_nothing_is_a_share() -> None:
    assert Usage({}).of_step({}) == dict.fromkeys(("tokens_wasted_share", *COUNTED), 0.0)


def test_an_estimate_of_wasted_tokens_is_never_more_than_all() -> None:
    assert Usage({}).of_step({"tokens": 3.0, "wasted_fenced": 5.0})["tokens_wasted_share"] == pytest.approx(1.0)


def test_what_was_counted_before_is_in_no_step() -> None:
    early = {"tokens": 100.0, "wasted_fenced": 100.0, "busy_s": 0.0, "servers_s": 60.0, "restarts": 1.0}
    found = Usage(early).of_step(early | {"tokens": 200.0, "busy_s": 4.0, "servers_s": 64.0})
    assert found["servers_idle_share"] == found["tokens_wasted_share"] == 0.0
    assert found["collector_restarts"] == 1.0, "a total"
