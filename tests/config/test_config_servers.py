"""The rollout servers: whether they can hold the policy, and where they stand."""

import json
import re

import pytest
from config_helpers import BASE, DENSE, EXPERTS, load, refusal, refusals
from refusal_table import Block, blocks

from megarl.arch.layout import ModelNumbers
from megarl.arch.sglang_options import TRIED, options_of
from megarl.config import ConfigError, load_config
from megarl.config.placement import gpu_seats, placements
from megarl.config.validate.servers import EP, TP, server_misfits

SGLANG = ("rollout.engine=sglang", "trainer.n_gpus_per_node=8")


REFUSED = """
with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.n=1 rollout.ahead=1 rollout.quantization=fp8
with model.dtype=bfloat16 rollout.placement=separate rollout.first_gpu=null actor.lora.push=adapter
rollout.tensor_model_parallel_size=3 @dense | does not divide .. heads=8; nearest: .. size=4, .. size=2, .. size=8
rollout.attention_dp=0 | expected at least 1
rollout.memory_fraction=1 | expected a number between 0 and 1, both excluded
rollout.turn_s=30 | servers and trainer take turns only .. expected null, and rollout.ahead for more
rollout.max_age=-1 | expected a number of at least 0
rollout.piece_tokens=-1 | expected a number of at least 0
rollout.urls=[http://a] | http://a is no server; expected http://host:port
rollout.sglang.args=[--ssl-certfile,own.pem] | rollout.sglang.args=--ssl-certfile | servers that .. expected rollout.tls
rollout.start_timeout_s=0 | expected a number above 0
rollout.dtype=float32 | rollout.quantization=fp8 quantizes 16-bit weights; expected bfloat16
rollout.push=sharded | rollout.quantization=fp8 quantizes whole tensors; expected auto, shared or gathered
actor.lora.rank=4 | rollout.quantization=fp8 | servers of adapters .. expected none, or push=merged

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=2 @dense rollout.n=1
rollout.expert_parallel_size=2 | the model has no experts; expected 1; nearest: rollout.expert_parallel_size=1
rollout.attention_dp=2 actor.lora.rank=4 actor.lora.push=adapter | servers of adapters .. expected 1, or push=merged
rollout.order=prompts | has no effect, because rollout.ahead=0 and rollout.turn_s=null
rollout.max_age=1 | has no effect, because rollout.ahead=0 and rollout.turn_s=null
rollout.urls=['http://a:x'] | http://a:x is no server; expected http://host:port

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=4 @experts
with model.dtype=bfloat16 trainer.device=cpu
rollout.expert_parallel_size=3 | does not divide rollout.tensor .. nearest: .. expert_parallel_size=4, .. =2, .. =1
rollout.urls=['http://a:1','http://a:1'] rollout.n=1 | expected each server once
rollout.quantization=fp8 | rollout.quantization=fp8 | SGLang quantizes on GPUs only .. expected none
rollout.join=29400 | expected HOST:PORT, an address of the machine that runs `megarl train`

with rollout.engine=sglang trainer.n_gpus_per_node=8 @experts model.config.intermediate_size=100
rollout.tensor_model_parallel_size=8 | does not divide .. intermediate_size=100; nearest: .. size=4, .. size=2, .. =1
rollout.placement=shared rollout.urls=['http://a:1'] | rollout.urls names servers that run elsewhere; expected separate
rollout.join=a:1 | rollout.placement=shared puts all .. expected separate, or null
rollout.join=a:1 actor.lora.rank=8 actor.lora.push=adapter | adapters are .. expected actor.lora.push=merged, or null

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.placement=shared model.dtype=bfloat16 @dense
with model.config.model_type=deepseek_v3
rollout.ahead=1 | with rollout.placement=shared the .. expected 0 .. or placement=separate
rollout.num_servers=5 rollout.tensor_model_parallel_size=2 | rollout.placement=shared leaves .. expected at most 4
rollout.quantization=fp8 | rollout.quantization=fp8 | SGLang quantizes pushed weights again .. expected none

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=2 rollout.n=1
rollout.expert_parallel_size=4 | does not divide rollout.tensor_model_parallel_size=2
rollout.first_gpu=7 rollout.placement=separate | GPUs 0 to 7 of each machine are the .. expected null or at least 8
rollout.join=a:b | expected HOST:PORT, an address of the machine that runs `megarl train`

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=4 @experts
rollout.attention_dp=3 | does not divide rollout.tensor .. nearest: .. attention_dp=4, .. tensor .. =3, .. tensor .. =6
rollout.first_gpu=0 rollout.memory_fraction=0.85 | GPUs 0 to 7 of each machine are the .. expected null or at least 8
rollout.join=a:0 | expected HOST:PORT, an address of the machine that runs `megarl train`

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.attention_dp=2 @dense model.config.num_attention_heads=6
with model.config.num_key_value_heads=2
rollout.tensor_model_parallel_size=8 | / rollout.attention_dp=2, which is 4, does not divide the model's
rollout.join=a:1 rollout.router=true | a router knows only the servers of the .. expected rollout.router=false, or null

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=2 @dense
with model.config.model_type=llama
rollout.attention_dp=2 | SGLang has it for qwen3, qwen3_moe .. expected 1

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=8 rollout.first_gpu=1
with rollout.placement=shared trainer.nnodes=2
rollout.num_servers=2 | from GPU 1 of 2 x 8 on, room for 0; expected rollout.tensor_model_parallel_size of at most 7

with trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=16 rollout.placement=shared
rollout.engine=sglang | rollout.num_servers=1 | room for 0; expected rollout.tensor_model_parallel_size of at most 8

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.placement=shared
rollout.tensor_model_parallel_size=3 | such servers do not fill machines of .. expected 4 or 2 or 8

with rollout.engine=sglang trainer.n_gpus_per_node=8 trainer.nnodes=2
rollout.tensor_model_parallel_size=16 | rollout.placement=separate puts servers .. expected rollout.placement=shared

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=4 trainer.nnodes=2
rollout.num_servers=6 | rollout.placement=separate puts servers .. expected rollout.placement=shared

with rollout.quantization=fp8 model.dtype=bfloat16 rollout.engine=hf
trainer.n_gpus_per_node=8 | rollout.quantization=fp8 | rollout.engine=hf does not quantize; expected none

with rollout.engine=sglang trainer.n_gpus_per_node=8
rollout.sglang.args=[--quantization,fp8] | rollout.sglang.args=--quantization | expected rollout.quantization=fp8

with rollout.engine=sglang trainer.n_gpus_per_node=8
rollout.sglang.args=['--quantization=fp8'] | rollout.sglang.args=--quantization=fp8 | expected rollout.quantization=fp8

with rollout.engine=hf
rollout.tensor_model_parallel_size=2 | expected 1, because rollout.engine=hf is one process
rollout.expert_parallel_size=2 | expected 1, because rollout.engine=hf is one process
rollout.attention_dp=2 | expected 1, because rollout.engine=hf is one process
rollout.router=true | rollout.engine=hf has no router

with rollout.engine=sglang actor.lora.rank=4 actor.lora.push=adapter
rollout.router=true | it may send a request to a server that does not hold the adapter .. expected false, or push=merged

with rollout.engine=sglang trainer.device=cpu @dense model.config.model_type=gpt_oss model.config.num_local_experts=8
rollout.engine=sglang | without a GPU SGLang has no attention sinks, which gpt_oss needs; expected hf

with rollout.engine=sglang trainer.device=cpu @dense model.config.model_type=glm_moe_dsa model.config.index_topk=8
rollout.engine=sglang | without a GPU SGLang has no indexers, which glm_moe_dsa needs; expected hf

with rollout.engine=sglang trainer.n_gpus_per_node=8 actor.router_replay=rollout rollout.tensor_model_parallel_size=2
with @experts model.config.model_type=glm_moe_dsa model.config.index_topk=8
rollout.attention_dp=1 | with actor.router_replay=rollout: SGLang reports the keys .. expected 2

with rollout.engine=sglang trainer.n_gpus_per_node=8 actor.router_replay=rollout data.max_prompt_length=500
with @experts model.config.model_type=glm_moe_dsa model.config.index_topk=20000
data.max_response_length=500 | with the keys of 1000 tokens SGLang's .. expected 745 tokens with the prompt's

with rollout.engine=sglang @dense model.config.model_type=qwen3_next
model.config.tie_word_embeddings=true | rollout.engine=sglang | SGLang gives Qwen3-Next output rows .. expected hf
model.config.mlp_only_layers=[1] | rollout.engine=sglang | SGLang gives every layer experts .. expected hf

with rollout.engine=sglang @dense model.config.model_type=qwen3_5_text model.config.linear_num_key_heads=6
with model.config.layer_types=[linear_attention,full_attention]
model.config.layer_types=[full_attention,linear_attention] | rollout.engine=sglang | full attention .. expected hf
rollout.tensor_model_parallel_size=4 | does not divide the model's linear_num_key_heads=6

with rollout.engine=sglang @dense model.config.model_type=nemotron_h
rollout.engine=sglang | SGLang's parameters of nemotron_h, by which a push is verified, are not known here yet

with rollout.engine=sglang trainer.n_gpus_per_node=8 rollout.tensor_model_parallel_size=2
with @dense model.config.model_type=gpt_oss model.config.num_local_experts=8
rollout.expert_parallel_size=2 | SGLang 0.5.23 does not distribute unquantized experts with biases; expected 1
"""


