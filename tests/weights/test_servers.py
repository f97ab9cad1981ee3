import pytest

from megarl.weights.servers import PushError, check_digests

SENT = {"embed": "1", "norm": "2"}


def test_equal_digests_pass() -> None:
    check_digests("http://a", dict(SENT), SENT, {})


def test_tensors_that_differ_are_missing_or_were_never_sent_are_named_with_their_server() -> None:
    with pytest.raises(PushError, match=r"^http://a does not hold the weights that the trainer sent \(differ: norm\)$"):
        check_digests("http://a", {"embed": "1", "norm": "3"}, SENT, {})
    with pytest.raises(PushError, match=r"missing: embed; never sent: bias"):
        check_digests("http://a", {"norm": "2", "bias": "4"}, SENT, {})


def test_a_tied_tensor_may_be_listed_twice_when_it_is_the_same() -> None:
    twins = {"head": "embed"}
    check_digests("http://a", SENT | {"head": "1"}, SENT, twins)
    with pytest.raises(PushError, match="never sent: head"):
        check_digests("http://a", SENT | {"head": "2"}, SENT, twins)
