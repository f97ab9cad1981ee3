import math

import estimator_reference as ref
import pytest
import torch
from algo_reference import Packed, packs
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.correction import Correction, correct, leave_out_old
from megarl.algo.finite import NonFiniteError
from megarl.samples.batch import Batch

LN2, NAN = math.log(2), math.nan


def batch_of(lengths, gaps, **columns) -> Batch:
    """gaps: d = l_old - l_roll of every token, NaN where the policy did not choose it."""
    d = torch.tensor(gaps, dtype=torch.float32)
    rollout = torch.where(d.isnan(), NAN, -1.0)
    columns = {name: torch.tensor(c, dtype=torch.float32) for name, c in columns.items()}
    columns |= {"response_mask": (~d.isnan()).float(), "rollout_log_probs": rollout, "old_log_probs": rollout + d}
    return Batch(torch.zeros(len(gaps), dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64), columns)


# ratios 4, 1/4 | 2, 2, 1/2: sequence products 1 and 2, geometric means 1 and 2^(1/3); a masked token in each
BATCH = batch_of([3, 4], [NAN, 2 * LN2, -2 * LN2, LN2, NAN, LN2, -LN2])
CBRT2 = 2 ** (1 / 3)


def test_a_rejection_comes_on_top_of_what_is_out_already_and_counts_only_itself():
    batch = BATCH.with_columns(keep=torch.tensor([1.0, 0, 1, 0, 1, 1, 1]))
    out, stats = correct(batch, Correction("token", 3.0, reject_by="k2", reject_high=0.5))
    assert (out.columns["keep"] * BATCH.columns["response_mask"]).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert stats["rollout_corr/share_rejected"].result() == pytest.approx(1 / 3)  # one of the three that were in
    assert stats["rollout_corr/share_cut"].result() == 0  # the truncated one was out
    assert out.columns["rollout_weight"].tolist() == pytest.approx([0, 3, 0.25, 2, 0, 2, 0.5])


def test_a_sequence_without_a_trainable_token_has_no_perplexity():
    _, stats = correct(batch_of([1, 2, 0, 1], [LN2, NAN, NAN, LN2]), Correction())
    assert stats["rollout_corr/ppl_ratio"].result() == pytest.approx(0.5)


def test_statistics_by_hand_with_the_correction_off():
    out, stats = correct(BATCH, Correction())
    assert out.columns["keep"].tolist() == [1] * 7
    assert out.columns.keys() == BATCH.columns.keys() | {"keep"}
    expected = {
        "log_prob_gap_mean": 7 * LN2 / 5,  # 2 + 2 + 1 + 1 + 1
        "log_prob_gap_max": 2 * LN2,
        "kl": -LN2 / 5,  # 2 - 2 + 1 + 1 - 1 = 1
        "k3_kl": (4 + 0.25 + 2 + 2 + 0.5 - 5 - LN2) / 5,
        "ppl_ratio": (1 + 1 / CBRT2) / 2,
        "ess": 8.75**2 / (5 * 24.3125),  # squares 16 + 1/16 + 4 + 4 + 1/4
        "share_cut": 0.0,
        "share_rejected": 0.0,
        "is_on": 0.0,
    }
    numbers = {name: stat.result() for name, stat in stats.items() if name.startswith("rollout_corr/")}
    assert numbers == {f"rollout_corr/{name}": pytest.approx(x, rel=1e-6) for name, x in expected.items()}


def test_differences_of_probabilities_have_verls_names():
    """Probabilities 1/2, 1/4, 1/8 of the trainer and 1/4, 1/4, 1/4 or 1/2, 1/8, 1/8 of the server."""
    old = torch.tensor([0.5, 0.25, 0.125, 0.9]).log()
    mask, lengths = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([4])

    def told(*rollout: float) -> dict[str, float]:
        columns = {
            "response_mask": mask,
            "old_log_probs": old,
            "rollout_log_probs": torch.tensor([*rollout, 0.1]).log(),
        }
        _, stats = correct(Batch(torch.zeros(4, dtype=torch.int64), lengths, columns), Correction())
        return {name.removeprefix("training/"): s.result() for name, s in stats.items() if name.startswith("training/")}

    apart = {"rollout_probs_diff_mean": 0.125, "rollout_probs_diff_max": 0.25, "rollout_probs_diff_std": 0.125}
    assert told(0.25, 0.25, 0.25) == pytest.approx(apart), "constants are not correlated"
    found = told(0.5, 0.125, 0.125)
    # centred: 5/24, -1/24, -4/24 and 1/4, -1/8, -1/8; their product 7.5/96 / sqrt(42/576 * 3/32)
    assert found["rollout_actor_probs_pearson_corr"] == pytest.approx(7.5 / 96 / math.sqrt(42 / 576 * 3 / 32), rel=1e-6)
    assert found["rollout_probs_diff_mean"] == pytest.approx(0.125 / 3)


