"""Servers, pushes and turns, with numbers that can be followed by hand."""

from dataclasses import replace

import pytest
from plan_jobs import FREE, GPU, HF, HYBRID, INDEXED, MIXED, MOE, changed, job
from preset_files import hf_of

from megarl.arch.layout import Layout
from megarl.plan import transfers
from megarl.plan.gpu_budget import fullest, gpu_budgets
from megarl.plan.lengths import context_of, running, tail_of
from megarl.plan.serving import Server, rollout, step_ahead
from megarl.weights.count import shape_of, whole

TOKEN = 2 * 2 * 2 * 4 * 4  # bytes of a token in the cache: 2 bytes, keys and values, 2 heads of 4, 4 layers
WEIGHTS = 2 * whole(HF)

FAST = replace(FREE, memory=1e30)  # memory of a GPU takes no time, either


def test_lengths_have_a_mean_and_a_tail():
    one = job(longest=250)
    assert tail_of(one) == 1.0
    assert tail_of(replace(one, constants=replace(FREE, tail=3.0))) == 3.0
    assert tail_of(replace(one, constants=replace(FREE, tail=9.0))) == 4.0  # 200 of the limit over a mean of 50
    mean = sum(running((at + 0.5) / 1000, 3.0) for at in range(1000)) / 1000
    assert mean == pytest.approx(1 / 3, abs=1e-3)
    assert context_of(one) == 100.0
    assert context_of(replace(one, constants=replace(FREE, tail=3.0))) == pytest.approx(
        (50**2 + 2 * 50 * 50 + 50**2 * 1.5) / 100
    )


def test_the_limit_of_completions_is_their_own():
    one, constants = job(longest=250), replace(FREE, tail=9.0)
    assert (
        tail_of(replace(one, most_response=100, constants=constants)) == 2.0
    )  # prompts leave some of their 150 unused
    assert tail_of(replace(one, most_response=30)) == 1.0


def test_a_step_of_a_server_reads_its_weights_and_the_cache():
    server = Server(job())
    assert server.token_bytes == TOKEN
    assert server.step(4) == pytest.approx((WEIGHTS + 4 * TOKEN * 75) / 1e9)


def test_many_completions_are_a_matter_of_products():
    own = job(gpu=replace(GPU, bf16_flops=1e9))
    cache = 100 * TOKEN * 75 / 1e9
    assert Server(own).step(100) == pytest.approx(2 * 100 * shape_of(HF).active_params / 1e9 + cache)


def test_of_experts_those_are_read_that_somebody_chose():
    own, experts = job(hf=MOE), 4 * 4 * 3 * 16 * 32 * 2
    one, many = (Server(own).step(n) - n * TOKEN * 75 / 1e9 for n in (1, 1000))
    assert many - one == pytest.approx(experts / 2 / 1e9, rel=0.05)


def test_a_cache_is_shared_as_far_as_there_are_heads():
    sizes = [Server(job(server_gpus=n)).token_bytes for n in (1, 2, 4)]
    assert sizes == [TOKEN, TOKEN / 2, TOKEN / 2]


def test_attention_groups_divide_the_completions_and_repeat_attention():
    # 4 layers of 16*(4+2*2)*4 + 16*16 numbers of matrices and 2 norms of 16, and two tables of 64 * 16
    again = 4 * (16 * 8 * 4 + 16 * 16 + 2 * 16) + 2 * 64 * 16
    whole_group, two = (Server(job(server_gpus=2, attention_dp=n)) for n in (1, 2))
    assert two.weight_bytes - whole_group.weight_bytes == 2 * again // 2
    assert (whole_group.token_bytes, two.token_bytes) == (TOKEN / 2, TOKEN)  # a group of one GPU has all heads
    assert two.room == pytest.approx(2 * two.cache_bytes / (TOKEN * 75))
    # Either way a GPU reads half of the cache of 8 completions.  An all-reduce over both GPUs in a layer is left out.
    all_reduce = 2 * (2 * 8 * 16) / 2 / GPU.link_bandwidth
    added = (two.weight_bytes - whole_group.weight_bytes) / 1e9 - 4 * all_reduce
    assert two.step(8) - whole_group.step(8) == pytest.approx(added)


