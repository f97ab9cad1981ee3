"""The HF server's model of every family: its two forward passes against transformers', and its tensors' hub names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.arch.hf_config import read_config
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import FAMILIES, write_tiny_model
from megarl.hf_server.kv_cache import Decode, Prefill
from megarl.hf_server.model import HFModel
from megarl.rollout.protocol import DTYPE_NAMES
from megarl.weights.verify.digests import digest

SHAPE = TinySizes(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
MODELS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    "mistral with a window": {"family": "mistral", "sliding_window": 4},
    "llama with scaled rope": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_moe with a dense layer": {"family": "qwen3_moe", "mlp_only_layers": [0]},
}


def write(folder: Path, seed: int, settings: dict[str, Any]) -> str:
    """A tiny model whose weights are large enough for every part to show."""
    write_tiny_model(folder, SHAPE, seed=seed, **settings)
    tensors = load_file(folder / "model.safetensors")
    g = torch.Generator().manual_seed(seed)
    loud = {n: torch.randn(t.shape, generator=g) * 0.2 + ("norm" in n) for n, t in sorted(tensors.items())}
    save_file(loud, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


FAST = ("qwen3", "gpt_oss", "deepseek_v3", "mistral with a window")


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in MODELS])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The same model with two sets of weights."""
    return write(tmp_path / "a", 1, MODELS[request.param]), write(tmp_path / "b", 2, MODELS[request.param])