# The weights in training are version 7; in the first sequence ages 2 and 1, in the second 5, -, 0 and 0.
AGED = BATCH.with_columns(versions=torch.tensor([-1, 5, 6, 2, -1, 7, 7], dtype=torch.int32))


@pytest.mark.parametrize(
    ("max_age", "stays", "share"),
    [
        (None, [1, 1, 1, 1, 1], None),
        (5, [1, 1, 1, 1, 1], 0),
        (4, [1, 1, 0, 1, 1], 0.2),
        (1, [0, 1, 0, 1, 1], 0.4),
        (0, [0, 0, 0, 1, 1], 0.6),
    ],
)
def test_tokens_that_are_too_old_leave_the_loss_by_hand(max_age, stays, share):
    mask = BATCH.columns["response_mask"] != 0
    young, stats = leave_out_old(AGED, version=7, max_age=max_age)
    if max_age is None:
        assert young is AGED and stats == {}
    else:
        assert young.columns["keep"][mask].tolist() == stays
        assert stats["rollout_corr/share_too_old"].result() == pytest.approx(share)
    out, stats = correct(young, Correction(), version=7)
    assert out.columns["keep"][mask].tolist() == stays
    assert stats["rollout_corr/share_rejected"].result() == 0, "these are not the rejected ones"


def test_a_token_that_is_too_old_is_no_case_for_rejection_or_a_cut():
    how = Correction("token", 3.0, reject_by="ratio", reject_low=0.3)  # cuts the first token, rejects the second
    young, of_ages = leave_out_old(AGED, version=7, max_age=1)  # the first and the third are too old
    out, stats = correct(young, how, version=7)
    assert (out.columns["keep"] * BATCH.columns["response_mask"]).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert of_ages["rollout_corr/share_too_old"].result() == pytest.approx(2 / 5)
    assert stats["rollout_corr/share_rejected"].result() == pytest.approx(1 / 3)
    assert stats["rollout_corr/share_cut"].result() == 0
    assert stats["rollout_corr/ess"].result() == pytest.approx(8.75**2 / (5 * 24.3125)), "the gap is of all tokens"


def test_only_what_was_still_in_can_be_too_old():
    batch = AGED.with_columns(keep=torch.tensor([1.0, 0, 1, 1, 1, 1, 1]))
    out, stats = leave_out_old(batch, version=7, max_age=1)
    assert (out.columns["keep"] * BATCH.columns["response_mask"]).tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert stats["rollout_corr/share_too_old"].result() == pytest.approx(1 / 4)


def test_statistics_by_age_by_hand():
    _, stats = correct(leave_out_old(AGED, version=7, max_age=2)[0], Correction("token", 3.0), version=7)
    numbers = {name.removeprefix("rollout_corr/"): stat.result() for name, stat in stats.items() if "age_" in name}
    expected = {
        "ess/age_0": 2.5**2 / (2 * 4.25),  # ratios 2 and 1/2
        "ess/age_1": 1.0,
        "ess/age_2": 1.0,
        "ess/age_5_8": 1.0,
        "log_prob_gap_mean/age_0": LN2,
        "log_prob_gap_mean/age_1": 2 * LN2,
        "log_prob_gap_mean/age_2": 2 * LN2,
        "log_prob_gap_mean/age_5_8": LN2,
        "share_cut/age_0": 0,
        "share_cut/age_1": 0,
        "share_cut/age_2": 1.0,  # the ratio 4
        "share_cut/age_5_8": 0,  # of no token, because it is too old
    }
    assert numbers == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
    _, stats = correct(AGED, Correction(), version=7)
    assert sorted(name.split("/")[1] for name in stats if "/age_" in name) == ["ess"] * 4 + ["log_prob_gap_mean"] * 4


