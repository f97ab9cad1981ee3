"""Host memory of routing replay, counted by hand."""

from dataclasses import replace

import pytest
from plan_jobs import GPU, HF, MOE, job

from megarl.plan.memory.host import host_budget
from megarl.plan.memory.routes import COPIES, driver_bytes, machine_bytes, rank_bytes
from megarl.plan.time.constants import CONSTANTS
from megarl.plan.time.serving import Server

REPLAYED = job(hf=MOE, router_replay="rollout", gpu=replace(GPU, memory_bytes=10**8))


def test_a_batch_has_two_experts_of_four_layers_for_each_token():
    assert REPLAYED.tokens == 800
    assert driver_bytes(REPLAYED) == COPIES * 800 * 4 * 2
    assert driver_bytes(replace(REPLAYED, ahead=3)) == (COPIES + 3) * 800 * 4 * 2
    assert driver_bytes(replace(REPLAYED, ahead=3, router_replay="old")) == COPIES * 800 * 4 * 2


def test_more_than_256_experts_take_two_bytes_each():
    many = REPLAYED.hf | {"num_local_experts": 300}
    assert driver_bytes(replace(REPLAYED, hf=many)) == 2 * driver_bytes(REPLAYED)


def test_a_servers_gpu_keeps_four_bytes_for_each_layer_of_all_tokens_that_its_cache_holds():
    """A token's keys and values: 2 bytes, 4 layers, 2 heads, 4 numbers, twice."""
    server = Server(REPLAYED, CONSTANTS)
    assert server.token_bytes == 2 * 4 * 2 * 4 * 2
    tokens = server.cache_bytes // 128
    assert tokens > 10**5
    assert rank_bytes(REPLAYED) == tokens * 4 * 2 * 4
    dense_layers = {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0, 1], "moe_intermediate_size": 8}
    assert driver_bytes(replace(REPLAYED, hf=MOE | dense_layers)) == driver_bytes(REPLAYED) // 2
    limited = replace(REPLAYED, max_total_tokens=1000)
    assert rank_bytes(limited) == 1000 * 4 * 2 * 4
    assert rank_bytes(replace(limited, hf=MOE | dense_layers)) == 1000 * 4 * 2 * 4, "SGLang keeps dense layers too"


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 8),
        ({"num_servers": 3}, 3),
        ({"server_gpus": 3}, 6),
        ({"server_gpus": 4, "num_servers": 1}, 4),
        ({"server_gpus": 8, "attention_dp": 4}, 8),
        ({"server_gpus": 16}, 8),
    ],
)
def test_every_gpu_of_a_machines_servers_has_the_experts_of_its_cache(changes, gpus):
    limits = {"max_total_tokens": 1000, "num_servers": 20, "gpus_per_node": 8}
    one = replace(REPLAYED, **limits | changes)
    assert rank_bytes(one) == 1000 * 4 * 2 * 4
    assert machine_bytes(one) == gpus * rank_bytes(one)


def test_our_own_server_keeps_them_within_its_cache():
    assert rank_bytes(replace(REPLAYED, pins_routes=False)) == 0


def test_the_fullest_machine_is_that_of_the_driver_or_of_servers():
    shared = replace(REPLAYED, max_total_tokens=1000, shared=True)
    found = host_budget(shared)
    assert (found["routes"], found["server_routes"]) == (driver_bytes(shared), machine_bytes(shared))
    apart = replace(shared, shared=False)
    assert machine_bytes(apart) > driver_bytes(apart)
    assert host_budget(apart) == {"server_routes": machine_bytes(apart), "total": machine_bytes(apart)}
    few = replace(apart, max_total_tokens=100)
    assert host_budget(few) == {"routes": driver_bytes(few), "total": driver_bytes(few)}


@pytest.mark.parametrize("changes", [{"router_replay": "off"}, {"hf": HF}])
def test_without_replay_or_experts_nothing_is_counted(changes):
    other = replace(REPLAYED, **changes)
    assert driver_bytes(other) == rank_bytes(other) == 0
