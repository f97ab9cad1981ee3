"""`trainer.check_only` says everything that would stop a run, at once, and starts nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ring_cases import make_parts, settings
from tiny_models import add_mtp

from megarl.cli import main

RAISES = "def score(prompt, completion):\n    raise KeyError('no such unit')\n"
Checked = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Checked:
    """The exit code, and what is told, or the faults without their mark."""

    def check(*words: str, command: str = "train") -> tuple[int, list[str]]:
        code = main([command, *words, "trainer.check_only=true"])
        out, err = capsys.readouterr()
        faults = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
        return code, faults if code else out.splitlines()

    return check


def test_what_was_looked_at_is_told_and_nothing_is_written(parts: Path, tmp_path: Path, checked: Checked) -> None:
    code, told = checked(*settings(parts, tmp_path, "fine"))
    assert code == 0
    assert any(line.startswith(f"model.path={parts}/model: ") for line in told)
    assert any(f"data.val_files=[{parts}/data/test.jsonl]: 20 prompts of up to 6 tokens" in line for line in told)
    assert any("rewards: tried on 8 rows" in line for line in told)
    said = "old log-probs: of the forward pass of the first optimizer step, checked by a pass "
    assert any(said in line for line in told)
    assert any(line.startswith("one optimizer step an iteration") for line in told)
    assert told[-1] == "nothing was found that would stop this run"
    assert not list(tmp_path.iterdir())


def test_all_faults_are_told_at_once(tmp_path: Path, checked: Checked) -> None:
    broken = make_parts(tmp_path / "parts")
    (broken / "model" / "model.safetensors").unlink()
    (broken / "data" / "test.jsonl").write_text('{"question": 3}\n')
    (broken / "loss.py").write_text("import no_such_module\n")
    code, told = checked(*settings(broken, tmp_path, "broken"), f"algorithm.plugins=[{broken}/loss.py]")
    assert (code, len(told)) == (2, 3)
    assert told[0].startswith(f"algorithm.plugins has '{broken}/loss.py', whose imports fail: No module named")
    assert told[1].startswith(f"{broken}/model holds neither model.safetensors nor ")
    assert told[2].startswith(f"{broken}/data/test.jsonl:1: no prompt; expected the key 'prompt'")


def test_faults_of_settings_come_before_those_of_files(parts: Path, tmp_path: Path, checked: Checked) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")
    words = [f"data.train_files=[{tmp_path}/broken.jsonl]", f"data.val_files=[{tmp_path}/missing.jsonl]"]
    words = [*settings(parts, tmp_path, "many"), *words, f"algorithm.plugins=[{tmp_path}/no_plugin.py]"]
    code, told = checked(*words, "actor.clip_ration=0.1")
    assert (code, [said.partition(":")[0] for said in told]) == (2, ["actor.clip_ration=0.1"])
    code, told = checked(*words)
    assert (code, [said.partition(": ")[0] for said in told]) == (
        2,
        [f"algorithm.plugins has '{tmp_path}/no_plugin.py'", f"{tmp_path}/missing.jsonl", f"{tmp_path}/broken.jsonl:1"],
    )


def test_of_a_recipe_that_makes_its_model_first_is_told_what_and_the_rest_is_looked_at(checked: Checked) -> None:
    code, told = checked("recipe=quickstart")
    assert code == 0
    first = "trainer.prepare=megarl.trainer.recipes.quickstart: the run calls it first, to make what is not here: "
    made = "model.path=runs/quickstart_sft/hf, runs/quickstart_data/train.jsonl, runs/quickstart_data/test.jsonl"
    assert first + made in told
    assert not list(Path().iterdir())
    Path("val.jsonl").write_text("{\n")
    plugin = "algorithm.plugins=[no_plugin.py]"
    words = ["trainer.prepare=megarl.train", "data.val_files=[val.jsonl]", "reward.fn=gone.py:score"]
    for more, sentences in (
        (words[:2], ["val.jsonl:1: not JSON"]),
        (words, ["reward.fn=gone.py:score: expected a file that exists"]),
        (
            ["trainer.prepare=megarl.nothing", plugin],
            ["algorithm.plugins has 'no_plugin.py'", "trainer.prepare=megarl.nothing: "],
        ),
    ):
        code, told = checked("recipe=quickstart", *more)
        assert code == 2
        for said, sentence in zip(told, sentences, strict=False):
            assert said.startswith(sentence)


@pytest.mark.parametrize("has_file", [True, False])
def test_a_reward_is_tried_and_a_missing_file_hides_no_fault_of_it(
    parts: Path, tmp_path: Path, checked: Checked, has_file: bool
) -> None:
    (tmp_path / "mine.py").write_text(RAISES)
    words = ["algorithm.adv_estimator=grpo", f"reward.fn={tmp_path}/mine.py:score"]
    words += [] if has_file else [f"data.train_files=[{tmp_path}/missing.jsonl]"]
    code, told = checked(*settings(parts, tmp_path, "raises"), *words)
    assert code == 2
    file = f"{parts}/data/{'train' if has_file else 'test'}.jsonl"
    assert told.pop().startswith(f"reward.fn={tmp_path}/mine.py:score: tried on {file}:1 with the ")
    assert len(told) == (not has_file) and all("missing.jsonl" in said for said in told)


def test_a_model_that_is_only_a_name_yet_is_no_fault_and_a_mistyped_folder_is_told(
    parts: Path, tmp_path: Path, checked: Checked
) -> None:
    """A name of the hub is not refused for being like a folder."""
    code, told = checked(
        *settings(parts, tmp_path, "named"), "model.path=nobody/nothing", "model.tokenizer_path=nobody/nothing"
    )
    assert code == 0
    absent = "model.path=nobody/nothing: its config.json is not on this machine; layout and memory were not planned"
    assert any(absent in line for line in told)
    nowhere = "no folder here, and no hub name that was downloaded before; the run asks the hub, this did not"
    assert f"model.path=nobody/nothing: {nowhere}" in told
    Path("models").mkdir()
    Path("models/tiny").symlink_to(parts / "model")
    words = ["model.path=modles/tiny", f"model.tokenizer_path={parts}/model"]
    code, told = checked(*settings(parts, tmp_path, "mistyped"), *words)
    assert code == 0
    assert any("this did not (if it is to be a folder: did you mean models/tiny?)" in line for line in told)


def test_a_run_that_belongs_to_another_machine_is_laid_out_alone(checked: Checked) -> None:
    code, told = checked("model=qwen2_5_7b", "layout=8x80", "data.train_files=[my_data.jsonl]")
    assert code == 0
    assert "data and models of this run are not on this machine: they were not looked at" in told
    assert told[-1] == "nothing was found that would stop this run; not checked: models, data"


def test_a_tracker_without_its_package_is_a_fault_where_the_run_is_to_run(
    parts: Path, tmp_path: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.commands.this_machine.find_spec", lambda name: None if name == "wandb" else name)
    code, told = checked(*settings(parts, tmp_path, "logged"), "trainer.logger=[wandb]")
    assert code == 2
    assert told == [
        "trainer.logger=[wandb]: wandb needs wandb, not installed here; expected `pip install 'megarl[wandb]'`, "
        "or no wandb in trainer.logger"
    ]
    elsewhere = ["model=qwen2_5_7b", "layout=8x80", "data.train_files=[my_data.jsonl]", "trainer.logger=[wandb]"]
    code, told = checked(*elsewhere)
    assert (code, told[-1].partition("not checked: ")[2]) == (
        0,
        "models, data, trackers, of which packages are not here",
    )


def test_what_is_not_here_stands_in_the_last_line(parts: Path, tmp_path: Path, checked: Checked) -> None:
    code, told = checked(*settings(parts, tmp_path, "named"), "critic.model.path=nobody/nothing")
    assert (code, told[-1]) == (
        0,
        "nothing was found that would stop this run; not checked: critic.model.path=nobody/nothing",
    )


def test_supervised_training_and_evaluations_are_checked_too(parts: Path, tmp_path: Path, checked: Checked) -> None:
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 8)
    words = [f"model.path={parts}/model", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/runs"]
    examples = [*words, f"sft.train_files=[{tmp_path}/sft.jsonl]", "sft.batch_size=4"]
    code, told = checked(*examples, command="sft")
    assert (code, told[-1]) == (0, "nothing was found that would stop this run")
    assert f"model.path={parts}/model: 24 tensors" in told
    assert any(line.startswith(f"sft.train_files=[{tmp_path}/sft.jsonl]: 8 ") for line in told)
    assert not any("servers" in line or "critic" in line for line in told), "it has neither"
    assert checked(*examples, "sft.batch_size=9", command="sft") == (
        2,
        ["sft.batch_size=9: there are 8 examples in 1 epochs; use a smaller batch or more epochs"],
    )
    asked = [*words, f"data.val_files=[{parts}/data/test.jsonl]", f"reward.fn={parts}/digits.py:share_of_digits"]
    code, told = checked(*asked, command="evaluate")
    assert (code, told[-2:]) == (0, ["rewards: tried on 4 rows", "nothing was found that would stop this run"])
    code, told = checked(*asked, "reward.fn=gone.py:score", command="evaluate")
    assert code == 2 and told[0].startswith("reward.fn=gone.py:score: ")
    said = "trainer.check_only=true: `megarl node` has no check; expected one of train, sft, dpo, rm, evaluate"
    assert checked("trainer.nnodes=2", "trainer.node_rank=1", command="node") == (2, [said])


@pytest.mark.megatron_0_19
def test_mtp_layers_that_config_json_names_must_be_there_to_be_trained(tmp_path: Path, checked: Checked) -> None:
    """As the ranks say it; and those that are there count among what is trained."""
    broken = make_parts(tmp_path / "parts", family="deepseek_v3", tied=False)
    words = settings(broken, tmp_path, "mtp", "algorithm.adv_estimator=grpo")
    file = broken / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    code, told = checked(*words, "actor.mtp=joint")
    assert code == 2 and told[0].startswith(f"the weights in {broken}/model do not fit its config.json; missing: ")
    add_mtp(broken / "model")
    (told_off, told) = (checked(*words, f"actor.mtp={how}") for how in ("off", "joint"))
    assert told_off[0] == told[0] == 0
    assert "are not trained" in " ".join(told_off[1]) and "are not trained" not in " ".join(told[1])


def test_a_run_on_cpus_is_compared_with_the_memory_of_this_machine(
    parts: Path, tmp_path: Path, checked: Checked
) -> None:
    """A model of 22,000 parameters takes little; micro-batches of a billion tokens do not fit anywhere."""
    words = [*settings(parts, tmp_path, "small"), "reward.try_rows=0"]
    code, told = checked(*words)
    assert code == 0
    assert sum(line.startswith("on this machine's CPUs: about ") for line in told) == 1
    assert not any("warning" in line or "GPU" in line for line in told)
    code, told = checked(*words, "actor.ppo_max_token_len_per_gpu=1000000000", "rollout.n=100000000")
    assert code == 0
    (warning,) = (line for line in told if line.startswith("warning: the run takes about "))
    assert "GB are free here: the system may end its processes; lower actor.ppo_max_token_len_per_gpu" in warning