def test_a_latent_cache_is_divided_by_groups_alone():
    own = job(hf=hf_of("deepseek_v3_671b"), gpu=replace(GPU, memory_bytes=10**12), server_gpus=16)
    plain, groups = Server(own), Server(replace(own, attention_dp=16))
    assert plain.token_bytes == groups.token_bytes == 2 * 61 * (512 + 64)
    assert groups.room / plain.room == pytest.approx(16 * groups.cache_bytes / plain.cache_bytes)


def test_layers_with_a_state_have_a_pool_of_states_beside_the_cache():
    """One of four layers has keys and values; the others 4 value heads of 4 x 8, and 3 inputs of a convolution."""
    hf = HYBRID | {"linear_num_value_heads": 4}
    one, two = (Server(job(hf=hf, gpu=replace(GPU, memory_bytes=10**7), server_gpus=n)) for n in (1, 2))
    assert one.token_bytes == 2 * 1 * 2 * 2 * 4
    assert one.state_bytes == 3 * (4 * 4 * 4 * 8 + 2 * 3 * (2 * 2 * 4 + 4 * 8)) == 2 * two.state_bytes
    assert (one.pool_bytes, one.pool_bytes + one.cache_bytes) == (int(0.9 / 1.9 * one.free_bytes), one.free_bytes)
    assert one.room == pytest.approx(one.pool_bytes / (5 * one.state_bytes))
    assert one.room < one.cache_bytes / one.token_bytes / 75
    assert gpu_budgets(one.job)["server"]["states"] == one.pool_bytes
    read = (one.weight_bytes + 4 * (75 * one.token_bytes + 2 * one.state_bytes)) / 1e9
    assert one.step(4) == pytest.approx(read)


def test_of_a_model_without_attention_states_alone_take_room():
    one = Server(job(hf=HYBRID | {"layer_types": ["linear_attention"] * 4}))
    assert one.token_bytes == 0 and one.room == pytest.approx(one.pool_bytes / (5 * one.state_bytes))


def test_mamba_layers_have_states_and_those_without_a_mixer_neither_cache_nor_state():
    """Four heads of 2 x 3 in float32, and 3 inputs of a convolution over x, B and C; one of four layers attends."""
    one, two = (Server(job(hf=MIXED, server_gpus=n)) for n in (1, 2))
    assert one.token_bytes == 2 * 2 * 2 * 4 == 2 * two.token_bytes
    assert one.state_bytes == 4 * 4 * 2 * 3 + 2 * 3 * (4 * 2 + 2 * 2 * 3) == 2 * two.state_bytes
    reduced = two._reduced(8, 2)
    assert two._sent(8) == pytest.approx(4 * reduced), "once in each layer, not twice"


def test_a_step_reads_the_chosen_latents_and_all_keys_of_indexers():
    """66 bytes for a key of 64 numbers and its share of a scale, in two of four layers."""
    server = Server(job(hf=INDEXED))
    assert server.token_bytes == 4 * 2 * (8 + 2) + 2 * 66
    read = 4 * 32 * 2 * (8 + 2) + 2 * 75 * 66
    assert server.step(4) == pytest.approx((server.weight_bytes + 4 * read) / 1e9)


def test_a_quantized_server_has_a_byte_for_a_parameter_but_whole_tables():
    plain, fp8 = (Server(job(server_precision=name)).weight_bytes for name in ("bf16", "fp8"))
    assert plain - fp8 == whole(HF) - 2 * 64 * 16


def test_all_completions_of_one_length_run_together():
    found = rollout(job())
    prompts = 2 * 8 * 50 * shape_of(HF).active_params / 1e12
    assert (found.concurrency, found.bound) == (8, "work")
    assert found.seconds == pytest.approx(50 * Server(job()).step(8) + prompts)


