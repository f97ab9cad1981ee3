"""Advantage estimators written in verl's documented way."""

from pathlib import Path

import pytest
import torch
from algo_reference import random_packed

from megarl import algo
from megarl.algo import estimate, load_plugins, register_adv_est
from megarl.algo.advantages.gae import gae
from megarl.algo.documented.estimators import Columns
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.segments import clean
from megarl.samples.batch import Batch

PRINTED = Path(__file__).parents[2] / "fixtures" / "source_documents" / "estimator_function.txt"


@pytest.fixture
def printed(tables, tmp_path):
    """The documents' estimator, pasted into a file character by character."""
    path = tmp_path / "my_advantage.py"
    path.write_text(PRINTED.read_text())
    load_plugins([str(path)])


@pytest.mark.parametrize("lengths", [[6, 0, 1, 9, 4], [1]])
def test_the_printed_estimator_is_gae(printed, lengths):
    batch = random_packed(lengths, 3).batch
    mask = batch.columns["response_mask"] != 0
    rewards, values = (clean(batch.columns[name], mask) for name in ("advantages", "values"))
    for gamma, lam in ((1.0, 1.0), (0.9, 0.7)):
        how = {"values": values, "gamma": gamma, "lam": lam}
        found = algo.ADV_ESTIMATORS["my_advantage"](rewards, mask, batch.segment_ids, **how)
        wanted = gae(rewards, values, mask, batch.segment_ids, gamma=gamma, lam=lam)
        for ours, theirs in zip(found, wanted, strict=True):
            assert type(ours) is torch.Tensor
            assert torch.allclose(ours, theirs, atol=1e-12)


def test_one_column_behind_the_last_is_0_and_the_next_is_not_there(tables, tmp_path):
    """The printed estimator asks for advantages[:, seq_len]; who looks further has made a mistake."""
    columns = torch.ones(2, 3, dtype=torch.float64).as_subclass(Columns)
    assert columns[:, 3].tolist() == [0.0, 0.0] and columns[0, 3].tolist() == 0.0
    assert torch.zeros_like(columns)[:, 3].tolist() == (columns + columns)[:, 3].tolist() == [0.0, 0.0]
    assert columns[:, 2].tolist() == columns[:, -1].tolist() == [1.0, 1.0]
    assert columns[1:].shape == (1, 3) and columns[columns > 0].shape == (6,) and columns[:, :2].shape == (2, 2)
    with pytest.raises(IndexError):
        columns[:, 4]
    path = tmp_path / "my_advantage.py"
    path.write_text(PRINTED.read_text().replace("advantages[:, t + 1]", "advantages[:, t + 2]"))
    with pytest.raises(ValueError) as refused:
        load_plugins([str(path)])
    sentence = str(refused.value)
    assert "advantage estimator my_advantage: on 2 sequences of 5 tokens it fails with IndexError" in sentence
    assert "index 6 is out of bounds for dimension 1 with size 5" in sentence
    assert "my_advantage.py:36, `advantages[:, t] = delta" in sentence, "the line of the user's own file"
    assert "my_advantage" not in algo.ADV_ESTIMATORS


def test_a_documented_estimator_gets_the_settings_of_the_configuration(tables):
    seen: list = []

    @register_adv_est("mine")
    def mine(rewards, values, dones, gamma=0.99, gae_lambda=0.95, **kwargs):
        seen.append((gamma, gae_lambda, dones.tolist(), kwargs["response_mask"].tolist()))
        return rewards - values, rewards

    columns = {
        "response_mask": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        "values": torch.tensor([9.0, 1.0, 2.0, 9.0, 3.0]),
    }
    batch = Batch(torch.zeros(5), torch.tensor([3, 2]), columns, {"score": torch.tensor([1.0, 5.0])})
    found, _ = estimate(batch, adv_estimator="mine", gamma=0.5, lam=0.25)
    assert seen[-1] == (0.5, 0.25, [[0.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]])
    assert found.columns["advantages"].tolist() == [0.0, -1.0, -1.0, 0.0, 2.0]
    assert found.columns["returns"].tolist() == [0.0, 0.0, 1.0, 0.0, 5.0]


def test_what_it_needs_stays_visible(tables):
    register_adv_est("with_critic")(lambda rewards, values, dones, gamma, gae_lambda: (rewards - values, rewards))
    register_adv_est("maybe_critic")(lambda rewards, values=None, dones=None, gamma=1.0: (rewards, rewards))
    register_adv_est("no_critic")(lambda rewards, dones: (rewards, rewards))
    asked = [keyword_names(algo.ADV_ESTIMATORS[n]) for n in ("with_critic", "maybe_critic", "no_critic")]
    assert asked == [{"values": False, "gamma": False, "lam": False}, {"values": True, "gamma": False}, {}]


@pytest.mark.parametrize(
    ("mask", "segments", "rewards", "expected"),
    [
        ([0, 0, 0], [0, 0, 2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        # A reward on a masked token moves back in its own sequence; with no choice before it, it is dropped.
        ([1, 0, 1, 0], [0, 1, 1, 1], [1.0, 5.0, 2.0, 3.0], [1.0, 0.0, 5.0, 0.0]),
    ],
)
def test_what_an_estimator_sees_of_rewards(tables, mask, segments, rewards, expected):
    register_adv_est("mine")(lambda rewards, dones: (rewards, rewards))
    found = algo.ADV_ESTIMATORS["mine"](torch.tensor(rewards), torch.tensor(mask) != 0, torch.tensor(segments))
    assert [column.tolist() for column in found] == [expected] * 2


def whitened(rewards, dones, **kwargs):
    mask = kwargs["response_mask"] > 0
    return torch.where(mask, rewards - rewards[mask].mean(), 0.0), rewards


def test_an_estimator_may_look_at_the_whole_batch_through_the_mask(tables):
    register_adv_est("mine")(whitened)
    mask, segment_ids = torch.tensor([True, True, True]), torch.tensor([0, 0, 1])
    advantages, _ = algo.ADV_ESTIMATORS["mine"](torch.tensor([1.0, 2.0, 6.0]), mask, segment_ids)
    assert advantages.tolist() == [-2.0, -1.0, 3.0]


BAD = {
    "padding": (lambda rewards, dones: (rewards - rewards.mean(), rewards), "two more columns of padding change"),
    "shape": (lambda rewards, dones: (rewards.sum(1), rewards), r"each a tensor of shape \[batch, sequence\]"),
    "one tensor": (lambda rewards, dones: rewards, "expected it to return"),
    "unknown": (lambda rewards, dones, uid: (rewards, rewards), "there is no value for its parameter uid; expected"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_has_no_meaning_is_refused_when_registered(tables, what):
    function, sentence = BAD[what]
    with pytest.raises(ValueError, match=f"advantage estimator '?mine'?: .*{sentence}"):
        register_adv_est("mine")(function)
    assert "mine" not in algo.ADV_ESTIMATORS
