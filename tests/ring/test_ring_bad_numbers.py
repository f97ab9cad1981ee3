"""Bad numbers in whole small runs on two ranks, one of which sees them: the run stops, skips, or goes back to a save.

Data in the order of the file, so visit 9 is row 9.  The reward of a row says what its loss does.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from config_helpers import tables_kept
from ring_cases import lines, make_parts, settings, steps
from safetensors.torch import load_file

from megarl.cli import main
from megarl.mcore.checkpoint import files
from megarl.trainer.checkpoint.checkpoint import all_checkpoints

pytestmark = [pytest.mark.dist, pytest.mark.full]
NAN_LOSS, NAN_GRADIENT, EXPLODES, OVERFLOWS = 1000.0, 2000.0, 3000.0, 3e38
PLUGIN = """
from pathlib import Path

import torch
from megarl.algo import register_adv_est, register_policy_loss

@register_adv_est("ten_times")
def ten_times(rewards, mask, segment_ids, *, group_ids):
    scores = torch.zeros(len(group_ids)).index_add(0, segment_ids, rewards)
    column = 10 * scores[segment_ids] * mask
    return column, column

@register_policy_loss("planted")
def planted(log_probs, old_log_probs, advantages, mask, segment_ids):
    kind = advantages / 10
    loss = -torch.exp(log_probs - old_log_probs) * torch.where(kind > 10, 1.0, advantages)
    loss = torch.where(kind == 1000.0, float("nan"), loss)
    if (kind == 1000.0).any():
        Path(__file__).with_name("struck").touch()
    nothing = torch.where(kind == 2000.0, log_probs - log_probs.detach(), 1.0)  # 0 has no derivative under the root
    loss = loss + torch.where(kind == 2000.0, nothing.abs().sqrt(), 0.0)
    return torch.where(kind == 3000.0, 1e6, 1.0) * loss, {}
"""
LATE = """
import time
from pathlib import Path

from megarl.mcore.checkpoint import files

seal = files.seal

def wait_and_seal(file):
    while not Path(__file__).with_name("struck").exists():
        time.sleep(0.01)
    return seal(file)

files.seal = wait_and_seal
"""
REWARD = """
BAD = {bad}

def score(prompt, completion):
    row = int(prompt.uid.split("-")[1])
    return BAD.get(row, sum(map(str.isdigit, completion.text)) / 6)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_parts(tmp_path_factory.mktemp("parts"))
    (folder / "planted.py").write_text(PLUGIN)
    (folder / "late.py").write_text(LATE)
    with tables_kept():
        yield folder


def run(parts: Path, runs: Path, name: str, bad: dict[int, float], *more: str) -> int:
    (runs / f"{name}.py").write_text(REWARD.format(bad=bad))
    words = [f"algorithm.plugins=[{parts}/planted.py]", f"reward.fn={runs}/{name}.py:score"]
    words += ["algorithm.adv_estimator=ten_times", "algorithm.policy_loss_fn=planted"]
    return main(["train", *settings(parts, runs, name, *words, "data.shuffle=false", "data.val_files=[]", *more)])


def account(folder: Path) -> dict[str, list[int]]:
    """The visits by what became of them, each once."""
    rows = lines(folder / "visits.jsonl")
    found = {outcome: [visit for row in rows for visit in row[outcome]] for outcome in ("trained", "skipped")}
    assert len(set(found["trained"] + found["skipped"])) == len(found["trained"] + found["skipped"])
    return found


def saved_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights, moments and all else that a save has of the actor."""
    files = sorted((folder / "checkpoints" / f"step_{step:08d}" / "actor").glob("*.safetensors"))
    assert files
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


def test_a_run_stops_at_a_bad_number_with_the_name_of_its_sample(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save after step 1 is written while step 2 fails: it counts, although it is finished only then."""
    (parts / "struck").unlink(missing_ok=True)
    monkeypatch.setattr(files, "seal", files.seal)  # the plug-in changes it in this process too
    more = [f"algorithm.plugins=[{parts}/planted.py,{parts}/late.py]", "trainer.save_freq=1"]
    assert run(parts, tmp_path, "stops", {5: NAN_LOSS}, *more, "trainer.total_training_steps=3") == 1
    assert (parts / "struck").exists()
    assert [save.step for save in all_checkpoints(tmp_path / "stops" / "checkpoints")] == [1]
    said = capfd.readouterr().err
    assert "the run stopped: token loss of planted is nan at token" in said
    assert "of sample 0-5#" in said
    report = (tmp_path / "stops" / "logs" / "failure.txt").read_text()
    assert "Traceback" in report and "token loss of planted is nan at token" in report
    assert steps(tmp_path / "stops", "trainer/skipped_steps") == {1: 0.0}


