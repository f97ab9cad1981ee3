"""Models whose layers have states: the gradient is that of transformers, and bfloat16 is as close as theirs.

Log-probs of all families are compared in tests/dist/test_families_dist.py, and layouts in test_expert_parity.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import gradients
from parity_cases import make_step
from parity_compare import assert_same_gradient
from spawn import run_ranks
from tiny_models import write_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.arch.hf_config import read_config, read_hf_config
from megarl.arch.layout import Layout
from megarl.hf_server.hub_names import hub_tensors
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, backward, forward_only
from megarl.samples.batch import Batch, LossOutput
from megarl.weights.hf.load import load_hf

pytestmark = pytest.mark.full
QWEN, NEMOTRON = (
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    ("nemotron_h", "nemotron_h_latent", "nemotron_h_dense"),
)
VOCAB = 45


class Weighted:
    columns = ("weight", "advantages")

    def __call__(self, batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
        return LossOutput((batch.columns["weight"] * batch.columns["advantages"] * outputs["log_probs"]).sum())


def ours(folder: str) -> dict[str, Any]:
    """Log-probs in both types, and the gradient in float32; several sequences in each row."""
    make_groups(Layout())
    hf, batch = read_hf_config(folder), make_step(VOCAB)
    micros, outputs = micro_batches(batch, [5, 8]), Outputs(Layout(), VOCAB)
    found: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        engine = ExecutionOptions().for_dtype(dtype)
        model = build_model(hf, Layout(), dtype=dtype, engine=engine)
        load_hf(model, folder, hf)
        columns = forward_only(model, micros, outputs, torch.device("cpu"))
        found[dtype] = torch.cat([column["log_probs"] for column in columns])
    model = wrap_for_training(model, Layout(), engine)
    backward(model, micros, outputs, Weighted(), num_tokens=batch.num_tokens, device=torch.device("cpu"))
    return found | {"gradient": gradients(model, hf, "actor")}


def theirs(folder: str, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Log-probs of each sequence alone, and the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, config=read_config(folder), dtype=dtype).eval()
    batch, columns = make_step(VOCAB), []
    for ids in batch.tokens.split(batch.lengths.tolist()):
        log_probs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        columns += [torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(columns), model


@pytest.mark.megatron_0_19
@pytest.mark.parametrize("family", [*QWEN, *NEMOTRON])
def test_gradients_are_those_of_transformers_and_bfloat16_is_no_further_off(tmp_path: Path, family: str) -> None:
    folder = str(write_model(tmp_path / "model", family, tied=False))
    (found,) = run_ranks(1, ours, folder, timeout_s=240)
    log_probs, model = theirs(folder, torch.float32)
    torch.testing.assert_close(found["float32"], log_probs.detach(), atol=1e-4, rtol=0)
    batch = make_step(VOCAB)
    (batch.columns["weight"] * batch.columns["advantages"] * log_probs).sum().backward()
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    expected = {
        n: t for n, t in hub_tensors(model, model.config.model_type).items() if not n.endswith("_correction_bias")
    }
    got = {name: found["gradient"][name] for name in expected}
    # Both are sums of float32 roundings, each up to what two layouts of the trainer may differ by.
    assert_same_gradient(got, expected, 1e-4)
    with torch.no_grad():
        rounded, _ = theirs(folder, torch.bfloat16)
    off, may_be_off = ((other - log_probs).abs().mean().item() for other in (found["bfloat16"], rounded))
    assert 0 < off < 1.5 * may_be_off, "the same number of roundings, in another order"
