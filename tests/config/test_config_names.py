"""The names that a key may hold are those of the tables of functions they stand for, and every number has a range."""

import re

import torch
from config_helpers import KEYS

from megarl import algo, rewards
from megarl.algo import correction
from megarl.algo.advantages.table import ADV_ESTIMATORS
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.losses import table as losses
from megarl.config import Config, config_dir, names
from megarl.config.keys import leaf_types
from megarl.config.validate.values import CHOICES, OPEN_CHOICES, RANGES
from megarl.servers.engines import ENGINES


def test_the_names_are_those_of_the_tables():
    assert set(names.POLICY_LOSSES) == set(algo.POLICY_LOSSES)
    assert set(names.ADV_ESTIMATORS) == set(algo.ADV_ESTIMATORS)
    assert set(names.AGG_MODES) == set(algo.AGG_MODES)
    kl = {name.removesuffix("+") for name in names.KL_ESTIMATORS}
    assert kl == {name.removesuffix("+") for name in algo.KL_ESTIMATORS} | {"full"}, "full is a column of the model"
    assert set(names.KL_CONTROLLERS) == set(algo.KL_CONTROLLERS)
    assert set(names.REWARDS) == set(rewards.REWARDS)
    assert set(names.ENGINES) == set(ENGINES)


def test_every_kl_estimator_is_one_the_loss_layer_computes():
    x = torch.tensor([-1.0]), torch.tensor([-2.0])
    for name in set(names.KL_ESTIMATORS) - set(names.FULL_KL):
        assert algo.kl_estimate(name, *x).shape == (1,)
    for name in names.FULL_KL:
        assert "full_kl" in algo.ActorLoss(use_kl_loss=True, kl_loss_type=name).outputs


def test_the_numbers_of_a_loss_are_its_keyword_arguments():
    clips = {"clip_low", "clip_high"}
    for name in names.POLICY_LOSSES:
        asked = keyword_names(losses.POLICY_LOSSES[name])
        selecting = keyword_names(losses.SELECTIONS[name]) if name in losses.SELECTIONS else {}
        own = {**asked, **selecting}
        columns = {*losses.COLUMN_KEYWORDS, "generator"}
        assert own.keys() - clips - {"clip_c"} - columns == set(names.POLICY_LOSS_ARGS.get(name, ())), name
        assert (name in names.LOSSES_WITHOUT_CLIP) == (not clips & own.keys()), name
        assert (name in names.LOSSES_WITH_DUAL_CLIP) == ("clip_c" in own), name
        needed = {hyperparameter for hyperparameter, has_default in own.items() if not has_default} - columns
        assert needed == set(names.POLICY_LOSS_ARGS_NEEDED.get(name, ())), name
    assert set(names.LOSSES_WITHOUT_RATIO) == losses.WITHOUT_RATIO
    assert set(names.SEQ_MEAN_WANTED) == losses.SEQ_MEAN_WANTED


def test_what_an_estimator_reads_is_what_it_asks_for():
    def asking_for(keyword: str) -> set[str]:
        return {name for name, function in ADV_ESTIMATORS.items() if keyword in keyword_names(function)}

    assert set(names.ADV_ESTIMATORS) - asking_for("values") == set(names.ESTIMATORS_WITHOUT_CRITIC)
    assert asking_for("group_ids") == set(names.GROUP_ESTIMATORS)
    assert asking_for("gamma") == set(names.ESTIMATORS_WITH_GAMMA)
    assert asking_for("norm_adv_by_std_in_grpo") == set(names.ESTIMATORS_WITH_STD)
    assert asking_for("lam") == {"gae"}
    assert asking_for("reward_weights") == {"gdpo"}


def test_the_names_of_the_correction_are_those_of_the_loss_layer():
    assert names.CORRECTION_LEVELS == correction.LEVELS
    assert (names.REJECT_BY, names.REJECT_LEVELS) == (correction.REJECT_BY, correction.REJECT_LEVELS)
    ours = vars(Config().algorithm.rollout_correction)
    assert ours == vars(correction.Correction()), "the same keys with the same defaults"


def test_every_checked_key_exists():
    assert {*CHOICES, *OPEN_CHOICES, *RANGES} <= set(KEYS)


def test_every_number_is_checked():
    """A new number without a range would be a hole."""
    free = {"trainer.seed", "data.seed", "rollout.seed"}
    numeric = {key for key, kind in leaf_types().items() if re.search(r"\b(int|float)\b", str(kind))}
    micro = {key for key in numeric if "micro_batch_size" in key or "max_token_len" in key}
    assert numeric - free - micro - {"rollout.max_total_tokens"} <= RANGES.keys()


def test_the_shipped_folder_is_found():
    assert (config_dir() / "train.yaml").is_file()
