"""Runs in SGLang's environment: SGLang's own loader and updater push into a small fp8 model, and read folders.

    python flash_updates.py FORMAT FOLDER BUCKETS

FOLDER: of model.safetensors.  BUCKETS: JSON, lists of names that are pushed together.  The model begins with zeros.
Its weights are pushed from the folder in these buckets, then the folder is read with load format FORMAT; all this
twice.  Output: a line of JSON, {"pushed": digest, "read": [digest, digest], "per_channel": whether each row of a fused
weight has a scale of its own, by compute capability under CUDA 13}, or {"error": text} for what is refused.
The fp8 kernel needs a GPU: a plain function takes its place.
"""

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader, QuantizedRLModelLoader
from sglang.srt.model_loader.weight_utils import default_weight_loader, supports_quantized_rl_reload
from torch import Tensor, nn

ROWS = {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}  # of the fused projection
CAPABILITIES = ((8, 9), (9, 0), (10, 0), (12, 0))
FP8 = torch.float8_e4m3fn


def quantize(
    x: Tensor, _: int, output_q: Tensor | None = None, output_s: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A scale for each row, as SGLang's kernel with a group of a whole row."""
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / torch.finfo(FP8).max
    quantized = (x.float() / scales).to(FP8)
    if output_q is None or output_s is None:
        return quantized, scales
    return output_q.copy_(quantized), output_s.copy_(scales)


class PerChannel:
    """What Fp8LinearMethod does with unquantized weights on GPUs with CUTLASS kernels."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        quantized, scales = quantize(layer.weight, layer.weight.shape[-1])
        layer.weight = nn.Parameter(quantized.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scales.t().contiguous(), requires_grad=False)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.bfloat16), requires_grad=False)
        self.weight.weight_loader = self.weight_loader
        self.quant_method = PerChannel()

    def weight_loader(self, param: Tensor, weight: Tensor, part: str) -> None:
        param.data[ROWS[part]] = weight


class Small(nn.Module):
    """model.layers.0.self_attn.qkv_proj and model.norm."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"norm": nn.LayerNorm(8, bias=False, dtype=torch.bfloat16)})
        attention = nn.ModuleDict({"qkv_proj": Fused()})
        self.model["layers"] = nn.ModuleList([nn.ModuleDict({"self_attn": attention})])

    @supports_quantized_rl_reload
    def load_weights(self, weights: Any) -> None:
        params = dict(self.named_parameters())
        for name, weight in weights:
            *module, projection, kind = name.split(".")
            if projection == "norm":
                default_weight_loader(params[name], weight)
            else:
                param = params[".".join([*module, "qkv_proj", kind])]
                param.weight_loader(param, weight, projection[0])


def updater_of(model: nn.Module) -> SimpleNamespace:
    """What a WeightUpdater knows, as far as it reads it here."""
    config = SimpleNamespace(revision=None, dtype=torch.bfloat16, quantization="fp8")
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        model_config=config,
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        _assert_weight_cache_inactive=lambda _: None,
    )


def is_per_channel(capability: tuple[int, int]) -> bool:
    """Whether SGLang quantizes for such a GPU as PerChannel does, and not with one scale for a whole weight."""
    fp8_utils._is_cuda = True
    fp8_utils.get_device_capability = lambda: capability
    fp8_utils.get_cuda_version = lambda: (13, 0)
    return fp8_utils.cutlass_fp8_supported.__wrapped__()  # without its cache


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, param in sorted(model.named_parameters()):
        total.update(name.encode() + param.data.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main() -> dict[str, Any]:
    load_format, folder, buckets = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    fp8_kernel.per_token_group_quant_fp8 = quantize
    weight_updater.get_pp_stage_load_group = lambda: None
    weight_updater.get_available_gpu_memory = lambda *_, **__: 0.0
    # It asks for the whole server's arguments.
    DefaultModelLoader._get_weights_iterator = lambda *_: iter(load_file(f"{folder}/model.safetensors").items())
    model = Small()
    QuantizedRLModelLoader(LoadConfig(load_format="flash_rl")).load_weights_and_postprocess(
        model, [], torch.device("cpu")
    )
    updater, tensors, read = updater_of(model), load_file(f"{folder}/model.safetensors"), []
    for _ in range(2):
        for names in buckets:
            model.load_weights([(name, tensors[name]) for name in names])
        pushed = digest(model)
        is_read, message = WeightUpdater.update_weights_from_disk(updater, folder, load_format)
        assert is_read, message
        read.append(digest(model))
    assert model.model["layers"][0]["self_attn"]["qkv_proj"].weight.dtype == FP8
    per_channel = {f"{major}.{minor}": is_per_channel((major, minor)) for major, minor in CAPABILITIES}
    return {"pushed": pushed, "read": read, "per_channel": per_channel}


if __name__ == "__main__":
    try:
        found = main()
    except ValueError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
