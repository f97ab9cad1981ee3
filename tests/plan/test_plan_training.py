"""Operations, communication and the pipeline, with numbers that can be followed by hand."""

from dataclasses import replace
from typing import Any

import pytest
from plan_jobs import FREE, GPU, HF, HYBRID, INDEXED, MIXED, MOE, SHARED, changed, job

from megarl.arch.layers import layers_of
from megarl.arch.layout import Layout
from megarl.plan.constants import Links
from megarl.plan.training import MicroBatches, RoleOnGpus, micro_batches, scoring, training
from megarl.weights.count import forward_flops, kinds_of, shape_of

LAYER = 16 * (4 + 2 * 2) * 4 + 16 * 16 + 3 * 16 * 32 + 2 * 16  # q, k and v; o; gate, up and down; two norms
HEAD = 64 * 16
LLAMA, MIXTRAL = (kinds_of(hf)[0] for hf in (HF, MOE))
KEYS = 4 * 4 * 4  # operations for a key: 4 heads of 4 numbers, twice 2


def test_a_token_costs_two_operations_a_parameter_and_four_a_key():
    shape = shape_of(HF)
    assert shape.active_params == 4 * LAYER + HEAD
    assert forward_flops(shape, 10, 100) == 10 * (2 * (4 * LAYER + HEAD) + 4 * KEYS * 50)


def test_of_experts_a_token_meets_the_chosen_ones():
    shape, expert = shape_of(MOE), 3 * 16 * 32
    (kind,) = shape.kinds
    assert (kind.parameters().experts, kind.chosen_params) == (4 * expert, 2 * expert)
    assert shape.active_params == 4 * (LAYER - expert + 16 * 4 + 2 * expert) + HEAD


def test_a_critic_has_no_vocabulary():
    assert shape_of(HF, "critic").active_params == 4 * LAYER


def test_one_latent_serves_all_heads():
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4}
    (layer,) = set(layers_of(HF | latent))
    assert (layer.mixer.cache_size, layer.mixer.parts) == (10, 1)
    assert layer.mixer.key_flops(100) == 2 * 4 * (6 + 4) * 50


