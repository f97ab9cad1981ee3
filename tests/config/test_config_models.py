"""What is known of the models before they are loaded: config.json, a preset's numbers, lengths and vocabularies."""

import json
from pathlib import Path

import pytest
from config_helpers import DENSE, load, refusal
from huggingface_hub import constants

from megarl.arch import model_types
from megarl.arch.layout import RANDOM_WEIGHTS
from megarl.config import ConfigError, from_yaml, load_config, model_config, to_yaml


def folder(path: Path, **numbers: object) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(numbers))
    return str(path)


def test_the_folder_counts_and_else_what_the_configuration_says(tmp_path: Path) -> None:
    there = folder(tmp_path / "m", num_hidden_layers=3)
    assert model_config(load(f"model.path={there}"), "actor") == {"num_hidden_layers": 3}
    assert model_config(load("model.config.num_hidden_layers=4"), "actor") == {"num_hidden_layers": 4}
    assert model_config(load(), "actor") == {}


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_model_of_random_weights_is_for_the_benchmark_only(tmp_path: Path, command: str) -> None:
    there = folder(tmp_path / "m", **{RANDOM_WEIGHTS: True})
    words = (f"model.path={there}", "data.val_files=[b.jsonl]", "rollout.engine=sglang")
    assert refusal(*words, command=command) == (
        f"model.path={there}: its weights are random, for benchmarks/ring/bench_ring.py only; expected a model"
    )
    for flags in ("[--load-format,dummy]", '["--load-format=dummy"]'):
        load(*words, f"rollout.sglang.args={flags}", command=command)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ({"vision_config": {"depth": 2}, "model_type": "qwen2_5_vl"}, "has vision_config"),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"]}, "says architectures=[Qwen2AudioForConditionalGe"),
    ],
)
def test_a_model_of_more_than_text_is_refused(tmp_path: Path, numbers: dict[str, object], found: str) -> None:
    there = folder(tmp_path / "m", **numbers)
    files = {"train": (), "evaluate": ("data.val_files=[b.jsonl]",), "sft": ("sft.train_files=[c.jsonl]",)}
    for command, words in files.items():
        said = refusal(f"model.path={there}", *words, command=command)
        assert said.startswith(f"model.path={there}: its config.json {found}")
        assert said.endswith("; expected a model of text alone, *ForCausalLM")


def test_a_model_that_megatron_cannot_compute_is_refused_before_the_start_but_can_be_evaluated(tmp_path: Path) -> None:
    there = folder(tmp_path / "m", model_type="kimi_linear")
    for command, words in (("train", ()), ("sft", ("sft.train_files=[c.jsonl]",))):
        said = refusal(f"model.path={there}", *words, command=command)
        assert said.startswith(
            f"model.path={there}: it is of model_type kimi_linear, and Megatron-Core has no Kimi delta "
        )
    load(f"model.path={there}", "data.val_files=[b.jsonl]", "rollout.engine=sglang", command="evaluate")


UNPROVED = ("actor.optim.name=muon", "actor.strategy=fsdp", "actor.lora.rank=4")
LATE = "actor.megatron={overlap_param_gather:true,use_distributed_optimizer:true}"


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        *((kind, word) for kind in ("qwen3_next", "nemotron_h", "deepseek_v32") for word in UNPROVED),
        *((kind, "actor.router_replay=rollout") for kind in ("qwen3_next", "nemotron_h")),
        *((kind, LATE) for kind in ("qwen3_5_text", "deepseek_v32")),
    ],
)
def test_what_layers_with_states_or_indexers_are_not_made_for_is_refused(
    tmp_path: Path, model_type: str, word: str
) -> None:
    numbers = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}
    there = folder(tmp_path / "m", model_type=model_type, num_experts=4, first_k_dense_replace=1, **numbers)
    said = refusal(f"model.path={there}", "trainer.n_gpus_per_node=2", word)
    key = "actor.megatron.overlap_param_gather=true" if word == LATE else word
    assert f"{key}: {model_type} has layers for which it is not made; expected " in said