def test_the_newest_weights_have_no_statistics_by_age():
    newest = BATCH.with_columns(versions=torch.tensor([-1, 7, 7, 7, -1, 7, 7], dtype=torch.int32))
    plain, plain_stats = correct(BATCH, Correction("token"))
    out, stats = correct(newest, Correction("token"), version=7)
    assert stats == plain_stats
    assert all(torch.equal(out.columns[name], plain.columns[name]) for name in ("keep", "rollout_weight"))


def test_a_server_that_agrees_has_no_gap():
    _, stats = correct(batch_of([2, 1], [NAN, 0.0, 0.0]), Correction("sequence", reject_by="ratio", reject_high=1.0))
    numbers = {name.removeprefix("rollout_corr/"): stat.result() for name, stat in stats.items()}
    assert numbers == dict.fromkeys(numbers, 0.0) | {"ppl_ratio": 1.0, "ess": 1.0, "is_on": 1.0}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_gap_of_45_stays_finite(level):
    out, stats = correct(batch_of([1, 1], [45.0, -45.0]), Correction(level, None, reject_by="k3", reject_high=1e9))
    assert out.columns["rollout_weight"].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert out.columns["keep"].tolist() == [1, 1]
    assert stats["rollout_corr/log_prob_gap_max"].result() == 45
    assert all(math.isfinite(stat.result()) for stat in stats.values())


@pytest.mark.parametrize("lengths", [[], [2, 0, 1]])
def test_nothing_to_train_on(lengths):
    n = sum(lengths)
    how = Correction("sequence", None, 0.5, 5.0, reject_by="k1", reject_level="sequence", reject_low=-1.0)
    out, stats = correct(batch_of(lengths, [NAN] * n), how)
    assert out.columns["rollout_weight"].tolist() == [0] * n
    assert {name: stat.result() for name, stat in stats.items()} == {
        "rollout_corr/share_cut": 0,
        "rollout_corr/share_rejected": 0,
        "rollout_corr/is_on": 1,
    }


def test_a_missing_column_and_a_broken_one_are_errors():
    batch = BATCH.keep_columns("response_mask", "old_log_probs")
    with pytest.raises(ValueError, match="rollout_correction needs the column rollout_log_probs"):
        correct(batch, Correction())
    with pytest.raises(NonFiniteError, match="rollout_log_probs is -inf at token 1 of sequence 0"):
        correct(BATCH.with_columns(rollout_log_probs=torch.full((7,), -math.inf)), Correction())


levels = st.sampled_from([None, "token", "sequence", "geometric"])
rejections = st.one_of(
    st.just((None, None, None)),
    st.tuples(st.just("ratio"), st.sampled_from([None, 0.5, 1.0]), st.sampled_from([1.0, 1.1, 2.0])),
    st.tuples(st.just("k1"), st.sampled_from([None, -0.3, 0.0]), st.sampled_from([0.0, 0.1, 1.0])),
    st.tuples(st.sampled_from(["k2", "k3"]), st.none(), st.sampled_from([0.0, 0.02, 0.5])),
)
cuts = st.sampled_from([(None, None, None), (1.0, None, None), (1.3, None, None), (None, 0.7, 1.3), (None, 0.0, 1.1)])


def wide_gaps(packed: Packed, scale: float) -> Packed:
    c = packed.batch.columns
    rollout = c["old_log_probs"] - scale * (c["old_log_probs"] - c["rollout_log_probs"])
    return Packed(packed.batch.with_columns(rollout_log_probs=rollout))


