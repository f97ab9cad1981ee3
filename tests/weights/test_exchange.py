import pytest
import torch

from megarl.weights.exchange import check_params
from megarl.weights.layouts import ServerSpread
from megarl.weights.names import Rename

SPREAD = ServerSpread((Rename("a", "a", (4, 2), 0), Rename("b", "b", (3,))), tp=2, dtypes=(("b", "float32"),))


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
