"""The rule of thumb for memory, with numbers that can be followed by hand."""

from dataclasses import replace

import pytest
from plan_jobs import HF, INDEXED, MIXED, MOE, SHARED, job
from preset_files import hf_of

from megarl.arch.layout import Layout
from megarl.plan.constants import CONSTANTS
from megarl.plan.gpu_budget import gpu_budgets
from megarl.plan.job import Role
from megarl.plan.memory import kept_numbers, kept_scores, of_stage_bytes, push_bucket_bytes
from megarl.weights.count import kinds_of, of_stage, shape_of, whole

ROLE = Role("actor", HF, Layout(), num_ranks=8, max_tokens=100, log_prob_tokens=100)
# of one token: four times the hidden state; queries, keys, values and what attention makes of them; gate, up, product
KEPT = 4 * 16 + 2 * (4 + 2) * 4 + 3 * 32


def test_the_distributed_optimizer_divides_by_data_and_context_parallel_ranks():
    layout = Layout(tp=2, cp=2, use_distributed_optimizer=True)
    parameters = of_stage(HF, layout, 0).dense
    assert parameters % 4 == 0
    assert of_stage_bytes(replace(ROLE, layout=layout), 0).optimizer == 12 * parameters // 4


def test_fsdp_divides_everything_that_is_learnt():
    parameters = of_stage(HF, Layout(), 0).total
    assert parameters % 8 == 0
    assert of_stage_bytes(replace(ROLE, fsdp=True), 0)[:3] == tuple(each * parameters // 8 for each in (2, 4, 12))
    assert of_stage_bytes(replace(ROLE, fsdp=True, dtype="float32"), 0)[:3] == tuple(
        each * parameters // 8 for each in (4, 4, 12)
    )


def test_fsdp_makes_two_layers_whole_and_what_lies_outside_of_them():
    layer, outside = 16 * 32 + 16 * 16 + 3 * 16 * 32 + 2 * 16, 2 * 64 * 16 + 16
    cut = replace(ROLE, fsdp=True)
    assert of_stage_bytes(ROLE, 0).gathered == 0
    assert of_stage_bytes(cut, 0).gathered == 2 * (2 * layer + outside) + 4 * layer
    assert of_stage_bytes(replace(cut, optimizer=None), 0).gathered == 2 * (2 * layer + outside)
    large = HF | {"vocab_size": 256}  # the gradients of one of them stand whole
    assert of_stage_bytes(replace(cut, hf=large), 0).gathered == 2 * (2 * layer + 8208) + 4 * 8208
    halves = of_stage_bytes(replace(cut, layout=Layout(tp=2)), 0).gathered
    assert halves == pytest.approx(of_stage_bytes(cut, 0).gathered / 2, rel=0.02)


def test_the_busiest_experts_keep_more_tokens_than_the_mean():
    chosen = 2 * (2 * 16 + 3 * 32)
    kept = KEPT - 3 * 32 + int(CONSTANTS.expert_imbalance * chosen) + 4
    assert CONSTANTS.expert_imbalance > 1
    assert of_stage_bytes(replace(ROLE, hf=MOE), 0).activations == 2 * 100 * 5 * kept


def test_experts_are_divided_over_their_own_ranks():
    layout = Layout(tp=2, ep=4, etp=1, sequence_parallel=True, use_distributed_optimizer=True)
    dense, experts = of_stage(MOE, layout, 0)
    assert dense % 4 == experts % 2 == 0
    assert of_stage_bytes(replace(ROLE, hf=MOE, layout=layout), 0).optimizer == 12 * (dense // 4 + experts // 2)


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 12), ("sgd", 8), ("muon", 8)])
def test_an_optimizer_keeps_its_own_numbers(optimizer, each):
    parameters = of_stage(HF, Layout(), 0).total
    bf16 = replace(ROLE, optimizer=optimizer)
    assert of_stage_bytes(bf16, 0).optimizer == each * parameters
    float32 = replace(bf16, dtype="float32")
    assert of_stage_bytes(float32, 0).optimizer == (each - 4) * parameters
    assert of_stage_bytes(float32, 0).weights == 4 * parameters


def test_a_reference_holds_weights_only():
    memory = of_stage_bytes(replace(ROLE, optimizer=None, name="ref"), 0)
    assert (memory.gradients, memory.optimizer) == (0, 0)
    assert memory.activations == 2 * 100 * 2 * KEPT


