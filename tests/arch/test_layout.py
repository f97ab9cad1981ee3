"""Layouts as numbers: what divides what."""

import pytest

from megarl.arch.layout import (
    KEYS,
    Layout,
    ModelNumbers,
    can_share_prefixes,
    exchange_misfits,
    misfits,
    numbers_of,
    padded_vocab_size,
    rank_misfits,
    training_misfits,
)

QWEN = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 120,
    "max_position_embeddings": 2048,
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096},
}


SPARSE = QWEN | {"num_experts": 8, "moe_intermediate_size": 32}


def told(hf: dict, layout: Layout) -> list[str]:
    return [misfit.sentence for misfit in misfits(numbers_of(hf), layout)]


def untrainable(hf: dict, layout: Layout) -> list[str]:
    return [misfit.sentence for misfit in training_misfits(numbers_of(hf), layout)]


def test_every_stage_of_a_trained_model_with_dealt_experts_has_some() -> None:
    half = SPARSE | {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}
    (sentence,) = untrainable(half, Layout(pp=2, ep=2))
    assert sentence.startswith("pipeline_model_parallel_size=2: stage 0 would hold no experts")
    assert "expert_model_parallel_size=2" in sentence and sentence.endswith("expected fewer stages, or 1")
    assert not untrainable(half, Layout(pp=2)), "not dealt: each rank has all of them"
    assert not untrainable(SPARSE, Layout(pp=2, ep=2))
    assert not untrainable(half, Layout(pp=2, ep=2, vpp=2)), "layers 6 to 8 are the first rank's second piece"
    assert not untrainable(half, Layout(pp=2, ep=2, first_stage_layers=7))
    assert not untrainable(QWEN, Layout(pp=2))


def test_experts_on_other_ranks_than_dense_layers_are_trained_only_if_they_are_dealt() -> None:
    """With ep=1 Megatron sums the gradients of experts over the replicas of dense layers."""
    for layout, etp, tp in ((Layout(tp=2, etp=1), 1, 2), (Layout(etp=2), 2, 1)):
        (sentence,) = untrainable(SPARSE, layout)
        assert sentence.startswith(f"expert_tensor_parallel_size={etp}: ")
        assert f"expected {tp}, as tensor_model_parallel_size, or expert_model_parallel_size above 1" in sentence
    for layout in (Layout(tp=2), Layout(tp=2, etp=2), Layout(tp=2, ep=2, etp=1), Layout(ep=2, etp=2)):
        assert not untrainable(SPARSE, layout)
    assert not untrainable(QWEN, Layout(tp=2, etp=2))


def test_layers_without_experts_are_those_that_config_json_names_or_steps_over() -> None:
    assert numbers_of(DEEPSEEK | {"first_k_dense_replace": 3}).dense_layers == (0, 1, 2)
    assert numbers_of(SPARSE | {"decoder_sparse_step": 4, "mlp_only_layers": [3]}).dense_layers == (
        0, 1, 2, 3, 4, 5, 6, 8, 9, 10,
    )  # fmt: skip
    assert numbers_of(QWEN | {"mlp_only_layers": [3]}).dense_layers == (), "of a model without experts nothing is said"


def test_the_keys_are_the_fields() -> None:
    assert set(KEYS) == set(vars(Layout()))


def test_replicas_are_what_is_left_of_the_ranks() -> None:
    assert Layout(tp=2, pp=2, cp=2).data_parallel_size(16) == 2
    assert Layout(tp=2, ep=4, etp=1).data_parallel_size(8) == 4, "experts take their ranks from the others"
    with pytest.raises(ValueError, match=r"^tp\*pp\*cp = 2\*3\*1 = 6 does not divide 8 ranks$"):
        Layout(tp=2, pp=3).data_parallel_size(8)
    with pytest.raises(ValueError, match=r"^ep\*etp\*pp = 4\*4\*1 = 16 does not divide 8 ranks$"):
        Layout(tp=4, ep=4).data_parallel_size(8)