MTP = """
 | ^ needs Megatron-Core 0.19.2, which wants Python 3.12
num_nextn_predict_layers=0 | ^: config.json of model_type=deepseek_v3 names no MTP layers that are known here
actor.strategy=fsdp | ^: actor.mtp=joint is not made for it; expected megatron
actor.optim.name=muon | ^: actor.mtp=joint is not made for it; expected adamw
actor.lora.rank=4 | ^: actor.mtp=joint is not made for it; expected 0
actor.megatron.recompute_num_layers=2 | ^: actor.mtp=joint is not made for it; expected 1, or recompute_method=block
actor.megatron.override_transformer_config.mtp_loss_scaling_factor=0 | ^: expected a number above 0
ref.megatron.override_transformer_config.mtp_loss_scaling_factor=0.3 | ^: belongs to the actor
trainer.share_prefixes=on | trainer.share_prefixes=on: it is not built for actor.mtp=joint; expected auto or off
"""


@pytest.mark.parametrize("row", MTP.strip("\n").splitlines())
def test_what_does_not_go_with_mtp_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    word, said = (cell.strip() for cell in row.split("|"))
    monkeypatch.setattr(model_types, "version", lambda _: "0.19.2" if word else "0.16.1")
    is_key = word.startswith(("actor", "ref", "trainer"))
    numbers = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0 if word.endswith("layers=0") else 1}
    there = folder(tmp_path / "m", model_type="deepseek_v3", **numbers)
    recomputes = "actor.megatron={recompute_granularity:full,recompute_method:uniform,recompute_num_layers:1}"
    words = (f"model.path={there}", "trainer.n_gpus_per_node=2", recomputes, "actor.mtp=joint")
    found = refusal(*words, *([word] if is_key else []))
    assert said.replace("^", word if is_key else "actor.mtp=joint") in found


def test_a_weight_of_mtp_layers_that_nobody_trains_is_refused() -> None:
    word = "actor.megatron.override_transformer_config.mtp_loss_scaling_factor=0.3"
    assert f"{word}: belongs to the actor, with actor.mtp=detached or joint" in refusal(DENSE, word)


def test_another_path_is_another_model(tmp_path: Path) -> None:
    own = folder(tmp_path / "m", num_hidden_layers=3)
    config = load(DENSE, f"critic.model.path={own}", "ref.model.path=elsewhere", "actor.use_kl_loss=true")
    assert model_config(config, "critic") == {"num_hidden_layers": 3}
    assert model_config(config, "ref") == {}
    assert model_config(load(DENSE), "critic") == model_config(load(DENSE), "actor")


def test_what_is_nested_in_config_json_stays_so() -> None:
    config = load("model.config={rope_scaling:{type:yarn,factor:4.0},layer_types:[a,b],sliding_window:null}")
    assert config.model.config == {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "layer_types": ["a", "b"],
        "sliding_window": None,
    }
    assert load("model.config.rope_scaling.factor=4").model.config == {"rope_scaling": {"factor": 4}}
    assert from_yaml(to_yaml(config)) == config


def test_a_folder_and_a_configuration_that_disagree_are_refused(tmp_path: Path) -> None:
    there = folder(tmp_path / "m", num_hidden_layers=3, rms_norm_eps=1e-5)
    (tmp_path / "a.yaml").write_text(
        f"model: {{path: {there}, config: {{num_hidden_layers: 4, rms_norm_eps: 1.0e-6}}}}"
    )
    assert refusal(f"recipe={tmp_path}/a.yaml", f"model.path={there}") == (
        f"model.config.num_hidden_layers=4: the config.json of model.path={there} says 3; expected the same, or "
        "another model"
    )
    (tmp_path / "b.yaml").write_text(
        f"model: {{path: {there}, config: {{num_hidden_layers: 3, rms_norm_eps: 1.0e-6}}}}"
    )
    load(f"recipe={tmp_path}/b.yaml", f"model.path={there}")
    assert "the config.json in model.path" in refusal(f"model.path={there}", "model.config.num_hidden_layers=3")


def test_an_empty_configuration_takes_away_that_of_a_recipe(tmp_path: Path) -> None:
    there = folder(tmp_path / "m", num_hidden_layers=3)
    (tmp_path / "a.yaml").write_text("model: {path: org/other, config: {num_hidden_layers: 4}}")
    assert load(f"recipe={tmp_path}/a.yaml", f"model.path={there}", "model.config={}").model.config == {}


def test_a_config_json_that_is_none_is_refused(tmp_path: Path) -> None:
    there = folder(tmp_path / "m")
    Path(there, "config.json").write_text("{")
    assert refusal(f"model.path={there}").startswith(f"model.path={there}: its config.json cannot be read")