def test_completions_wait_for_a_place():
    found = rollout(job(max_running=2))
    assert (found.concurrency, found.bound) == (2, "requests")
    assert found.seconds - found.prefill == pytest.approx(8 / 2 * 50 * Server(job()).step(2))
    full = job(gpu=replace(GPU, memory_bytes=2 * (WEIGHTS + 4 * TOKEN * 75)))
    assert rollout(full).bound == "cache"
    assert rollout(full).concurrency == pytest.approx(4)


def test_a_tail_takes_longer_and_is_written_beside_others_ahead():
    tailed = replace(FREE, tail=2.0)
    long = job(longest=500)
    assert rollout(replace(long, constants=tailed)).seconds > rollout(long).seconds
    apart = replace(long, shared=False, ahead=4)
    assert rollout(replace(apart, constants=tailed)).tail == 0


def test_ahead_full_servers_write_an_iteration_at_their_rate():
    apart = job(shared=False, ahead=2, max_running=2)  # 8 completions of 50 tokens, two at a time
    written = rollout(apart)
    assert (written.places, written.bound) == (2, "requests")
    full_s = 8 / 2 * 50 * Server(apart).step(2) + written.prefill
    assert written.seconds == pytest.approx(full_s)
    assert step_ahead(apart, written, 0.9 * full_s) == pytest.approx(full_s)
    assert step_ahead(apart, written, 2 * full_s) == pytest.approx(2 * full_s)


def test_ahead_with_free_places_equal_lengths_are_waited_for_as_one():
    """A completion takes 50 steps; of two iterations of 1 s of work one is written while the other is trained."""
    apart = job(shared=False, ahead=1)
    written = rollout(apart)
    one_s = 50 * written.step_s
    assert one_s > 2 * written.prefill
    for order in ("prompts", "finished"):
        found = step_ahead(replace(apart, order=order), written, written.prefill + one_s / 4)
        assert found == pytest.approx((one_s + one_s / 4) / 2 + written.prefill), order


def test_a_push_that_drains_lies_between_whole_iterations():
    """An iteration is finished when the push comes, and the next is begun behind it: nothing hides its tail."""
    tailed, apart = replace(FREE, tail=2.0), job(longest=500, shared=False, ahead=4, drains=True)
    written = rollout(replace(apart, constants=tailed))
    assert written == rollout(job(longest=500, constants=tailed)) and written.tail > 0
    assert step_ahead(replace(apart, constants=tailed), written, 0.5 * written.seconds) == written.seconds
    assert step_ahead(replace(apart, constants=tailed), written, 3 * written.seconds) == 3 * written.seconds


def test_no_more_requests_run_than_are_in_flight():
    found = rollout(job(max_in_flight=4, num_servers=2))  # two for each server, which has four completions
    assert (found.concurrency, found.bound, found.places) == (2, "requests", 2)
    assert found.seconds - found.prefill == pytest.approx(4 / 2 * 50 * Server(job()).step(2))
    assert rollout(job(max_in_flight=1000, max_running=2)) == rollout(job(max_running=2))
    ahead = job(max_in_flight=2, shared=False, ahead=2)
    assert rollout(ahead) == rollout(replace(ahead, max_in_flight=None, max_running=2))


def test_a_turn_is_as_long_as_it_is_set_unless_nothing_is_left():
    """Equal lengths: with two iterations at a time, half of a completion's 50 steps are written in a turn."""
    own = job(ahead=1, turn_s=1e-9)
    plain = rollout(job())
    half_s, prefill = 25 * plain.step_s, plain.prefill
    assert rollout(own).seconds == pytest.approx(half_s + prefill)
    assert rollout(replace(own, turn_s=1.5 * half_s + prefill)).seconds == pytest.approx(1.5 * half_s + prefill)
    assert rollout(replace(own, turn_s=9 * half_s)) == plain, "all that was begun is finished"
    # two places for 8 completions: an iteration's tokens take as long as without turns
    full = replace(own, max_running=2)
    assert rollout(full).seconds == pytest.approx(rollout(replace(full, turn_s=None)).seconds)


