"""The rewards of a run, from the configuration; its reward model on a server, and on the ranks."""

import asyncio
import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from answers import completion
from chat_templates import tokenizer_of
from config_helpers import load
from safetensors.torch import load_file, save_file
from tiny_server import make_model, make_reward_model

from megarl.algo.finite import BadNumber
from megarl.config import Config, resolved
from megarl.rewards.scorer import RewardSettings
from megarl.samples.sample import Prompt, Sample
from megarl.servers.supervisor import ServerDied, State
from megarl.trainer import collectors
from megarl.trainer.checks.rewards import check_reward_model, check_rewards
from megarl.trainer.collectors import check_agents, make_rewards
from megarl.trainer.roles import Roles
from megarl.trainer.servers import make_servers
from megarl.trainer.servers.make_servers import look_after, make_reward_server


def config_of(*fns: str, **model: Any) -> Config:
    config = Config()
    config.model.path, config.trainer.device, config.rollout.engine = "/m", "cpu", "hf"
    config.reward.fn = list(fns)
    for key, value in model.items():
        setattr(config.reward.model, key, value)
    return resolved(config)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collectors, make_servers):
        monkeypatch.setattr(module, "model_folder", lambda path, key: f"{path} of {key}")


@pytest.mark.usefixtures("folders")
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
    assert make_reward_server(config_of("exact"), "token") is None
    assert make_reward_server(config_of("model", path="/reward", url="http://h:1"), "token") is None, "it has one"


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
    assert made.keywords["settings"].num_workers == 2
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


def sample(text: str, reward: float, **extra: float) -> Sample:
    return Sample.of(Prompt("0-0", [7, 8], "x"), completion(text), reward, extra)


def scorer(*scores: float) -> tuple[Any, list[list[int]]]:
    """Gives these scores in turn; and the sequences that it saw."""
    left, seen = iter(scores), list[list[int]]()

    def score(sequences: list[list[int]]) -> list[float]:
        seen.extend(sequences)
        return [next(left) for _ in sequences]

    return SimpleNamespace(weight=0.5, scores=score), seen


def test_scores_count_with_their_weight_where_the_stand_in_was() -> None:
    nobody: Any = None
    model, seen = scorer(2.0, -4.0)
    judged = [sample("a", 1.0, exact=1.0, model=0.0), sample("b", 0.0, exact=0.0, model=0.0)]
    other = sample("c", 3.0, own=3)
    (first, second), (found,) = Roles(nobody, reward_model=model).scored([judged, [other]])
    assert (first.reward, first.reward_extra) == (2.0, {"exact": 1.0, "model": 2.0})
    assert (second.reward, second.reward_extra) == (-2.0, {"exact": 0.0, "model": -4.0})
    assert found is other
    assert seen == [[7, 8, 1]] * 2
    with pytest.raises(BadNumber, match="the reward model's score of the sample 0-0 is nan; expected a number"):
        Roles(nobody, reward_model=scorer(math.nan)[0]).scored([judged[:1]])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.mark.parametrize("fn", ["model", "[exact,model]"])
def test_the_stand_in_of_collectors_marks_what_is_to_be_scored(policy: str, tmp_path: Path, fn: str) -> None:
    judge = make_reward_model(tmp_path / "judge", seed=2)
    words = (f"reward.fn={fn}", f"reward.model.path={judge}", "reward.model.engine=megatron")
    rewards = make_rewards(load(f"model.path={policy}", *words), 1)(settings=RewardSettings(num_workers=0))
    (outcome,) = asyncio.run(rewards.score(Prompt("0-0", [1], "x", ground_truth="a"), [completion("a")]))
    assert not isinstance(outcome, str)
    exact = {} if fn == "model" else {"exact": 1.0}
    assert (outcome.reward, outcome.extra) == (sum(exact.values()), {**exact, "model": 0.0})


def check_judge(policy: str, judge: str, *, greedy: bool = False) -> None:
    words = (f"model.path={policy}", "reward.fn=model", f"reward.model.path={judge}", "reward.model.engine=megatron")
    check_reward_model(load(*words), wants_greedy=greedy)


def test_a_model_for_ranks_has_one_score_and_the_tokens_of_the_policy(policy: str, tmp_path: Path) -> None:
    judge = make_reward_model(tmp_path / "judge", seed=2)
    weights_file, tokens_file = tmp_path / "judge" / "model.safetensors", tmp_path / "judge" / "tokenizer.json"
    check_judge(policy, judge)
    with pytest.raises(ValueError, match="it compares with a greedy completion, which reward.model.engine=megatron do"):
        check_judge(policy, judge, greedy=True)
    with pytest.raises(ValueError, match="it has no score.weight; expected a model for sequence classification"):
        check_judge(policy, policy)
    weights = load_file(weights_file)
    save_file({**weights, "score.weight": weights["score.weight"].repeat(2, 1)}, weights_file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"it has score.weight of the shape \[2, \d+\]; expected a model for sequence"):
        check_judge(policy, judge)
    save_file(weights, weights_file, {"format": "pt"})
    content = json.loads(tokens_file.read_text())
    vocab = content["model"]["vocab"]
    one, other = [name for name in vocab if len(name) == 1][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    tokens_file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its tokenizer has other tokens than that of .*; expected a model of "):
        check_judge(policy, judge)


@pytest.mark.parametrize(
    ("style", "parser", "sentence"),
    [
        ("glm4", "auto", ""),
        ("glm4", "glm", ""),
        ("glm4", "none", ""),
        ("glm4", "hermes", "agent.tool_parser=hermes: tool calls are read as hermes, but the chat template writes"),
        (
            "phi",
            "auto",
            "agent.tool_parser=auto: tool calls are read as hermes, but the chat template writes them as '<|",
        ),
    ],
)
def test_a_sentence_says_where_the_template_writes_calls_otherwise_than_they_are_read(
    style: str, parser: str, sentence: str, tmp_path: Path
) -> None:
    tokenizer_of(style).save_pretrained(tmp_path)
    config = Config()
    config.model.tokenizer_path, config.agent.tool_parser = str(tmp_path), parser
    config.agent.command, config.agent.history = ["true"], "rendered"
    said = check_agents(config)
    assert said.startswith(sentence) and bool(said) == bool(sentence)