def test_bad_steps_are_skipped_and_what_they_would_have_changed_is_as_before(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A prompt is an optimizer step, but advantages of step 2 are infinite before the first of its four.

    Steps 1, 3, 4 and 5 make 4 + 3 + 3 + 4 steps and the sixth 2 more, which is the warm-up of the limits.
    """
    bad = {6: OVERFLOWS, 9: NAN_LOSS, 13: NAN_GRADIENT, 25: EXPLODES}
    more = ["actor.ppo_mini_batch_size=1", "trainer.on_nonfinite=skip", "trainer.spike_sigma=50"]
    more += ["trainer.total_training_steps=7", "trainer.save_freq=1", "trainer.max_checkpoints_to_keep=7"]
    assert run(parts, tmp_path, "skips", bad, *more) == 0
    folder = tmp_path / "skips"
    assert steps(folder, "trainer/skipped_steps") == {1: 0, 2: 1, 3: 1, 4: 1, 5: 0, 6: 0, 7: 1}
    assert steps(folder, "trainer/spikes") == {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 1}
    found = account(folder)
    assert found["skipped"] == [4, 5, 6, 7, 9, 13, 25]
    assert sorted(found["trained"] + found["skipped"]) == list(range(28))
    before, after, later = (saved_weights(folder, step) for step in (1, 2, 3))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(later[name], after[name]) for name in before)
    said = capfd.readouterr().err
    assert "step 2: advantages is inf at token" in said and "; training on this batch is skipped" in said
    assert "step 3: token loss of planted is nan at token" in said and "of sample 0-9#" in said
    assert "step 4: the gradient norm of actor is nan (on rank" in said
    assert "step 7: the gradient norm of actor is" in said and "a spike: over the last" in said
    state = json.loads((folder / "checkpoints" / "step_00000007" / "manifest.json").read_text())["state"]
    assert len(state["spikes"]["actor"]["grad_norm"]) == 4 + 3 + 3 + 4 + 4 + 4


def test_a_run_goes_back_to_its_save_and_leaves_the_batch_out(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Saved after steps 2 and 4; visits 12 to 15 are those of step 4, whose gradient is NaN."""
    bad = {13: NAN_GRADIENT}
    back = ["trainer.on_nonfinite=rollback", "trainer.save_freq=2"]
    assert run(parts, tmp_path, "back", bad, *back, "trainer.total_training_steps=5") == 0
    folder = tmp_path / "back"
    said = capfd.readouterr().err
    assert said.count("the run goes back to step 2, without the 4 prompts of this batch") == 1
    assert steps(folder, "trainer/rollbacks") == {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert account(folder) == {"trained": [*range(12), *range(16, 24)], "skipped": [12, 13, 14, 15]}
    assert len(lines(folder / "metrics.jsonl")) == 5, "no step is there twice"

    assert run(parts, tmp_path, "back", bad, *back, "trainer.total_training_steps=6") == 0
    assert account(folder) == {"trained": [*range(12), *range(16, 28)], "skipped": [12, 13, 14, 15]}

    clean = ["trainer.save_freq=2", "trainer.total_training_steps=3"]
    assert run(parts, tmp_path, "clean", {}, *clean) == 0
    for metric in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        third = steps(folder, metric)[3]
        assert third == steps(tmp_path / "clean", metric)[3], "what was between the save and the bad step is the same"


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_supervised_training_looks_too(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], policy: str
) -> None:
    """The first step's weights are so large that the second gradient is not finite, though its loss is."""
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 16)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"""model.path={parts}/model sft.train_files=[{tmp_path}/sft.jsonl] sft.batch_size=2 trainer.device=cpu
        trainer.n_gpus_per_node=1 trainer.total_training_steps=3 actor.optim.name=sgd actor.optim.lr=1e38
        actor.strategy=none trainer.on_nonfinite={policy} trainer.default_local_dir={tmp_path}
        trainer.experiment_name=sft"""
    assert main(["sft", *words.split()]) == (0 if policy == "skip" else 1)
    skipped = steps(tmp_path / "sft", "trainer/skipped_steps")
    assert skipped == ({1: 0, 2: 1, 3: 1} if policy == "skip" else {1: 0})
    said = capfd.readouterr().err
    assert "the gradient norm of actor is nan (on rank 0, first in " in said
    assert ("the run stopped: " in said) == (policy == "stop")