def test_the_field_at_fault_is_the_largest_that_was_set() -> None:
    assert next(rank_misfits(Layout(tp=2, cp=4), 6)).field == "cp"
    assert [misfit.field for misfit in rank_misfits(Layout(tp=4), 6)] == ["tp", "tp"]
    assert [misfit.field for misfit in rank_misfits(Layout(etp=4), 6)] == ["etp"]


def test_on_gpus_windows_and_sinks_leave_each_context_parallel_rank_whole_heads() -> None:
    mistral = {"model_type": "mistral", "num_attention_heads": 8, "num_key_value_heads": 4}
    windows = numbers_of(mistral | {"sliding_window": 4096})
    for fits in (Layout(cp=4), Layout(tp=2, cp=2), Layout(tp=4)):
        assert not list(exchange_misfits(windows, fits))
    (misfit,) = exchange_misfits(windows, Layout(tp=2, cp=4))
    assert misfit.sentence == (
        "context_parallel_size=4: on GPUs windows and attention sinks are computed for whole rows of some heads, and a "
        "tensor-parallel rank has 2 of keys and values; expected a divisor of them"
    )
    assert not list(exchange_misfits(numbers_of(mistral | {"sliding_window": None}), Layout(tp=2, cp=4)))


def test_prefixes_can_be_shared_by_local_layers_over_whole_sequences_whose_experts_are_not_given() -> None:
    whole = Layout(tp=2, sequence_parallel=True, pp=2, vpp=2, ep=2)
    assert can_share_prefixes({}, whole, router_replay=False, transformer_engine=False)
    assert not can_share_prefixes({}, whole, router_replay=False, transformer_engine=True)
    assert not can_share_prefixes({}, whole, router_replay=True, transformer_engine=False)
    assert not can_share_prefixes({}, Layout(cp=2), router_replay=False, transformer_engine=False)
    of_each = [{"layer_types": [kind, "full_attention"]} for kind in ("linear_attention", "indexed_attention")]
    for hybrid in (*of_each, {"layers_block_type": ["linear_attention", "mlp"]}):
        assert not can_share_prefixes(hybrid, whole, router_replay=False, transformer_engine=False)


def test_chunks_begin_with_layers_that_choose_their_own_keys() -> None:
    """GLM-5's rhythm over 78 layers, of which 1, 2, 6, 10, .. choose."""
    kinds = ["shared" if max(layer - 1, 0) % 4 else "full" for layer in range(78)]
    glm = numbers_of({"num_hidden_layers": 78, "index_topk": 2048, "indexer_types": kinds})
    for fits in (Layout(pp=2, first_stage_layers=37), Layout(pp=4, first_stage_layers=17, last_stage_layers=21)):
        assert not list(misfits(glm, fits))
    for wrong, said in (
        (Layout(pp=2), "pipeline_model_parallel_size=2: a chunk would begin with layer 40 of 78"),
        (Layout(pp=2, vpp=3), "virtual_pipeline_model_parallel_size=3: a chunk would begin with layer 27 of 78"),
    ):
        (misfit,) = misfits(glm, wrong)
        assert misfit.sentence == (
            f"{said}, which takes over the keys chosen before it; expected one that chooses its own"
        )


def test_sparse_attention_is_over_tensor_parallel_ranks_with_parts_of_sequences_alone() -> None:
    numbers = numbers_of({"num_hidden_layers": 4, "index_topk": 4})
    (misfit,) = misfits(numbers, Layout(tp=2))
    assert misfit.sentence == (
        "sequence_parallel=false: Megatron-Core's sparse attention needs parts of sequences with "
        "tensor_model_parallel_size=2; expected true"
    )
    assert not list(misfits(numbers, Layout(tp=2, sequence_parallel=True)))


@pytest.mark.parametrize(
    ("layout", "num_layers", "chunks"),
    [
        (Layout(), 5, (5,)),
        (Layout(pp=2), 6, (3, 3)),
        (Layout(pp=2, vpp=3), 6, (1, 1, 1, 1, 1, 1)),
        (Layout(pp=4, last_stage_layers=13), 61, (16, 16, 16, 13)),
        (Layout(pp=4, first_stage_layers=3, last_stage_layers=2), 11, (3, 3, 3, 2)),
        (Layout(pp=2, vpp=2, first_stage_layers=2), 6, (1, 2, 1, 2)),
        (Layout(pp=2, first_stage_layers=2, last_stage_layers=4), 6, (2, 4)),
    ],
)
def test_layers_lie_over_the_stages_in_turns(layout: Layout, num_layers: int, chunks: tuple[int, ...]) -> None:
    assert layout.layers_per_chunk(num_layers) == chunks
    assert sum(chunks) == num_layers


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
VPP, ETP = "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"