@pytest.mark.parametrize("block", blocks(REFUSED), ids=str)
def test_servers_that_cannot_be_are_told(block: Block) -> None:
    block.check()


# A folder whose MTP layer is trained, and whose servers have GPUs of their own.
DRAFTED = (
    "trainer.device=cuda",
    "model.dtype=bfloat16",
    "actor.mtp=detached",
    "model.config={model_type:glm4_moe,num_hidden_layers:4,num_nextn_predict_layers:1}",
)
TWO_GROUPS = ("rollout.attention_dp=2", "rollout.tensor_model_parallel_size=2")
NOT_TRIED = {
    "--pp-size=2": "no push knows which stage holds a layer; expected no such option",
    "--data-parallel-size=2": "no push knows the copies inside a server; expected rollout.num_servers, or rollout.a",
    "--moe-dp-size=2": "no push knows the copies inside a server; expected no such option",
    "--attn-cp-size=2": "nothing was pushed to servers that cut attention by positions; expected no such option",
    "--dcp-size=2": "nothing was pushed to servers that cut attention by positions; expected no such option",
    "--moe-dense-tp-size=1": "dense layers are then whole on each rank; expected no such option",
    "--moe-a2a-backend=deepep": "shared experts are then whole on each rank; expected no such option",
    "--moe-runner-backend=flashinfer_trtllm": "other kernels lay experts out anew, so that .*; expected triton",
    "--enable-eplb": "experts are then not where a push writes them; expected no such option",
    "--init-expert-location=x.json": "experts are then not where a push writes them; expected no such option",
    "--ep-num-redundant-experts=2": "experts are then not where a push writes them; expected no such option",
    "--speculative-algorithm=EAGLE3": "a push has no weights for such a draft model; expected NEXTN, with actor.mtp",
    "--speculative-token-map=x": "a push would not reach all weights of the draft model; expected no such option",
    "--enable-multi-layer-eagle": "a push would not reach all weights of the draft model; expected no such option",
    "--speculative-accept-threshold-single=0.9": "completions are then not drawn from the policy; expected no such",
    "--speculative-accept-threshold-acc=0.9": "completions are then not drawn from the policy; expected no such",
    "--enforce-shared-experts-fusion": "experts are then not where a push writes them; expected no such option",
    "--enable-dense-mlp-attn-tp": "they are then cut over other ranks than a push writes to; expected no such",
    "--enable-shared-experts-attn-tp": "they are then cut over other ranks than a push writes to; expected no such",
    "--shared-experts-tp-size=1": "they are then cut over other ranks than a push writes to; expected no such",
    "--model-impl=transformers": "the model may hold other tensors than a push writes; expected no such option",
    "--json-model-override-args={}x": "the model may hold other tensors than a push writes; expected no such option",
    "--modelopt-quant=fp8": "the model may hold other tensors than a push writes; expected rollout.quantization",
    "--cpu-offload-gb=1": "weights are then not where a push writes them; expected no such option",
    "--offload-group-size=2": "weights are then not where a push writes them; expected no such option",
    "--kt-weight-path=x": "weights are then not where a push writes them; expected no such option",
    "--dwdp-size=2": "weights are then not where a push writes them; expected no such option",
    "--enable-symm-mem": "it changes NCCL's variables inside the server, and NCCL then hangs between it and the tr",
    "--enable-nccl-nvls": "it changes NCCL's variables inside the server, and NCCL then hangs between it and the tr",
    "--speculative-algo=STANDALONE": "a push has no weights for such a draft model; expected NEXTN, with actor.mtp",
    "--moe-runner=auto": "other kernels lay experts out anew, so that .*; expected triton",
    "--tensor-par=2": "servers are placed and get their weights by rollout.tensor_model_parallel_size; expected that",
    "--tp-size=2": "servers are placed and get their weights by rollout.tensor_model_parallel_size; expected that key",
    "--ep=2": "servers are placed and get their weights by rollout.expert_parallel_size; expected that key",
    "--enable-dp-attention": "servers are placed and get their weights by rollout.attention_dp; expected that key",
    "--config=x.yaml": "what a file says is not checked; expected its options here",
}


