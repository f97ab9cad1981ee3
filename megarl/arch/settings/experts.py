"""Experts and their routers as config.json describes them, without load-balancing losses: the user defines the loss.

Routers score experts by a softmax over them, or each by a sigmoid.  With sigmoids, experts are chosen by their score
plus a bias that gets no gradient (arXiv:2412.19437, section 2.1.2).  Pretraining updates this bias to balance the load;
here it keeps the value from the folder, so that trainer and servers choose the same experts.
"""

from __future__ import annotations

from megarl.arch.layout import dense_layers
from megarl.arch.settings.hf import HFConfig, Settings, at_least, need, refuse


def _experts(hf: HFConfig, *, least: int, count: int, ffn: int) -> Settings:
    """What the two kinds have in common.  `count`: experts of a layer; `least`: the fewest of a token."""
    chosen = at_least(least, hf, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"config.json: num_experts_per_tok={chosen}; expected at most the {count} experts of a layer")
    layers, dense = hf["num_hidden_layers"], dense_layers(hf)
    if len(dense) == layers:
        raise ValueError(f"config.json: none of {layers} layers has experts; expected fewer dense ones")
    return {
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",  # in bfloat16 rounding alone would choose other experts
        "num_moe_experts": count,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": [int(layer not in dense) for layer in range(layers)] if dense else 1,
        "moe_router_topk": chosen,
    }


def softmax_experts(hf: HFConfig, *, ffn: int, renormalised: bool) -> Settings:
    """`renormalised`: the weights of the chosen experts sum to 1, else they are the softmax over all experts.

    Megatron chooses experts by logits and transformers by probabilities: the same experts, unless the float32 softmax
    makes different logits equal.
    """
    settings = _experts(hf, least=1, count=need(hf, "num_experts", "num_local_experts"), ffn=ffn)
    if renormalised and settings["moe_router_topk"] == 1:
        raise ValueError(
            "config.json: num_experts_per_tok=1 leaves a renormalised router no gradient; expected at least 2"
        )
    return settings | {"moe_router_pre_softmax": not renormalised}


def sigmoid_experts(hf: HFConfig, *, count: int, ffn: int, total: float = 1.0) -> Settings:
    """Experts that are chosen by biased sigmoid scores; the weights of the chosen ones sum to `total`."""
    refuse(hf, scoring_func="sigmoid", norm_topk_prob=True)
    if total <= 0:  # Megatron would not multiply by 0
        raise ValueError(f"config.json: routed_scaling_factor={total} is not supported; expected more than 0")
    return _experts(hf, least=2, count=count, ffn=ffn) | {
        "moe_router_topk_scaling_factor": total,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    }


def grouped_experts(hf: HFConfig) -> Settings:
    """Such experts in groups."""
    ffn, total = at_least(1, hf, "moe_intermediate_size"), float(need(hf, "routed_scaling_factor"))
    routed = sigmoid_experts(hf, count=need(hf, "n_routed_experts"), ffn=ffn, total=total)
    return routed | _groups(hf, routed["moe_router_topk"])


def shared_and_routed_experts(hf: HFConfig) -> Settings:
    """DeepSeek-V3's: dense layers first, then shared experts beside groups of routed ones."""
    refuse(hf, topk_method="noaux_tc", moe_layer_freq=1)
    if not hf.get("mlp_layer_types"):
        at_least(0, hf, "first_k_dense_replace")
    shared = need(hf, "moe_intermediate_size") * at_least(1, hf, "n_shared_experts")
    return grouped_experts(hf) | {"moe_shared_expert_intermediate_size": shared}


def _groups(hf: HFConfig, chosen: int) -> Settings:
    """Experts form groups, and only experts of the best `topk_group` groups can be chosen."""
    number, best = at_least(1, hf, "n_group"), at_least(1, hf, "topk_group")
    if (count := hf["n_routed_experts"]) % number:
        raise ValueError(f"config.json: n_group={number} does not divide n_routed_experts={count}")
    if best > number:
        raise ValueError(f"config.json: topk_group={best} is not supported; expected at most n_group={number}")
    if best == number:
        return {}
    if chosen // best != 2:  # Megatron ranks a group by this many best experts; the model's code by two
        raise ValueError(
            f"config.json: num_experts_per_tok={chosen} with topk_group={best} is not supported; expected twice "
            "topk_group, as a group is ranked by its two best experts"
        )
    return {"moe_router_num_groups": number, "moe_router_group_topk": best}
