"""Collectors, and the processes of rewards that they start, get no secret through their environment."""

from functools import partial
from pathlib import Path

import psutil

from megarl.rewards.scorer import Rewards
from megarl.rewards.surroundings import Surroundings
from megarl.rollout.collector.collector_client import Collectors

SECRETS = ("MEGARL_TOKEN", "MEGARL_SERVER_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")


def variables_of(process: psutil.Process) -> str:
    """As a program got them; "" if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/environ").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_collectors_and_rewards_get_allowed_variables_only(model_path, tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, f"the secret of {name}")
    collectors = Collectors(
        urls=["http://127.0.0.1:9"],
        token="",
        tokenizer_path=model_path,
        make_scorer=partial(Rewards, ["exact"], surroundings=Surroundings(environment={"OWN": "the secret of OWN"})),
        timeout_s=200,
        log_path=tmp_path / "collector.log",
    )
    try:
        (pid,) = collectors.pids
        # multiprocessing's two servers of the collector, and a process of rewards
        while len(found := list(filter(None, map(variables_of, psutil.Process(pid).children(recursive=True))))) < 3:
            collectors.wait(0.05)  # raises if the collector ends
        found.append(variables_of(psutil.Process(pid)))
    finally:
        collectors.close()
    for variables in found:
        names = {variable.partition("=")[0] for variable in variables.split("\0")}
        assert "PATH" in names and not names & set(SECRETS)
        assert "the secret of" not in variables