def test_options_of_sglang_that_were_not_tried_are_refused_with_the_reason() -> None:
    words = (*SGLANG, f"rollout.sglang.args={list(NOT_TRIED)}")
    *found, without = refusals(*words)
    assert without.startswith("actor.mtp=off: no push brings MTP layers to servers that draft")
    for (given, why), sentence in zip(NOT_TRIED.items(), found, strict=True):
        assert re.match(f"rollout.sglang.args={re.escape(given)}: {why}", sentence), sentence
    assert all(any(given.split("=")[0] in option.names for given in NOT_TRIED) for option in TRIED.values())
    tried = ["--pp-size", "1", "--moe-runner-backend=triton", "--moe-a2a-backend", "none", "--enable-metrics"]
    load(*SGLANG, f"rollout.sglang.args={tried}")


@pytest.mark.megatron_0_19
def test_mtp_layers_are_drafted_with_only_where_that_is_safe() -> None:
    args = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps=2", "--speculative-eagle-topk=1"]
    words = (*SGLANG, *DRAFTED, f"rollout.sglang.args={args}")
    assert load(*words).drafts
    refused = {
        "trainer.device=cpu": "with --speculative-algorithm SGLang takes the likeliest token whatever the temperature",
        "rollout.placement=shared": "a server that sleeps loses what its draft model computed from its weights",
        "rollout.push=sharded": "slices do not reach a draft model; expected auto, shared or gathered",
        "actor.mtp=off": "no push brings MTP layers to servers that draft; expected detached or joint",
        "rollout.top_p=0.9": "SGLang does not report the tokens that could be drawn",
        "actor.router_replay=rollout": "what notes experts has no room for the tokens of drafts",
        "model.config.num_nextn_predict_layers=2": "SGLang drafts with one MTP layer, and config.json says 2",
    }
    for word, why in refused.items():
        assert any(why in sentence for sentence in refusals(*words, word)), word
    assert any("attention_dp=2: it was not tried" in one for one in refusals(*words, *TWO_GROUPS))