def test_a_layer_with_a_state_costs_the_same_at_any_length():
    """Two value heads, by the products of a chunk of 64 tokens: with keys of 4 and values of 8."""
    shape = shape_of(HYBRID)
    chunk = 64 * 64
    products = 2 * chunk * (4 + 4 + 4 + 8 + 8) + 64**3 // 3 + 3 * 2 * 64 * 4 * 8
    convolution = 2 * 4 * (2 * 2 * 4 + 2 * 8)
    beside = 2 * (products // 64) + convolution
    assert forward_flops(shape, 1, 0) == 2 * shape.active_params + 3 * beside
    assert forward_flops(shape, 1, 100) - forward_flops(shape, 1, 0) == KEYS * 50, "of one layer in four"


def test_a_mamba_layer_costs_the_same_at_any_length():
    """Chunks of 8 tokens, two groups with B and C of 3, four heads of 2; a convolution of 4 taps is in the table."""
    mamba, *_ = layers_of(MIXED)
    scores, products, states = 2 * 2 * 8 * 3, 4 * 2 * 8 * 2, 4 * 2 * 2 * 3 * 2
    assert mamba.mixer.token_flops == scores + products + states
    shape, channels = shape_of(MIXED), 4 * 2 + 2 * 2 * 3
    assert next(iter(shape.kinds)).parameters().dense == (
        16 + 16 * (channels + 4 * 2 + 4) + channels * (4 + 1) + 3 * 4 + 8 + 8 * 16
    )
    assert forward_flops(shape, 1, 100) - forward_flops(shape, 1, 0) == KEYS * 50, "of one layer in four"


def test_an_indexer_scores_all_keys_and_its_own_layer_and_the_next_attend_to_those_that_it_chooses():
    chooses, takes_over, *_ = layers_of(INDEXED)
    read = sum(min(at + 0.5, 32) for at in range(100)) / 100  # by a token of a sequence of 100
    for layer in (chooses, takes_over):
        assert layer.mixer.key_flops(100) == pytest.approx(2 * 4 * (8 + 8 + 2) * read)
        assert layer.mixer.key_flops(20) == pytest.approx(2 * 4 * (8 + 8 + 2) * 10)
    assert (chooses.mixer.choice_flops(100), takes_over.mixer.choice_flops(100)) == (2 * 2 * 64 * 50, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_scores_all_keys_without_a_backward_pass_and_matrices_of_indexers_are_counted_as_others(tp):
    own = job(hf=INDEXED, constants=replace(FREE, memory=1e9), layout=Layout(tp=tp, sequence_parallel=tp > 1))
    layers = [RoleOnGpus(own, own.actor).layer(kind, 100, 100) for kind in kinds_of(INDEXED)[:2]]
    indexer = 8 * 2 * 64 + 16 * 64 + 2 * 64 + 2 * 16
    assert kinds_of(INDEXED)[0].of("indexer") == indexer
    products = 100 / tp * 2 * indexer / 1e12
    assert layers[0].forward - layers[1].forward == pytest.approx(products + 100 * 2 * 2 * 64 * 50 / 1e12)
    assert layers[0].backward - layers[1].backward == pytest.approx(2 * products)


def test_a_layer_that_is_one_thing_sends_once_and_experts_are_sent_what_they_see():
    own = job(hf=MIXED, layout=Layout(tp=2, sequence_parallel=True, ep=2, etp=1), num_ranks=2)
    mamba, plain, attention, sparse = (RoleOnGpus(own, own.actor).layer(kind, 100, 100) for kind in kinds_of(MIXED))
    once = 100 * 16 * 2 / 2 / GPU.link_bandwidth  # half of the hidden states
    for layer in (mamba, plain, attention):
        assert layer.exposed == pytest.approx((2 + 3) * once)
    latents = 2 * (100 / 2) * 6 * 2 / 2 / GPU.link_bandwidth  # two experts of each token, half of which are elsewhere
    assert sparse.exposed == pytest.approx((2 + 2) * latents)


def test_ranks_that_share_a_context_exchange_heads_of_layers_with_a_state():
    """8 numbers of q and k, 16 of v, 16 of z, 2 each of decay and strength there, 16 back; half of them go."""
    own = job(hf=HYBRID, layout=Layout(cp=2), num_ranks=2)
    layer = RoleOnGpus(own, own.actor).layer(kinds_of(HYBRID)[0], 100, 100)
    sent = 50 * 2 * (16 + 16 + 16 + 4 + 16) / 2 / GPU.link_bandwidth
    assert layer.exposed == pytest.approx((1 + 2) * sent)


def test_a_ring_inside_a_machine_and_beyond():
    links = Links(link=100.0, nic=10.0, domain=8)
    assert links.ring(800, 1) == 0
    assert links.ring(800, 8) == pytest.approx(7.0)
    assert links.ring(1600, 16) == pytest.approx(1500 / 80)  # through the adapters of the 8 that stand on a machine
    assert links.ring(1600, 16, stride=8) == pytest.approx(1500 / 10)


def test_an_exchange_inside_a_machine_and_beyond():
    links = Links(link=100.0, nic=10.0, domain=8)
    assert links.exchange(100, 8, 1, 2) == pytest.approx(2 * 100 * 7 / 8 / 100)
    assert links.exchange(100, 16, 1, 2) == pytest.approx(2 * 100 * 8 / 16 / 10)
    assert links.exchange(100, 16, 1, 2, once=True) == pytest.approx((1 - 1 / 4) * 100 / 10)


def test_a_pass_is_products_keys_and_the_head():
    passes = RoleOnGpus(job(constants=replace(FREE, memory=1e9)), job().actor).stage(0, 100, 100)
    layers = 100 * 4 * (2 * LAYER + KEYS * 50) / 1e12
    head = 100 * 2 * HEAD / 1e12
    assert passes.forward == pytest.approx(layers + head)
    assert passes.backward == pytest.approx(100 * 4 * (4 * LAYER + 2.5 * KEYS * 50) / 1e12 + 3 * head)


def test_a_layer_takes_at_least_its_launches_and_the_reading_of_its_weights():
    slow = RoleOnGpus(job(constants=replace(FREE, layer_s=1.0)), job().actor).layer(LLAMA, 100, 100)
    assert (slow.forward, slow.backward) == (1.0, 2.0)
    few = RoleOnGpus(job(), job().actor).layer(LLAMA, 0, 0)
    assert few.forward == pytest.approx(2 * LAYER / 1e9)
    assert few.backward == pytest.approx((2 + 8) * LAYER / 1e9)


def test_layers_that_are_run_again_take_a_forward_pass_more():
    own, free = job(recompute="full"), replace(FREE, memory=1e9)
    kept, again = (RoleOnGpus(replace(one, constants=free), one.actor).layer(LLAMA, 100, 100) for one in (job(), own))
    assert again.backward == pytest.approx(kept.backward + kept.forward)


@pytest.mark.parametrize(
    ("hf", "modules", "operations", "numbers"),
    [
        (HF, (), KEYS * 50, 0),  # the core attention, whose operands are kept
        (HF, ("core_attn",), KEYS * 50, 0),
        (HF, ("mlp", "moe_act", "shared_experts"), 2 * 3 * 16 * 32, 3 * 32),
        # the router, and two chosen experts
        (MOE, ("moe", "mlp"), 2 * (16 * 4 + 2 * 3 * 16 * 32), 4 + 2 * (2 * 16 + 3 * 32)),
        (SHARED, ("shared_experts", "moe_act"), 2 * 2 * 3 * 16 * 32, 2 * 3 * 32 + 2 * 32),
    ],
)
def test_modules_that_are_run_again_take_their_products_once_more(
    hf: dict[str, Any], modules: tuple[str, ...], operations: int, numbers: int
) -> None:
    """`numbers` of each token were not kept, and are read and written once more."""
    free, kind = replace(FREE, memory=1e9), kinds_of(hf)[0]
    own = job(hf=hf, recompute="selective", recompute_modules=modules)
    kept, again = (
        RoleOnGpus(replace(one, constants=free), one.actor).layer(kind, 100, 100) for one in (job(hf=hf), own)
    )
    assert again.forward == kept.forward
    assert again.backward - kept.backward == pytest.approx(100 * operations / 1e12)
    free = replace(free, touches=1e9)  # 1 GB/s for these, and reading weights stays free
    kept, again = (
        RoleOnGpus(replace(one, constants=free), one.actor).layer(kind, 100, 100) for one in (job(hf=hf), own)
    )
    assert again.backward - kept.backward == pytest.approx(100 * operations / 1e12 + 100 * numbers * 2 / 1e9)


def test_a_feed_forward_that_is_run_again_gathers_and_scatters_again() -> None:
    own = job(layout=Layout(tp=2, sequence_parallel=True), num_ranks=2)
    again = changed(own, recompute="selective", recompute_modules=("mlp",))
    one = 100 * 16 * 2 / 2 / GPU.link_bandwidth
    assert RoleOnGpus(again, again.actor).layer(LLAMA, 100, 100).exposed == pytest.approx((4 + 6 + 2) * one)


def test_tensor_parallel_ranks_gather_and_scatter_twice_a_layer():
    own = job(layout=Layout(tp=2, sequence_parallel=True), num_ranks=2)
    layer = RoleOnGpus(own, own.actor).layer(LLAMA, 100, 100)
    one = 100 * 16 * 2 / 2 / GPU.link_bandwidth
    assert layer.exposed == pytest.approx((4 + 6) * one)


def test_experts_exchange_their_tokens():
    own = job(hf=MOE, layout=Layout(ep=4), num_ranks=4)
    layer = RoleOnGpus(own, own.actor).layer(MIXTRAL, 100, 100)
    assert layer.exposed == pytest.approx(4 * 2 * 100 * 16 * 2 * 3 / 4 / GPU.link_bandwidth)
    across = replace(own, gpus_per_node=2)
    assert RoleOnGpus(across, across.actor).layer(MIXTRAL, 100, 100).exposed == pytest.approx(
        4 * 2 * 100 * 16 * 2 * 2 / 4 / GPU.nic_bandwidth
    )


def test_micro_batches_are_few_and_even():
    own = job(max_tokens=250)
    assert micro_batches(own, own.actor, 800, 250).count == 4  # two sequences of 100 in each
    split = changed(own, layout=Layout(), num_ranks=4)
    assert micro_batches(split, split.actor, 800, 250) == MicroBatches(count=1, tokens=200)
    turns = changed(own, layout=Layout(pp=4, vpp=2), num_ranks=4, max_tokens=100)
    assert micro_batches(turns, turns.actor, 600, 100).count == 8  # whole turns of 4 stages


def test_the_pipeline_idles_for_all_stages_but_one():
    own = job(layout=Layout(pp=4), num_ranks=4)
    found = training(own)
    assert found.micro_batches == 8
    assert found.bubble == pytest.approx(3 / 8)
    twice = training(job(layout=Layout(pp=2, vpp=2), num_ranks=2))
    assert twice.bubble == pytest.approx(1 / 16)


def test_mfu_counts_no_operation_twice():
    own = replace(job(), gpu=replace(GPU, memory_bandwidth=1e30))
    free = replace(FREE, head=1e9)
    busy = training(replace(own, constants=free)).mfu
    again = training(replace(changed(own, recompute="full"), constants=free)).mfu
    assert 0.7 < again < 0.77 < 0.95 < busy <= 1.1  # attention's backward is taken as 2.5 times its forward


def test_adapters_want_no_gradients_of_the_weights():
    own = replace(job(), gpu=replace(GPU, memory_bandwidth=1e30))
    free = replace(FREE, attention=1e9)  # so that only products count
    whole, adapters = (training(replace(changed(own, lora_rank=rank), constants=free)) for rank in (0, 8))
    assert adapters.seconds < whole.seconds
    assert adapters.mfu * adapters.seconds == pytest.approx(whole.mfu * whole.seconds * 2 / 3)
    head = RoleOnGpus(replace(own, constants=free), replace(own.actor, lora_rank=8))._head(100)
    assert head.backward == pytest.approx(2 * head.forward)


def test_the_optimizer_reads_and_writes_its_numbers():
    own = job(gpu=replace(GPU, bf16_flops=1e30))
    params = 4 * LAYER + 2 * HEAD + 16
    assert training(own).optimizer_s == pytest.approx(params * (4 + 2 * 12 + 2) / 1e9)
    split = changed(own, layout=Layout(use_distributed_optimizer=True), num_ranks=8)
    assert training(split).optimizer_s == pytest.approx(params / 8 * 30 / 1e9)


def test_gradients_are_reduced_and_parameters_handed_out():
    own = job(layout=Layout(use_distributed_optimizer=True), num_ranks=8)
    params = 4 * LAYER + 2 * HEAD + 16
    assert training(own).gradients_s == pytest.approx(params * 6 * 7 / 8 / GPU.link_bandwidth)
    hidden = changed(own, overlap_grad_reduce=True)
    assert training(hidden).gradients_s < training(own).gradients_s


def test_every_optimizer_step_costs_its_own():
    one, four = job(), job(mini_batch=2, epochs=2)
    assert (one.optimizer_steps, four.optimizer_steps) == (1, 8)
    assert training(four).optimizer_s == pytest.approx(8 * training(one).optimizer_s)


def test_scoring_is_a_forward_pass_of_all_tokens():
    own = job(gpu=replace(GPU, memory_bandwidth=1e30))
    assert scoring(own, None) == pytest.approx(forward_flops(shape_of(HF), 800, 100) / 1e12)


def test_mtp_layers_cost_time_in_training_and_none_in_passes_for_log_probs():
    hf = HYBRID | {"mtp_num_hidden_layers": 1}
    plain, trained = job(hf=hf), job(hf=hf, mtp=1)
    assert scoring(trained) == scoring(plain)
    assert training(trained).passes_s > training(plain).passes_s
