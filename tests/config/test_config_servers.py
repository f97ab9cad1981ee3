"""The rollout servers: whether they can hold the policy, and where they stand."""

import json

import pytest
from config_helpers import BASE, DENSE, EXPERTS, load, refusal

from megarl.config import ConfigError, load_config
from megarl.config.placement import placements
from megarl.config.validate.servers import ADP, EP, TP, server_misfits
from megarl.layout import ModelNumbers

SGLANG = ("rollout.engine=sglang", "trainer.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("model", "typed", "told"),
    [
        (
            DENSE,
            f"{TP}=3",
            f"{TP}=3 does not divide the model's num_attention_heads=8; nearest: {TP}=4, or {TP}=2, or {TP}=8",
        ),
        (DENSE, f"{TP}=2 {EP}=2", f"{EP}=2: the model has no experts; expected 1; nearest: {EP}=1"),
        (EXPERTS, f"{TP}=4 {EP}=3", f"{EP}=3 does not divide {TP}=4; nearest: {EP}=4, or {EP}=2, or {EP}=1"),
        (
            EXPERTS.replace("intermediate_size:96", "intermediate_size:100"),
            f"{TP}=8",
            f"{TP}=8 does not divide the model's intermediate_size=100; nearest: {TP}=4, or {TP}=2, or {TP}=1",
        ),
        ("rollout.n=1", f"{TP}=2 {EP}=4", f"{EP}=4 does not divide {TP}=2"),
        (
            EXPERTS,
            f"{TP}=4 {ADP}=3",
            f"{ADP}=3 does not divide {TP}=4; nearest: {ADP}=4, or {TP}=3, or {TP}=6",
        ),
        (
            DENSE.replace("heads:8", "heads:6").replace("heads:4", "heads:2"),
            f"{TP}=8 {ADP}=2",
            f"{TP}=8 / {ADP}=2, which is 4, does not divide the model's num_attention_heads=6",
        ),
        (
            f"{DENSE[:-1]},model_type:llama}}",
            f"{TP}=2 {ADP}=2",
            f"{ADP}=2: SGLang has it for qwen3, qwen3_moe, deepseek_v3, kimi_k2, glm4_moe, gpt_oss, and the "
            "model is of llama; expected 1",
        ),
        (
            DENSE,
            f"{TP}=2 {ADP}=2 actor.lora.rank=4 actor.lora.push=adapter",
            f"{ADP}=2: servers of adapters (actor.lora.push=adapter) run without it; expected 1, or push=merged",
        ),
        ("rollout.n=1", f"{ADP}=0", f"{ADP}=0: expected at least 1"),
        ("rollout.n=1", "rollout.memory_fraction=1", "rollout.memory_fraction=1.0: expected a number between 0 and 1"),
        (
            "rollout.placement=shared",
            "rollout.ahead=1",
            "rollout.ahead=1: with rollout.placement=shared the servers sleep while the trainer works; expected 0 "
            "(and rollout.turn_s for completions that last several turns), or placement=separate",
        ),
        (
            "rollout.placement=separate rollout.first_gpu=null",
            "rollout.turn_s=30",
            "rollout.turn_s=30.0: servers and trainer take turns only with rollout.placement=shared; expected null",
        ),
        ("rollout.ahead=1", "rollout.order=oldest", "rollout.order=oldest: expected one of finished, prompts"),
        ("rollout.ahead=1", "rollout.update=abort", "rollout.update=abort: expected one of in_place, retract, drain"),
        ("rollout.ahead=1", "rollout.max_age=-1", "rollout.max_age=-1: expected a number of at least 0"),
        ("rollout.ahead=1", "rollout.piece_tokens=-1", "rollout.piece_tokens=-1: expected a number of at least 0"),
        ("rollout.n=1", "rollout.order=prompts", "rollout.order=prompts: has no effect"),
        ("rollout.n=1", "rollout.max_age=1", "rollout.max_age=1: has no effect"),
        (
            "rollout.placement=shared",
            f"{TP}=2 rollout.num_servers=5",
            "rollout.num_servers=5: rollout.placement=shared leaves servers of 2 GPUs, from GPU 0 of 1 x 8 on, room "
            "for 4; expected at most 4",
        ),
        (
            "rollout.placement=shared trainer.nnodes=2",
            f"{TP}=8 rollout.num_servers=2 rollout.first_gpu=1",
            "from GPU 1 of 2 x 8 on, room for 0; expected rollout.tensor_model_parallel_size of at most 7",
        ),
        ("rollout.placement=shared", f"{TP}=16", f"room for 0; expected {TP} of at most 8"),
        (
            "rollout.placement=shared",
            f"{TP}=3",
            f"{TP}=3: such servers do not fill machines of trainer.n_gpus_per_node=8 evenly; expected 4 or 2 or 8",
        ),
        ("rollout.placement=near", "rollout.n=1", "rollout.placement=near: expected one of separate, shared"),
        (
            "rollout.n=1",
            "rollout.urls=[http://a]",
            "rollout.urls=[http://a]: http://a is no server; expected http://host:p",
        ),
        ("rollout.n=1", "rollout.urls=['http://a:x']", "http://a:x is no server"),
        (
            "rollout.n=1",
            "rollout.sglang.args=[--ssl-certfile,own.pem]",
            "rollout.sglang.args=--ssl-certfile: servers that a run starts get its certificate; expected rollout.tls",
        ),
        ("rollout.n=1", "rollout.tls=on", "rollout.tls=on: expected one of auto, always, never"),
        ("rollout.n=1", "rollout.urls=['http://a:1','http://a:1']", "expected each server once"),
        ("rollout.placement=shared", "rollout.urls=['http://a:1']", "rollout.urls names servers that run elsewhere"),
        (
            "rollout.placement=separate",
            "rollout.first_gpu=7",
            "rollout.first_gpu=7: GPUs 0 to 7 of each machine are the trainer's, and rollout.placement=separate; "
            "expected null or at least 8, rollout.placement=shared, or rollout.memory_fraction up to 0.5",
        ),
        ("rollout.memory_fraction=0.85", "rollout.first_gpu=0", "rollout.first_gpu=0: GPUs 0 to 7 of each machine are"),
        (
            "trainer.nnodes=2",
            f"{TP}=16",
            f"{TP}=16: rollout.placement=separate puts servers behind the trainer's GPUs, and GPU 23 is on no machine; "
            "expected rollout.placement=shared, fewer or smaller ones, or rollout.urls",
        ),
        ("trainer.nnodes=2", f"{TP}=4 rollout.num_servers=6", "rollout.num_servers=6: rollout.placement=separate puts"),
        ("rollout.n=1", "rollout.start_timeout_s=0", "rollout.start_timeout_s=0.0: expected a number above 0"),
    ],
)
def test_servers_that_cannot_be_are_told(model: str, typed: str, told: str) -> None:
    assert told in refusal(*SGLANG, *model.split(), *typed.split())