def test_without_pushes_only_options_that_keys_set_are_refused() -> None:
    """`megarl evaluate` places its servers by the keys too."""
    words = "rollout.engine=sglang", "data.val_files=[y]", "rollout.sglang.args=['--cpu-offload-gb=1','--tp-size=2']"
    assert refusals(*words, command="evaluate")[0].startswith("rollout.sglang.args=--tp-size=2: servers are placed")
    load(*words[:2], "rollout.sglang.args=['--cpu-offload-gb=1']", command="evaluate")


FP8 = ("rollout.quantization=fp8", "model.dtype=bfloat16")


def test_quantized_servers_are_advised_to_be_corrected_for() -> None:
    words = ["model.path=x", "data.train_files=[y]", *SGLANG, *FP8, f"{DENSE[:-1]},model_type:qwen3}}"]
    advice = "rollout.quantization=fp8: log-probs of the quantized servers differ from the trainer's"
    assert any(advice in said for said in load_config(words)[1])
    corrected = load_config([*words, "algorithm.rollout_correction.level=token"])[1]
    assert not any(advice in said for said in corrected)


def test_wider_servers_on_shared_gpus_are_fewer() -> None:
    shared = (*SGLANG, DENSE.replace("heads:8", "heads:28"), "rollout.placement=shared", "rollout.num_servers=8")
    told = refusal(*shared, f"{TP}=8")
    near = told.partition("; nearest: ")[2].split(", or ")
    assert near == [f"{TP}=4 rollout.num_servers=2", f"{TP}=2 rollout.num_servers=4", f"{TP}=1"]
    for words in near:
        load(*shared, *words.split())


