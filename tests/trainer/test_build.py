"""From the configuration to the parts of a run."""

from __future__ import annotations

import pytest
from config_helpers import load

from megarl.trainer.build import make_group


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        (["trainer.n_gpus_per_node=2", "actor.megatron.tensor_model_parallel_size=2"], True),
        (["trainer.n_gpus_per_node=2", "actor.megatron.context_parallel_size=2"], True),
        (["trainer.n_gpus_per_node=2"], False),
        (["trainer.n_gpus_per_node=4", "actor.megatron.tensor_model_parallel_size=2", "actor.strategy=fsdp"], False),
    ],
)
def test_ranks_that_overlap_communication_get_one_hardware_queue(words: list[str], ordered: bool) -> None:
    config = load(*words)
    group = make_group(config, config.actor, "ranks_0")
    assert not group._setup["has_neighbours"]
    assert dict(group._environment) == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered else {})
    assert group._start_timeout_s == config.trainer.start_timeout_s == 600


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        (["rollout.first_gpu=1", "rollout.memory_fraction=0.3"], True),
        (["rollout.first_gpu=2"], False),
        (["rollout.first_gpu=1", "rollout.placement=shared"], False),  # in turns
        (["rollout.urls=['http://a:1']"], False),
        (["actor.num_ranks=1", "rollout.first_gpu=1", "rollout.memory_fraction=0.3"], False),
    ],
)
def test_ranks_learn_of_servers_that_work_on_their_gpus_at_the_same_time(words: list[str], beside: bool) -> None:
    config = load("trainer.n_gpus_per_node=2", *words)
    assert make_group(config, config.actor, "ranks_0")._setup["has_neighbours"] == beside
