import pytest
import torch

from megarl.weights.mapping.names import Rename
from megarl.weights.reshard.exchange import Link, check_messages, check_params
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import ServerSharding

SPREAD = ServerSharding((Rename("a", "a", (4, 2), 0), Rename("b", "b", (3,))), tp=2, dtypes=(("b", "float32"),))


def params(**changed):
    return {"a": torch.zeros(2, 2, dtype=torch.bfloat16), "b": torch.zeros(3)} | changed


def test_parameters_as_described_are_taken():
    check_params(SPREAD, 1, params())


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"c": torch.zeros(1)}, "unknown: c"),
        ({"b": torch.zeros(3, dtype=torch.bfloat16)}, r"different: b \(\(3,\), 'bfloat16'\) for \(\(3,\), 'float32'\)"),
        ({"a": torch.zeros(4, 2, dtype=torch.bfloat16)}, "different: a"),
    ],
)
def test_other_parameters_are_refused_with_their_names(changed, fault):
    with pytest.raises(ValueError, match=rf"rank 1 does not hold the parameters of its description \({fault}"):
        check_params(SPREAD, 1, params(**changed))
    with pytest.raises(ValueError, match="missing: a, b"):
        check_params(SPREAD, 0, {})


def link(*ranks):
    return Link(None, dict.fromkeys(ranks, 0), torch.device("cpu"))


def test_a_receiver_wants_all_its_senders_in_the_group_and_all_its_bytes_in_their_messages():
    by_columns = ServerSharding((Rename("a", "a", (4, 2), 1), Rename("b", "b", (3,))), tp=2, dtypes=SPREAD.dtypes)
    plan = Plan(by_columns, SPREAD)
    messages = plan.messages_in(0, 64)
    assert plan.num_bytes(0) == 2 * 2 * 2 + 3 * 4
    assert {message.peer for message in messages} == {0, 1}
    check_messages(plan, 0, messages, link(0, 1))
    with pytest.raises(ValueError, match="rank 0 of the server needs slices of the trainer's ranks 1, which have not"):
        check_messages(plan, 0, messages, link(0))
    with pytest.raises(ValueError, match=r"rank 0 of the server is to be sent \d+ bytes, expected 20"):
        check_messages(plan, 0, messages[1:], link(0, 1))