def test_the_hf_engine_stands_on_gpus_as_sglang_does() -> None:
    on_gpus = ("rollout.engine=hf", "trainer.device=cuda", "model.dtype=bfloat16")
    assert [gpu for _, gpu in placements(load(*on_gpus, "rollout.num_servers=2"), trains=True)] == [1, 2]
    assert refusal(*on_gpus, "rollout.first_gpu=0").startswith("rollout.first_gpu=0: GPU 0 of each machine is the tr")
    load(*on_gpus, "rollout.first_gpu=0", "rollout.memory_fraction=0.3")
    # Whether this machine has GPUs is seen when the run starts.
    load("rollout.engine=hf", "rollout.num_servers=40")


def test_an_engine_that_is_not_chosen_yet_is_checked_as_sglang() -> None:
    assert load().rollout.engine == "auto"
    assert load(DENSE, f"{TP}=8", "rollout.router=true").rollout.engine == "auto"
    assert refusal(DENSE, f"{TP}=3").startswith(f"{TP}=3 does not divide the model's num_attention_heads=8")
    assert refusal("rollout.num_servers=40").endswith("fewer or smaller ones, or rollout.urls")


def test_the_engine_is_chosen_before_the_checks_that_depend_on_it() -> None:
    words = [*BASE, f"{TP}=2"]
    for engine, wanted in (("sglang", "sglang"), ("auto", "auto")):
        config, _ = load_config(words, choose_engine=lambda config, engine=engine: engine)
        assert config.rollout.engine == wanted
    with pytest.raises(ConfigError, match="rollout.engine=hf is one process"):
        load_config(words, choose_engine=lambda config: "hf")
    config, _ = load_config([*words, "rollout.engine=sglang"], choose_engine=lambda config: "hf")
    assert config.rollout.engine == "sglang", "what is said is not chosen"


def test_servers_may_be_wider_than_keys_and_values_and_than_a_machine() -> None:
    wide = ["trainer.nnodes=4", "rollout.placement=shared", f"{TP}=32"]
    experts = [EXPERTS, "rollout.placement=shared", f"{TP}=8", f"{EP}=8"]
    for words, size in (([DENSE, f"{TP}=8"], 8), (wide, 32), (experts, 8)):
        assert load(*SGLANG, *words).rollout.tensor_model_parallel_size == size
    urls = "rollout.urls=['https://a:1','https://b:30000/']"
    assert len(load(*SGLANG, urls, "rollout.dtype=bfloat16").rollout.urls) == 2


