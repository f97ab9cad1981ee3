"""Single words of verl: each sets what it says, gets a line that is true, or is refused with what to write."""

import pytest
import yaml
from config_helpers import EXPERTS, refusals
from refusal_table import Block, blocks

from megarl.config import load_config
from megarl.config.validate.values import value_of

WHOLE = ("data.train_files=[a.jsonl]", "actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=2", "rollout.n=2")
SETS = """
reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64 | \
algorithm.overlong_buffer.len | 64
reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64 \
reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 | algorithm.overlong_buffer.penalty_factor | 0.5
reward.fn=code reward.sandbox_fusion.url=http://h:1/run_code | reward.sandbox | url:http://h:1
reward.fn=code reward.sandbox_fusion.memory_limit_mb=64 | reward.memory_mb | 8192
reward.fn=code reward.sandbox_fusion.max_concurrent=3 | reward.num_workers | 1
reward.reward_model.enable=True reward.reward_model.model_path=m reward.model.first_gpu=7 | reward.fn | [model]
reward.reward_model.enable=True reward.reward_model.model_path=m reward.model.first_gpu=7 \
reward.reward_model.rollout.gpu_memory_utilization=0.8 | reward.model.memory_fraction | 0.8
algorithm.adv_estimator=rloo_vectorized | algorithm.adv_estimator | rloo
algorithm.adv_estimator=grpo_vectorized | algorithm.adv_estimator | grpo
actor.policy_loss.loss_mode=bypass_mode algorithm.rollout_correction.bypass_mode=True | \
algorithm.rollout_correction.bypass | true
rollout.engine_kwargs.sglang.attention_backend=fa3 rollout.engine_kwargs.sglang.cuda_graph_bs=[1,2] \
rollout.engine_kwargs.sglang.disable_radix_cache=True rollout.engine_kwargs.sglang.page_size=null | \
rollout.sglang.args | ['--attention-backend', fa3, '--cuda-graph-bs', '1', '2', '--disable-radix-cache']
agent.command=[sh] rollout.multi_turn.use_inference_chat_template=True | agent.history | rendered
rollout.val_kwargs.do_sample=False rollout.val_kwargs.temperature=1.0 | rollout.val_kwargs.temperature | 1
rollout.val_kwargs.do_sample=False | rollout.val_kwargs.temperature | 0
rollout.val_kwargs.do_sample=True rollout.val_kwargs.temperature=1.0 | rollout.val_kwargs.temperature | 1
actor.fsdp_config.dtype=bfloat16 | model.dtype | bfloat16
actor.fsdp_config.model_dtype=bf16 | model.dtype | bfloat16
actor.fsdp_config.mixed_precision.param_dtype=fp32 | model.dtype | float32
actor.fsdp_config.offload_policy=True | actor.megatron.optimizer_offload | true
actor.use_dynamic_bsz=True actor.ppo_micro_batch_size_per_gpu=4 | actor.ppo_max_token_len_per_gpu | 16384
critic.use_dynamic_bsz=True critic.ppo_micro_batch_size_per_gpu=4 | critic.ppo_max_token_len_per_gpu | 32768
actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=9000 ref.log_prob_micro_batch_size_per_gpu=4 | \
ref.log_prob_max_token_len_per_gpu | 9000
rollout.quantization=null | rollout.quantization | none
reward.fn=math reward_model.num_workers=8 | reward.num_workers | 8
data.train_max_samples=9 | data.train_max_samples | 9
data.train_max_samples=-1 | data.train_max_samples | null
actor_rollout_ref.model.lora_rank=64 | actor.strategy | megatron
actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.actor.strategy=fsdp2 | actor.strategy | megatron
actor_rollout_ref.actor.strategy=fsdp2 | actor.strategy | fsdp
global_profiler.steps=[3,4] global_profiler.tool=torch | trainer.profile.steps | [3, 4]
global_profiler.steps=[3,4] global_profiler.tool=nsys | trainer.profile.tool | nvtx
# prompts that are too long: filtering comes before truncation, whatever their order
data.truncation=left | data.overlong_prompts | left
data.filter_overlong_prompts=True data.truncation=error | data.overlong_prompts | filter
data.truncation=middle data.filter_overlong_prompts=True | data.overlong_prompts | filter
data.truncation=right data.filter_overlong_prompts=False | data.overlong_prompts | right
recipe=grpo_qwen3_8b_1x8h100 trainer.n_gpus_per_node=8 data.filter_overlong_prompts=False | \
data.overlong_prompts | error
data.overlong_prompts=filter | data.overlong_prompts | filter
# losses and corrections
actor.policy_loss.loss_mode=gspo actor.loss_agg_mode=seq-mean-token-mean | algorithm.policy_loss_fn | gspo
actor.policy_loss.loss_mode=clip_cov actor.policy_loss.clip_cov_ratio=0.1 actor.policy_loss.clip_cov_lb=2 \
actor_rollout_ref.actor.policy_loss.clip_cov_ub=3 | algorithm.policy_loss_args | {clip_cov_ratio: 0.1, clip_cov_lb: \
2.0, clip_cov_ub: 3.0}
actor.policy_loss.loss_mode=kl_cov actor.policy_loss.kl_cov_ratio=0.1 actor.policy_loss.ppo_kl_coef=2 | \
algorithm.policy_loss_args | {kl_cov_ratio: 0.1, ppo_kl_coef: 2.0}
algorithm.policy_loss_fn=sapo actor.tau_pos=2 actor.tau_neg=3 | algorithm.policy_loss_args | {tau_pos: 2.0, tau_neg: \
3.0}
reward.overlong_buffer.enable=true reward.overlong_buffer.len=64 | algorithm.overlong_buffer.len | 64
reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=64 \
reward_model.overlong_buffer.penalty_factor=0.5 | algorithm.overlong_buffer.penalty_factor | 0.5
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3 | \
algorithm.rollout_correction.truncate | 3.0
algorithm.rollout_correction.bypass_mode=true | algorithm.rollout_correction.bypass | true
# how a role is computed
actor.megatron.override_transformer_config.recompute_granularity=selective | actor.megatron.recompute_granularity | \
selective
actor.megatron.override_ddp_config.overlap_grad_reduce=true | actor.megatron.overlap_grad_reduce | true
actor_rollout_ref.actor.fsdp_config.param_offload=True | actor.megatron.param_offload | true
actor.fsdp_config.optimizer_offload=True | actor.megatron.optimizer_offload | true
actor.megatron.param_offload=True | actor.megatron.param_offload | true
trainer.n_gpus_per_node=4 actor.megatron.pipeline_model_parallel_size=2 \
actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=2 | \
actor.megatron.num_layers_in_last_pipeline_stage | 2
critic.model.fsdp_config.param_offload=True | critic.megatron.param_offload | true
actor.use_kl_loss=true actor_rollout_ref.ref.fsdp_config.param_offload=True | ref.megatron.param_offload | true
rollout.engine=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.6 | rollout.memory_fraction | 0.6
actor_rollout_ref.actor.use_prefix_grouper=True | trainer.share_prefixes | auto
actor_rollout_ref.actor.use_prefix_grouper=False | trainer.share_prefixes | 'off'
"""