@pytest.mark.parametrize(
    ("layout", "said", "expected"),
    [
        (Layout(pp=5), "pipeline_model_parallel_size=5 does not divide", "num_hidden_layers=12"),
        (Layout(pp=3, vpp=3), f"{VPP}=3 does not divide the 4 layers", "of a pipeline rank"),
        (Layout(pp=3, first_stage_layers=3), f"{FIRST}=3: 9 of", "left for the other 2 pipeline ranks; expected a mul"),
        (Layout(pp=2, last_stage_layers=12), f"{LAST}=12: 0 of", "left for the other pipeline rank; expected at leas"),
        (
            Layout(pp=2, first_stage_layers=5, last_stage_layers=5),
            f"{FIRST}=5 and {LAST}=5 are 10 layers",
            "expected the model's num_hidden_layers=12",
        ),
        (Layout(pp=2, vpp=2, first_stage_layers=7), f"{VPP}=2 does not divide the 5 layers", "of a pipeline rank"),
        (Layout(vpp=2), f"{VPP}=2: there is one pipeline rank", "above 1, or null or 1"),
        (Layout(last_stage_layers=2), f"{LAST}=2: there is one pipeline rank", "above 1, or null"),
        (Layout(tp=0), "tensor_model_parallel_size=0: ", "expected at least 1"),
        (Layout(sequence_parallel=True), "sequence_parallel=true: ", "tensor_model_parallel_size above 1, or false"),
        (Layout(ep=2), "expert_model_parallel_size=2: the model has no experts", "expected 1"),
        (Layout(tp=2, etp=1), f"{ETP}=1: the model has no experts", "expected 2, as tensor_model_parallel_size"),
    ],
)
def test_what_a_dense_model_cannot_is_told(layout: Layout, said: str, expected: str) -> None:
    (sentence,) = told(QWEN, layout)
    assert sentence.startswith(said) and expected in sentence


def test_ranks_share_key_value_heads_where_each_has_heads_of_one() -> None:
    assert not told(QWEN, Layout(tp=8)), "two ranks have the queries of one head of keys and values"
    twelve = QWEN | {"num_attention_heads": 12}
    (sentence,) = told(twelve, Layout(tp=6))
    assert (
        sentence
        == "tensor_model_parallel_size=6 neither divides the model's num_key_value_heads=4, nor is a multiple of it"
    )
    minimax = QWEN | {"model_type": "minimax_m2"}
    assert told(minimax, Layout(tp=8)) == [
        "tensor_model_parallel_size=8 does not divide the model's num_key_value_heads=4"
    ]
    assert list(exchange_misfits(numbers_of(QWEN | {"model_type": "mistral", "sliding_window": 8}), Layout(tp=8, cp=2)))


def test_experts_and_latents_are_divided_too() -> None:
    assert not told(DEEPSEEK, Layout(tp=8, pp=4, last_stage_layers=13, ep=32, etp=1))
    for hf, layout, size, divided in (
        (DEEPSEEK, Layout(ep=48), "expert_model_parallel_size=48", "number of experts=256"),
        (DEEPSEEK, Layout(etp=3), "expert_tensor_parallel_size=3", "intermediate size of an expert=2048"),
        (DEEPSEEK | {"kv_lora_rank": 508}, Layout(tp=8), "tensor_model_parallel_size=8", "+ qk_rope_head_dim=572"),
    ):
        (sentence,) = told(hf, layout)
        assert sentence.startswith(f"{size} does not divide the model's ") and sentence.endswith(divided)