def test_servers_apart_stand_behind_the_trainer_or_knowingly_beside_it() -> None:
    behind = load(*SGLANG, f"{TP}=4", "rollout.num_servers=2")
    assert [gpu for _, gpu in placements(behind, trains=True)][0] == behind.trainer.n_gpus_per_node
    beside = load(*SGLANG, "rollout.first_gpu=0", "rollout.memory_fraction=0.3")
    assert [gpu for _, gpu in placements(beside, trains=True)] == [0]
    # Without GPUs there is nothing to run out of.
    assert load(*SGLANG, "rollout.num_servers=40", "trainer.device=cpu").rollout.num_servers == 40


def test_an_evaluation_has_all_gpus_for_its_servers() -> None:
    alone = ("rollout.engine=sglang", "data.val_files=[a]", "rollout.placement=shared")
    config = load(*alone, "rollout.num_servers=8", command="evaluate")
    assert [gpu for _, gpu in placements(config, trains=False)] == list(range(8))
    wide = load(*alone, "trainer.nnodes=4", "trainer.n_gpus_per_node=8", f"{TP}=16", "rollout.num_servers=2",
                command="evaluate")  # fmt: skip
    assert placements(wide, trains=False) == [(range(2), 0), (range(2, 4), 0)]
    over = (*alone, "trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    assert refusal(*over, f"{TP}=16", "rollout.num_servers=2", command="evaluate") == (
        f"{TP}=16: for rollout.num_servers=2 of them trainer.nnodes=2 machines of 8 GPUs have no room, expected 4 "
        "machines"
    )
    assert "expected a multiple of 2" in refusal(*over, f"{TP}=9", command="evaluate")
    assert "rollout.num_servers=9: GPU 17 is on no machine" in refusal(
        *alone, f"{TP}=2", "rollout.num_servers=9", command="evaluate"
    )


def test_a_latent_is_copied_to_every_rank() -> None:
    latent = ModelNumbers(num_attention_heads=24, num_key_value_heads=16, kv_latent_size=576)
    assert not list(server_misfits(latent, 24, 1))
    told = [sentence for _, sentence in server_misfits(ModelNumbers(num_key_value_heads=16), 24, 1)]
    assert told == ["24 neither divides the model's num_key_value_heads=16 nor is a multiple of it"]


def test_an_expert_is_shared_by_what_is_left() -> None:
    numbers = ModelNumbers(num_experts=8, expert_intermediate_size=6)
    assert [sentence for _, sentence in server_misfits(numbers, 8, 2)] == [
        "8 leaves 4 ranks to an expert, which do not divide its intermediate size=6"
    ]
    assert not list(server_misfits(numbers, 8, 4))


def test_servers_that_are_started_apart_take_the_words_of_the_run() -> None:
    urls = "rollout.urls=['https://a:1']"
    config = load(*SGLANG, urls, f"{TP}=2", "rollout.first_gpu=4", "rollout.memory_fraction=0.7")
    assert (
        load(*SGLANG, urls, f"{TP}=2", "rollout.first_gpu=4", "rollout.memory_fraction=0.7", command="serve") == config
    )
    wanted = "at least one http://host:port, or rollout.join with HOST:PORT of a run"
    assert refusal(command="serve") == f"rollout.urls is not set: `megarl serve` needs {wanted}"
    assert load("rollout.join=127.0.0.1:29400", command="serve").rollout.join == "127.0.0.1:29400"


