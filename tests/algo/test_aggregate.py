import algo_reference as ref
import pytest
import torch
from algo_reference import Packed, packs
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import AGG_MODES, token_weights

# Four sequences, three prompt groups: n_b = 2, 1, 0, 3; group 7 has no trainable token.
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.float64)
GROUPS = torch.tensor([5, 5, 7, 9])


def weigh(mode, mask=MASK, segments=SEGMENTS, groups=GROUPS, scale=8.0):
    return token_weights(mode, mask, segments, group_ids=groups, loss_scale_factor=scale)


def test_every_mode_has_a_reference():
    assert ref.missing(AGG_MODES, ref.AGG_MODES) == ""


def test_aliases():
    assert AGG_MODES["token_level"] is AGG_MODES["token-mean"]
    assert AGG_MODES["sample_level"] is AGG_MODES["seq-mean-token-mean"]


@pytest.mark.parametrize("mode", ref.AGG_MODES)
def test_no_trainable_token_gives_zero_weights(mode):
    assert weigh(mode, mask=torch.zeros(9)).tolist() == [0.0] * 9
    assert weigh(mode, mask=torch.zeros(0), segments=SEGMENTS[:0]).tolist() == []


def test_refusals_are_one_sentence():
    with pytest.raises(ValueError, match="loss_agg_mode='mean': expected one of token-mean"):
        token_weights("mean", MASK, SEGMENTS)
    with pytest.raises(ValueError, match="loss_scale_factor=None"):
        token_weights("token-sum-norm", MASK, SEGMENTS)
    with pytest.raises(ValueError, match="prompt group"):
        token_weights("prompt-mean-token-mean", MASK, SEGMENTS)


def test_weights_take_the_type_of_a_floating_mask():
    assert weigh("token-mean").dtype == torch.float64
    assert weigh("token-mean", mask=MASK.float()).dtype == torch.float32
    assert weigh("token-mean", mask=MASK.bool()).dtype == torch.float32


@given(packs, st.sampled_from(sorted(ref.AGG_MODES)), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_weights_agree_with_the_slow_reference(packed: Packed, mode, groups):
    groups = groups[: packed.batch.num_sequences]
    mask, segments = packed.batch.columns["response_mask"], packed.batch.segment_ids
    fast = weigh(mode, mask=mask, segments=segments, groups=torch.tensor(groups))
    assert fast.tolist() == pytest.approx(ref.weights(mode, packed.masks, groups, 8.0), rel=1e-14)
