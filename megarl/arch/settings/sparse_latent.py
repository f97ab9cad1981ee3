"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5: latent attention over the keys that an indexer chooses for each token.

In GLM-5 some layers take over the choice of the layer before them, and have no indexer.
"""

from __future__ import annotations

import json

from megarl.arch.layout import layers_that_share
from megarl.arch.settings.hf import HFConfig, Settings, at_least, need, refuse

INDEXED = "indexed_attention"


def sparse_latent(attention: Settings, hf: HFConfig) -> Settings:
    """`attention`: the settings of DeepSeek-V3's layers."""
    if other := sorted(set(need(hf, "layer_types")) - {INDEXED}):
        raise ValueError(f"config.json: layer_types holds {other[0]}; expected {INDEXED} only")
    for latent in ("q_lora_rank", "kv_lora_rank"):
        at_least(1, hf, latent)
    turns_pairs = hf["model_type"] == "glm_moe_dsa"
    refuse(hf, indexer_rope_interleave=turns_pairs)
    size, rotated = at_least(1, hf, "index_head_dim"), need(hf, "qk_rope_head_dim")
    if size < rotated:
        raise ValueError(f"config.json: index_head_dim={size}; expected at least qk_rope_head_dim={rotated}")
    every, offset = _rhythm(hf)
    return attention | {
        "experimental_attention_variant": "dsa",
        "cp_comm_type": "allgather",
        "dsa_indexer_n_heads": at_least(1, hf, "index_n_heads"),
        "dsa_indexer_head_dim": size,
        "dsa_indexer_topk": at_least(1, hf, "index_topk"),
        "dsa_indexer_topk_freq": every,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rope_interleaved": turns_pairs,
    }


def _rhythm(hf: HFConfig) -> tuple[int, int]:
    """Megatron's (frequency, offset): after `offset` layers that choose, one layer in `frequency` does.

    Example: full, full, shared, shared, full, shared -> (3, 2).  ValueError of one sentence for any other order.
    """
    layers, shared, kinds = hf["num_hidden_layers"], layers_that_share(hf), hf.get("indexer_types")
    offset = shared[0] if shared else layers
    every = next((layer for layer in range(offset, layers) if layer not in shared), layers) - offset + 1
    wanted = tuple(layer for layer in range(offset, layers) if (layer + 1 - offset) % every)
    if not offset or shared != wanted or (kinds is not None and len(kinds) < layers):
        raise ValueError(
            f"config.json: indexer_types={json.dumps(kinds)} is not supported; expected full layers, and then one full "
            f"layer in every few, for all {layers}"
        )
    return every, offset
