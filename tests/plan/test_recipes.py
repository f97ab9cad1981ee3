"""configs/recipe: whole runs that are named by their hardware compose as they are, and are what they are named."""

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ladder import ROOT, read_ladder

from megarl.arch.gpus import GPUS
from megarl.config import load_config, recipe_names
from megarl.config.placement import gpu_seats, placements
from megarl.plan.from_config import job_of
from megarl.plan.lengths import tail_of
from megarl.plan.predictions import lost_at_an_end
from megarl.trainer.servers.colocation import check_shared_gpus
from megarl.weights.push.gpu_handles import Gpus
from megarl.weights.push.state import PushState

HARDWARE = re.compile(r"(?P<method>grpo|ppo)_(?P<model>\w+)_(?P<nodes>\d+)x(?P<gpus>\d+)h(?P<gpu>100|200)")
RUNS = [name for name in recipe_names() if HARDWARE.fullmatch(name)]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_needs_nothing_typed(name):
    """And a push finds a rank of the actor on every GPU of a server, so that it goes by memory that both map."""
    named = HARDWARE.fullmatch(name)
    config, warnings = load_config([f"recipe={name}", "trainer.device=cuda"], command="train")
    assert not warnings
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (int(named["nodes"]), int(named["gpus"]))
    assert config.trainer.experiment_name == name
    assert config.uses_critic == (named["method"] == "ppo")
    assert config.algorithm.adv_estimator == {"ppo": "gae", "grpo": "grpo"}[named["method"]]
    assert config.rollout.engine == "sglang" and config.rollout.placement == "shared"
    assert config.rollout.push == "auto"
    assert config.model.dtype == "bfloat16"
    # 20 steps may be a working day, and a step may be longer than the time between a warning and the end of a machine.
    assert lost_at_an_end(config, f"NVIDIA H{named['gpu']}", 500) == ""
    assert_shares(config)
    assert_no_completion_is_planned_longer_than_it_may_be(config)


def test_so_does_the_run_of_one_gpu():
    (rung,) = [rung for rung in read_ladder(ROOT / "launch/one_gpu.toml") if rung.name == "sglang_quickstart"]
    words = shlex.split(rung.commands[0].format(python="python", out="/out"))
    config, warnings = load_config(words[words.index("train") + 1 :], command="train")
    assert not warnings
    assert config.rollout.placement == "shared"
    assert_shares(config)


def test_trainer_and_server_of_the_reference_run_take_its_one_gpu_in_turns():
    config, warnings = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu", "trainer.device=cuda"], command="train")
    assert not warnings
    assert config.rollout.engine == "auto"
    assert placements(config, trains=True) == [(range(0, 1), 0)]
    assert_shares(config)


def assert_shares(config):
    check_shared_gpus(config)
    urls = [f"http://{index}" for index in range(config.rollout.num_servers)]
    gpus = Gpus(**gpu_seats(config, urls))
    assert sorted(gpu for seats in gpus.servers.values() for gpu in seats) == sorted(gpus.trainer)
    with ThreadPoolExecutor(1) as threads:
        servers = {url: server_at(url, gpus.servers[url]) for url in urls}
        targets = PushState(servers, threads, 1, flush_cache=True, checks=False)
        targets.choose(config.rollout.push, on_gpu=True, is_cut=True, gpus=gpus.trainer)
    assert targets.waiting() == dict.fromkeys(urls, "shared")


def server_at(url, gpus):
    """As a server of SGLang that runs there would be found to be."""
    able = SimpleNamespace(
        first_gpu=int(gpus[0].split("/")[1]), has_receiver=True, is_plain=True, is_stacked=False, drafts=False
    )
    return SimpleNamespace(url=url, gpus=gpus, capabilities=able, fits_slices=None)


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_what_is_ones_own_takes_five_words(method):
    own = ["data.train_files=[my.jsonl]", "data.val_files=[]", "trainer.logger=[wandb]", "reward.fn=gsm8k"]
    name = next(name for name in RUNS if name.startswith(method))
    config, _ = load_config([f"recipe={name}", *own, "model.path=/models/mine"], command="train")
    assert config.model.path == "/models/mine"
    assert config.model.config["model_type"]


@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in RUNS and not name.endswith("sft")])
def test_other_runs_are_planned_with_lengths_that_may_be(name):
    """With a preset in place of models that are downloaded or made, and without teachers, who are as well."""
    taught = load_config([f"recipe={name}"], command="config")[0].teachers
    alone = ["teachers={}", "algorithm.adv_estimator=grpo", "rollout.n=2"] if taught else []
    config, _ = load_config([f"recipe={name}", "model=qwen3_mini", *alone], command="config")
    assert_no_completion_is_planned_longer_than_it_may_be(config)


def assert_no_completion_is_planned_longer_than_it_may_be(config):
    job = job_of(config, GPUS["h100"])
    assert job.most_response == config.data.max_response_length < job.longest - job.prompt_tokens
    assert tail_of(job) * job.response_tokens <= config.data.max_response_length
