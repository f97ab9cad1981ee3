"""For every key of every family: the trainer computes what transformers computes from the same config.json, or refuses.

Keys are left out, null, other than they were, under both of their names, and taken from other families.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_configs import hf_of
from spawn import run_ranks
from tiny_models import LACKING, filled, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.arch.hf_config import SAME_MODEL, SUPPORTED, read_hf_config
from megarl.arch.layout import Layout
from megarl.arch.model_types import OF_0_19
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.step import Outputs, forward_only
from megarl.samples.batch import Batch, MicroBatch
from megarl.weights.hf.load import load_hf

Variant = tuple[str, dict[str, Any]]  # what was done, and the config.json
KINDS = [kind for kind in SUPPORTED if kind not in LACKING]
TINY = {kind: "llama3" if kind == "llama" else kind for kind in KINDS}
LENGTHS = [9, 1, 12, 140]  # past the windows, and past the contexts before and after their extension
MOST_PARAMETERS = 200_000  # of a model whose weights are made for the test; else it has those of the family's
# Say nothing about the mathematics; those of dropout and routers are for training, and are none of the trainer's.
IRRELEVANT = {
    *("architectures", "dtype", "transformers_version", "_name_or_path", "id2label", "label2id", "problem_type"),
    *("return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "router_aux_loss_coef"),
    *("is_encoder_decoder", "chunk_size_feed_forward", "use_cache", "pretraining_tp", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
    *("time_step_min", "time_step_max"),  # by which weights are drawn
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": None},
    {"type": "yarn", "factor": 4.0},
    YARN,
    YARN | {"factor": None},
    YARN | {"rope_theta": 50.0, "beta_fast": 4, "beta_slow": None, "truncate": False},
    YARN | {"attention_factor": 0.8},
    YARN | {"mscale": 0.5},
    YARN | {"mscale": 0.5, "mscale_all_dim": 0.9},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0},
    {"rope_type": "llama3", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "proportional"},
    {"rope_type": "unheard of"},
    {},
)


def base_of(kind: str) -> dict[str, Any]:
    return {key: value for key, value in hf_of(TINY[kind], num_hidden_layers=2).items() if key not in IRRELEVANT}


def others(value: Any) -> Iterator[Any]:
    """Other values of the same type, and null."""
    if value is not None:
        yield None
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value, 0)
    elif isinstance(value, float):
        yield from (3 * value, 0.0, int(value))
    elif isinstance(value, str):
        yield "gelu"
    elif isinstance(value, list):
        yield from ([], value[:-1], [*value[:-1], "sliding_attention"], ["chunked_attention"] * len(value), [0])
    elif value is None:
        yield from (3, True, ["sliding_attention"] * 2, ["full_attention"] * 2)


def variants(kind: str) -> Iterator[Variant]:
    base = base_of(kind)
    of_class = AutoConfig.for_model(SAME_MODEL.get(kind, kind))
    for key, value in base.items():
        if key == "model_type":
            continue
        yield f"no {key}", {name: held for name, held in base.items() if name != key}
        if key != "rope_parameters":
            yield from ((f"{key}={other}", base | {key: other}) for other in others(value))
    for alias, own in of_class.attribute_map.items():
        yield f"{alias} as {own}", base | {alias: base[own]}
        other = base[own] + 1 if isinstance(base[own], int) else base[own][:-1]
        yield f"{alias} beside {own}", base | {alias: other}
        yield f"{alias} for {own}", {name: held for name, held in base.items() if name != own} | {alias: base[own]}
    without = {name: held for name, held in base.items() if name != "rope_parameters"}
    of_rope = base.get("rope_parameters", {})  # not every family has one
    for key, value in of_rope.items():
        rest = {name: held for name, held in of_rope.items() if name != key}
        yield f"rope without {key}", base | {"rope_parameters": rest}
        for other in others(value):
            yield f"rope with {key}={other}", base | {"rope_parameters": rest | {key: other}}
    yield "rope_scaling as rope_parameters", base | {"rope_scaling": of_rope}
    for rope in ROPES:
        yield f"rope_parameters={rope}", base | {"rope_parameters": rope}
        yield f"rope_scaling={rope}", without | {"rope_scaling": rope, "rope_theta": 300.0}
        yield f"rope_scaling={rope} beside", base | {"rope_scaling": rope}
    for key, value in (("rope_theta", 77.0), ("partial_rotary_factor", 0.5), ("original_max_position_embeddings", 24)):
        yield f"{key} beside", base | {key: value}
        yield f"{key} alone", without | {key: value}
        yield f"{key} with YaRN", base | {"rope_parameters": YARN, key: value}
    foreign: dict[str, Any] = {}
    for other in sorted(KINDS, key=OF_0_19.__contains__, reverse=True):  # so that the last word is that of the older
        foreign |= {key: value for key, value in base_of(other).items() if key not in base}
    more = {"rotary_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"0": {}}}
    yield from ((f"foreign {key}={value}", base | {key: value}) for key, value in (foreign | more).items())
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}
    yield (
        "windows of no layer",
        {k: v for k, v in base.items() if k != "layer_types"} | windows | {"max_window_layers": 2},
    )
    yield "windows of some", {k: v for k, v in base.items() if k != "layer_types"} | windows | {"max_window_layers": 1}
    yield "windows of all", base | windows | {"layer_types": ["sliding_attention"] * 2}
    yield "windows but full", base | windows | {"layer_types": ["full_attention"] * 2}


def tokens() -> torch.Tensor:
    return torch.randint(0, 44, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def oracle(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    """Writes the folder's weights, and returns transformers' log-probs; raises whatever transformers raises."""
    theirs = config | {"model_type": SAME_MODEL.get(config["model_type"], config["model_type"])}
    (folder / "config.json").write_text(json.dumps(theirs))
    read = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(deepcopy(read)).parameters())
    if count < MOST_PARAMETERS:
        made = AutoModelForCausalLM.from_config(deepcopy(read), dtype=torch.float32)
        filled(made).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(theirs))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    columns = []
    for ids in tokens().split(LENGTHS):
        with torch.no_grad():
            log_probs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        columns += [torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(columns)


def ours(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    (folder / "config.json").write_text(json.dumps(config))
    hf = read_hf_config(folder)
    model = build_model(hf, Layout())
    load_hf(model, folder, hf)
    micro = MicroBatch(Batch(tokens(), torch.tensor(LENGTHS)))
    found: torch.Tensor = forward_only(model, [micro], Outputs(Layout(), hf["vocab_size"]), torch.device("cpu"))[0][
        "log_probs"
    ]
    return found


def outcome(got: torch.Tensor, expected: torch.Tensor | Exception, limit: float) -> str:
    if isinstance(expected, Exception) and "multiple of 16 bytes" in str(expected):
        return "not compared: a limit of torch's kernels for CPUs"
    if isinstance(expected, Exception):
        return f"WRONG: computed, but transformers says {type(expected).__name__}: {expected}"
    difference = (got - expected).abs().max().item()
    return "equal" if difference < limit or not expected.isfinite().all() else f"WRONG: differs by {difference}"


def compare(root: str, kind: str, chosen: list[Variant]) -> list[tuple[str, str]]:
    """(variant, what is wrong or how it went) of each."""
    make_groups(Layout())
    folder, found = Path(root), []
    tiny_model(TINY[kind], tied=False, num_hidden_layers=2).save_pretrained(folder)
    weights = (folder / "model.safetensors").read_bytes()
    limit = 1e-4 if kind in OF_0_19 else 1e-5  # 4e-5 where states pass 140 tokens; in float64 it is 1e-14
    for name, config in chosen:
        (folder / "model.safetensors").write_bytes(weights)
        expected: torch.Tensor | Exception
        try:
            expected = oracle(folder, config)
        except Exception as error:
            expected = error
        try:
            found.append((name, outcome(ours(folder, config), expected, limit)))
        except ValueError as error:
            found.append((name, "refused" if "\n" not in str(error) else f"WRONG: several lines: {error}"))
        except Exception as error:
            found.append((name, f"WRONG: {type(error).__name__}: {error}"))
    destroy_groups()
    return found


# What was wrong once, and what is nearest to it, with the outcome.
CHOSEN: dict[str, dict[str, str]] = {
    "qwen2": {"foreign attention_bias=True": "equal", "windows of no layer": "equal", "windows of some": "refused"},
    "llama": {"no num_key_value_heads": "equal", f"rope_scaling={YARN} beside": "refused"},
    "mistral": {"windows but full": "equal", "windows of all": "equal", "no sliding_window": "equal"},
    "qwen3_moe": {"no norm_topk_prob": "equal", "windows of all": "refused"},
    "mixtral": {"no rope_parameters": "equal", "no rms_norm_eps": "equal", "windows but full": "equal"},
    "deepseek_v3": {
        **{"no routed_scaling_factor": "equal", "no n_group": "equal", "norm_topk_prob=None": "refused"},
        "no v_head_dim": "equal",  # values that are wider than keys
    },
    "glm4_moe": {"no rms_norm_eps": "equal", "rope_scaling as rope_parameters": "equal"},
    "minimax_m2": {"no rope_parameters": "equal"},
    "gpt_oss": {"no rope_parameters": "equal", "rope with beta_slow=3.0": "equal", "no sliding_window": "equal"},
}


def compare_chosen(root: str) -> dict[str, dict[str, str]]:
    return {
        kind: dict(compare(root, kind, [(name, hf) for name, hf in variants(kind) if name in names]))
        for kind, names in CHOSEN.items()
    }


@pytest.mark.full
def test_config_readers_agree_where_they_once_did_not(tmp_path: Path) -> None:
    """All keys of all families are below."""
    (found,) = run_ranks(1, compare_chosen, str(tmp_path), timeout_s=120)
    for kind, outcomes in CHOSEN.items():
        assert found[kind] == outcomes, kind


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_config_readers_agree_on_every_key_or_refuse(tmp_path: Path, kind: str) -> None:
    (found,) = run_ranks(1, compare, str(tmp_path), kind, list(variants(kind)), timeout_s=900)
    wrong = [f"{name}: {said}" for name, said in found if said.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)
    assert sum(said == "equal" for _, said in found) > len(found) / 4, "most are refused: nothing is compared"
