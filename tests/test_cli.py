"""The front door: exit codes, one sentence for a mistake, and the right module for a command."""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from saved_runs import no_file_above

from megarl import __version__, cli
from megarl.commands.doctor import versions
from megarl.config import Config, load_config
from megarl.config.keys import group_helps
from megarl.plugins.options import settings_of

ROOT = Path(__file__).parent.parent


def call(*words: str) -> int:
    return cli.main(list(words))


@pytest.fixture
def train(monkeypatch):
    """A `megarl train` that only notes the configuration it gets."""
    seen = SimpleNamespace(config=None, result=0)

    def run(config: Config, command: str = "train") -> int:  # noqa: ARG001
        seen.config = config
        if isinstance(seen.result, BaseException):
            raise seen.result
        return seen.result

    monkeypatch.setattr(cli, "_work_of", lambda command: run)
    return seen


def test_a_misspelt_key_exits_2_with_one_sentence_that_names_the_right_one():
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "train", "recipe=quickstart", "actor.clip_ration=0.1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    sentence = "error: actor.clip_ration=0.1: there is no key actor.clip_ration; did you mean actor.clip_ratio?\n"
    assert done.stderr == sentence


def test_a_command_gets_the_configuration_and_gives_the_exit_code(train):
    train.result = 3
    assert call("train", "recipe=quickstart", "actor.optim.lr=0.5") == 3
    assert train.config.actor.optim.lr == 0.5


def test_quickstart_is_a_training_of_its_recipe(train, capsys):
    assert call("quickstart", "actor.optim.lr=0.5", "trainer.total_training_steps=4") == 0, (
        "steps enough for its critic"
    )
    assert (train.config.trainer.experiment_name, train.config.actor.optim.lr) == ("quickstart", 0.5)
    assert call("quickstart", "recipe=quickstart_grpo") == 2
    assert "expected one recipe, and recipe=quickstart is already given" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_tracker_without_its_package_is_refused_before_the_command_starts(train, capsys, monkeypatch, command):
    monkeypatch.setattr("megarl.commands.this_machine.find_spec", lambda name: None if name == "alembic" else name)
    words = ["recipe=quickstart"] if command == "train" else ["recipe=quickstart_sft"]
    assert call(command, *words, "trainer.logger=[jsonl,wandb]") == 0
    train.config = None
    assert call(command, *words, "trainer.logger=[jsonl,mlflow]") == 2 and train.config is None
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        "error: trainer.logger=[jsonl, mlflow]: mlflow needs alembic, not installed here; "
        "expected `pip install 'megarl[mlflow]'`, or no mlflow in trainer.logger"
    )


def test_warnings_go_to_stderr_and_the_command_still_runs(train, capsys):
    assert call("train", "recipe=quickstart", "actor.use_dynamic_bsz=true") == 0
    assert "warning: actor.use_dynamic_bsz=true: sequences are always packed" in capsys.readouterr().err
    assert train.config is not None


def test_check_only_gets_the_configuration_and_starts_nothing(train):
    assert call("train", "recipe=quickstart", "trainer.check_only=true") == 0
    assert train.config.trainer.check_only, "of the work that looks at data, rewards and models"


def test_files_that_are_not_there_are_told_after_the_faults_of_the_settings(train, capsys):
    def told() -> list[str]:
        return [line.partition(":")[2].partition(":")[0].strip() for line in capsys.readouterr().err.splitlines()]

    words = ("model.path=m", "data.train_files=[no.jsonl]", "data.val_files=[none.jsonl]", "rollout.engine=hf")
    assert call("train", *words, "rollout.n=two") == 2
    assert told() == ["rollout.n=two"]
    assert call("train", *words) == 2, "before anything starts"
    assert told() == ["no.jsonl", "none.jsonl"] and train.config is None
    assert call("train", *words, "trainer.prepare=mine") == 0, "which may make them"


def test_a_users_mistake_found_later_is_told_in_the_same_way(train, capsys):
    train.result = ValueError("data/a.jsonl:3: expected a prompt")
    assert call("train", "recipe=quickstart") == 2
    assert capsys.readouterr().err == "error: data/a.jsonl:3: expected a prompt\n"


def test_debug_shows_the_traceback(train):
    train.result = ValueError("data/a.jsonl:3: expected a prompt")
    with pytest.raises(ValueError, match="expected a prompt"):
        call("train", "--debug", "recipe=quickstart")