def test_a_server_over_machines_sums_through_adapters():
    constants = replace(FREE, all_reduce_s=1.0, all_reduce_nic_s=7.0)
    inside, across = (Server(job(server_gpus=2, gpus_per_node=n, constants=constants)).step(1) for n in (2, 1))
    assert inside == pytest.approx(2 * 4 * 1.0, rel=0.01)
    assert across == pytest.approx(2 * 4 * 7.0, rel=0.01)


LINK, NIC = GPU.link_bandwidth, GPU.nic_bandwidth
GATHERED = {"shared": False, "push": "gathered"}
MAPPED = {"push": "gathered"}
FSDP = {"fsdp": True, "num_ranks": 16, "layout": Layout(use_distributed_optimizer=True)}
EXPERTS = 2 * 4 * 4 * 3 * 16 * 32  # bytes: layers, experts, matrices
DENSE = 2 * whole(MOE) - EXPERTS
SPARSE = {"hf": MOE, "layout": Layout(tp=2, ep=4, etp=1, sequence_parallel=True), "num_ranks": 4, "server_gpus": 4}


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        # each GPU of a server gets its own part; four ranks send eight models
        ({"shared": False, "num_ranks": 4, "server_gpus": 2, "num_servers": 1}, WEIGHTS / 2 / NIC),
        ({"shared": False, "num_ranks": 4, "server_gpus": 2, "num_servers": 8}, WEIGHTS * 2 / NIC),
        # whole tensors are gathered, and sent
        (GATHERED, WEIGHTS / NIC),
        (GATHERED | {"layout": Layout(tp=2), "num_ranks": 2}, WEIGHTS / NIC + WEIGHTS / 2 / LINK),
        # the same on the trainer's GPUs: of two ranks one sends, of one none; over machines it is the adapters
        ({"layout": Layout(tp=2), "num_ranks": 2, "server_gpus": 2}, WEIGHTS / 2 / 2 / LINK),
        ({}, 0),
        ({"num_ranks": 16, "server_gpus": 2, "num_servers": 8}, WEIGHTS / 2 * 15 / 16 / NIC),
        # servers there that map what was gathered; one rank has all
        (MAPPED | {"layout": Layout(tp=2), "num_ranks": 2, "server_gpus": 2}, WEIGHTS / 2 / LINK),
        (MAPPED, 0),
        # the 8 ranks of each of two machines receive through the adapters of all 8
        (MAPPED | FSDP, WEIGHTS * 15 / 16 / (8 * NIC)),
        (FSDP | {"shared": False, "num_servers": 16}, WEIGHTS / NIC),
        # stages, each of which is one machine, pass on their parts before ranks gather them
        (MAPPED | {"layout": Layout(tp=2, pp=4), "num_ranks": 32, "server_gpus": 8, "num_servers": 4},
         WEIGHTS / 2 * 3 / 4 / NIC + WEIGHTS / 2 / LINK),
        # experts are gathered over their own ranks; of two machines each has the adapters of two ranks
        (MAPPED | SPARSE, (DENSE / 2 + EXPERTS * 3 / 4) / LINK),
        (MAPPED | SPARSE | {"gpus_per_node": 2}, DENSE / 2 / LINK + EXPERTS * 3 / 4 / (2 * NIC)),
    ],
)  # fmt: skip
def test_a_push_takes_as_long_as_what_it_gathers_and_sends(changes, seconds):
    assert transfers.push(job(**changes, constants=FAST)) == pytest.approx(seconds)