def test_the_longest_sequence_must_be_known_to_every_model(tmp_path: Path) -> None:
    assert refusal(DENSE, "data.max_response_length=1025") == (
        "data.max_prompt_length + data.max_response_length=2049: model.path=m knows 2048 positions "
        "(max_position_embeddings); expected at most 2048"
    )
    load(DENSE, "data.max_response_length=1024")
    short = folder(tmp_path / "m", max_position_embeddings=1000)
    assert f"critic.model.path={short} knows 1000 positions" in refusal(f"critic.model.path={short}")
    assert "sft.max_length=3000: model.path=m knows 2048" in refusal(
        "sft.train_files=[a]", DENSE, "sft.max_length=3000", command="sft"
    )
    assert "response_length=2049" in refusal(
        "data.val_files=[a]", DENSE, "data.max_response_length=1025", command="evaluate"
    )


def vocabulary(size: int) -> str:
    return f"model.config={{vocab_size:{size}}}"


def test_a_vocabulary_may_be_smaller_by_its_padding(tmp_path: Path) -> None:
    """Qwen2.5-7B and 1.5B have one tokenizer, and rows for 152,064 and for 151,936 tokens."""
    critic = folder(tmp_path / "critic", vocab_size=151936)
    load(vocabulary(152064), f"critic.model.path={critic}")
    less = folder(tmp_path / "less", vocab_size=151000)
    assert "has 151000 tokens" in refusal(vocabulary(152064), f"critic.model.path={less}")
    far = folder(tmp_path / "far", vocab_size=128256)
    assert "has 128256 tokens" in refusal(vocabulary(152064), f"critic.model.path={far}")


def test_the_tokenizer_says_what_is_padding(tmp_path: Path) -> None:
    critic, there = folder(tmp_path / "critic", vocab_size=128), folder(tmp_path / "tokenizer")
    words = [vocabulary(192), f"critic.model.path={critic}", f"model.tokenizer_path={there}"]
    found = {"model": {"vocab": {"a": 0, "b": 126}}, "added_tokens": [{"id": 127}]}
    Path(there, "tokenizer.json").write_text(json.dumps(found))
    load(*words)
    found["added_tokens"] = [{"id": 128}]
    Path(there, "tokenizer.json").write_text(json.dumps(found))
    assert refusal(*words).startswith(f"critic.model.path={critic}: its vocabulary has 128 tokens")


def test_a_full_kl_wants_a_reference_of_the_same_vocabulary(tmp_path: Path) -> None:
    for size in (151936, 152192):
        other = folder(tmp_path / f"ref_{size}", vocab_size=size)
        words = [vocabulary(152064), f"ref.model.path={other}", "actor.use_kl_loss=true"]
        load(*words)
        assert f"ref.model.path={other}: its vocabulary has {size} tokens" in refusal(*words, "actor.kl_loss_type=full")


def test_critic_and_reference_must_know_the_actors_tokens(tmp_path: Path) -> None:
    small = folder(tmp_path / "m", vocab_size=119)
    assert refusal(DENSE, f"critic.model.path={small}") == (
        f"critic.model.path={small}: its vocabulary has 119 tokens, and that of model.path=m has 120; expected a model "
        "that knows them all"
    )
    larger = folder(tmp_path / "l", vocab_size=121)
    load(DENSE, f"ref.model.path={larger}", "actor.use_kl_loss=true")


TP = "tensor_model_parallel_size"
TP_24 = [
    f"actor.megatron.{TP}=24",
    "trainer.n_gpus_per_node=24",
    "rollout.placement=shared",
    "data.train_files=[rows.jsonl]",
]


def test_a_hub_name_that_is_not_here_has_the_numbers_of_its_preset():
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=Qwen/Qwen3-8B", *TP_24])
    assert str(caught.value).startswith(
        f"actor.megatron.{TP}=24 does not divide the model's num_attention_heads=32; nearest: actor.megatron.{TP}="
    )
    config, warnings = load_config(["model.path=Qwen/Qwen3-8B", "data.train_files=[rows.jsonl]"])
    assert config.model.config["num_hidden_layers"] == config.critic.model.config["num_hidden_layers"] == 36
    assert "Qwen/Qwen3-8B: its config.json is not here; model=qwen3_8b has its numbers" in warnings
    assert load_config(["model.path=nobody/nothing", *TP_24])[0].model.config == {}


def test_a_hub_name_that_was_downloaded_before_has_the_numbers_of_its_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    snapshot = tmp_path / "models--nobody--nothing" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--nobody--nothing" / "refs").mkdir()
    (tmp_path / "models--nobody--nothing" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 28}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{TP}=24 does not divide the model's num_attention_heads=28"):
        load_config(["model.path=nobody/nothing", *TP_24])
