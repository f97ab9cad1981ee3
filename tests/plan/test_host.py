"""Host memory of a machine, counted by hand: offloaded roles, checkpoints, replays and what teachers say of tokens."""

from dataclasses import replace

import numpy as np
import pytest
from config_helpers import DENSE, load
from plan_jobs import GPU, HF, MOE, changed, job

from megarl.arch.layout import Layout
from megarl.plan.from_config import job_of
from megarl.plan.gpu_budget import fullest, gpu_budgets, gpu_budgets_of_trainer
from megarl.plan.host import (
    COPIES,
    RANK_COPIES,
    STEP_COPIES,
    host_budget,
    routes_in_driver,
    routes_per_machine,
    routes_per_server_gpu,
    saved_bytes,
    supports_in_driver,
    teaching_in_driver,
    teaching_per_rank,
)
from megarl.plan.job import Role
from megarl.plan.predict import predict
from megarl.plan.serving import Server
from megarl.samples.ragged import Ragged
from megarl.weights.count import whole

QWEN = f"{DENSE[:-1]},model_type:qwen3}}"
CRITIC = Role("critic", HF, Layout(), 4, max_tokens=100, log_prob_tokens=100)


def test_a_checkpoint_has_weights_master_weights_and_moments():
    actor = job().actor
    assert saved_bytes(actor) == whole(HF) * (2 + 4 + 8)
    assert saved_bytes(replace(actor, dtype="float32")) == whole(HF) * (4 + 8)
    assert saved_bytes(replace(actor, optimizer="sgd")) == whole(HF) * (2 + 4 + 4)
    # A matrix [out, in] has adapters of rank * (out + in): per layer q and o 32 each, k and v 24, gate, up, down 48.
    assert saved_bytes(replace(actor, lora_rank=8)) == 4 * 8 * (2 * 32 + 2 * 24 + 3 * 48) * 14


