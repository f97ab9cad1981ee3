"""The rewards of a run and the server of its reward model, from the configuration."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.config import Config, resolved
from megarl.servers.supervisor import ServerDied, State
from megarl.trainer import collectors
from megarl.trainer.collectors import check_rewards, look_after, make_reward_server, make_rewards


def config_of(*fns: str, **model: Any) -> Config:
    config = Config()
    config.model.path, config.trainer.device, config.rollout.engine = "/m", "cpu", "hf"
    config.reward.fn = list(fns)
    for key, value in model.items():
        setattr(config.reward.model, key, value)
    return resolved(config)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "model_folder", lambda path, key: f"{path} of {key}")


def test_the_reward_models_server_is_our_own_with_the_type_of_the_rollout_servers() -> None:
    config = config_of("exact", "model", path="/reward", memory_fraction=0.3)
    servers = make_reward_server(config, "token")
    assert servers is not None
    (watched,) = servers._servers
    launch = watched.process.launch
    assert (launch.engine, launch.dtype, launch.device) == ("hf", config.rollout.dtype, "cpu")
    assert (launch.model_path, launch.scores, launch.memory_fraction) == ("/reward of reward.model.path", True, 0.3)
    assert watched.process.log == config.trainer.run_dir / "logs" / "reward_model" / "server_0.log"
    servers.stop()


def test_a_run_without_a_reward_model_or_with_a_server_of_it_starts_none() -> None:
    assert make_reward_server(config_of("exact"), "token") is None
    assert make_reward_server(config_of("model", path="/reward", url="http://h:1"), "token") is None


@pytest.mark.parametrize("first_gpu", [None, 2])
def test_on_a_machine_with_gpus_one_of_them_is_chosen(first_gpu: int | None) -> None:
    config = config_of("model", path="/reward", first_gpu=first_gpu)
    config.trainer.device = "cuda"
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        pytest.raises(ValueError, match=rf"^reward.model.first_gpu={first_gpu}: expected the GPU of .*, 0 to 1$"),
    ):
        make_reward_server(config, "token")


def test_a_reward_models_server_that_may_not_come_back_stops_the_run() -> None:
    polled: list[str] = []
    event = SimpleNamespace(reason="server 0 ended")
    server: Any = SimpleNamespace(poll=lambda: polled.append("polled") or [], states=[State.RESTING])
    look_after(server, "the reward model")
    assert polled == ["polled"]
    server = SimpleNamespace(poll=lambda: [event], states=[State.OUT])
    with pytest.raises(ServerDied, match="^the server of the reward model is gone; server 0 ended$"):
        look_after(server, "the reward model")


def test_collectors_share_workers_and_limits() -> None:
    config = config_of("exact")
    config.reward.num_workers, config.reward.concurrency, config.reward.per_minute = 3, 5, 1.0
    made = pickle.loads(pickle.dumps(make_rewards(config, 2)))
    assert made.keywords["num_workers"] == 2
    assert made.keywords["make_limit"].args == (3, 0.5, 4, 120.0, 1800.0)


def test_a_functions_file_and_a_services_key_are_looked_at_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def one(prompt):\n    return 0\n")
    with pytest.raises(ValueError, match=r"it takes \(prompt\); expected \(prompt, completion\)"):
        check_rewards(config_of(f"{tmp_path}/mine.py:one"))
    config = config_of("model", path="/reward", url="http://h:1", api_key_env="REWARDS_KEY")
    with pytest.raises(ValueError, match="^reward.model.api_key_env=REWARDS_KEY: expected an environment variable"):
        check_rewards(config)
    monkeypatch.setenv("REWARDS_KEY", "secret")
    check_rewards(config)
