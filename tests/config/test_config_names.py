"""The names that a key may hold are those of the tables of functions they stand for, and every number has a range."""

import re

import torch
from config_helpers import KEYS

from megarl import algo, rewards
from megarl.algo import correction
from megarl.algo.hyperparameters import CLIP_KEYS, hyperparameter_names
from megarl.config import Config, config_dir, names
from megarl.config.keys import entry_types, leaf_types
from megarl.config.validate.values import CHOICES, OPEN_CHOICES, RANGES
from megarl.servers.engines import ENGINES


def test_the_names_are_those_of_the_tables():
    """What the decorators' source says is what they do when they run."""
    assert set(names.POLICY_LOSSES) == set(algo.POLICY_LOSSES)
    assert set(names.ADV_ESTIMATORS) == set(algo.ADV_ESTIMATORS)
    assert set(names.AGG_MODES) == set(algo.AGG_MODES)
    assert set(names.KL_PENALTIES) == {*algo.KL_ESTIMATORS, "full"}, "full is a column of the model"
    assert set(names.REWARDS) == set(rewards.REWARDS)
    assert set(names.ENGINES) == set(ENGINES)


def test_every_kl_estimator_is_one_the_loss_layer_computes():
    x = torch.tensor([-1.0]), torch.tensor([-2.0])
    for name in set(names.KL_ESTIMATORS) - set(names.FULL_KL):
        assert algo.kl_estimate(name, *x).shape == (1,)
    for name in names.FULL_KL:
        assert "full_kl" in algo.ActorLoss(use_kl_loss=True, kl_loss_type=name).outputs


def test_the_numbers_of_a_loss_are_its_keyword_arguments():
    """By their annotations the source tells hyperparameters from columns; the running code goes by names."""
    for name in names.POLICY_LOSSES:
        own = {key: default for key, default in hyperparameter_names(name).items() if key not in CLIP_KEYS}
        assert own == names.POLICY_LOSS_ARGS[name], name


def test_what_the_configuration_knows_of_each_choice():
    """By hand, as the papers have it."""
    assert set(names.LOSSES_WITHOUT_CLIP) == {"reinforce", "gpg", "sapo", "dro", "kl_cov"}
    assert set(names.LOSSES_WITH_DUAL_CLIP) == {"ppo", "vanilla", "grpo"}
    assert set(names.LOSSES_WITHOUT_RATIO) == {"reinforce", "gpg", "dro"}
    assert set(names.LOSSES_WITHOUT_OLD) == {"reinforce", "gpg"}
    assert dict.fromkeys(("gspo", "gmpo", "geo_mean"), "seq-mean-token-mean") == names.AGG_MODE_OF_LOSS
    assert names.POLICY_LOSS_ARGS["dro"] == {"beta": False}
    assert set(names.ADV_ESTIMATORS) - set(names.ESTIMATORS_WITHOUT_CRITIC) == {"gae"}
    alone = {"gae", "none", "remax", "reinforce_plus_plus"}
    assert set(names.ADV_ESTIMATORS) - set(names.GROUP_ESTIMATORS) == alone
    assert set(names.ESTIMATORS_WITH_GAMMA) == {"gae", "reinforce_plus_plus", "optimal_token_baseline"}
    assert set(names.ESTIMATORS_WITH_STD) == {"grpo", "grpo_passk", "gdpo"}
    assert (names.ESTIMATORS_WITH_LAMBDA, names.ESTIMATORS_WITH_REWARD_WEIGHTS) == (("gae",), ("gdpo",))
    assert names.KL_WITHOUT_GRADIENT == ("kl", "k1")
    assert set(names.AGG_MODES_WITH_SCALE) == {"seq-mean-token-sum-norm", "token-sum-norm"}


def test_the_names_of_the_correction_are_those_of_the_loss_layer():
    ours = vars(Config().algorithm.rollout_correction)
    assert ours == vars(correction.Correction()), "the same keys with the same defaults"


def test_every_checked_key_exists():
    assert {*CHOICES, *OPEN_CHOICES, *RANGES} <= {*KEYS, *entry_types()}


def test_every_number_is_checked():
    """A new number without a range would be a hole."""
    free = {"trainer.seed", "data.seed", "rollout.seed"}
    numeric = {key for key, kind in (leaf_types() | entry_types()).items() if re.search(r"\b(int|float)\b", str(kind))}
    micro = {key for key in numeric if "micro_batch_size" in key or "max_token_len" in key}
    assert numeric - free - micro - {"rollout.max_total_tokens"} <= RANGES.keys()


def test_the_shipped_folder_is_found():
    assert (config_dir() / "train.yaml").is_file()