def test_copies_are_the_share_of_a_machine():
    own = job(num_ranks=16, gpus_per_node=8, shared=False, async_save=True)
    assert host_budget(own) == {"save_copies": whole(HF) * 14 // 2, "total": whole(HF) * 14 // 2}
    assert host_budget(replace(own, async_save=False)) == {"total": 0}
    small = changed(own, num_ranks=4)
    assert host_budget(small)["save_copies"] == whole(HF) * 14


def test_every_role_that_is_offloaded_counts_on_each_rank():
    own = job(num_ranks=4, shared=True, critic=CRITIC)
    actor, critic = fullest(own.actor), fullest(CRITIC)
    assert host_budget(own) == {
        "weights": 4 * (actor.weights + critic.weights),
        "optimizer": 4 * (actor.optimizer + critic.optimizer),
        "total": 4 * (actor.weights + critic.weights + actor.optimizer + critic.optimizer),
    }
    apart = replace(own, shared=False, critic=replace(CRITIC, optimizer_offload=True, first_rank=4))
    assert host_budget(apart) == {"optimizer": 4 * critic.optimizer, "total": 4 * critic.optimizer}
    beside = changed(apart, param_offload=True, gpus_per_node=8)
    both = {"weights": 4 * actor.weights, "optimizer": 4 * critic.optimizer}
    assert host_budget(beside) == both | {"total": sum(both.values())}, "on other GPUs of the same machine"
    assert host_budget(replace(beside, gpus_per_node=4))["total"] == max(both.values())


def test_adam_on_the_host_has_its_moments_a_copy_and_gradients_there():
    own = job(num_ranks=4, shared=False)
    there = changed(own, optimizer_on_host=True)
    learnt = fullest(own.actor).optimizer // 12  # a float32 copy and two moments of each parameter
    assert fullest(there.actor).optimizer == 4 * learnt, "the copy stays on the GPU"
    assert host_budget(there) == {"optimizer": 4 * 16 * learnt, "total": 4 * 16 * learnt}
    assert saved_bytes(there.actor) == saved_bytes(own.actor)
    on_gpu, on_host = changed(own, lora_rank=8), changed(there, lora_rank=8)
    assert fullest(on_gpu.actor).optimizer == 3 * fullest(on_host.actor).optimizer


def test_a_save_needs_no_gradients_and_gathers_only_with_fsdp():
    own = job(param_offload=True, optimizer_offload=True)
    found = gpu_budgets(own)["save"]
    held = fullest(own.actor)
    assert found == {
        "weights": held.weights, "optimizer": held.optimizer, "reserve": held.reserve,
        "total": held.weights + held.optimizer + held.reserve,
    }  # fmt: skip
    fsdp = job(num_ranks=2, fsdp=True, layout=Layout(use_distributed_optimizer=True))
    assert gpu_budgets(fsdp)["save"]["gathered"] == 2 * whole(HF)


def test_host_memory_is_compared_where_it_is_known():
    own = job(num_ranks=8, async_save=True, gpu=replace(GPU, memory_bytes=10**11))
    assert predict(own).fits
    found = predict(replace(own, gpu=replace(own.gpu, host_bytes=10**6)))
    assert not found.fits
    assert any(line.startswith("host: 0 GB of the 0 of a machine, most of it ") for line in found.why)


# ---- routing replay

REPLAYED = job(hf=MOE, router_replay="rollout", gpu=replace(GPU, memory_bytes=10**8))


def test_a_batch_has_two_experts_of_four_layers_for_each_token():
    assert REPLAYED.tokens == 800
    assert routes_in_driver(REPLAYED) == COPIES * 800 * 4 * 2
    assert routes_in_driver(replace(REPLAYED, ahead=3)) == (COPIES + 3) * 800 * 4 * 2
    assert routes_in_driver(replace(REPLAYED, ahead=3, router_replay="old")) == COPIES * 800 * 4 * 2


def test_more_than_256_experts_take_two_bytes_each():
    many = REPLAYED.actor.hf | {"num_local_experts": 300}
    assert routes_in_driver(changed(REPLAYED, hf=many)) == 2 * routes_in_driver(REPLAYED)


def test_a_servers_gpu_keeps_four_bytes_for_each_layer_of_all_tokens_that_its_cache_holds():
    """A token's keys and values: 2 bytes, 4 layers, 2 heads, 4 numbers, twice."""
    server = Server(REPLAYED)
    assert server.token_bytes == 2 * 4 * 2 * 4 * 2
    tokens = server.cache_bytes // 128
    assert tokens > 10**5
    assert routes_per_server_gpu(REPLAYED) == tokens * 4 * 2 * 4
    dense_layers = {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0, 1], "moe_intermediate_size": 8}
    assert routes_in_driver(changed(REPLAYED, hf=MOE | dense_layers)) == routes_in_driver(REPLAYED) // 2
    limited = replace(REPLAYED, max_total_tokens=1000)
    assert routes_per_server_gpu(limited) == 1000 * 4 * 2 * 4
    assert routes_per_server_gpu(changed(limited, hf=MOE | dense_layers)) == 1000 * 4 * 2 * 4, (
        "SGLang keeps dense layers too"
    )


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
    one = changed(REPLAYED, **limits | changes)
    assert routes_per_server_gpu(one) == 1000 * 4 * 2 * 4
    assert routes_per_machine(one) == gpus * routes_per_server_gpu(one)


def test_our_own_server_keeps_them_within_its_cache():
    assert routes_per_server_gpu(replace(REPLAYED, pins_routes=False)) == 0


def test_the_fullest_machine_is_that_of_the_driver_or_of_servers():
    shared = replace(REPLAYED, max_total_tokens=1000, shared=True)
    found = host_budget(shared)
    assert (found["routes"], found["server_routes"]) == (routes_in_driver(shared), routes_per_machine(shared))
    apart = replace(shared, shared=False)
    assert routes_per_machine(apart) > routes_in_driver(apart)
    assert host_budget(apart) == {"server_routes": routes_per_machine(apart), "total": routes_per_machine(apart)}
    few = replace(apart, max_total_tokens=100)
    assert host_budget(few) == {"routes": routes_in_driver(few), "total": routes_in_driver(few)}


@pytest.mark.parametrize("changes", [{"router_replay": "off"}, {"hf": HF}])
def test_without_replay_or_experts_nothing_is_counted(changes):
    other = changed(REPLAYED, **changes)
    assert routes_in_driver(other) == routes_per_server_gpu(other) == 0


# ---- what teachers say of tokens

NARROW, WIDE = (
    Role(f"teachers.{size}", HF | {"hidden_size": size}, Layout(), 1, max_tokens=100, log_prob_tokens=100)
    for size in (8, 24)
)
# 8 prompts of one completion, 50 + 50 tokens; two optimizer steps.
WHOLE = job(teachers=(NARROW, WIDE), reads_heads=True, mini_batch=4, num_ranks=4, layout=Layout(tp=2))
LIKELIEST = replace(WHOLE, reads_heads=False, teacher_top_k=6)


