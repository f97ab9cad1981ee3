"""The names that a key may hold are those of the tables of functions they stand for, and every number has a range."""

import re

import pytest
import torch
from torch import Tensor

from megarl import algo, rewards
from megarl.agents.conversation import HISTORIES
from megarl.agents.load import ADAPTERS
from megarl.agents.tool_calls.forms import AUTO, FORMS
from megarl.algo import correction
from megarl.algo.aggregate import StepCounts
from megarl.algo.hyperparameters import CLIP_KEYS, hyperparameter_names, hyperparameters_of, keyword_names
from megarl.config import Config, names
from megarl.config.keys import schema_keys
from megarl.servers.server_process import ENGINES


def test_the_names_are_those_of_the_tables() -> None:
    """What the decorators' source says is what they do when they run."""
    assert set(names.POLICY_LOSSES) == set(algo.POLICY_LOSSES)
    assert set(names.ADV_ESTIMATORS) == set(algo.ADV_ESTIMATORS)
    assert set(names.AGG_MODES) == set(algo.AGG_MODES)
    assert set(names.KL_PENALTIES) == {*algo.KL_ESTIMATORS, "full"}, "full is a column of the model"
    assert set(names.REWARDS) == set(rewards.REWARDS)
    assert set(names.ENGINES) == set(ENGINES)
    assert set(names.TOOL_PARSERS) == {AUTO, *FORMS}
    assert names.AGENT_HISTORIES == HISTORIES
    assert set(names.AGENT_ADAPTERS) == set(ADAPTERS)


@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_the_numbers_of_a_loss_are_its_keyword_arguments(name: str) -> None:
    """By their annotations the source tells hyperparameters from columns; the running code goes by names."""
    found = hyperparameter_names(name)
    assert names.POLICY_LOSS_ARGS[name] == {key: default for key, default in found.items() if key not in CLIP_KEYS}
    assert set(names.CLIPS_OF_LOSS[name]) == {key for clip, key in CLIP_KEYS.items() if clip in found}


def loss_and_gradient(name: str, advantage: float, moved: float) -> tuple[Tensor, Tensor]:
    """Of two tokens of a sequence whose log-probs were higher by `moved` when they were sampled."""
    loss, log_probs = algo.POLICY_LOSSES[name], torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    required = {key: 0.1 for key, has_default in hyperparameter_names(name).items() if not has_default}
    own = hyperparameters_of(loss.function, required)
    if "selected" in keyword_names(loss.function):
        own["selected"] = torch.zeros(2, dtype=torch.bool)
    advantages, segments = torch.full_like(log_probs, advantage).detach(), torch.zeros(2, dtype=torch.long)
    found, _ = loss.function(
        log_probs, log_probs.detach() + moved, advantages, torch.ones(2, dtype=torch.bool), segments, **own
    )
    found.sum().backward()
    assert log_probs.grad is not None
    return found.detach(), log_probs.grad


@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_what_is_said_of_ratio_and_old_log_probs_is_what_a_loss_computes(name: str) -> None:
    """The ratio is in the part of the gradient that grows with the advantage."""
    by_moved = {moved: [loss_and_gradient(name, advantage, moved) for advantage in (1.0, 2.0)] for moved in (0.0, 1e-4)}
    losses, parts = zip(*((two[1][0], two[1][1] - two[0][1]) for two in by_moved.values()), strict=True)
    assert (name in names.LOSSES_WITHOUT_OLD) == torch.equal(*losses)
    assert (name in names.LOSSES_WITHOUT_RATIO) == torch.allclose(*parts, rtol=1e-9, atol=0)


def test_losses_that_were_published_with_an_aggregation() -> None:
    """By hand, as the papers have it: GSPO arXiv:2507.18071, GMPO arXiv:2507.20673."""
    assert dict.fromkeys(("gspo", "gmpo", "geo_mean"), "seq-mean-token-mean") == names.AGG_MODE_OF_LOSS


@pytest.mark.parametrize("name", names.ADV_ESTIMATORS)
def test_what_an_estimator_needs_are_its_keyword_arguments(name: str) -> None:
    found = keyword_names(algo.ADV_ESTIMATORS[name])
    assert (name in names.ESTIMATORS_WITHOUT_CRITIC) == ("values" not in found)
    assert (name in names.GROUP_ESTIMATORS) == ("group_ids" in found)
    assert set(names.SETTINGS_OF_ESTIMATOR[name]) <= set(found)
    assert (name in names.ESTIMATORS_WITH_REWARD_WEIGHTS) == ("reward_weights" in found)


@pytest.mark.parametrize("name", sorted(set(names.KL_ESTIMATORS) - set(names.FULL_KL)))
def test_a_kl_term_is_said_to_have_no_gradient_where_its_expectation_is_zero(name: str) -> None:
    """Summed over a vocabulary of four tokens, each as often as it is sampled."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    (
        log_probs.detach().exp() * algo.kl_estimate(name, log_probs, logits.detach().flip(0).log_softmax(0))
    ).sum().backward()
    assert logits.grad is not None
    assert (name in names.KL_WITHOUT_GRADIENT) == bool(logits.grad.abs().max() < 1e-12)


@pytest.mark.parametrize("name", names.AGG_MODES)
def test_an_aggregation_is_said_to_have_a_constant_where_its_weights_depend_on_it(name: str) -> None:
    weights = [
        algo.AGG_MODES[name].function(StepCounts(torch.tensor([3.0, 5.0]), torch.tensor([0, 1]), scale))
        for scale in (2.0, 4.0)
    ]
    assert (name in names.AGG_MODES_WITH_SCALE) == (not torch.equal(*weights))


def test_the_names_of_the_correction_are_those_of_the_loss_layer() -> None:
    ours = vars(Config().algorithm.rollout_correction)
    assert ours == vars(correction.Correction()), "the same keys with the same defaults"


def test_every_number_is_checked() -> None:
    """A new number without a range would be a hole."""
    numbers = {key for key, found in schema_keys().items() if re.search(r"\b(int|float)\b", str(found.kind))}
    micro = {key for key in numbers if "micro_batch_size" in key or "max_token_len" in key}
    checked = numbers - micro - {"rollout.max_total_tokens"}
    assert all(schema_keys()[key].range for key in checked)