INNER = KEPT - 4 * 16  # which tensor-parallel ranks share
# Experts of local layers: four hidden states, what a local attention keeps, the router, and what two chosen ones keep
LOCAL_REST = 4 * 16 + 2 + 3 * (16 + 8) + 3 * 4 + 4
LOCAL_MOE = LOCAL_REST + 2 * (16 + 4 * 32) + 12 * 4
NORMED = HF | {"model_type": "qwen3", "head_dim": 4}  # norms of queries and keys keep their inputs


@pytest.mark.parametrize(
    ("hf", "layout", "stage", "changes", "numbers"),
    [
        (HF, Layout(), 0, {}, 100 * 5 * KEPT),  # four layers, and the head takes as much as one
        (NORMED, Layout(), 0, {}, 100 * 5 * (KEPT + (4 + 2) * 4)),
        (MOE, Layout(), 0, {"local": True}, 100 * 5 * LOCAL_MOE),
        (HF, Layout(), 0, {"recompute": "full"}, 100 * (4 * 16 + 2 * KEPT)),  # inputs, and one layer that is run again
        # what is computed again is there once, too
        (
            HF,
            Layout(),
            0,
            {"recompute": "selective", "recompute_modules": ("mlp",)},
            100 * (4 * (KEPT - 96) + KEPT + 96),
        ),
        (
            HF,
            Layout(tp=2, sequence_parallel=True),
            0,
            {"recompute": "selective", "recompute_modules": ("layernorm",)},
            50 * (5 * KEPT - 3 * 32),
        ),
        (
            MOE,
            Layout(),
            0,
            {"local": True, "recompute": "selective", "recompute_modules": ("moe",)},
            100 * (3 * LOCAL_REST + 2 * LOCAL_MOE),
        ),
        (
            HF,
            Layout(),
            0,
            {"recompute": "selective", "recompute_modules": ("core_attn", "moe_act", "moe", "shared_experts")},
            100 * 5 * KEPT,
        ),
        (HF, Layout(cp=2), 0, {}, 50 * 5 * KEPT),
        (HF, Layout(tp=2), 0, {}, 100 * 5 * (4 * 16 + INNER // 2)),
        (HF, Layout(tp=2, sequence_parallel=True), 0, {}, 100 * 5 * KEPT // 2),
        (HF, Layout(pp=4), 0, {}, 100 * (4 * KEPT + KEPT)),  # as many micro-batches as there are stages
        (HF, Layout(pp=4), 3, {}, 100 * (KEPT + KEPT)),
        # rank 0 of 2: 2 warm-up turns for the rank behind, 2 for the other half of its layers, and 1, each of 1 layer
        (HF, Layout(pp=2, vpp=2), 0, {}, 100 * (5 * KEPT + KEPT)),
    ],
)
def test_so_many_numbers_are_kept_for_the_backward_pass(hf, layout, stage, changes, numbers):
    assert of_stage_bytes(replace(ROLE, hf=hf, layout=layout, **changes), stage).activations == 2 * numbers


def test_of_a_stage_with_two_kinds_of_layers_the_one_that_is_recomputed_counts_once() -> None:
    """Three dense layers keep more than 58 with experts do without them, and have nothing that is computed again."""
    hf = hf_of("deepseek_v3_671b")
    dense = kept_numbers(kinds_of(hf)[0], 7168, Layout())
    sparse = kept_numbers(kinds_of(hf)[-1], 7168, Layout(), CONSTANTS.expert_imbalance)
    rest = kept_numbers(kinds_of(hf)[-1], 7168, Layout(), CONSTANTS.expert_imbalance, ("moe",))
    assert (dense, rest) == (167_936, 112_640) and sparse > dense
    numbers = 3 * dense + 58 * rest + sparse + (sparse - rest)
    memory = of_stage_bytes(replace(ROLE, recompute="selective", recompute_modules=("moe",), hf=hf), 0)
    assert memory.activations == 2 * 100 * numbers


def test_a_push_holds_the_weights_of_both_the_largest_tensor_twice_and_two_buckets():
    layout, embedding = Layout(pp=2), 64 * 16
    ours = max(of_stage(HF, layout, stage).total for stage in (0, 1))
    for role, width in (
        (replace(ROLE, layout=layout), 2),
        (replace(ROLE, dtype="float32", fsdp=True, layout=layout), 4),
    ):
        found = gpu_budgets(job(actor=role, bucket_bytes=1))["push"]
        assert (found["weights"], found["push_bucket"]) == (width * ours, width * 4 * embedding)
    assert push_bucket_bytes(ROLE, 2**33) == 2 * 2 * embedding + 2**33


def test_of_experts_the_activation_and_those_that_all_tokens_share_are_computed_again_alone() -> None:
    (shared,) = set(kinds_of(SHARED))
    whole, *rest = (
        kept_numbers(shared, 16, Layout(), again=again)
        for again in ((), ("moe_act",), ("shared_experts",), ("moe", "moe_act"))
    )
    assert [whole - one for one in rest] == [2 * 32, 2 * 3 * 32, 2 * (2 * 16 + 3 * 32) + 2 * 3 * 32 + 4]
    latent = kinds_of(hf_of("deepseek_v3_671b"))[-1]
    heads = kept_numbers(latent, 7168, Layout()) - kept_numbers(latent, 7168, Layout(), again=("mla_up_proj",))
    assert heads == 128 * (192 + 192 + 128), "queries, keys and values"


def test_indexers_are_weights_that_nothing_learns() -> None:
    indexers = 2 * kinds_of(INDEXED)[0].of("indexer")
    for cut in ({}, {"tp": 2, "sequence_parallel": True}):
        parameters = of_stage(INDEXED, Layout(**cut), 0).total
        memory = of_stage_bytes(replace(ROLE, hf=INDEXED, layout=Layout(**cut)), 0)
        learnt = parameters - indexers
        assert (memory.weights, memory.gradients, memory.optimizer) == (2 * parameters, 4 * learnt, 12 * learnt)


def test_scores_of_chosen_keys_are_kept_for_all_tokens_of_a_row_and_those_of_an_indexer_are_there_once() -> None:
    """Of 4 heads 13 bytes a key, halved by two ranks; of the indexer's 2 heads 2 float32 numbers on either rank."""
    kind, layout = kinds_of(INDEXED)[0], Layout(tp=2, sequence_parallel=True)
    assert kept_scores(kind, layout, 100, 2) == 13 * 4 * 100 // 4
    assert kept_scores(kinds_of(HF)[0], layout, 100, 2) == 0
    kept = kept_numbers(kind, 16, layout) + 13 * 4 * 100 // 4
    found = of_stage_bytes(replace(ROLE, hf=INDEXED, layout=layout), 0).activations
    assert found == 2 * 100 * (5 * kept + 2 * 2 * 2 * 100)


def test_a_layer_that_is_one_thing_has_one_norm_and_no_gate_is_kept() -> None:
    mamba, plain, attention, sparse = (kept_numbers(kind, 16, Layout()) for kind in kinds_of(MIXED))
    inputs = 4 * 2 + 2 * 2 * 3 + 4 * 2 + 4  # x, B and C, the gate, and the steps
    assert mamba == 2 * 16 + inputs + 3 * 4 * 2
    assert (plain, attention) == (2 * 16 + 2 * 32, 2 * 16 + 2 * (4 + 2) * 4)
    assert sparse == 2 * 16 + 2 * (2 * 6 + 2 * 8) + 2 * 12 + 4 + 6


def test_mtp_layers_that_are_trained_are_on_the_last_stage_with_an_embedding_of_their_own() -> None:
    """By hand, of DeepSeek-V3; its README_WEIGHTS.md says 11.5 billion parameters, without embedding and head."""
    hf, hidden = hf_of("deepseek_v3_671b"), 7168
    latents = hidden * (1536 + 576) + 1536 * (1 + 128 * 192) + 512 * (1 + 128 * 256) + 128 * 128 * hidden
    expert, outside = 3 * hidden * 2048, latents + 256 * hidden + 2 * hidden * hidden + 5 * hidden
    assert whole(hf, mtp=1) - whole(hf) == outside + 257 * expert == pytest.approx(11.5e9, rel=0.02)
    layout, table = Layout(pp=2, first_stage_layers=31), 129280 * hidden
    more = [of_stage(hf, layout, at, mtp=1).total - of_stage(hf, layout, at).total for at in (0, 1)]
    assert more == [0, outside + 257 * expert + table]
    assert shape_of(hf, mtp=1).active_params - shape_of(hf).active_params == outside + 9 * expert + table
    role = replace(ROLE, hf=hf, max_tokens=2)
    trained, plain = (of_stage_bytes(replace(role, mtp=mtp), 0) for mtp in (1, 0))
    of_layer = kept_numbers(kinds_of(hf)[-1], hidden, Layout(), CONSTANTS.expert_imbalance)
    assert trained.optimizer - plain.optimizer == 12 * (outside + 257 * expert)
    assert trained.activations - plain.activations == 2 * 2 * (of_layer + 6 * hidden)
