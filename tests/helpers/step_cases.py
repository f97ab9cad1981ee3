"""One optimizer step of a small model by the layers and the dtype that are asked for, and when two of them agree.

tests/gpu compares Transformer-Engine's layers and bfloat16 on a GPU; a test on the CPU runs the same functions.
"""

from pathlib import Path
from typing import Any

import torch
from chunks import gradients, weights
from parity_cases import LOSSES, make_step
from torch import Tensor

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import device_for
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, backward, forward_only
from megarl.weights.hf.load import load_hf

# The first step of AdamW is then a formula of its gradient alone; with this eps it is smooth where a gradient is 0.
ADAMW = OptimSettings("adamw", lr=0.01, eps=1e-3, weight_decay=0.1, max_grad_norm=1e9)
# Of bfloat16 against float32: three times what was seen on a CPU.
GRADIENT_ERROR, LOG_PROB_ERROR = 0.06, 0.005
NUM_SEQUENCES, LAYOUT = 40, Layout()
# Heads of 64: the smallest that the fast attention kernels take.
SHAPE = TinySizes(hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=512)
# Every token goes to every expert: rounding changes no choice.
ALL_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "qwen3_moe": ALL_EXPERTS,
    "deepseek_v3": ALL_EXPERTS | {"qk_nope_head_dim": 112, "v_head_dim": 128},  # with the rotary part, 128,
}


def write_families(root: Path) -> dict[str, str]:
    """Family -> folder of a model of it."""
    for family, settings in FAMILIES.items():
        write_tiny_model(root / family, SHAPE, family=family, tied=False, seed=1, **settings)
    return {family: str(root / family) for family in FAMILIES}


def one_step(
    folder: str,
    dtype: str = "float32",
    transformer_impl: str = "local",
    settings: OptimSettings = ADAMW,
    layout: Layout = LAYOUT,
) -> dict[str, Any]:
    """Log-probs, gradient, and the weights before and after AdamW's first step, all in host memory.

    Needs Megatron's groups of one rank; uses its GPU if there is one.
    """
    device, hf = device_for("auto"), read_hf_config(folder)
    engine = ExecutionOptions(transformer_impl=transformer_impl)
    model = build_model(hf, layout, dtype=dtype, engine=engine)
    load_hf(model, folder, hf)
    model = wrap_for_training(model, layout, engine)
    optimizer = Optimizer(model, settings)
    batch, loss = make_step(hf["vocab_size"], NUM_SEQUENCES), LOSSES["actor"]
    micros = micro_batches(batch.keep_columns(*loss.columns), [NUM_SEQUENCES // 2] * 2)
    outputs = Outputs(layout, hf["vocab_size"], names=("log_probs", "entropy"))
    columns = forward_only(model, micros, outputs, device)
    optimizer.zero_grad()
    backward(model, micros, outputs, loss, num_tokens=batch.num_tokens, device=device)
    gradient, before = gradients(model, hf, "actor"), weights(model, hf, "actor")
    norm = optimizer.gradient_norm()
    optimizer.step(norm)
    return {
        "log_probs": torch.cat([column["log_probs"] for column in columns]).double().cpu(),
        "gradient": _on_host(gradient),
        "before": _on_host(before),
        "after": _on_host(weights(model, hf, "actor")),
        "norm": norm,
    }


def steps_of(folder: str, *ways: tuple[str, str]) -> list[dict[str, Any]]:
    """The steps by several (dtype, layers), in a world of one rank; for a rank of a test on the CPU."""
    from megarl.mcore.setup import destroy_groups, make_groups

    make_groups(LAYOUT)
    found = [one_step(folder, *way) for way in ways]
    destroy_groups()
    return found


def gradient_error(got: dict[str, Any], exact: dict[str, Any]) -> float:
    """|g - g_exact| / |g_exact| of all gradients as one vector."""
    assert sorted(got["gradient"]) == sorted(exact["gradient"])
    squares = [(got["gradient"][name] - g).square().sum() for name, g in exact["gradient"].items()]
    whole = [g.square().sum() for g in exact["gradient"].values()]
    return (sum(squares) / sum(whole)).sqrt().item()


def log_prob_error(got: dict[str, Any], exact: dict[str, Any]) -> float:
    """The mean difference of a token's log-prob."""
    return (got["log_probs"] - exact["log_probs"]).abs().mean().item()


def assert_steps_by_its_gradient(found: dict[str, Any], dtype: str) -> None:
    """The weights after the step are AdamW's formula of the gradient, rounded once to the weights' dtype."""
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
    squares = sum(g.square().sum() for g in found["gradient"].values())
    assert abs(found["norm"] - squares.sqrt().item()) < 1e-4 * found["norm"]
    moved = 0.0
    for name, before in found["before"].items():
        g = found["gradient"][name]
        decay = ADAMW.weight_decay if before.ndim == 2 else 0.0
        expected = before - ADAMW.lr * (g / (g.abs() + ADAMW.eps) + decay * before)
        error = (found["after"][name] - expected).abs().max().item()
        assert error <= rounding * expected.abs().max().item(), f"{name}: {error:.1e}"
        moved = max(moved, (found["after"][name] - before).abs().max().item())
    assert moved > 0.5 * ADAMW.lr, "the step is larger than its rounding"


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double().cpu() for name, tensor in tensors.items()}
