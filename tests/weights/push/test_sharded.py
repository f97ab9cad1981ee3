"""What the trainer's ranks settle before they send slices; the sending itself is in tests/dist/test_push.py."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.weights.push.sharded import ShardedSender, _Claim, _members

MB = 1 << 20


def test_rank_0_and_those_that_send_meet_the_server() -> None:
    claims = [_Claim("", "f", sends) for sends in (False, True, False, True)]
    assert _members(claims) == {0: 0, 1: 1, 3: 2}


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (_Claim("no such layer", "", False), "^no such layer$"),
        (_Claim("", "g", False), "rank 2 of the trainer describes"),
    ],
)
def test_nobody_sends_where_one_rank_cannot_or_has_another_plan(odd: _Claim, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _members([_Claim("", "f", True), _Claim("", "f", True), odd])


@pytest.mark.parametrize(
    ("bucket_mb", "num_servers", "message_mb"),
    [(64, 1, 32), (64, 8, 4), (64, 32, 1), (64, 1000, 1), (1, 1, 0.5), (1, 4, 0.5)],
)
def test_the_messages_to_all_servers_share_one_bucket(bucket_mb: int, num_servers: int, message_mb: float) -> None:
    with ThreadPoolExecutor(1) as threads:
        sender = ShardedSender({}, bucket_mb * MB, num_servers, 1.0, threads)
    assert sender._message_bytes == message_mb * MB
