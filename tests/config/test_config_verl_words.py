"""Single words of verl: each sets what it says, gets a line that is true, or is refused with what to write."""

import pytest
from config_helpers import EXPERTS, refusal, refusals

from megarl.config import load_config
from megarl.config.validate.values import value_of

WHOLE = ("data.train_files=[a.jsonl]", "actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=2", "rollout.n=2")
LORA = "actor_rollout_ref.model.lora_rank=64"
SANDBOX = "reward.fn=code reward.sandbox_fusion"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
MODEL = "reward.reward_model.enable=True reward.reward_model.model_path=m reward.model.first_gpu=7"
DYNAMIC = "use_dynamic_bsz=True"
TURNS = "agent.command=[sh] rollout.multi_turn"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        # rewards, in the newer tree
        (
            "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64",
            "algorithm.overlong_buffer.len",
            64,
        ),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64 "
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            "algorithm.overlong_buffer.penalty_factor",
            0.5,
        ),
        (f"{SANDBOX}.url=http://h:1/run_code", "reward.sandbox", "url:http://h:1"),
        (f"{SANDBOX}.memory_limit_mb=64", "reward.memory_mb", 64),
        (f"{SANDBOX}.max_concurrent=3", "reward.num_workers", 3),
        (MODEL, "reward.fn", ["model"]),
        (f"{MODEL} reward.reward_model.rollout.gpu_memory_utilization=0.8", "reward.model.memory_fraction", 0.8),
        # algorithms
        ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
        ("algorithm.adv_estimator=grpo_vectorized", "algorithm.adv_estimator", "grpo"),
        (f"actor.policy_loss.loss_mode=bypass_mode {BYPASS}", "algorithm.rollout_correction.bypass", True),
        # servers and agents
        (
            "rollout.engine_kwargs.sglang.attention_backend=fa3 rollout.engine_kwargs.sglang.cuda_graph_bs=[1,2] "
            "rollout.engine_kwargs.sglang.disable_radix_cache=True rollout.engine_kwargs.sglang.page_size=null",
            "rollout.sglang.args",
            ["--attention-backend", "fa3", "--cuda-graph-bs", "1", "2", "--disable-radix-cache"],
        ),
        (f"{TURNS}.use_inference_chat_template=True", "agent.history", "rendered"),
        ("rollout.val_kwargs.do_sample=False rollout.val_kwargs.temperature=1.0", "rollout.val_kwargs.temperature", 0),
        ("rollout.val_kwargs.temperature=1.0 rollout.val_kwargs.do_sample=False", "rollout.val_kwargs.temperature", 0),
        ("rollout.val_kwargs.do_sample=True rollout.val_kwargs.temperature=1.0", "rollout.val_kwargs.temperature", 1),
        # dtypes
        ("actor.fsdp_config.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("actor.fsdp_config.model_dtype=bf16", "model.dtype", "bfloat16"),
        ("actor.fsdp_config.mixed_precision.param_dtype=fp32", "model.dtype", "float32"),
        ("actor.fsdp_config.offload_policy=True", "actor.megatron.optimizer_offload", True),
        # micro-batches
        (f"actor.{DYNAMIC} actor.ppo_micro_batch_size_per_gpu=4", "actor.ppo_max_token_len_per_gpu", 16384),
        (f"critic.{DYNAMIC} critic.ppo_micro_batch_size_per_gpu=4", "critic.ppo_max_token_len_per_gpu", 32768),
        (
            f"actor.{DYNAMIC} actor.ppo_max_token_len_per_gpu=9000 ref.log_prob_micro_batch_size_per_gpu=4",
            "ref.log_prob_max_token_len_per_gpu",
            9000,
        ),
        ("rollout.quantization=null", "rollout.quantization", "none"),
        ("reward.fn=math reward_model.num_workers=8", "reward.num_workers", 8),
        # data
        ("data.train_max_samples=9", "data.train_max_samples", 9),
        ("data.train_max_samples=-1", "data.train_max_samples", None),
        # adapters
        (LORA, "actor.strategy", "megatron"),
        (f"{LORA} actor_rollout_ref.actor.strategy=fsdp2", "actor.strategy", "megatron"),
        ("actor_rollout_ref.actor.strategy=fsdp2", "actor.strategy", "fsdp"),
    ],
)
def test_a_word_sets_what_it_says(words: str, key: str, value: object) -> None:
    config, _ = load_config([*WHOLE, *words.split()])
    assert value_of(config, key) == value


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("reward.reward_kwargs.overlong_buffer_cfg.log=True", "log=true: the penalty is always logged"),
        ("reward.reward_kwargs.max_resp_len=512", "max_resp_len=512: data.max_response_length counts"),
        ("reward.sandbox_fusion.url=null", "url=null: code runs in the sandbox of this machine"),
        ("reward.reward_model.enable=False", "enable=false: no model scores"),
        ("reward.reward_model.n_gpus_per_node=8", "n_gpus_per_node=8: reward.reward_model.enable=false"),
        (f"{MODEL} reward.reward_model.nnodes=0", "nnodes=0: reward.reward_model.enable_resource_pool=false"),
        (f"{MODEL} reward.reward_model.rollout.name=sglang", "name=sglang: the server of the reward model decides"),
        ("rollout.enable_rollout_routing_replay=True", "where actor.router_replay reads them"),
        ("actor.calculate_sum_pi_squared=True", "where algorithm.adv_estimator reads it"),
        ("actor.policy_loss.loss_mode=bypass_mode " + BYPASS, "loss_mode=bypass_mode: algorithm.rollout_correction."),
        ("rollout.engine_kwargs.vllm.swap_space=4", "swap_space=4: there is no vLLM here"),
        ("rollout.engine_kwargs.sglang.enable_mixed_chunk=False", "an option that is off is left out"),
        ("rollout.agent.default_agent_loop=single_turn_agent", "completions are plain"),
        ("rollout.agent.agent_loop_config_path=null", "there is no loop"),
        ("rollout.trace.backend=weave", "kept in samples.jsonl"),
        ("rollout.prometheus.enable=False", "not collected"),
        ("rollout.prometheus.port=9090", "trainer.prometheus_port"),
        ("rollout.skip.enable=False", "always generated"),
        ("rollout.multi_turn.max_parallel_calls=1", "completions are plain"),
        ("rollout.multi_turn.max_tool_response_length=256", "completions are plain"),
        ("rollout.multi_turn.tool_response_truncate_side=middle", "completions are plain"),
        ("rollout.multi_turn.tokenization_sanity_check_mode=strict", "are trained as such"),
        ("actor.data_loader_seed=1", "keep the order"),
        ("actor.megatron.use_remove_padding=True", "always packed"),
        ("trainer.remove_previous_ckpt_in_save=False", "earlier saves stay"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=null", "no token vetoes its sequence"),
        ("actor.freeze_vision_tower=True", "only text is read"),
        ("model.lora_adapter_path=null", "adapters begin at zero"),
        ("transfer_queue.enable=True", "changes no result"),
        (f"{EXPERTS} actor.megatron.override_transformer_config.moe_aux_loss_coeff=0", "rewards alone train the rou"),
        (f"{EXPERTS} actor.megatron.override_transformer_config.moe_router_load_balancing_type=none", "rewards alone"),
        ("actor.fsdp_config.model_dtype=fp32", "the optimizer keeps weights in float32"),
        ("ref.fsdp_config.model_dtype=bfloat16", "all roles compute in model.dtype, which is the same"),
        ("actor.fsdp_config.mixed_precision.reduce_dtype=fp32", "gradients are summed in float32"),
        ("data.train_max_samples=9", "the first 9 rows, and not a random choice"),
        ("rollout.multi_turn.max_assistant_turns=null", "agent.max_turns ends an episode"),
        ("rollout.agent.agent_loop_manager_class=null", "there is no loop"),
        ("rollout.skip_rollout=False", "always generated"),
        ("reward_model.use_reward_loop=True", "while others generate"),
        ("model.mtp.enable=False", "one token is predicted"),
        ("model.tiled_mlp.enabled=False", "changes memory only"),
        ("actor.qat.enable=False", "are not quantized"),
        ("actor.fsdp_config.full_determinism=False", "nothing asks for it"),
        ("actor.fsdp_config.seed=3", "trainer.seed"),
        ("actor.checkpoint.load_contents=[model,optimizer,extra]", "a resume loads all of a save"),
        ("actor.checkpoint.load_contents=[model] trainer.resume_mode=disable", "nothing is resumed"),
        (
            f"actor.{DYNAMIC} actor.ppo_micro_batch_size_per_gpu=4",
            "micro-batches are cut by tokens, verl's default actor.ppo_max_token_len_per_gpu=16384",
        ),
        ("rollout.val_kwargs.do_sample=False rollout.val_kwargs.temperature=1.0", "do_sample=false is greedy"),
        (LORA, "actor.strategy=megatron, where verl's default is fsdp: adapters train by Megatron, not by FSDP"),
        (f"{LORA} actor_rollout_ref.actor.strategy=fsdp", "actor.strategy=megatron: adapters train by Megatron"),
    ],
)
def test_a_word_gets_one_true_line(words: str, line: str) -> None:
    _, lines = load_config([*WHOLE, *words.split()])
    assert len([told for told in lines if line in told]) == 1, lines


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("reward.reward_kwargs.max_resp_len=9 data.max_response_length=8", "expected the same number"),
        ("reward.reward_kwargs.threshold=9", "expected reward.fn=FILE.py:function, with defaults of its own param"),
        ("reward.custom_reward_function.reward_kwargs.alpha=1", "expected defaults of the function's own parameters"),
        ("reward.reward_manager.module.path=a.py", "expected reward.fn=FILE.py:function"),
        (f"{MODEL} reward.reward_model.enable_resource_pool=True", "expected reward.model.first_gpu, or reward.model"),
        (f"{MODEL} reward.reward_model.rollout.tensor_model_parallel_size=2", "expected 1, or reward.model.url"),
        ("reward.reward_model.dtype=a", "expected a key of reward.model"),
        ("actor.policy_loss.loss_mode=bypass_mode", "expected algorithm.rollout_correction.bypass_mode=true"),
        ("rollout.engine_kwargs.sglang.a=1 rollout.sglang.args=[--b]", "expected it in rollout.sglang.args"),
        ("rollout.engine_kwargs.sglang.a.b=1", "expected it in rollout.sglang.args"),
        ("rollout.agent.default_agent_loop=tool_agent", "expected agent.fn=FILE.py:function"),
        ("rollout.agent.agent_loop_config_path=a.yaml", "expected agent.fn=FILE.py:function"),
        ("rollout.prometheus.enable=True", "expected prometheus in trainer.logger"),
        ("rollout.skip.enable=True", "expected false"),
        (f"{TURNS}.max_user_turns=3", "expected agent.max_turns=ANSWERS"),
        (f"{TURNS}.max_parallel_calls=1", "for a limit expected agent.fn=FILE.py:function"),
        (f"{TURNS}.max_tool_response_length=256", "expected a tool that returns less"),
        (f"{TURNS}.tool_response_truncate_side=left", "expected a tool that returns less"),
        ("model.lora_adapter_path=a", "expected model.path of a folder into which the adapter is merged"),
        ("actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.001", "expected 0"),
        ("actor.megatron.override_transformer_config.moe_router_load_balancing_type=aux_loss", "expected none"),
        ("actor.fsdp_config.dtype=float16", "expected float32 or bfloat16"),
        ("actor.fsdp_config.mixed_precision.reduce_dtype=bf16", "expected fp32"),
        ("critic.fsdp_config.dtype=bfloat16", "all roles compute in one dtype: expected model.dtype"),
        ("actor.megatron.dtype=fp16", "expected float32 or bfloat16"),
        ("actor.checkpoint.load_contents=[model]", "trainer.resume_mode=disable and model.path=FOLDER of these weigh"),
    ],
)
def test_what_means_something_else_is_refused_with_what_to_write(words: str, told: str) -> None:
    sentence = refusal(*words.split())
    assert told in sentence
    assert "did you mean" not in sentence


def test_verls_supervised_trainer_has_the_dtype_that_is_said_and_resumes_all() -> None:
    base = ["sft.train_files=[a.jsonl]", "model.path=m"]
    words = ["data.train_files=[a.jsonl]", "model.path=m", "model.fsdp_config.model_dtype=bf16"]
    assert load_config(words, command="sft")[0].model.dtype == "bfloat16"
    assert load_config([*words[:2], "engine.dtype=bfloat16"], command="sft")[0].model.dtype == "bfloat16"
    assert load_config(base, command="sft")[0].model.dtype == "float32"
    (sentence,) = refusals("data.train_files=[a.jsonl]", "checkpoint.load_contents=[model]", command="sft")
    assert "expected [model,optimizer,extra]" in sentence
