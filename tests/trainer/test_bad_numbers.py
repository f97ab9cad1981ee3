"""What a run does about bad numbers, without a run: what is said, counted, settled and raised."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algo.finite import BadNumber, NonFiniteError
from megarl.algo.spikes import Spike, Spikes
from megarl.config import Config
from megarl.metrics.reading.jsonl import ROLLBACKS, read_lines
from megarl.trainer.bad_numbers import BadNumbers, left_out, watch

NAMES, VISITS = ["0-4#0", "0-4#1", "0-9#0", "0-9#1"], [40, 41]


def begun(policy: str, folder: Path, said: list[str] | None = None, epochs: int = 1) -> BadNumbers:
    warn: Callable[[str], None] = [].append if said is None else said.append
    found = BadNumbers(policy, folder, epochs=epochs, warn=warn)
    found.begin(12, NAMES, VISITS)
    return found


def of_a_step(error: BadNumber, role: str, *groups: int) -> BadNumber:
    error.role, error.groups = role, groups
    return error


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_bad_number_is_raised_with_the_name_of_its_sample(tmp_path: Path, policy: str) -> None:
    sentence = r"^old_log_probs is nan at token 1 of sample 0-9#1, where the policy chose the token: expected a finite"
    bad_numbers = begun(policy, tmp_path)
    with pytest.raises(NonFiniteError, match=sentence), bad_numbers.judged():
        raise NonFiniteError("old_log_probs", 3, 1, float("nan"))
    with pytest.raises(RuntimeError, match="other"), bad_numbers.judged():
        raise RuntimeError("other")


def test_a_step_that_is_skipped_is_said_in_a_line_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    bad_numbers = begun("skip", tmp_path, said)
    bad_numbers.judge(of_a_step(Spike("the loss of critic is 9, a spike"), "critic", 0, 1))
    assert bad_numbers.skipped == [], "the actor trained with both"
    bad_numbers.judge(of_a_step(NonFiniteError("log_probs", 2, 5, float("inf")), "actor", 1))
    assert said == [
        "step 12: the loss of critic is 9, a spike; this optimizer step of critic is skipped",
        "step 12: log_probs is inf at token 5 of sample 0-9#0, where the policy chose the token: expected a finite "
        "number; this optimizer step of actor is skipped",
    ]
    assert bad_numbers.skipped == [41]
    assert bad_numbers.metrics == {"trainer/skipped_steps": 2.0, "trainer/spikes": 1.0, "trainer/rollbacks": 0.0}
    bad_numbers.begin(13, NAMES, VISITS)
    assert not any(bad_numbers.metrics.values())


def test_a_prompt_is_skipped_if_it_was_in_no_step_of_all_epochs(tmp_path: Path) -> None:
    said: list[str] = []
    bad_numbers = begun("skip", tmp_path, said, epochs=2)
    for groups in ((0, 1), (1,)):
        bad_numbers.judge(of_a_step(BadNumber("x"), "actor", *groups))
    assert bad_numbers.skipped == [41]
    with bad_numbers.judged():  # before the first step, which is the whole batch
        raise NonFiniteError("score", 1, None, float("inf"))
    assert said[2:] == [
        "step 12: score is inf for sample 0-4#1: expected a finite number; training on this batch is skipped"
    ]
    assert bad_numbers.skipped == VISITS


def test_a_rollback_is_written_down_and_left_out_from_then_on(tmp_path: Path) -> None:
    said: list[str] = []
    save: Any = SimpleNamespace(step=8)
    begun("rollback", tmp_path, said).roll_back(BadNumber("the gradient norm of actor is nan"), save)
    assert said == [
        "step 12: the gradient norm of actor is nan; the run goes back to step 8, without the 2 prompts of this batch"
    ]
    (row,) = read_lines(tmp_path / ROLLBACKS)
    assert row == {"step": 8, "bad_step": 12, "what": "the gradient norm of actor is nan", "skipped": VISITS}
    assert left_out(tmp_path) == VISITS
    assert begun("rollback", tmp_path).metrics["trainer/rollbacks"] == 1


def test_the_fourth_trouble_after_one_save_stops_the_run(tmp_path: Path) -> None:
    bad_numbers, first = begun("rollback", tmp_path), BadNumber("the loss of actor is 9, a spike")
    for _ in range(3):
        bad_numbers.roll_back(first, None)
    later: Any = SimpleNamespace(step=4)
    bad_numbers.roll_back(first, later)
    sentence = (
        "^the loss of actor is 9, a spike; the run has gone back to step 0 3 times, and no later save was reached: "
        "lower the learning rate, or look at the data$"
    )
    with pytest.raises(BadNumber, match=sentence):
        bad_numbers.roll_back(first, None)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_nothing_goes_back_unless_the_configuration_says_so(tmp_path: Path, policy: str) -> None:
    """Nor without a batch: weights of a model folder, which are bad before the first step."""
    with pytest.raises(BadNumber, match="^x$"):
        begun(policy, tmp_path).roll_back(BadNumber("x"), None)
    with pytest.raises(BadNumber, match="^x$"):
        BadNumbers("rollback", tmp_path).roll_back(BadNumber("x"), None)
    assert not (tmp_path / ROLLBACKS).exists()


def test_roles_tell_of_bad_numbers_and_go_on_with_the_spikes_of_a_save(tmp_path: Path) -> None:
    before, bad_numbers = Spikes(3.0, 1.0), begun("stop", tmp_path)
    before.add(2.0, 0.5)
    save: Any = SimpleNamespace(step=1, state={"spikes": {"actor": before.state_dict()}})
    roles: Any = {name: SimpleNamespace(spikes=None) for name in ("actor", "critic")}
    config = Config()
    watch(roles, bad_numbers, config, None)
    assert all(role.on_bad == bad_numbers.judge and role.spikes is None for role in roles.values())
    config.trainer.spike_sigma, config.actor.max_grad_norm, config.critic.max_grad_norm = 3.0, 0.5, 7.0
    watch(roles, bad_numbers, config, save)
    assert roles["actor"].spikes.state_dict() == {"grad_norm": [2.0], "loss": [0.5]}
    assert roles["critic"].spikes.state_dict() == {"grad_norm": [], "loss": []}
    for norm, loss in [(0.1, 0.4), (0.3, 0.6)] * 8:
        roles["critic"].spikes.add(norm, loss)
    assert roles["critic"].spikes.limits.grad_norm == 7.0, "what is not clipped is no spike"
