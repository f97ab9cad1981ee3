"""The projections of a layer that adapters can be trained for: the matrices of attention and of feed-forwards.

Their names are Hugging Face's.  The experts of Mixtral are named as those of other models: gate_proj is w1 in its
folders, up_proj is w3, down_proj is w2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Megatron's linear -> the projections in it, in the order of its rows.
LINEARS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),  # of a dense layer, of an expert, of the shared experts
    "linear_fc2": ("down_proj",),
}
TARGETS = tuple(dict.fromkeys(projection for held in LINEARS.values() for projection in held))
ALL = "all-linear"  # PEFT's word for all projections of a model


def projections_of(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """The projections that the layers of a model have, by its config.json.

    Example, DeepSeek-V3: q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj.
    """
    if "kv_lora_rank" in hf:  # multi-head latent attention
        queries = ("q_proj",) if hf.get("q_lora_rank") is None else ("q_a_proj", "q_b_proj")
        attention = {*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    else:
        attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return tuple(name for name in TARGETS if name in attention | {"gate_proj", "up_proj", "down_proj"})


def chosen(targets: Sequence[str], has: Sequence[str]) -> tuple[str, ...]:
    """The projections that `targets` means in a model that `has` these.  ValueError for one that it lacks."""
    if list(targets) == [ALL]:
        return tuple(has)
    if lacking := [target for target in targets if target not in has]:
        raise ValueError(
            f"lora.targets={list(targets)}: this model has no {', '.join(lacking)}; expected {ALL}, or some of "
            f"{', '.join(has)}"
        )
    return tuple(targets)
