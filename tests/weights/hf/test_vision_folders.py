"""Of a folder with a vision part the text part is read, under the names of a folder of text alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from vision_folders import KINDS, write_vision_folder

from megarl.arch.hf_config import read_config, read_hf_config
from megarl.hf_server.kv_cache import Prefill
from megarl.hf_server.model import HFModel
from megarl.weights.hf.named import check_complete, open_for

TOKENS = torch.arange(2, 13) % 45


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_vision_folders_are_read_as_their_text_part(tmp_path: Path, family: str, tied: bool) -> None:
    whole = write_vision_folder(tmp_path, family, tied=tied)
    numbers = read_hf_config(tmp_path)
    assert (numbers["model_type"], numbers["num_hidden_layers"]) == (f"{family}_text", 2)
    check_complete(tmp_path)
    text = AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path), dtype=torch.float32).eval()
    own = dict(text.state_dict())
    with open_for(tmp_path, numbers) as held:
        for name in (
            n for n in held.hub_shapes if not n.startswith(("mtp.", "model.visual.")) and ".experts." not in n
        ):
            assert torch.equal(held.read_hub(name), own[name]), name
    served = HFModel(str(tmp_path), torch.float32)
    assert not any("visual" in name or "mtp" in name or "language_model" in name for name in served.weights)
    served.load_weights(served.read_folder(str(tmp_path)))
    cache = served.new_cache(max_tokens=len(TOKENS))
    cache.reserve(1, len(TOKENS), used=(0, 0))
    with torch.inference_mode():
        found = served.logits(served.prefill(TOKENS[None], Prefill(cache, 0, [0], [0], [len(TOKENS)])))
        for model in (whole, text):
            torch.testing.assert_close(found, model(input_ids=TOKENS[None]).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": None}, "without a text_config of 'qwen3_5_text'"),
        ({"text_config": {"model_type": "qwen3"}}, "without a text_config of 'qwen3_5_text'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, and in text_config false"),
    ],
)
def test_vision_folders_whose_parts_disagree_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": {}} | change))
    with pytest.raises(ValueError, match=said):
        read_hf_config(tmp_path)