def test_a_bucket_costs_what_its_request_costs():
    small = job(bucket_bytes=WEIGHTS // 4, constants=replace(FREE, bucket_s=1.0))
    apart = replace(small, shared=False)
    assert transfers.push(replace(apart, push="gathered")) == pytest.approx(4, rel=1e-3)
    mapped = transfers.push(replace(small, push="gathered"))
    assert mapped == pytest.approx(8, rel=1e-3), "one is filled while the other is loaded"
    assert max(transfers.push(small), transfers.push(apart)) < 1, "shards have no buckets"


def test_experts_go_stacked_unless_they_are_gathered():
    """Of each layer four projections, two norms and a router; three matrices of each expert."""
    assert transfers.tensors(job(hf=MOE, shared=False)) == 4 * (7 + 3)
    assert transfers.tensors(job(hf=MOE, shared=False, push="gathered")) == 4 * (7 + 3 * 4)
    assert transfers.tensors(job(hf=MOE)) == 4 * (7 + 3)


def test_an_offloaded_role_comes_for_each_pass_and_comes_and_goes_once_for_an_update():
    own = job(param_offload=True, optimizer_offload=True, epochs=3)
    held = fullest(own.actor)
    both = held.weights + held.optimizer
    assert transfers.onload_of_pass(own, own.actor, held) == pytest.approx(held.weights / 1e8)
    assert transfers.offload_of_update(own, own.actor, held, 0.0) == pytest.approx(2 * both / 1e8)
    assert transfers.offload_of_turn(own, own.actor, held, 0.0) == 0
    taught = replace(own, reads_heads=True)
    assert taught.optimizer_steps > 1
    assert transfers.offload_of_update(taught, taught.actor, held, 0.0) == pytest.approx(
        taught.optimizer_steps * 2 * both / 1e8
    )
    adapted = changed(own, lora_rank=8)
    assert transfers.offload_of_update(adapted, adapted.actor, held, 0.0) == pytest.approx(
        (held.weights + 2 * held.optimizer) / 1e8
    )


def test_another_stays_for_the_whole_turn():
    own = job()
    held = fullest(own.actor)
    assert transfers.onload_of_pass(own, own.actor, held) == 0
    assert transfers.offload_of_update(own, own.actor, held, 0.0) == 0
    assert transfers.offload_of_turn(own, own.actor, held, 0.0) == pytest.approx(
        2 * (held.weights + held.optimizer) / 1e8
    )
    frozen = replace(own.actor, optimizer=None)
    of_frozen = transfers.offload_of_turn(own, frozen, held._replace(optimizer=0), 0.0)
    assert of_frozen == pytest.approx(held.weights / 1e8)
    apart = replace(own, shared=False)
    assert transfers.offload_of_turn(apart, own.actor, held, 0.0) == 0
    assert transfers.onload_of_push(apart, held) == 0
    assert transfers.onload_of_push(own, held) == pytest.approx(held.weights / 1e8)


@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_moments_come_beside_the_passes_of_a_step_and_only_what_is_left_of_them_is_waited_for(share):
    """`share`: seconds of the passes over those of the moments' way."""
    offloaded, stays = job(param_offload=True, optimizer_offload=True, epochs=2), job(epochs=2)
    held = fullest(stays.actor)
    weights_s, moments_s = held.weights / 1e8, held.optimizer / 1e8
    left = max(0.0, 1 - share) * moments_s
    passes_s = share * moments_s
    once = pytest.approx(2 * weights_s + moments_s + left)  # nothing hides the weights, nor what goes back
    assert transfers.offload_of_update(offloaded, offloaded.actor, held, passes_s) == once
    assert transfers.offload_of_turn(stays, stays.actor, held, passes_s) == once
    taught = replace(offloaded, reads_heads=True)
    assert transfers.offload_of_update(taught, taught.actor, held, passes_s) == pytest.approx(2 * once.expected), (
        "each step brings it all"
    )


def test_with_pipeline_stages_nothing_hides_the_way_of_moments():
    own = job(optimizer_offload=True)
    piped = replace(own.actor, layout=replace(own.actor.layout, pp=2))
    held = fullest(own.actor)
    hidden_s, seen_s = (transfers.offload_of_update(own, role, held, 1e6) for role in (own.actor, piped))
    assert seen_s - hidden_s == pytest.approx(held.optimizer / 1e8)


def test_servers_that_share_sleep_and_wake():
    constants = replace(FREE, sleep_s=2.0, wake_s=3.0)
    assert transfers.offload_of_servers(job(constants=constants)) == 5.0
    assert transfers.offload_of_servers(job(shared=False, constants=constants)) == 0.0
