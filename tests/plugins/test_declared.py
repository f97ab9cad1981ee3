"""What decorators declare is read from their source; a built-in is one function in one file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.plugins.declared import REQUIRED, argument_faults, constant, declared

ROOT = Path(__file__).parents[2]
SPRING = '''"""A loss that pulls towards the old policy."""

from torch import Tensor

from megarl.algo.registry import register_policy_loss


def select_spring(old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, generator, share: float = 0.5) -> Tensor:
    return mask


@register_policy_loss("spring", "coil", select=select_spring, uses_ratio=False, agg_mode="token-sum")
def spring(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor, *,
    selected: Tensor, strength: float, clip_low: float = 0.1,
):
    """A spring.

    L = -A l + strength (l - l_old)^2

    When: never.
    """
    return -advantages * log_probs + strength * (log_probs - old_log_probs) ** 2 * selected, {}
'''
REWARD = '''"""Reward 1 for silence."""

from megarl.rewards import register_reward


@register_reward("silence")
def silence(prompt, completion):
    return float(not completion.text)
'''
PROGRAM = """
import sys
from megarl.config import ConfigError, load_config

base = ["data.train_files=[a.jsonl]", "model.path=m", "algorithm.policy_loss_fn=coil", "reward.fn=silence"]
config, warnings = load_config([*base, "algorithm.policy_loss_args.strength=0.5", "actor.clip_ratio_low=0.3"])
print(*warnings)
for words in ([], ["algorithm.policy_loss_args.strength=0.5", "algorithm.policy_loss_args.tau=1"]):
    try:
        load_config([*base, *words])
    except ConfigError as error:
        print(error)
assert "torch" not in sys.modules
from write_pages import PAGES
print(*(line for line in PAGES["../megarl/algo/README.md"]().splitlines() if "`spring`" in line))

from megarl.rewards import load_reward
from megarl.trainer.algorithm import make_algorithm
from megarl.algo.registry import POLICY_LOSSES
print(make_algorithm(config).actor.loss.columns[-1], POLICY_LOSSES["coil"].uses_ratio, load_reward("silence").__name__)
"""


@pytest.mark.full
def test_a_new_built_in_is_one_file(tmp_path: Path) -> None:
    """Configuration, checks, documentation and loss layer know it, and nothing else was written."""
    for folder in ("megarl", "configs", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "megarl/algo/losses/spring.py").write_text(SPRING)
    (tmp_path / "megarl/rewards/functions/silence.py").write_text(REWARD)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{tmp_path}/docs"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warned, lacks, too_many, row, last = done.stdout.splitlines()
    assert warned.startswith("actor.loss_agg_mode=token-mean with algorithm.policy_loss_fn=coil: ")
    assert warned.endswith("expected token-sum")
    assert "policy_loss_fn=coil: expected a value in algorithm.policy_loss_args.strength" in lacks
    assert too_many.endswith("algorithm.policy_loss_args.tau=1.0: algorithm.policy_loss_fn=coil takes strength, share")
    assert row == (
        "| `spring`, `coil` | A spring: `L = -A l + strength (l - l_old)^2` | `algorithm.policy_loss_args.strength` "
        "(no default), `actor.clip_ratio_low=0.1`, `algorithm.policy_loss_args.share=0.5` | never |"
    )
    assert last == "selected False silence"


def test_a_decorator_is_read_with_its_function() -> None:
    found = declared("register_policy_loss", "algo/losses")
    assert found["vanilla"] is found["ppo"]
    assert found["ppo"].names == ("ppo", "vanilla", "grpo")
    assert found["ppo"].address == "megarl.algo.losses.clipped:ppo"
    assert dict(found["ppo"].settings) == {"clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}
    assert dict(found["gmpo"].options) == {"per_sequence": True, "agg_mode": "seq-mean-token-mean"}
    assert found["dro"].settings["beta"] == REQUIRED


def test_a_selection_brings_its_numbers_and_columns_are_told_by_their_type() -> None:
    found = declared("register_policy_loss", "algo/losses")["clip_cov"]
    assert found.inputs == ("selected",)
    assert set(found.settings) == {"clip_low", "clip_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"}


def test_a_constant_is_read_from_the_top_of_a_file() -> None:
    assert constant("algo/correction.py", "REJECT_LEVELS") == ("token", "sequence")
    with pytest.raises(AssertionError, match=r"algo/kl.py has no constant NONE"):
        constant("algo/kl.py", "NONE")


def test_arguments_that_are_too_many_or_missing_are_named() -> None:
    known = {"a": True, "b": False}
    assert list(argument_faults("loss=x", "args", known, {"b": 1})) == []
    assert list(argument_faults("loss=x", "args", known, {"c": 2})) == [
        "args.c=2: loss=x takes a, b",
        "loss=x: expected a value in args.b, it has no default",
    ]
    assert list(argument_faults("loss=x", "args", {}, {"c": 2})) == ["args.c=2: loss=x takes no values of its own"]
