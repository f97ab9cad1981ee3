"""Whole small runs in which something is killed or fails: what is repaired, what stops it, what it leaves."""

import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from programs import runs
from ring_cases import PPO, lines, settings, steps, train_in_a_process, wait_for_step
from safetensors.torch import load_file, save_file
from saved_runs import flip
from small_disk import fill, resize, small_disk

from megarl.cli import main
from megarl.commands.doctor.run_folder import explain
from megarl.io.auth import VARIABLE, server_token
from megarl.processes.ranks import TOKEN
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch
from megarl.servers.supervisor import Servers, State, Supervision
from megarl.trainer.checkpoint.checkpoint import all_checkpoints
from megarl.trainer.run_lock import RESULTS

pytestmark = [pytest.mark.dist, pytest.mark.full]


def test_a_run_whose_newest_save_is_damaged_goes_on_from_the_one_before(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One bit of a tensor: the ranks find it, start again, and repeat the steps in between to the last bit."""
    words = settings(parts, tmp_path, "flipped", *PPO, "trainer.save_freq=1", "trainer.async_save=false")
    assert main(["train", *words, "trainer.total_training_steps=3"]) == 0
    before = steps(tmp_path / "flipped", "actor/grad_norm")
    folder = tmp_path / "flipped" / "checkpoints" / "step_00000003"
    file = max((folder / "actor").glob("*.safetensors"))
    flip(file, file.stat().st_size - 1, 6)
    longer = [*words, "trainer.total_training_steps=4"]
    capfd.readouterr()
    assert main(["train", *longer, f"trainer.resume_mode={folder}"]) == 2
    assert f"error: {file} is damaged: its SHA-256 is not that of what was written" in capfd.readouterr().err
    assert main(["train", *longer]) == 0
    said = capfd.readouterr().err
    assert f"warning: step_00000003 is passed over: {file} is damaged" in said
    assert "going on from step 2 (" in said
    after = steps(tmp_path / "flipped", "actor/grad_norm")
    assert {step: after[step] for step in before} == before
    assert 4 in after


def test_a_disk_that_is_full_ends_a_run_in_a_sentence(parts: Path, tmp_path: Path) -> None:
    """The driver may write to no file from its second step on, as on a full disk."""
    run = tmp_path / "full"
    words = settings(parts, tmp_path, "full", *PPO, "trainer.total_training_steps=100000")
    command = [sys.executable, "-m", "megarl", "train", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for_step(run, 2, process)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(timeout=300) == 1
    assert f"\nthe run stopped: {run}/" in said and ": File too large (" in said
    assert f"{run}/logs/failure.txt could not be written (File too large); " in said
    assert "Traceback" not in said


def visits_of(run: Path) -> list[int]:
    """The steps that were trained, each time."""
    return [row["step"] for row in lines(run / "visits.jsonl")]


def wait_for_words(words: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while words not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_full_disk_from_some_step_on_holds_a_run_until_there_is_room(parts: Path, tmp_path: Path) -> None:
    """With saves in the background, some of which the disk does not take."""
    log, words = tmp_path / "full.log", settings(parts, tmp_path / "disk", "full", *PPO, "trainer.save_freq=1")
    with small_disk(tmp_path / "disk", "64m") as disk:
        process = train_in_a_process([*words, "trainer.total_training_steps=8", "trainer.test_freq=3"], log)
        wait_for_step(disk / "full", 2, process)
        filler = fill(disk)
        wait_for_words("the run waits for room", log, process)
        filler.unlink()
        assert process.wait(600) == 0, log.read_text()
        assert visits_of(disk / "full") == list(range(1, 9))
        assert sorted(steps(disk / "full", "actor/pg_loss")) == list(range(1, 9))
    said = log.read_text()
    assert "started again" not in said and "going on from" not in said and "Traceback" not in said
    assert re.search(rf"warning: {disk}/full/\S+: No space left on device \(0 bytes free\); the run waits", said), said


def test_full_disk_for_the_first_save_holds_a_run_until_the_save_is_made(parts: Path, tmp_path: Path) -> None:
    """Nothing would keep what is trained: it waits after the step in which it has seen that, and saves that one."""
    run, log = tmp_path / "first", tmp_path / "first.log"
    words = settings(parts, tmp_path, "first", *PPO, "trainer.save_freq=3", "trainer.total_training_steps=6")
    with small_disk(run / "checkpoints", "16k") as checkpoints:
        process = train_in_a_process(words, log)
        wait_for_words("the run waits for room", log, process)
        trained = visits_of(run)
        assert trained in ([1, 2, 3], [1, 2, 3, 4])
        resize(checkpoints, "64m")
        wait_for_step(run, trained[-1] + 1, process)
        assert [c.step for c in all_checkpoints(checkpoints)] == [trained[-1]]
        assert process.wait(600) == 0, log.read_text()
    assert visits_of(run) == list(range(1, 7))
    assert f"{checkpoints}: the save of step {trained[-1]} failed and was deleted: rank " in log.read_text()


def test_full_disk_at_the_export_costs_no_step(parts: Path, tmp_path: Path) -> None:
    """The export has a disk of its own here.  It waits, then ends in a sentence; the same command exports.

    Adapters are exported twice, merged and alone: all ranks take part in both, also when rank 0 has no room.
    """
    run, log = tmp_path / "export", tmp_path / "export.log"
    more = [*PPO, "actor.lora.rank=4", "trainer.save_freq=3", "trainer.call_timeout_s=60"]
    words = settings(parts, tmp_path, "export", *more)
    with small_disk(run / "hf", "16k") as hf:
        process = train_in_a_process(words, log)
        assert process.wait(900) == 1, log.read_text()
        said = log.read_text()
        assert re.search(
            rf"\nthe run stopped: {hf}: group ranks_0: rank 0 .* No space left .*; the run has waited", said
        )
        assert "the same command goes on from the last checkpoint" in said
        assert "started again" not in said and "Traceback" not in said
        assert explain(run).cause == "a disk is full"
        process = train_in_a_process(words, log)
        wait_for_words("the run waits for room", log, process)
        resize(hf, "64m")
        assert process.wait(600) == 0, log.read_text()
        assert (hf / "config.json").is_file() and (run / "adapter" / "adapter_config.json").is_file()
    assert "going on from step 3" in log.read_text()
    assert visits_of(run) == [1, 2, 3]


def test_of_two_servers_the_trainer_goes_on_with_one_until_the_other_is_back_and_stops_without_any(
    parts: Path, tmp_path: Path
) -> None:
    """However many steps that takes: then both are killed until they may not come back any more."""
    more = ["rollout.num_servers=2", "rollout.ahead=1", "rollout.max_restarts=1"]
    run, log = tmp_path / "healed", tmp_path / "healed.log"
    words = settings(parts, tmp_path, "healed", *PPO, *more, "trainer.total_training_steps=100000")
    process = train_in_a_process(words, log)
    wait_for_step(run, 2, process)
    children_of(process, "megarl.hf_server.main")[0].kill()
    deadline = time.monotonic() + 800
    while not any(
        row.get("push/servers_died") == 1 and row["push/servers"] == 2 for row in lines(run / "metrics.jsonl")
    ):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "it does not come back"
        time.sleep(0.1)
    while process.poll() is None:
        assert time.monotonic() < deadline, "it does not stop"
        for server in children_of(process, "megarl.hf_server.main"):
            server.kill()
        time.sleep(0.1)
    assert_fresh(run, ahead=1)
    said = log.read_text()
    assert process.returncode == 1 and "Traceback" not in said
    assert re.search("the run stopped: no server is left; .*server [01]", said)
    assert (run / "logs" / "failure.txt").stat().st_size > 0
    found = explain(run)
    assert found.state == "failed"
    assert re.match("the servers ended: no server is left; .*server [01]", found.cause), found.cause


def children_of(driver: subprocess.Popen[bytes], module: str) -> list[psutil.Process]:
    """Its processes that run this module."""
    found = []
    with suppress(psutil.NoSuchProcess):  # the driver has ended
        for child in psutil.Process(driver.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                found += [child] if runs(child, module) else []
    return found


def assert_fresh(run: Path, *, ahead: int) -> None:
    """No sample was generated by other weights than those of its step, or of so many steps before."""
    for sample in lines(run / "samples.jsonl"):
        versions = [version for version, _, _ in sample["versions"]]
        assert all(sample["step"] - 1 - ahead <= v <= sample["step"] - 1 for v in versions)


def test_ranks_that_start_again_go_on_without_a_server_that_is_away_until_it_is_back(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine is lost, with a rank and a server of another program on it."""
    token, run, log = "the key of these servers", tmp_path / "away", tmp_path / "away.log"
    monkeypatch.setenv("MEGARL_SERVER_TOKEN", token)
    launch = EngineLaunch("hf", str(parts / "model"), dtype="float32")
    with Servers([launch] * 2, token, tmp_path / "servers", Supervision(rest_s=0)) as servers:
        servers.start()
        more = [f"rollout.urls=[{','.join(servers.urls)}]", "trainer.save_freq=1", "trainer.n_gpus_per_node=1"]
        more += ["algorithm.adv_estimator=grpo", "data.val_files=[]", "trainer.total_training_steps=100000"]
        process = train_in_a_process(settings(parts, tmp_path, "away", *more), log)
        wait_for_step(run, 2, process)
        os.kill(servers.pids[1], signal.SIGKILL)
        children_of(process, "megarl.roles.worker")[0].kill()
        for number in (1, 2):  # servers during a step: without the one that is away, and with both
            wait_for_servers(run, number, process, log)
            while State.RESTING not in servers.states and number == 1:
                servers.poll(starts=False)
            servers.poll()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
    said = log.read_text()
    assert said.count("the ranks are started again (1 of 3 without a new step)") == 1
    assert f"{servers.urls[1]} is out of service: " in said
    assert_fresh(run, ahead=0)


def wait_for_servers(run: Path, number: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the run's last step was made with so many servers."""
    deadline = time.monotonic() + 800
    while steps(run, "push/servers").popitem()[1] != number:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.1)


def test_a_reward_that_always_raises_is_0_or_stops_the_run(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fn = tmp_path / "mine.py"
    fn.write_text("def score(prompt, completion):\n    raise KeyError('no such unit')\n")
    common = ["algorithm.adv_estimator=grpo", f"reward.fn={fn}:score", "trainer.n_gpus_per_node=1"]
    common += ["reward.try_rows=0"]
    zero = [*common, "reward.on_error=zero", "trainer.total_training_steps=1"]
    assert main(["train", *settings(parts, tmp_path, "zero", *zero)]) == 0
    assert set(steps(tmp_path / "zero", "critic/score/mean").values()) == {0.0}
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "no such unit" in line]
    assert line.startswith(f"warning: reward {fn}:score, sample ")
    assert line.endswith(f"; counted as 0; more errors are in {tmp_path}/zero/logs/collector.log")
    assert main(["train", *settings(parts, tmp_path, "stop", *common, "reward.on_error=stop")]) == 1
    said = capfd.readouterr().err
    assert "no such unit" in said and "sample" in said
    assert re.match("a reward failed: .*no such unit", explain(tmp_path / "stop").cause)
    assert main(["train", *settings(parts, tmp_path, "unscored", *common, "data.val_files=[]")]) == 1
    said = capfd.readouterr().err
    assert "all 4 prompts of an iteration were lost; the first: 4 of 4 completions could not be scored" in said
    assert "no such unit" in said


def test_a_model_with_weights_that_are_not_finite_is_one_sentence_before_the_first_step(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, name = shutil.copytree(parts / "model", tmp_path / "model"), "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name][-1, -1] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert main(["train", *settings(parts, tmp_path, "nan", *PPO, f"model.path={model}")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said == [f"error: {model}/model.safetensors: the tensor {name} holds nan; expected finite numbers"]


GIVEN = {VARIABLE: "the-token-of-a-run-that-nobody-reads", "HF_TOKEN": "hf_of_a_user", "WANDB_API_KEY": "0badc0de" * 5}


def test_others_read_no_file_of_a_run_and_no_file_holds_a_key(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves, and then loses a rank, so that it writes its report of a failure too."""
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    more = ["trainer.save_freq=1", "trainer.total_training_steps=1000", "trainer.logger=[console,jsonl,tensorboard]"]
    more += ["trainer.max_restarts=0"]
    temporary = tempfile.mkdtemp(dir="/tmp")  # a short name: there are sockets in it
    monkeypatch.setenv("TMPDIR", temporary)
    run = tmp_path / "runs/secret"
    (run.parent).mkdir(mode=0o755)
    log = tmp_path / "screen.log"
    os.umask(os.umask(0o022))  # that of the tests, whatever it is, is not what protects the files
    process = train_in_a_process(settings(parts, run.parent, "secret", *more), log)
    try:
        wait_for_step(run, 2, process)
        children = psutil.Process(process.pid).children(recursive=True)
        keys, shown = {*GIVEN.values(), server_token({}, GIVEN[VARIABLE])}, b""
        forked = set()
        for child in children:
            shown += " ".join(child.cmdline()).encode()
            if child.name() in ("roles.worker", "hf_server.main"):
                # They are forked, and got their keys, the ranks' own too, over a socket.
                assert not {VARIABLE, TOKEN, TOKEN_VARIABLE} & child.environ().keys()
                forked.add(child.name())
        assert forked == {"roles.worker", "hf_server.main"}
        next(child for child in children if child.name() == "roles.worker").kill()
        assert process.wait() == 1, log.read_text()
    finally:
        process.kill()
        process.wait()
    os.rmdir(temporary)  # nothing is left there
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "failure.txt", "rank_0.log"} <= names
    assert any(path.suffix == ".safetensors" for path in files), "a checkpoint"
    open_to_others = [str(path) for path in (run, *run.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert not open_to_others
    texts = {str(path): path.read_bytes() for path in (*files, log)} | {"command lines": shown}
    assert not [(name, key) for name, text in texts.items() for key in keys if key.encode() in text]


@pytest.mark.full
def test_a_run_whose_folder_is_deleted_ends_and_leaves_it_to_another_one(parts: Path, tmp_path: Path) -> None:
    words = settings(parts, tmp_path, "gone", "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo")
    run, log = tmp_path / "gone", tmp_path / "screen.log"
    process = train_in_a_process([*words, "trainer.total_training_steps=1000"], log)
    try:
        wait_for_step(run, 2, process)
        run.rename(tmp_path / "deleted")  # at once, unlike rmtree, which loses races with the run
        shutil.rmtree(tmp_path / "deleted", ignore_errors=True)
        assert process.wait(120) == 1, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert log.read_text().splitlines()[-1] == (
        f"the run stopped: {run} was deleted, moved or replaced, so nothing more of this run is written there"
    )
    assert not run.exists()
    others = ["trainer.share_results=true", "trainer.total_training_steps=1"]
    before = os.umask(0o022)
    second = train_in_a_process([*words, *others], log)
    os.umask(before)
    assert second.wait() == 0, log.read_text()
    assert list(steps(run, "actor/pg_loss")) == [1]
    open_to_all = {str(path.relative_to(run)) for path in run.rglob("*") if path.stat().st_mode & 0o004}
    assert {"hf/config.json", "hf/model.safetensors", "report.html", "README.md", "summary.json"} <= open_to_all
    assert {name.partition("/")[0] for name in open_to_all} <= set(RESULTS)
    assert stat.S_IMODE(run.stat().st_mode) == 0o711


REWARD = """
def raises_last(prompt, completion):
    if completion.versions[0].version == 1: raise KeyError("no such unit")
    return sum(map(str.isdigit, completion.text)) / 6
"""


def test_a_reward_that_raises_in_the_last_evaluation_takes_only_its_score(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentence comes when all is written, and the exit code is that of a failure."""
    (tmp_path / "mine.py").write_text(REWARD)
    more = ["trainer.total_training_steps=1", "trainer.save_freq=1", "reward.on_error=stop", "reward.try_rows=0"]
    more += ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", f"reward.fn={tmp_path}/mine.py:raises_last"]
    assert main(["train", *settings(parts, tmp_path, "ends", *more)]) == 1
    run = tmp_path / "ends"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["score_after"] is None and summary["score_before"] >= 0
    for name in ("hf/config.json", "README.md", "report.html", "checkpoints/step_00000001"):
        assert (run / name).exists(), name
    out, err = capfd.readouterr()
    assert "KeyError: 'no such unit'" in err and "KeyError" not in out.partition('"steps"')[2]
