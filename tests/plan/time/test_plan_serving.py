"""Servers, pushes and turns, with numbers that can be followed by hand."""

from dataclasses import replace

import pytest
from plan_jobs import FREE, GPU, HF, MOE, job

from megarl.layout import Layout
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import fullest
from megarl.plan.time import transfers
from megarl.plan.time.flops import shape_of
from megarl.plan.time.lengths import context_of, running, tail_of
from megarl.plan.time.serving import Server, rollout

TOKEN = 2 * 2 * 2 * 4 * 4  # bytes of a token in the cache: 2 bytes, keys and values, 2 heads of 4, 4 layers
WEIGHTS = 2 * whole(HF)


def test_lengths_have_a_mean_and_a_tail():
    one = job(longest=250)
    assert tail_of(one, FREE) == 1.0
    assert tail_of(one, replace(FREE, tail=3.0)) == 3.0
    assert tail_of(one, replace(FREE, tail=9.0)) == 4.0  # 200 of the limit over a mean of 50
    mean = sum(running((at + 0.5) / 1000, 3.0) for at in range(1000)) / 1000
    assert mean == pytest.approx(1 / 3, abs=1e-3)
    assert context_of(one, FREE) == 100.0
    assert context_of(one, replace(FREE, tail=3.0)) == pytest.approx((50**2 + 2 * 50 * 50 + 50**2 * 1.5) / 100)


def test_the_limit_of_completions_is_their_own():
    one, constants = job(longest=250), replace(FREE, tail=9.0)
    assert tail_of(replace(one, most_response=100), constants) == 2.0  # prompts leave some of their 150 unused
    assert tail_of(replace(one, most_response=30), constants) == 1.0


def test_a_step_of_a_server_reads_its_weights_and_the_cache():
    server = Server(job(), FREE)
    assert server.token_bytes == TOKEN
    assert server.step(4) == pytest.approx((WEIGHTS + 4 * TOKEN * 75) / 1e9)


def test_many_completions_are_a_matter_of_products():
    own = job(gpu=replace(GPU, bf16_flops=1e9))
    cache = 100 * TOKEN * 75 / 1e9
    assert Server(own, FREE).step(100) == pytest.approx(2 * 100 * shape_of(HF).active_params / 1e9 + cache)


def test_of_experts_those_are_read_that_somebody_chose():
    own, experts = job(hf=MOE), 4 * 4 * 3 * 16 * 32 * 2
    one, many = (Server(own, FREE).step(n) - n * TOKEN * 75 / 1e9 for n in (1, 1000))
    assert many - one == pytest.approx(experts / 2 / 1e9, rel=0.05)


def test_a_cache_is_shared_as_far_as_there_are_heads():
    sizes = [Server(job(server_gpus=n), FREE).token_bytes for n in (1, 2, 4)]
    assert sizes == [TOKEN, TOKEN / 2, TOKEN / 2]


def test_all_completions_of_one_length_run_together():
    found = rollout(job(), FREE)
    prompts = 2 * 8 * 50 * shape_of(HF).active_params / 1e12
    assert (found.concurrency, found.bound) == (8, "work")
    assert found.seconds == pytest.approx(50 * Server(job(), FREE).step(8) + prompts)


def test_completions_wait_for_a_place():
    found = rollout(job(max_running=2), FREE)
    assert (found.concurrency, found.bound) == (2, "requests")
    assert found.seconds - found.prefill == pytest.approx(8 / 2 * 50 * Server(job(), FREE).step(2))
    full = job(gpu=replace(GPU, memory_bytes=2 * (WEIGHTS + 4 * TOKEN * 75)))
    assert rollout(full, FREE).bound == "cache"
    assert rollout(full, FREE).concurrency == pytest.approx(4)


def test_a_tail_takes_longer_and_is_not_waited_for_ahead():
    tailed = replace(FREE, tail=2.0)
    long = job(longest=500)
    assert rollout(long, tailed).seconds > rollout(long, FREE).seconds
    apart = replace(long, shared=False, ahead=4)
    assert rollout(apart, tailed).tail == 0


def test_a_server_over_machines_sums_through_adapters():
    constants = replace(FREE, all_reduce_s=1.0, all_reduce_nic_s=7.0)
    inside, across = (Server(job(server_gpus=2, gpus_per_node=n), constants).step(1) for n in (2, 1))
    assert inside == pytest.approx(2 * 4 * 1.0, rel=0.01)
    assert across == pytest.approx(2 * 4 * 7.0, rel=0.01)


def test_a_push_sends_each_gpu_its_own_part():
    apart = job(shared=False, num_ranks=4, server_gpus=2, num_servers=1)
    assert transfers.push(apart, FREE) == pytest.approx(WEIGHTS / 2 / GPU.nic_bandwidth)
    many = replace(apart, num_servers=8)  # four ranks send eight models
    assert transfers.push(many, FREE) == pytest.approx(WEIGHTS * 2 / GPU.nic_bandwidth)


def test_shared_gpus_have_some_of_it_near():
    near = job(num_ranks=8, layout=Layout(tp=8, sequence_parallel=True), server_gpus=8)
    assert transfers.near_share(near) == 1
    assert transfers.push(near, FREE) == pytest.approx(WEIGHTS / 8 / GPU.link_bandwidth)
    far = job(num_ranks=32, layout=Layout(tp=8, pp=4, sequence_parallel=True), server_gpus=8, num_servers=4)
    assert transfers.near_share(far) == 1 / 4
    assert transfers.near_share(replace(far, shared=False)) == 0


def test_whole_tensors_are_gathered_and_sent():
    alone = job(shared=False, push="gathered")
    assert transfers.push(alone, FREE) == pytest.approx(WEIGHTS / GPU.nic_bandwidth)
    cut = replace(alone, layout=Layout(tp=2), num_ranks=2)
    assert transfers.push(cut, FREE) == pytest.approx(WEIGHTS / GPU.nic_bandwidth + WEIGHTS / 2 / GPU.link_bandwidth)


def test_experts_go_stacked_unless_they_are_gathered():
    assert transfers.tensors(job(hf=MOE)) == 4 * (12 + 3)
    assert transfers.tensors(job(hf=MOE, push="gathered")) == 4 * (12 + 3 * 4)


def test_an_offloaded_role_comes_and_goes_for_each_call():
    own = job(param_offload=True, optimizer_offload=True)
    held = fullest(own.actor)
    assert transfers.offload_of_call(own, own.actor, held, FREE, learns=False) == pytest.approx(2 * held.weights / 1e8)
    both = held.weights + held.optimizer
    assert transfers.offload_of_call(own, own.actor, held, FREE, learns=True) == pytest.approx(2 * both / 1e8)
    assert transfers.offload_of_turn(own, own.actor, held, FREE) == 0


def test_another_stays_for_the_whole_turn():
    own = job()
    held = fullest(own.actor)
    assert transfers.offload_of_call(own, own.actor, held, FREE, learns=True) == 0
    assert transfers.offload_of_turn(own, own.actor, held, FREE) == pytest.approx(
        2 * (held.weights + held.optimizer) / 1e8
    )
    assert transfers.offload_of_turn(replace(own, shared=False), own.actor, held, FREE) == 0
    assert (
        transfers.offload_of_push(replace(own, shared=False), held, FREE)
        == 0
        < transfers.offload_of_push(own, held, FREE)
    )


def test_servers_that_share_sleep_and_wake():
    constants = replace(FREE, sleep_s=2.0, wake_s=3.0)
    assert transfers.offload_of_servers(job(), constants) == 5.0
    assert transfers.offload_of_servers(job(shared=False), constants) == 0.0