def test_heads_of_gated_delta_nets_are_dealt_over_tensor_and_context_parallel_ranks() -> None:
    hybrid = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 4}
    assert not told(hybrid, Layout(tp=2, cp=2, sequence_parallel=True))
    (sentence,) = told(hybrid, Layout(tp=4, cp=2, sequence_parallel=True))
    assert sentence.endswith("context_parallel_size=2 does not divide the model's linear_num_key_heads=4")


def test_groups_of_mambas_heads_are_whole_on_tensor_parallel_ranks_and_shared_out_by_context_parallel_ones() -> None:
    mixed = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
    mixed |= {"mamba_num_heads": 16, "n_groups": 4, "num_attention_heads": 8, "intermediate_size": 16}
    for fits in (Layout(tp=4), Layout(tp=2, cp=2), Layout(tp=2, cp=4), Layout(cp=2)):
        assert not told(mixed, fits)
    for layout, end in (
        (Layout(tp=8), "tensor_model_parallel_size=8 does not divide the model's n_groups=4"),
        (Layout(tp=4, cp=8), "times context_parallel_size=8 does not divide the model's mamba_num_heads=16"),
    ):
        (sentence,) = told(mixed, layout)
        assert sentence.endswith(end)
    (sentence,) = told(mixed | {"n_groups": 6, "mamba_num_heads": 24}, Layout(tp=2, cp=4))
    assert sentence.startswith("context_parallel_size=4: a tensor-parallel rank has 3 of the model's n_groups=6; exp")


def test_a_number_that_no_layer_of_a_mixed_model_has_is_no_rule() -> None:
    """transformers' class has defaults for them all."""
    numbers: dict[str, object] = {"intermediate_size": 15, "n_routed_experts": 8, "moe_intermediate_size": 16}
    mixed = {"num_hidden_layers": 4, "num_attention_heads": 4, **numbers, "moe_shared_expert_intermediate_size": 16}
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    assert numbers_of(mixed | {"layers_block_type": kinds}).dense_layers == (0, 2, 3)
    assert told(mixed | {"layers_block_type": kinds}, Layout(tp=2))[0].endswith("intermediate_size=15")
    assert not told(mixed | {"layers_block_type": ["linear_attention", "moe"] * 2}, Layout(tp=2, ep=2, etp=1))
    without = numbers_of(mixed | {"layers_block_type": ["linear_attention", "full_attention"] * 2})
    assert (without.num_experts, without.shared_intermediate_size, without.intermediate_size) == (None, None, None)


def test_experts_with_biases_are_not_cut() -> None:
    oss = {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 8, "intermediate_size": 16}
    assert not told(oss, Layout(tp=2, ep=2, etp=1))
    for layout in (Layout(tp=2, ep=2), Layout(ep=2, etp=2)):
        (sentence,) = told(oss, layout)
        assert sentence.startswith("expert_tensor_parallel_size=2: ") and sentence.endswith("biases; expected 1")


def test_numbers_are_found_under_every_familys_names() -> None:
    assert numbers_of(DEEPSEEK).num_experts == numbers_of({"num_experts": 256}).num_experts == 256
    mixtral = numbers_of({"num_local_experts": 8, "intermediate_size": 32})
    assert (mixtral.num_experts, mixtral.expert_intermediate_size) == (8, 32)
    assert numbers_of(DEEPSEEK | {"n_shared_experts": 2}).shared_intermediate_size == 4096
    assert numbers_of({"num_attention_heads": 8}).num_key_value_heads == 8
    assert numbers_of({}) == ModelNumbers()


def test_a_scaled_rope_knows_more_positions() -> None:
    assert numbers_of(DEEPSEEK).max_position_embeddings == 163840
    assert numbers_of(DEEPSEEK | {"max_position_embeddings": 4096}).max_position_embeddings == 163840
    assert numbers_of(QWEN | {"rope_scaling": {"type": "linear", "factor": 2}}).max_position_embeddings == 2048
    assert not told({}, Layout(tp=7, pp=5, vpp=3, ep=3)), "what is not known is not asked"


def test_the_vocabulary_is_padded_and_so_divides_always() -> None:
    assert [padded_vocab_size(45, tp) for tp in (1, 2, 4, 3)] == [48, 48, 64, 48]
