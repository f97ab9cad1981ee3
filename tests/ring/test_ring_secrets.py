"""What a run leaves behind and shows of itself: its files are its user's alone, and no key is in them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil
import pytest
from ring_cases import make_parts, settings, train_in_a_process, wait_for_step

from megarl.network.auth import VARIABLE, server_token
from megarl.processes.ranks import TOKEN
from megarl.servers.launch import TOKEN_VARIABLE

pytestmark = [pytest.mark.dist, pytest.mark.slow]
GIVEN = {VARIABLE: "the-token-of-a-run-that-nobody-reads", "HF_TOKEN": "hf_of_a_user", "WANDB_API_KEY": "0badc0de" * 5}


def test_others_read_no_file_of_a_run_and_no_file_holds_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves, and then loses a rank, so that it writes its report of a failure too."""
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    more = ["trainer.save_freq=1", "trainer.total_training_steps=1000", "trainer.logger=[console,jsonl,tensorboard]"]
    more += ["trainer.max_restarts=0"]
    run = tmp_path / "runs/secret"
    (run.parent).mkdir(mode=0o755)
    log = tmp_path / "screen.log"
    os.umask(os.umask(0o022))  # that of the tests, whatever it is, is not what protects the files
    process = train_in_a_process(settings(make_parts(tmp_path / "parts"), run.parent, "secret", *more), log)
    try:
        wait_for_step(run, 2, process)
        children = psutil.Process(process.pid).children(recursive=True)
        keys, shown = {*GIVEN.values(), server_token({}, GIVEN[VARIABLE])}, b""
        forked = set()
        for child in children:
            shown += " ".join(child.cmdline()).encode()
            if child.cmdline()[1:3] in (["-m", "megarl.roles.worker"], ["-m", "megarl.hf_server.main"]):
                # They are forked, and got their keys, the ranks' own too, over a socket.
                assert not {VARIABLE, TOKEN, TOKEN_VARIABLE} & child.environ().keys()
                forked.add(child.cmdline()[2])
        assert forked == {"megarl.roles.worker", "megarl.hf_server.main"}
        next(child for child in children if "megarl.roles.worker" in child.cmdline()).kill()
        assert process.wait() == 1, log.read_text()
    finally:
        process.kill()
        process.wait()
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "failure.txt", "rank_0.log"} <= names
    assert any(path.suffix == ".safetensors" for path in files), "a checkpoint"
    open_to_others = [str(path) for path in (run, *run.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert not open_to_others
    texts = {str(path): path.read_bytes() for path in (*files, log)} | {"command lines": shown}
    assert not [(name, key) for name, text in texts.items() for key in keys if key.encode() in text]