FP8 = ("rollout.quantization=fp8", "model.dtype=bfloat16")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("rollout.engine=hf", "rollout.quantization=fp8: rollout.engine=hf does not quantize; expected none"),
        ("trainer.device=cpu", "rollout.quantization=fp8: SGLang quantizes on GPUs only, and trainer.device=cpu"),
        (
            f"{DENSE[:-1]},model_type:deepseek_v3}}",
            "rollout.quantization=fp8: SGLang quantizes pushed weights again for qwen2 and qwen3 only, not for "
            "deepseek_v3; expected none",
        ),
        ("rollout.dtype=float32", "rollout.dtype=float32: rollout.quantization=fp8 quantizes 16-bit weights; expected"),
        (
            "rollout.push=sharded",
            "rollout.push=sharded: rollout.quantization=fp8 quantizes whole tensors; expected auto",
        ),
        ("actor.lora.rank=4 actor.lora.push=adapter", "rollout.quantization=fp8: servers of adapters (actor.lora.push"),
        ("rollout.quantization=int4", "rollout.quantization=int4: expected one of none, fp8"),
    ],
)
def test_servers_that_cannot_be_quantized_are_told(typed: str, told: str) -> None:
    assert told in refusal(*SGLANG, *FP8, *typed.split())


def test_quantization_has_a_key_of_its_own() -> None:
    for words in ("[--quantization,fp8]", "['--quantization=fp8']"):
        told = refusal(*SGLANG, f"rollout.sglang.args={words}")
        assert told.startswith("rollout.sglang.args=--quantization")
        assert told.endswith("expected rollout.quantization=fp8")


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


def test_the_hf_engine_is_one_process() -> None:
    for key in (TP, EP, ADP):
        told = refusal("rollout.engine=hf", f"{key}=2")
        assert told == f"{key}=2: expected 1, because rollout.engine=hf is one process"
    assert refusal("rollout.engine=hf", "rollout.router=true").startswith(
        "rollout.router=true: rollout.engine=hf has no router"
    )


def test_a_router_is_refused_for_adapters_which_not_every_server_holds_at_a_time() -> None:
    words = ("rollout.engine=sglang", "rollout.router=true", "actor.lora.rank=4")
    assert load(*words).rollout.router
    assert refusal(*words, "actor.lora.push=adapter") == (
        "rollout.router=true: it may send a request to a server that does not hold the adapter "
        "(actor.lora.push=adapter); expected false, or push=merged"
    )


