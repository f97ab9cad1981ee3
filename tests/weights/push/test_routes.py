"""What the trainer's ranks settle before they send slices; the sending itself is in tests/dist/test_push.py."""

import pytest

from megarl.weights.push.routes import Claim, members_of, message_bytes_of

MB = 1 << 20


def test_rank_0_and_those_that_send_meet_the_server() -> None:
    claims = [Claim("", "f", sends) for sends in (False, True, False, True)]
    assert members_of(claims) == {0: 0, 1: 1, 3: 2}


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (Claim("no such layer", "", False), "^no such layer$"),
        (Claim("", "g", False), "rank 2 of the trainer describes"),
    ],
)
def test_nobody_sends_where_one_rank_cannot_or_has_another_plan(odd: Claim, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        members_of([Claim("", "f", True), Claim("", "f", True), odd])


@pytest.mark.parametrize(("bucket_mb", "message_mb"), [(1, 0.5), (64, 32), (128, 64), (1024, 64)])
def test_two_messages_take_these_bytes_until_larger_ones_gain_nothing(bucket_mb: int, message_mb: float) -> None:
    assert message_bytes_of(bucket_mb * MB) == message_mb * MB
