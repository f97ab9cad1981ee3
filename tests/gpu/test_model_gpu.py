"""On a real GPU: Megatron's log-probs are those of transformers, by Transformer-Engine's layers and by ours."""

from pathlib import Path

import pytest
import torch
from tiny_models import read_config, write_model
from transformers import AutoModelForCausalLM

from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions, has_transformer_engine
from megarl.mcore.models.model import build_model
from megarl.mcore.training.offload import OffloadBuffer
from megarl.mcore.training.step import Outputs, forward_only
from megarl.samples.batch import Batch, MicroBatch
from megarl.weights.hf.load import load_hf

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]

LENGTHS = [65, 1, 30, 200]
# Heads of 64: the smallest that the fast attention kernels take.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
FAMILIES = ("qwen2", "qwen3", "llama3", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_model(root / family, family, tied=False, **SIZES)
    return root


def tokens() -> torch.Tensor:
    return torch.randint(0, 45, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def ours(folder: Path, dtype: str, engine: ExecutionOptions) -> torch.Tensor:
    config = read_config(folder)
    model = build_model(config, Layout(), dtype=dtype, engine=engine)
    load_hf(model, folder, config)
    micro = MicroBatch(Batch(tokens(), torch.tensor(LENGTHS)))
    columns = forward_only(model, [micro], Outputs(Layout(), config["vocab_size"]), torch.device("cuda", 0))
    return columns[0]["log_probs"].float().cpu()


def theirs(folder: Path, dtype: str) -> torch.Tensor:
    """Log-probs of each sequence by itself, 0 where nothing predicts a token."""
    # torch's grouped products of experts take no float64.
    how = {"experts_implementation": "eager"} if dtype == "float64" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **how).eval().cuda()
    at_least_float32 = torch.promote_types(model.dtype, torch.float32)
    columns = []
    for ids in tokens().cuda().split(LENGTHS):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].to(at_least_float32).log_softmax(-1)
        columns += [torch.zeros(1, dtype=at_least_float32), log_probs[:-1].gather(1, ids[1:, None])[:, 0].cpu()]
    return torch.cat(columns)


def assert_as_near_as_transformers(got: torch.Tensor, folder: Path) -> None:
    """bfloat16 is judged by its distance from float32, where that of transformers is what rounding costs."""
    exact = theirs(folder, "float32")
    assert (got - exact).abs().mean() < 1.5 * (theirs(folder, "bfloat16") - exact).abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_transformers(root: Path, family: str) -> None:
    """Float32, as near to float64 as theirs; log-probs are around -8."""
    exact = theirs(root / family, "float64")
    rounding = (theirs(root / family, "float32") - exact).abs().max().item()
    got = ours(root / family, "float32", ExecutionOptions(transformer_impl="local"))
    torch.testing.assert_close(got.double(), exact, atol=3 * rounding + 1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_costs_what_it_costs_transformers(root: Path, family: str) -> None:
    assert_as_near_as_transformers(
        ours(root / family, "bfloat16", ExecutionOptions(transformer_impl="local")), root / family
    )


@pytest.mark.skipif(not has_transformer_engine(), reason="Transformer-Engine is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engine_is_as_near(root: Path, family: str) -> None:
    """In bfloat16: its attention over packed rows takes no float32."""
    engine = ExecutionOptions(transformer_impl="transformer_engine")
    assert_as_near_as_transformers(ours(root / family, "bfloat16", engine), root / family)


def test_an_offloaded_model_leaves_its_memory_and_comes_back_as_it_was(root: Path) -> None:
    config = read_config(root / "qwen2")
    model = build_model(config, Layout(), dtype="bfloat16")
    load_hf(model, root / "qwen2", config)
    before = [parameter.clone().cpu() for parameter in model[0].parameters()]
    buffer = OffloadBuffer(model, None, parameters=True)
    onloaded = torch.cuda.memory_allocated()
    moved = buffer.offload()
    assert onloaded - torch.cuda.memory_allocated() >= moved.parameters > 0
    buffer.onload()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, model[0].parameters(), strict=True))
