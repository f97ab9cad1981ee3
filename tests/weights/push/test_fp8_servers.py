"""Servers that quantize what they get, by SGLang's own loader and updater; no server starts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_server import CURRENT, ROOT, sglang_of

from megarl.weights.push.buckets import plan_buckets
from megarl.weights.push.servers import ServerCapabilities

HELPERS = ROOT / "tests" / "helpers"
QKV = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]


def updates(folder: Path, load_format: str) -> dict[str, Any]:
    """Each tensor in a bucket of its own, and the folder, twice."""
    tensors = {name: torch.randn(rows, 8).bfloat16() for name, rows in zip(QKV, (8, 4, 4), strict=True)}
    tensors["model.norm.weight"] = torch.randn(8).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    buckets = plan_buckets({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, bucket_bytes=1)
    assert buckets == [[name] for name in tensors]
    stand_ins = ROOT / "megarl" / "servers" / "sglang_cpu"
    done = subprocess.run(
        [sglang_of(CURRENT), str(HELPERS / "flash_updates.py"), load_format, str(folder), json.dumps(buckets)],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(stand_ins)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sglang
def test_flash_rl_takes_buckets_and_folders_again_and_again(tmp_path: Path) -> None:
    """The parts of a fused weight may come in several buckets, because each row has a scale of its own."""
    able = ServerCapabilities.read({"version": CURRENT, "load_format": "flash_rl", "quantization": "fp8"}, {})
    assert able.disk_format is not None, "its own format can be loaded only once"
    found = updates(tmp_path, able.disk_format)
    assert found["read"] == [found["pushed"]] * 2, "a folder of the pushed weights changes nothing"
    assert set(found["per_channel"].values()) == {True}