def test_a_run_that_fails_says_so_in_a_sentence_and_keeps_the_rest_in_a_file(train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.result = RuntimeError("rank 1 died")
    assert call("train", "recipe=quickstart") == 1
    said = capsys.readouterr().err
    assert said.startswith("the run stopped: rank 1 died\n")
    assert "Traceback" not in said
    report = tmp_path / "runs" / "quickstart" / "logs" / "failure.txt"
    assert str(report.relative_to(tmp_path)) in said
    assert "RuntimeError: rank 1 died" in report.read_text()


def test_a_full_disk_is_a_sentence_though_the_report_cannot_be_written(train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.result = OSError(28, "No space left on device")
    report = Path("runs/quickstart/logs/failure.txt")
    report.parent.mkdir(parents=True)
    with no_file_above(0):
        assert call("train", "recipe=quickstart") == 1
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"the run stopped: runs/quickstart: No space left on device \([\d,]+ bytes free\)", said[-2])
    elsewhere = f"{tempfile.gettempdir()}/megarl_failure_"
    assert said[-1].startswith(f"{report} could not be written (File too large); {elsewhere}")
    assert said[-1].endswith("(File too large); the same command begins anew, as there is no checkpoint yet")
    assert not report.exists()


@pytest.mark.parametrize("error", [UnicodeEncodeError("ascii", "é", 0, 1, "no such sign"), MemoryError("1 TiB")])
def test_no_memory_and_a_console_without_a_sign_are_no_mistakes_of_the_user(train, tmp_path, monkeypatch, error):
    monkeypatch.chdir(tmp_path)
    train.result = error
    assert call("train", "recipe=quickstart") == 1


def test_what_the_runs_folder_cannot_hold_goes_to_another(train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    train.result = RuntimeError("rank 1 died")
    Path("runs").touch()
    assert call("train", "recipe=quickstart") == 1
    (report,) = tmp_path.glob("megarl_failure_*.txt")
    assert f"could not be written (Not a directory); all of it: {report};" in capsys.readouterr().err
    assert "RuntimeError: rank 1 died" in report.read_text()


def test_a_fault_of_ours_keeps_its_traceback(train):
    train.result = AssertionError("this cannot be")
    with pytest.raises(AssertionError):
        call("train", "recipe=quickstart")


def test_an_interruption_exits_130(train):
    train.result = KeyboardInterrupt()
    assert call("train", "recipe=quickstart") == 130


def test_an_unknown_command_or_option_is_refused_with_the_nearest(capsys):
    assert call("trian") == 2
    assert "did you mean train?" in capsys.readouterr().err
    assert call("train", "--recipe", "quickstart") == 2
    assert "there is no option --recipe" in capsys.readouterr().err


def test_help_names_every_command_group_and_recipe(capsys):
    assert call("--help") == 0
    shown = capsys.readouterr().out
    groups = list(vars(Config()))
    for word in [*cli.COMMANDS, *groups, "gsm8k_qwen2_5_0_5b_1gpu", "--config"]:
        assert word in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_a_page_of_its_own(name, capsys):
    assert call(name, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.removeprefix("usage: ").startswith(f"megarl {name}") and "commands" not in shown.split()[:40]
    for group in cli.COMMANDS[name].groups:
        assert group_helps()[group][:20] in shown


def test_help_explains_a_key_or_names_the_nearest(capsys):
    assert call("config", "--help", "algorithm.lam") == 0
    assert "lambda of GAE: 0 trusts the critic" in capsys.readouterr().out
    assert call("config", "--help", "trainer.profile") == 0
    told = capsys.readouterr().out
    assert "trainer.profile.steps" in told and "trainer.profile.ranks" in told, "a group has all its keys"
    assert call("config", "--help", "algorithm.lamb") == 2
    assert "did you mean algorithm.lam?" in capsys.readouterr().err


def test_without_a_command_the_help_is_an_error(capsys):
    assert call() == 2
    assert "megarl COMMAND" in capsys.readouterr().err


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"megarl {__version__}\n"


def test_the_printed_configuration_is_a_file_that_gives_the_same_run(tmp_path, capsys):
    words = ["recipe=quickstart", "rollout.n=3", f"trainer.project_name='a [bold]name[/] of many words {90 * 'x'}'"]
    assert call("config", *words) == 0
    file = tmp_path / "it's mine.yaml"
    file.write_text(capsys.readouterr().out)
    again, warnings = load_config(settings_of(["--config", str(file)]))
    assert again == load_config(words)[0]
    assert again.trainer.project_name.startswith("a [bold]name[/] of many words x")
    assert not warnings


def test_config_wants_a_yaml_file(capsys):
    assert call("train", "--config") == 2
    assert "expected the path of a YAML file" in capsys.readouterr().err


def test_every_command_is_a_function_that_exists():
    for command in cli.COMMANDS.values():
        assert callable(cli._work_of(command))


def test_the_tests_run_with_the_pinned_megatron():
    assert version("megatron-core") == versions.TESTED["megatron-core"]