OSS = f"{DENSE[:-1]},model_type:gpt_oss,num_local_experts:8}}"


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "mxfp4"), ("qwen3", "fp8")])
def test_servers_hold_what_is_pushed_and_so_nothing_quantized(tmp_path, family, method):
    said = (
        f"model.path={tmp_path}: its config.json says that its weights are in {method}, and servers get and hold "
        f"unquantized weights; expected a folder that `megarl convert from={tmp_path} to=FOLDER format=hf` wrote"
    )
    numbers = {"model_type": family, "num_hidden_layers": 2, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    assert said in refusal(f"model.path={tmp_path}", "rollout.engine=hf")
    numbers.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    load(f"model.path={tmp_path}", "rollout.engine=hf")


def test_gpt_oss_is_served_whole_on_gpus() -> None:
    load(OSS, *SGLANG, f"{TP}=2")
    assert load("rollout.engine=sglang", "rollout.router=true", "actor.lora.rank=4").rollout.router


def test_servers_that_are_called_in_clear_over_a_network_are_named() -> None:
    urls = "http://10.0.0.5:30000,https://10.0.0.6:30000,http://127.0.0.1:30000,http://localhost:1"
    _, (warning,) = load_config([*BASE, *SGLANG, f"rollout.urls=[{urls}]"])
    assert warning == (
        "rollout.urls: http sends the servers' key, prompts and completions over the network in clear: "
        "http://10.0.0.5:30000; expected https:// of servers with a certificate, as `megarl serve` starts them"
    )
    assert not load_config([*BASE, *SGLANG, "rollout.urls=[http://127.0.0.1:30000,'http://[::1]:1']"])[1]
    asked = "teachers.math={model:{path:t},engine:server,server:{urls:[http://gpu7:1]}}"
    _, (warning,) = load_config([*BASE, asked, "distill.top_k=8"])
    assert warning.startswith("teachers.math.server.urls: http sends ")


# ---- where servers and the actor stand, and options of a server

ON_SHARED_GPUS = [
    "rollout.engine=sglang",
    "rollout.placement=shared",
    "trainer.device=cuda",
    "model.dtype=bfloat16",
    "trainer.n_gpus_per_node=4",
]


def test_gpus_are_named_by_machine_and_number_of_servers_on_one_machine_each() -> None:
    sizes = ["trainer.nnodes=2", "rollout.tensor_model_parallel_size=2", "rollout.num_servers=4"]
    assert gpu_seats(load(*ON_SHARED_GPUS, *sizes), ["a", "b", "c", "d"]) == {
        "trainer": ["0/0", "0/1", "0/2", "0/3", "1/0", "1/1", "1/2", "1/3"],
        "servers": {"a": ["0/0", "0/1"], "b": ["0/2", "0/3"], "c": ["1/0", "1/1"], "d": ["1/2", "1/3"]},
    }


def test_gpus_of_a_server_over_several_machines_are_named_by_each() -> None:
    config = load(*ON_SHARED_GPUS, "trainer.nnodes=2", "rollout.tensor_model_parallel_size=8")
    seats = gpu_seats(config, ["a"])
    assert seats is not None
    assert seats["servers"]["a"] == seats["trainer"] == [f"{machine}/{gpu}" for machine in (0, 1) for gpu in range(4)]


def test_servers_beside_the_trainer_are_not_taken_for_the_next_machine() -> None:
    config = load("rollout.engine=sglang", "trainer.n_gpus_per_node=4", "trainer.nnodes=2", "rollout.num_servers=2")
    seats = gpu_seats(config, ["a", "b"])
    assert seats is not None
    assert seats["servers"] == {"a": ["0/4"], "b": ["1/4"]}


def test_an_actor_on_later_gpus_is_named_by_these() -> None:
    seats = gpu_seats(load(*ON_SHARED_GPUS, "actor.first_rank=2", "actor.num_ranks=2"), ["a"])
    assert seats == {"trainer": ["0/2", "0/3"], "servers": {"a": ["0/0"]}}


def test_a_value_stands_behind_an_equals_sign_or_in_the_words_that_follow() -> None:
    words = ["--dtype=half", "--enable-lora", "--targets", "a", "b", "--params={}"]
    assert list(options_of(words)) == [
        ("--dtype", "half"),
        ("--enable-lora", ""),
        ("--targets", "a b"),
        ("--params", "{}"),
    ]
    assert list(options_of([])) == []