def test_hidden_states_of_the_widest_teacher_travel_one_optimizer_step_at_a_time():
    assert teaching_in_driver(WHOLE) == STEP_COPIES * 400 * 24 * 2
    assert teaching_in_driver(changed(WHOLE, dtype="float32")) == 2 * teaching_in_driver(WHOLE)
    assert teaching_in_driver(replace(WHOLE, mini_batch=16)) == 2 * teaching_in_driver(WHOLE)


def test_every_rank_has_those_of_its_replica():
    """Two replicas of two ranks."""
    assert teaching_per_rank(WHOLE) == RANK_COPIES * 200 * 24 * 2
    assert host_budget(replace(WHOLE, shared=False))["taught"] == teaching_in_driver(WHOLE) + 4 * teaching_per_rank(
        WHOLE
    )


def test_likeliest_tokens_take_eight_bytes_each_in_the_whole_batch():
    assert teaching_in_driver(LIKELIEST) == 4 * 800 * 6 * 8
    assert teaching_per_rank(LIKELIEST) == RANK_COPIES * 200 * 6 * 8


def test_a_machine_of_further_ranks_has_no_driver():
    there = {"first_rank": 8, "gpus_per_node": 8, "shared": False, "teachers": (replace(WIDE, first_rank=8),)}
    large = changed(WHOLE, num_ranks=16, **there)
    assert host_budget(large)["taught"] == 8 * teaching_per_rank(large)


@pytest.mark.parametrize(
    ("words", "reads_heads", "top_k"),
    [
        ([], True, 0),
        (["distill.top_k=16"], False, 16),
        (["distill.form=reward"], False, 0),
        (["teachers.a.engine=server", "distill.top_k=16", "rollout.engine=hf"], False, 16),
        (None, False, 0),
    ],
)
def test_a_configuration_says_what_travels(words, reads_heads, top_k):
    words_of_teachers = [] if words is None else ["teachers.a.model.path=t", f"teachers.a.{QWEN}", *words]
    found = job_of(load(QWEN, *words_of_teachers), GPU)
    assert (found.reads_heads, found.teacher_top_k) == (reads_heads, top_k)
    assert ("taught" in host_budget(found)) == (reads_heads or top_k > 0)


# ---- sampling-mask replay

NARROWED = job(most_drawn=20, num_servers=1)


def test_each_token_in_training_has_places_for_the_most_ids_and_every_token_their_number():
    """8 prompts of one completion, 50 + 50 tokens.  One sequence of long lists gives every token as many places."""
    assert supports_in_driver(NARROWED) == COPIES * (8 * 100 * 20 + 8 * 100) * 4
    assert (
        supports_in_driver(replace(NARROWED, ahead=3)) == supports_in_driver(NARROWED) + 3 * (8 * 50 * 20 + 8 * 100) * 4
    )


def test_the_batch_of_a_driver_takes_no_more_than_is_counted():
    """7 sequences whose tokens have one id, and one of a prompt of 1 token and an answer of 99, each with 20 ids."""
    rows = [*[[]] * 50, *[[7]] * 50] * 7 + [[], *[list(range(20))] * 99]
    columns = Ragged.of(rows).spread(np.full(8, 100))
    assert (
        0.95 * supports_in_driver(NARROWED)
        < COPIES * sum(column.nbytes for column in columns)
        <= supports_in_driver(NARROWED)
    )


def test_the_last_stage_has_the_ids_of_a_micro_batch_and_their_places_in_a_chunk():
    """100 tokens of 20 ids: 4 bytes each and 40 bytes of indices; 64 logits of each token, a byte each."""
    plain, narrowed = (gpu_budgets_of_trainer(each)["actor"] for each in (job(num_servers=1), NARROWED))
    more = 100 * 20 * (4 + 40) + 100 * 64
    assert narrowed["log_prob_chunk"] - plain["log_prob_chunk"] == narrowed["total"] - plain["total"] == more


def test_it_is_counted_on_the_machine_of_the_driver():
    assert host_budget(NARROWED)["support"] == supports_in_driver(NARROWED)


def test_without_narrowing_nothing_is_counted():
    assert supports_in_driver(job()) == 0


def test_the_most_ids_are_those_of_top_k_or_the_vocabulary():
    """QWEN has a vocabulary of 120."""
    for words, most in ((["top_k=20"], 20), (["top_k=500"], 120), (["top_p=0.5"], 120), ([], 0)):
        config = load(QWEN, "rollout.engine=hf", *(f"rollout.{word}" for word in words))
        assert job_of(config, GPU).most_drawn == most