def rows_of(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.strip().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(("words", "key", "value"), rows_of(SETS))
def test_a_word_sets_what_it_says(words: str, key: str, value: str) -> None:
    config, _ = load_config([*WHOLE, *words.split()])
    assert value_of(config, key) == yaml.safe_load(value)


LINES = """
reward.reward_kwargs.overlong_buffer_cfg.log=True | log=true: the penalty is always logged
reward.reward_kwargs.max_resp_len=512 | max_resp_len=512: data.max_response_length counts
reward.sandbox_fusion.url=null | url=null: code runs in the sandbox of this machine
reward.reward_model.enable=False | enable=false: no model scores
reward.reward_model.n_gpus_per_node=8 | n_gpus_per_node=8: reward.reward_model.enable=false
reward.reward_model.enable=True reward.reward_model.model_path=m reward.model.first_gpu=7 reward.reward_model.nnodes=0 \
| nnodes=0: reward.reward_model.enable_resource_pool=false
reward.reward_model.enable=True reward.reward_model.model_path=m reward.model.first_gpu=7 \
reward.reward_model.rollout.name=sglang | name=sglang: the server of the reward model decides
rollout.enable_rollout_routing_replay=True | where actor.router_replay reads them
actor.calculate_sum_pi_squared=True | where algorithm.adv_estimator reads it
actor.policy_loss.loss_mode=bypass_mode algorithm.rollout_correction.bypass_mode=True | loss_mode=bypass_mode: \
algorithm.rollout_correction.
rollout.engine_kwargs.vllm.swap_space=4 | swap_space=4: there is no vLLM here
rollout.engine_kwargs.sglang.enable_mixed_chunk=False | an option that is off is left out
rollout.agent.default_agent_loop=single_turn_agent | completions are plain
rollout.agent.agent_loop_config_path=null | there is no loop
rollout.trace.backend=weave | kept in samples.jsonl
rollout.prometheus.enable=False | not collected
rollout.prometheus.port=9090 | trainer.prometheus_port
rollout.skip.enable=False | always generated
rollout.multi_turn.max_parallel_calls=1 | completions are plain
rollout.multi_turn.max_tool_response_length=256 | completions are plain
rollout.multi_turn.tool_response_truncate_side=middle | completions are plain
rollout.multi_turn.tokenization_sanity_check_mode=strict | are trained as such
actor.data_loader_seed=1 | keep the order
actor.megatron.use_remove_padding=True | always packed
trainer.remove_previous_ckpt_in_save=False | earlier saves stay
algorithm.rollout_correction.rollout_token_veto_threshold=null | no token vetoes its sequence
actor.freeze_vision_tower=True | only text is read
model.lora_adapter_path=null | adapters begin at zero
transfer_queue.enable=True | changes no result
@experts actor.megatron.override_transformer_config.moe_aux_loss_coeff=0 | rewards alone train the rou
@experts actor.megatron.override_transformer_config.moe_router_load_balancing_type=none | rewards alone
actor.fsdp_config.model_dtype=fp32 | the optimizer keeps weights in float32
ref.fsdp_config.model_dtype=bfloat16 | all roles compute in model.dtype, which is the same
actor.fsdp_config.mixed_precision.reduce_dtype=fp32 | gradients are summed in float32
data.train_max_samples=9 | the first 9 rows, and not a random choice
rollout.multi_turn.max_assistant_turns=null | agent.max_turns ends an episode
rollout.agent.agent_loop_manager_class=null | there is no loop
rollout.skip_rollout=False | always generated
reward_model.use_reward_loop=True | while others generate
model.mtp.enable=False | one token is predicted
model.tiled_mlp.enabled=False | changes time and memory only
actor.qat.enable=False | are not quantized
actor.fsdp_config.full_determinism=False | nothing asks for it
actor.fsdp_config.seed=3 | trainer.seed
actor.checkpoint.load_contents=[model,optimizer,extra] | a resume loads all of a save
actor.checkpoint.load_contents=[model] trainer.resume_mode=disable | nothing is resumed
actor.use_dynamic_bsz=True actor.ppo_micro_batch_size_per_gpu=4 | micro-batches are cut by tokens, verl's default \
actor.ppo_max_token_len_per_gpu=16384
rollout.val_kwargs.do_sample=False rollout.val_kwargs.temperature=1.0 | do_sample=false: not read, as in verl: \
evaluation draws at temperature=1.0
reward.sandbox_fusion.max_concurrent=128 | max_concurrent=128: each of reward.num_workers processes asks one at a time
actor_rollout_ref.model.lora_rank=64 | actor.strategy=megatron, where verl's default is fsdp: adapters train by \
Megatron, not by FSDP
actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.actor.strategy=fsdp | actor.strategy=megatron: adapters train \
by Megatron
actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 | strategy=fsdp shards everything
actor.megatron.grad_offload=True | with param_offload
actor.megatron.use_mbridge=True | Hugging Face folders
critic.megatron.use_dist_checkpointing=True | shard by shard
actor_rollout_ref.rollout.free_cache_engine=True | rollout.placement=shared makes servers sleep
"""


@pytest.mark.parametrize(("words", "line"), rows_of(LINES))
def test_a_word_gets_one_true_line(words: str, line: str) -> None:
    typed = words.replace("@experts", EXPERTS).split()
    _, lines = load_config([*WHOLE, *typed, *typed])
    assert len([told for told in lines if line in told]) == 1, lines


REFUSED = """
with reward.reward_model.enable=True reward.reward_model.model_path=m reward.model.first_gpu=7
reward.reward_kwargs.max_resp_len=9 data.max_response_length=8 | the penalty is highest at .. expected the same number
reward.reward_kwargs.threshold=9 | expected reward.fn=FILE.py:function, with defaults of its own parameters
reward.custom_reward_function.reward_kwargs.alpha=1 | expected defaults of the function's own parameters
reward.reward_manager.module.path=a.py | expected reward.fn=FILE.py:function
reward.reward_model.enable_resource_pool=True | expected reward.model.first_gpu, or reward.model.url of a server that
reward.reward_model.rollout.tensor_model_parallel_size=2 | expected 1, or reward.model.url of a server of your own
reward.reward_model.dtype=a | expected a key of reward.model, which says what scores and where it is served
actor.policy_loss.loss_mode=bypass_mode | expected algorithm.rollout_correction.bypass_mode=true, and its loss_type
rollout.engine_kwargs.sglang.a=1 rollout.sglang.args=[--b] | expected it in rollout.sglang.args
rollout.engine_kwargs.sglang.a.b=1 | expected it in rollout.sglang.args
rollout.agent.default_agent_loop=tool_agent | expected agent.fn=FILE.py:function (docs/agents.md)
rollout.agent.agent_loop_config_path=a.yaml | expected agent.fn=FILE.py:function (docs/agents.md)
rollout.prometheus.enable=True | expected prometheus in trainer.logger, and its trainer.prometheus_port
rollout.skip.enable=True | completions are always generated: expected false
rollout.multi_turn.max_user_turns=3 agent.command=[sh] | expected agent.max_turns=ANSWERS

with agent.command=[sh]
rollout.multi_turn.max_parallel_calls=1 | a tool is called as often as an answer .. expected agent.fn=FILE.py:function
rollout.multi_turn.max_tool_response_length=256 | what a tool returns is read whole: expected a tool that returns less
rollout.multi_turn.tool_response_truncate_side=left | what a tool returns is read .. expected a tool that returns less
model.lora_adapter_path=a | expected model.path of a folder into which the adapter is merged
actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.001 | rewards alone train the router: expected 0
actor.megatron.override_transformer_config.moe_router_load_balancing_type=aux_loss | rewards alone .. expected none
actor.fsdp_config.dtype=float16 | expected float32 or bfloat16
actor.fsdp_config.mixed_precision.reduce_dtype=bf16 | gradients are summed in float32: expected fp32
critic.fsdp_config.dtype=bfloat16 | all roles compute in one dtype: expected model.dtype
actor.megatron.dtype=fp16 | expected float32 or bfloat16
actor.checkpoint.load_contents=[model] | a resume loads all of a save .. expected [model,optimizer,extra], or
hybrid_engine=3 | expected true or false
reward_model.enable=maybe | expected true or false
async_training.staleness_threshold=inf | expected a number
actor.optim.min_lr_ratio=[1] | expected a number
"""


@pytest.mark.parametrize("block", blocks(REFUSED), ids=str)
def test_what_means_something_else_is_refused_with_what_to_write(block: Block) -> None:
    block.check()


def test_verls_supervised_trainer_has_the_dtype_that_is_said_and_resumes_all() -> None:
    base = ["sft.train_files=[a.jsonl]", "model.path=m"]
    words = ["data.train_files=[a.jsonl]", "model.path=m", "model.fsdp_config.model_dtype=bf16"]
    assert load_config(words, command="sft")[0].model.dtype == "bfloat16"
    assert load_config([*words[:2], "engine.dtype=bfloat16"], command="sft")[0].model.dtype == "bfloat16"
    assert load_config(base, command="sft")[0].model.dtype == "float32"
    (sentence,) = refusals("data.train_files=[a.jsonl]", "checkpoint.load_contents=[model]", command="sft")
    assert "expected [model,optimizer,extra]" in sentence
