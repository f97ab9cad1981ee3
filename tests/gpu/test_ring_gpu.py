"""On a real GPU: whole small runs with each engine on the same GPU, weights by CUDA IPC; with two GPUs, by NCCL."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import SHAPE, make_parts, settings, steps
from tiny_models import add_mtp

from megarl.cli import main
from megarl.servers.sglang_environment import PYTHON_VARIABLE, sglang_python

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
ON_ONE = ["trainer.n_gpus_per_node=1", "rollout.first_gpu=0", "rollout.memory_fraction=0.3"]
LAYOUTS = {
    "separate": [*ON_ONE, "rollout.placement=separate"],
    "shared": [*ON_ONE, "rollout.placement=shared"],
    "offloaded": [*ON_ONE, "actor.megatron.param_offload=true", "actor.megatron.optimizer_offload=true"],
}
WAYS = ("gathered", "sharded")
ENGINES = ("hf", "sglang")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64: the smallest that the servers' attention kernels take."""
    return make_parts(tmp_path_factory.mktemp("parts"), replace(SHAPE, hidden=256, head_dim=64, ffn=512))


def run(parts: Path, folder: Path, name: str, engine: str, *more: str) -> dict[str, Any]:
    words = [f"rollout.engine={engine}", "algorithm.adv_estimator=grpo", "model.dtype=bfloat16", "trainer.device=cuda"]
    if engine == "sglang":
        words.append(f"rollout.sglang.python={sglang_python(os.environ.get(PYTHON_VARIABLE))}")
    assert main(["train", *settings(parts, folder, name, *words, *more)]) == 0
    return json.loads((folder / name / "summary.json").read_text())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_and_server_share_one_gpu(parts: Path, tmp_path: Path, layout: str, engine: str) -> None:
    summary = run(parts, tmp_path, layout, engine, *LAYOUTS[layout])
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert summary["log_prob_gap_max"] < 0.3, "bfloat16 on both sides, other kernels and another order of sums"
    assert set(steps(tmp_path / layout, "push/fallbacks").values()) == {0.0}, "CUDA IPC, and nothing slower"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_cross_by_nccl(parts: Path, tmp_path: Path, way: str, engine: str) -> None:
    summary = run(
        parts, tmp_path, way, engine, "trainer.n_gpus_per_node=1", f"rollout.push={way}", "rollout.first_gpu=1"
    )
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert set(steps(tmp_path / way, "push/fallbacks").values()) == {0.0}


APART = ["trainer.n_gpus_per_node=1", "rollout.first_gpu=1", "rollout.push=gathered"]


@pytest.mark.megatron_0_19
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_mtp_layers_are_pushed_and_drafted_with(tmp_path: Path, family: str) -> None:
    """Draws of verified drafts are the policy's: log-probs agree as without drafts, and the digests of both models."""
    parts = make_parts(tmp_path / "parts", replace(SHAPE, hidden=256, head_dim=64, ffn=512), family=family, tied=False)
    add_mtp(parts / "model")
    more = ["actor.mtp=detached", "rollout.sglang.args=[--speculative-algorithm,NEXTN]"]
    summary = run(parts, tmp_path, "drafts", "sglang", *APART, *more)
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert summary["log_prob_gap_max"] < 0.3, "as without drafts"


@pytest.mark.megatron_0_19
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_pushed_and_its_keys_are_reported(tmp_path: Path, family: str) -> None:
    """Heads, latents and indexers have the published sizes, as kernels take no others."""
    sizes = replace(SHAPE, hidden=512, heads=64, head_dim=64, ffn=512)
    latents = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    indexers = {"v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    parts = make_parts(tmp_path / "parts", sizes, family=family, tied=False, **latents, **indexers)
    summary = run(parts, tmp_path, "keys", "sglang", *APART, "actor.router_replay=rollout")
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert summary["log_prob_gap_max"] < 0.3, "as of other families"
