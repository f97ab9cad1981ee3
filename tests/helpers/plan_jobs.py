"""Small runs whose numbers can be followed by hand."""

from dataclasses import replace

from megarl.arch.gpus import Gpu
from megarl.arch.layout import Layout
from megarl.plan.constants import Constants
from megarl.plan.job import Job, Role

# Numbers with few digits: 1 TFLOP/s, 1 GB/s of memory and less of everything else.
GPU = Gpu("toy", 1e12, 10**9, 1e9, 1e8, 1e7, host_bandwidth=1e8)

HF = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MOE = HF | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = (
    HF
    | {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2}
    | {"moe_intermediate_size": 32}
)

HYBRID = HF | {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip

# Layers that are one thing each; experts see a latent of 6.
MIXED = HF | {
    "model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "head_dim": 4, "mamba_num_heads": 4, "mamba_head_dim": 2, "n_groups": 2, "ssm_state_size": 3, "conv_kernel": 4,
    "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_latent_size": 6, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 12,
}  # fmt: skip
# The second and the fourth layer take over the keys that the one before them chose.
INDEXED = HF | {
    "model_type": "glm_moe_dsa", "layer_types": ["indexed_attention"] * 4, "indexer_types": ["full", "shared"] * 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
    "index_topk": 32, "index_n_heads": 2, "index_head_dim": 64, "first_k_dense_replace": 4,
}  # fmt: skip

# Nothing costs anything but what a test turns on.
FREE = replace(
    Constants(),
    **dict.fromkeys(
        ("layer_s", "expert_layer_s", "decode_step_s", "decode_layer_s", "all_reduce_s", "all_reduce_nic_s", "push_s",
         "push_tensor_s", "bucket_s", "sleep_s", "wake_s", "step_s", "sequence_s", "touches", "ring_turn"), 0.0,
    ),
    **dict.fromkeys(
        ("matmul", "experts", "attention", "head", "memory", "link", "nic", "all_to_all", "tp_exposed",
         "replica_imbalance", "expert_imbalance", "decode_memory", "decode_matmul", "prefill_matmul", "cache_waste",
         "push_nic", "gather", "broadcast", "host"), 1.0,
    ),
    tail=1.0,
)  # fmt: skip


def job(**changes) -> Job:
    """8 prompts of one completion each, 50 + 50 tokens, all in one optimizer step."""
    actor = Role("actor", HF, Layout(), num_ranks=1, max_tokens=100, log_prob_tokens=100)
    plain = Job(
        GPU, actor, prompts=8, prompt_tokens=50.0, response_tokens=50.0, longest=100, mini_batch=8, memory_fraction=0.5,
        constants=FREE,
    )  # fmt: skip
    return changed(plain, **changes)


def changed(run: Job, **changes) -> Job:
    """With other values of its own fields, and of the actor's."""
    own = {name: changes.pop(name) for name in Job.__dataclass_fields__.keys() & changes.keys()}
    run = replace(run, **own)
    return replace(run, actor=replace(run.actor, **changes))