@given(packs, st.sampled_from([1.0, 50.0, 5000.0]), levels, cuts, rejections, st.sampled_from(["token", "sequence"]))
def test_agrees_with_the_slow_reference(packed, scale, level, cuts, rejection, reject_level):
    packed = wide_gaps(packed, scale)
    by, low, high = rejection
    truncate, mask_low, mask_high = cuts if level else (2.0, None, None)
    reject_level = reject_level if by else "token"
    bounds = {"reject_low": low, "reject_high": high}
    how = Correction(level, truncate, mask_low, mask_high, reject_by=by, reject_level=reject_level, **bounds)
    out, stats = correct(packed.batch, how)
    masks = packed.masks
    gaps = [
        [x - y for x, y in zip(*rows, strict=True)]
        for rows in zip(packed.lists("old_log_probs"), packed.lists("rollout_log_probs"), strict=True)
    ]
    flat_mask = sum(masks, [])
    if level:
        rho = sum(ref.ratios(level, gaps, masks), [])
        weights = [ref.cut(r, truncate, mask_low, mask_high) if m else 0.0 for r, m in zip(rho, flat_mask, strict=True)]
        assert out.columns["rollout_weight"].tolist() == pytest.approx(weights, rel=1e-6)
        share = sum(w != r for w, r, m in zip(weights, rho, flat_mask, strict=True) if m) / max(sum(flat_mask), 1)
        assert stats["rollout_corr/share_cut"].result() == pytest.approx(share)
        assert by or bool(out.columns["keep"].all()), "a weight of 0 stays in the denominators"
    if by:
        gone = sum(ref.rejected(by, reject_level, low, high, gaps, masks), [])
        keep = (out.columns["keep"] != 0).tolist()
        assert [not k and m for k, m in zip(keep, flat_mask, strict=True)] == gone
        share = sum(gone) / max(sum(flat_mask), 1)
        assert stats["rollout_corr/share_rejected"].result() == pytest.approx(share)


TOKEN = {"level": "token", "truncate": None}


@pytest.mark.parametrize(
    ("name", "value", "settings", "sentence"),
    [
        ("level", "tokens", {}, "expected null or one of token, sequence, geometric"),
        ("reject_by", "k4", {"reject_high": 1.0}, "expected null or one of ratio, k1, k2, k3"),
        ("reject_level", "geometric", {"reject_by": "k2", "reject_high": 1.0}, "expected one of token, sequence"),
        ("truncate", 0.5, {}, "expected null or a number of at least 1"),
        ("truncate", NAN, {}, "expected null or a number of at least 1"),
        ("truncate", 2.0, {"level": "token", "mask_low": 0.5, "mask_high": 5.0}, "a weight is cut by mask_low=0.5"),
        ("normalize", True, {}, "has no effect without a level"),
        ("mask_low", 0.5, {}, "has no effect without a level"),
        ("mask_high", 5.0, {}, "has no effect without a level"),
        ("mask_high", None, TOKEN | {"mask_low": 0.5}, "mask_low is set and needs"),
        ("mask_low", None, TOKEN | {"mask_high": 5.0}, "mask_high is set and needs"),
        ("mask_low", 2.0, TOKEN | {"mask_high": 5.0}, "expected a number from 0 to 1"),
        ("mask_low", -1.0, TOKEN | {"mask_high": 5.0}, "expected a number from 0 to 1"),
        ("mask_high", 0.9, TOKEN | {"mask_low": 0.5}, "expected a number of at least 1"),
        ("reject_high", 2.0, {}, "has no effect without reject_by"),
        ("reject_low", 0.5, {}, "has no effect without reject_by"),
        ("reject_level", "sequence", {}, "has no effect without reject_by"),
        ("reject_by", "ratio", {}, "needs reject_low, reject_high or both"),
        ("reject_high", 0.9, {"reject_by": "ratio"}, "expected a number of at least 1, the ratio where"),
        ("reject_low", 1.1, {"reject_by": "ratio"}, "expected a number of at most 1, the ratio where"),
        ("reject_low", 0.1, {"reject_by": "k1"}, "expected a number of at most 0, the k1 where"),
        ("reject_high", -0.1, {"reject_by": "k3"}, "expected a number of at least 0, the k3 where"),
        ("reject_low", 0.0, {"reject_by": "k3"}, "k3 has only an upper bound"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_sentence(name, value, settings, sentence):
    with pytest.raises(ValueError, match=f"^algorithm.rollout_correction.{name}={value}: {sentence}.*$"):
        Correction(**settings | {name: value})