def logits_in_two_ways(model: HFModel, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """[T] -> [T - prompt + 1, V]: of the prompt's last token in one pass, then of each further token by itself."""
    cache = model.new_cache(max_tokens=len(tokens))
    cache.reserve(1, len(tokens), used=(0, 0))
    with torch.inference_mode():
        hidden = model.prefill(tokens[None, :prompt], Prefill(cache, 0, [0], [0], [prompt]))
        found = [model.logits(hidden[0, -1])]
        for at in range(prompt, len(tokens)):
            position = torch.tensor([at])
            found.append(model.decode(tokens[None, at], Decode(cache, position, at + 1), position, at + 1)[0])
    return torch.stack(found)


def test_a_prefill_behind_cached_tokens_is_that_of_the_whole(folders: tuple[str, str]) -> None:
    """Three sequences, of which 0, 5 and 11 of 12 tokens are there; the second one is for two completions."""
    model, length, starts, sources = HFModel(folders[0], torch.float32), 12, [0, 5, 11], [0, 1, 1, 2]
    tokens = torch.randint(model.vocab_size, (3, length), generator=torch.Generator().manual_seed(0))
    alone = [model.new_cache(max_tokens=length) for _ in starts]
    cache = model.new_cache(max_tokens=5 * length)
    cache.reserve(5, length, used=(0, 0))
    with torch.inference_mode():
        expected = []
        for own, ids in zip(alone, tokens, strict=True):
            own.reserve(1, length, used=(0, 0))
            expected.append(model.prefill(ids[None], Prefill(own, 0, [0], [0], [length]))[0])
        for slot, number in enumerate(sources, start=1):
            at = torch.arange(starts[number])
            cache.copy(alone[number], (at * 0, at), (at * 0 + slot, at))
        counts = [length - start for start in starts]
        new = torch.zeros(3, length, dtype=torch.int64)
        for number, start in enumerate(starts):
            new[number, : counts[number]] = tokens[number, start:]
        found = model.prefill(new, Prefill(cache, 1, sources, starts, counts))
    assert not found.isnan().any(), "nor is padding"
    for number, start in enumerate(starts):
        torch.testing.assert_close(found[number, : counts[number]], expected[number][start:], atol=1e-5, rtol=1e-5)
    for layer, held in enumerate(cache.tensors):
        assert not held[0].any(), "slot 0 is not among them"
        for slot, number in enumerate(sources, start=1):
            torch.testing.assert_close(held[slot], alone[number].tensors[layer][0], atol=1e-5, rtol=1e-5)


def test_tensors_pushed_under_hub_names_make_the_model_of_their_folder(folders: tuple[str, str]) -> None:
    held, pushed = HFModel(folders[0], torch.float32), load_file(f"{folders[1]}/model.safetensors")
    tokens = torch.arange(7, 19) * 5 % held.vocab_size
    before = logits_in_two_ways(held, tokens, prompt=6)
    held.check_weights(
        list(pushed), [DTYPE_NAMES[t.dtype] for t in pushed.values()], [t.shape for t in pushed.values()]
    )
    again = HFModel(folders[0], torch.float32)
    again.load_weights(again.read_folder(folders[1]))
    held.load_weights(pushed)
    assert held.checksums() == again.checksums(), "a folder is read under hub names too"
    assert held.checksums() == {name: digest(tensor) for name, tensor in pushed.items()}
    assert held.checksums() == HFModel(folders[1], torch.float32).checksums()
    after = logits_in_two_ways(held, tokens, prompt=6)
    assert (after - before).abs().max() > 0.1
    config = read_config(folders[1])
    theirs = AutoModelForCausalLM.from_pretrained(folders[1], config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(tokens[None], use_cache=False).logits[0, 5:]
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)


def test_a_mamba_mixer_takes_steps_as_short_as_the_trainer_does(tmp_path: Path) -> None:
    """Of 1e-4 here; transformers would take none below 1e-3."""
    folder = write(tmp_path / "a", 1, {"family": "nemotron_h"})
    tensors = load_file(f"{folder}/model.safetensors")
    save_file(tensors | {n: t - 9 for n, t in tensors.items() if n.endswith("dt_bias")}, f"{folder}/model.safetensors")
    tokens = torch.arange(7, 19)
    held = logits_in_two_ways(HFModel(folder, torch.float32), tokens, prompt=6)
    theirs = AutoModelForCausalLM.from_pretrained(folder, config=read_config(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        limited = theirs(tokens[None], use_cache=False).logits[0, 5:]
        for module in theirs.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, torch.inf)
        free = theirs(tokens[None], use_cache=False).logits[0, 5:]
    torch.testing.assert_close(held, free, atol=1e-5, rtol=1e-5)
    assert (held - limited).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_decays_are_float32_beside_bfloat16_as_the_trainer_pushes_them(tmp_path: Path, family: str) -> None:
    folder = write(tmp_path / "a", 1, {"family": family})
    held, stored = HFModel(folder, torch.bfloat16), load_file(f"{folder}/model.safetensors")
    decays = {name for name, tensor in held.weights.items() if tensor.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in decays} >= {"A_log"}
    assert all(torch.equal(held.weights[name], stored[name]) for name in decays)
    tokens = torch.arange(7, 19) * 5 % held.vocab_size
    exact = logits_in_two_ways(HFModel(folder, torch.float32), tokens, prompt=6)
    assert (logits_in_two_ways(held, tokens, prompt=6).float() - exact).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_layer_that_predicts_further_tokens_is_left_alone(tmp_path: Path, family: str) -> None:
    """Published folders have one behind the last layer, with a router's bias of its own."""
    folder = Path(write(tmp_path / "a", 1, {"family": family, "num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    last = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.")}
    assert any(name.endswith("e_score_correction_bias") for name in last)
    more = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in last.items()}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    held = HFModel(str(folder), torch.float32)
    held.load_weights(held.read_folder(str(folder)))
    assert held.checksums().keys() == tensors.keys()


def test_experts_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    held = HFModel(write(tmp_path / "a", 1, {"family": "mixtral"}), torch.float32)
    layer, given = "model.layers.0.block_sparse_moe.experts", ("0.w1", "1.w2", "4.w3", "2.gate_proj")
    with pytest.raises(ValueError) as caught:
        held.check_weights([f"{layer}.{name}.weight" for name in given], ["float32"] * 4, [[48, 32]] * 4)
    said = str(caught.value)
    assert "experts.0.w1" not in said and "experts.1.w2.weight: shape [48, 32], expected [32, 48]" in said
    assert "experts.4.w3.weight: unknown" in said and "experts.2.gate_proj.weight: unknown" in said