def test_the_hf_engine_stands_on_gpus_as_sglang_does() -> None:
    on_gpus = ("rollout.engine=hf", "trainer.device=cuda")
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


@pytest.mark.parametrize(
    ("typed", "because"),
    [
        ("rollout.num_servers=2 rollout.urls=['http://a:1']", "rollout.urls names servers that run already"),
        ("rollout.host=b rollout.urls=['http://a:1']", "rollout.urls names servers that run already"),
        ("rollout.tls=always rollout.urls=['http://a:1']", "rollout.urls names servers that run already"),
        ("rollout.slow_factor=9", "no collector has two servers to compare"),
        ("rollout.slow_factor=9 rollout.num_servers=2 rollout.num_collectors=2", "no collector has two servers"),
        ("rollout.tls=never", "servers at rollout.host=127.0.0.1 use http unless it is always"),
        ("rollout.host=b trainer.nnodes=2", "with trainer.nnodes=2 servers listen at the addresses of their machines"),
        ("rollout.memory_fraction=0.5 rollout.engine=hf trainer.device=cpu", "trainer.device=cpu uses no GPU"),
        ("rollout.first_gpu=2 rollout.engine=sglang trainer.device=cpu", "trainer.device=cpu uses no GPU"),
    ],
)
def test_a_typed_key_of_servers_that_would_do_nothing_is_refused(typed: str, because: str) -> None:
    assert refusal(*typed.split()).startswith(f"{typed.split()[0]}: has no effect, because {because}")


def test_servers_that_are_started_apart_take_the_words_of_the_run() -> None:
    urls = "rollout.urls=['https://a:1']"
    config = load(*SGLANG, urls, f"{TP}=2", "rollout.first_gpu=4", "rollout.memory_fraction=0.7")
    assert (
        load(*SGLANG, urls, f"{TP}=2", "rollout.first_gpu=4", "rollout.memory_fraction=0.7", command="serve") == config
    )
    wanted = "at least one http://host:port, or rollout.join with HOST:PORT of a run"
    assert refusal(command="serve") == f"rollout.urls is not set: `megarl serve` needs {wanted}"
    assert load("rollout.join=127.0.0.1:29400", command="serve").rollout.join == "127.0.0.1:29400"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rollout.join=29400", "expected HOST:PORT, an address of the machine that runs `megarl train`"),
        ("rollout.join=a:b", "expected HOST:PORT, an address of the machine that runs `megarl train`"),
        ("rollout.join=a:0", "expected HOST:PORT, an address of the machine that runs `megarl train`"),
        (
            "rollout.join=a:1 rollout.router=true rollout.engine=sglang",
            "a router knows only the servers of the start; expected rollout.router=false, or null",
        ),
        (
            "rollout.join=a:1 rollout.placement=shared",
            "rollout.placement=shared puts all servers on the trainer's GPUs; expected separate, or null",
        ),
        (
            "rollout.join=a:1 actor.lora.rank=8 actor.lora.push=adapter rollout.engine=sglang",
            "adapters are pushed to the servers of the start only; expected actor.lora.push=merged, or null",
        ),
    ],
)
def test_servers_join_where_they_can_be_told_of_and_pushed_to(words: str, said: str) -> None:
    assert refusal(*words.split()) == f"{words.split()[0]}: {said}"


OSS = f"{DENSE[:-1]},model_type:gpt_oss,num_local_experts:8}}"


def test_servers_of_gpt_oss_hold_what_is_pushed_and_so_no_mxfp4(tmp_path):
    said = (
        f"model.path={tmp_path}: its weights are in mxfp4, and servers get and hold unquantized weights; expected a "
        f"folder that `megarl convert from={tmp_path} to=FOLDER format=hf` wrote"
    )
    numbers = {"model_type": "gpt_oss", "num_hidden_layers": 2, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    assert said in refusal(f"model.path={tmp_path}", "rollout.engine=hf")
    numbers.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    load(f"model.path={tmp_path}", "rollout.engine=hf")


def test_sglang_does_not_distribute_stacks_of_experts():
    sentence = "SGLang 0.5.23 does not distribute unquantized experts with biases; expected 1"
    assert refusal(OSS, *SGLANG, f"{TP}=2", f"{EP}=2") == f"{EP}=2: {sentence}; nearest: {EP}=1"
    load(OSS, *SGLANG, f"{TP}=2")


def test_without_a_gpu_sglang_has_no_attention_sinks():
    sentence = "without a GPU SGLang has no attention sinks, which gpt_oss needs; expected hf"
    assert refusal(OSS, "rollout.engine=sglang", "trainer.device=cpu") == f"rollout.engine=sglang: {sentence}"
    load(OSS, *SGLANG)


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
