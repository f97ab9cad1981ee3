"""Single words of verl: each sets what it says, gets a line that is true, or is refused with what to write."""

import pytest
import yaml
from config_helpers import EXPERTS, refusals
from refusal_table import Block, blocks

from megarl.config import ConfigError, load_config
from megarl.config.validate.values import value_of

WHOLE = ("data.train_files=[a.jsonl]", "actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=2", "rollout.n=2")
SETS = """
reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64 | \
algorithm.overlong_buffer.len | 64
reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64 \
reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 | algorithm.overlong_buffer.penalty_factor | 0.5
reward.fn=code reward.sandbox_fusion.url=http://h:1/run_code | reward.sandbox | url:http://h:1
# verl's estimator ends at 10
actor.use_kl_loss=True actor.kl_loss_type=low_var_kl | actor.kl_loss_type | low_var_kl_clamped
actor.use_kl_loss=True actor.kl_loss_type=k3+ | actor.kl_loss_type | low_var_kl_clamped+
actor.use_kl_loss=True | actor.kl_loss_type | low_var_kl_clamped
algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl | algorithm.kl_penalty | low_var_kl_clamped
# schedules: verl counts iterations, of ppo_epochs times 1024 / 256 prompts
actor.optim.lr_warmup_steps=10 | actor.optim.lr_warmup_steps | 40
data.train_batch_size=512 actor.ppo_mini_batch_size=32 actor.optim.lr_warmup_steps=10 | actor.optim.lr_warmup_steps | \
160
data.train_batch_size=512 actor.ppo_mini_batch_size=256 actor.ppo_epochs=3 actor.optim.lr_warmup_steps=1 | \
actor.optim.lr_warmup_steps | 6
actor.optim.lr_decay_style=cosine actor.optim.lr_decay_steps=100 | actor.optim.lr_decay_steps | 400
actor.optim.lr_decay_style=cosine actor.optim.total_training_steps=100 | actor.optim.lr_decay_steps | 400
actor.optim.lr_decay_style=cosine actor.optim.total_training_steps=-1 | actor.optim.lr_decay_steps | null
critic.ppo_mini_batch_size=512 critic.ppo_epochs=3 critic.optim.lr_warmup_steps=2 | critic.optim.lr_warmup_steps | 12
actor.ppo_epochs=2 critic.optim.lr_warmup_steps=2 | critic.optim.lr_warmup_steps | 16
--config-name=fully_async_ppo_trainer async_training.require_batches=2 actor.optim.lr_warmup_steps=10 | \
actor.optim.lr_warmup_steps | 20
recipe=grpo_qwen3_8b_1x8h100 trainer.n_gpus_per_node=8 actor.optim.lr_warmup_steps=10 | actor.optim.lr_warmup_steps | 10
trainer.total_training_steps=50 actor.optim.lr_warmup_steps_ratio=0.1 | actor.optim.lr_warmup_steps | 20
trainer.total_training_steps=50 actor.optim.lr_warmup_steps_ratio=0.1 actor.optim.lr_warmup_steps=-1 | \
actor.optim.lr_warmup_steps | 20
trainer.total_training_steps=50 actor.optim.lr_warmup_steps_ratio=0.1 actor.optim.lr_warmup_steps=null | \
actor.optim.lr_warmup_steps | 20
trainer.total_training_steps=50 actor.optim.lr_warmup_steps_ratio=0.1 actor.optim.lr_warmup_steps=0 | \
actor.optim.lr_warmup_steps | 20
trainer.total_training_steps=50 actor.optim.lr_warmup_steps=10 actor.optim.lr_warmup_steps_ratio=0.1 | \
actor.optim.lr_warmup_steps | 40
critic.optim.lr_warmup_steps=10 critic.optim.lr_warmup_steps_ratio=0.0 | critic.optim.lr_warmup_steps | 40
actor.optim.lr_decay_style=cosine actor.optim.total_training_steps=100 actor.optim.lr_decay_steps=null | \
actor.optim.lr_decay_steps | 400
actor.optim.lr_scheduler_type=cosine actor.optim.lr=1.0 actor.optim.min_lr_ratio=0.2 actor.optim.min_lr=0.0 | \
actor.optim.min_lr | 0.2
actor.optim.lr_scheduler_type=cosine actor.optim.lr=1.0 actor.optim.min_lr=0.1 actor.optim.min_lr_ratio=0.0 | \
actor.optim.min_lr | 0.1
actor.optim.warmup_style=cosine actor.optim.lr_scheduler_type=constant | actor.optim.lr_decay_style | cosine
actor.optim.beta2=0.5 actor.optim.betas=[0.7,0.9] | actor.optim.betas | [0.7, 0.5]
async_training.require_batches=1 actor.ppo_mini_batch_size=32 | data.train_batch_size | 128
async_training.require_batches=1 actor.ppo_mini_batch_size=32 | rollout.ahead | 1
async_training.staleness_threshold=0 actor.ppo_mini_batch_size=32 | rollout.ahead | 0
# losses with an aggregation of their own, clips and defaults of verl
actor.policy_loss.loss_mode=geo_mean | actor.loss_agg_mode | seq-mean-token-mean
actor.policy_loss.loss_mode=sapo actor.loss_agg_mode=token-mean | actor.loss_agg_mode | seq-mean-token-mean
actor.policy_loss.loss_mode=sapo actor.loss_agg_mode=token-mean | critic.loss_agg_mode | token-mean
actor.policy_loss.loss_mode=gspo | actor.loss_agg_mode | token-mean
actor.policy_loss.loss_mode=gspo | actor.clip_ratio_low | 0.2
actor.policy_loss.loss_mode=geo_mean actor.clip_ratio_low=0.3 | actor.clip_ratio_high | 0.2
actor.policy_loss.loss_mode=gspo actor.clip_ratio_c=10 | actor.clip_ratio_c | null
actor.policy_loss.loss_mode=kl_cov actor.clip_ratio_low=0.1 | actor.clip_ratio_low | null
actor.policy_loss.loss_mode=dppo_tv actor.clip_ratio_c=10000 | algorithm.policy_loss_args | {dppo_ratio_cap: 10000.0}
actor.policy_loss.loss_mode=dppo_kl | algorithm.policy_loss_args | {dppo_ratio_cap: 3.0}
actor.policy_loss.loss_mode=cispo actor.clip_ratio_low=10 | actor.clip_ratio_low | 1.0
actor.policy_loss.loss_mode=dro actor.policy_loss.dro_beta=0.5 | algorithm.policy_loss_args | {beta: 0.5}
actor.policy_loss.loss_mode=sapo actor.policy_loss.tau_pos=2 | algorithm.policy_loss_args | {tau_pos: 2.0}
actor.clip_ratio=0.1 | actor.clip_ratio_low | 0.2
actor.policy_loss.loss_mode=gspo algorithm.rollout_correction.bypass_mode=True | algorithm.policy_loss_fn | ppo
# servers: on all GPUs of the trainer, or on those of the same machine after them
rollout.tensor_model_parallel_size=1 hybrid_engine=True | rollout.num_servers | 2
trainer.n_gpus_per_node=4 hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=4 | rollout.num_servers | 2
trainer.n_gpus_per_node=4 hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=4 | rollout.placement | separate
trainer.n_gpus_per_node=4 --config-name=one_step_off_ppo_trainer rollout.n_gpus_per_node=4 \
rollout.tensor_model_parallel_size=1 | rollout.num_servers | 4
hybrid_engine=True rollout.nnodes=0 rollout.n_gpus_per_node=8 | rollout.placement | shared
rollout.nnodes=0 rollout.n_gpus_per_node=0 | rollout.placement | shared
# tokens of a micro-batch are those of whole sequences
actor.use_dynamic_bsz=True actor.ulysses_sequence_parallel_size=2 actor.ppo_max_token_len_per_gpu=2816 | \
actor.ppo_max_token_len_per_gpu | 5632
actor.use_dynamic_bsz=True actor.megatron.context_parallel_size=2 actor.ppo_micro_batch_size_per_gpu=4 | \
actor.ppo_max_token_len_per_gpu | 32768
# replays, adapters, saves, filters
@experts actor.megatron.router_replay.mode=R3 rollout.engine=sglang | actor.router_replay | rollout
model.lora_rank=8 | actor.lora.alpha | 16.0
model.lora.rank=8 | actor.lora.alpha | 32.0
model.lora.rank=8 model.lora.target_modules=[linear_qkv,linear_proj] | actor.lora.targets | [q_proj, k_proj, v_proj, \
o_proj]
trainer.max_actor_ckpt_to_keep=null | trainer.max_checkpoints_to_keep | 1000000
algorithm.filter_groups.enable=True algorithm.filter_groups.metric=null algorithm.filter_groups.max_num_gen_batches=0 \
| algorithm.filter_groups.max_num_gen_batches | 1000000
# distillation
distillation.enabled=True distillation.teacher_models.one.model_path=t distillation.distillation_loss.loss_mode=k1 \
distillation.distillation_loss.use_policy_gradient=True | distill.form | reward
distillation.enabled=True distillation.teacher_models.one.model_path=t distillation.distillation_loss.topk=64 \
distillation.distillation_loss.loss_mode=forward_kl_topk | distill.top_k | 64
distillation.enabled=True distillation.teacher_models.one.model_path=t \
distillation.distillation_loss.loss_mode=forward_kl_topk | distill.divergence | forward_kl
distillation.enabled=True distillation.teacher_models.one.model_path=t algorithm.adv_estimator=grpo \
distillation.distillation_loss.use_task_rewards=False distillation.distillation_loss.loss_mode=forward_kl_topk | \
algorithm.adv_estimator | none
distillation.enabled=True distillation.teacher_models.one.model_path=t \
distillation.distillation_loss.distillation_loss_coef=0.5 distillation.distillation_loss.loss_mode=forward_kl_topk | \
distill.coef | 0.5
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
ref.ppo_max_token_len_per_gpu | 9000
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
    config, _ = load_config([*WHOLE, *words.replace("@experts", EXPERTS).split()])
    assert value_of(config, key) == yaml.safe_load(value)


LINES = """
reward.reward_kwargs.overlong_buffer_cfg.log=True | log=true: the penalty is always logged
actor.optim.lr_warmup_steps=10 | lr_warmup_steps=10: actor.optim.lr_warmup_steps=40: verl counts iterations, of 4
actor.policy_loss.loss_mode=sapo actor.loss_agg_mode=token-mean | verl's loss sapo reads no other
actor.policy_loss.loss_mode=gspo actor.clip_ratio_c=10 | clip_ratio_c=10: the loss gspo has no such clip
actor.tau_pos=2 | actor.tau_pos=2: the loss ppo does not read it
actor.clip_ratio=0.1 | has no effect, because actor.clip_ratio_low=0.2 and actor.clip_ratio_high=0.2
hybrid_engine=False rollout.n_gpus_per_node=2 | n_gpus_per_node=2: rollout.num_servers=1, on the GPUs of this machine \
after
--config-name=ppo_megatron_trainer.yaml | --config-name=ppo_megatron_trainer.yaml: verl's file \
ppo_megatron_trainer sets model_engine=megatron
--config-name=ppo_trainer --config-path=config | --config-path=config: no file of this folder is read
model.trust_remote_code=True | no code of a model's folder is run
data.trust_remote_code=True | no code of a model's folder is run
actor.megatron.override_transformer_config.attention_dropout=0.0 | there is no dropout
actor.megatron.dist_checkpointing_path= | weights come from model.path
model.lora.dropout=0.1 | there are no adapters
distillation.distillation_loss.loss_mode=k3 | distillation.enabled=false: there are no teachers
actor.megatron.override_transformer_config.recompute_modules=[core_attn] | recompute_granularity is not selective
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
model.override_config.max_position_embeddings=9 | the number in the model's config.json counts instead
rollout.repetition_penalty=1.0 | no penalty
rollout.presence_penalty=0 | no penalty
rollout.min_p=0.0 | no bound
actor.optim.num_cycles=0.5 | a cosine falls once
reward_model.use_reward_loop=True | while others generate
model.mtp.enable=False | actor.mtp says whether MTP layers are trained
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
actor.fsdp_config.qat.enable=True | weights in training are not quantized: expected false
critic.fsdp.qat.enable=True | weights in training are not quantized: expected false
actor.fsdp_config.turbo_config.distributed.tensor_parallel_size=8 | there is no Turbo here .. expected 1
ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO | expected it in the environment of the command
model_engine=veomni | expected dp or megatron
rollout.response_length=9 | servers and data have one limit: expected it in data.max_response_length
rollout.logprobs_mode=raw_logprobs | log-probs are those of what was drawn from: expected processed_logprobs
trainer.v1.trainer_mode=separate_async | rollout.ahead says how far generation may be in front: expected sync
algorithm.adv_estimator=ppo | PPO's estimator is called gae: expected gae
distillation.enabled=True | expected distillation.distillation_loss.loss_mode as well
--config-name=mine --config-path=a/b | expected one of verl's files (ppo_trainer, .. or a file of ours in --config FILE
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
distillation.enabled=maybe | expected true or false
algorithm.rollout_correction.bypass_mode=maybe | expected true or false
actor.use_dynamic_bsz=2 | expected true or false
async_training.staleness_threshold=inf | expected a number
async_training.staleness_threshold=true | expected a number
async_training.require_batches=two | expected a whole number
async_training.require_batches=null | expected a whole number
async_training.trigger_parameter_sync_step=2.5 | expected a whole number
actor.optim.min_lr_ratio=[1] | expected a number
actor.optim.lr_warmup_steps_ratio='1' trainer.total_training_steps=50 | expected a number
rollout.update_weights_bucket_megabytes=text | expected a number
rollout.checkpoint_engine.update_weights_bucket_megabytes=[1] | expected a number
actor.ppo_micro_batch_size=true | expected a number

with hybrid_engine=False
rollout.n_gpus_per_node=two | expected a whole number
rollout.n_gpus_per_node=0 | expected at least 1
trainer.n_gpus_per_node=two | expected an integer
rollout.tensor_model_parallel_size=0 | expected at least 1

with actor.max_grad_norm=2.0
actor.optim.clip_grad=0.5 | expected one value of actor.max_grad_norm, and actor.max_grad_norm=2.0 sets 2.0
"""


@pytest.mark.parametrize("block", blocks(REFUSED), ids=str)
def test_what_means_something_else_is_refused_with_what_to_write(block: Block) -> None:
    block.check()


SFT = ("data.train_files=[a.parquet]", "model.path=m", "trainer.n_gpus_per_node=16")
SFT_SETS = """
engine=megatron engine.expert_model_parallel_size=8 @experts | actor.megatron.expert_model_parallel_size | 8
engine=megatron engine.tensor_model_parallel_size=2 | actor.megatron.tensor_model_parallel_size | 2
engine=megatron engine.tensor_model_parallel_size=2 | actor.megatron.sequence_parallel | true
engine=megatron engine.pipeline_model_parallel_size=2 | actor.megatron.pipeline_model_parallel_size | 2
engine=megatron engine.context_parallel_size=2 | actor.megatron.context_parallel_size | 2
engine=megatron optim=megatron model=hf_model engine.param_offload=True | actor.megatron.param_offload | true
engine=megatron | actor.megatron.use_distributed_optimizer | true
engine=megatron engine.use_megatron_fsdp=True | actor.strategy | fsdp
engine=megatron engine.override_transformer_config.recompute_granularity=selective | \
actor.megatron.recompute_granularity | selective
engine=megatron engine.seed=7 | trainer.seed | 7
engine.seed=7 trainer.seed=3 | trainer.seed | 3
engine.strategy=fsdp2 | actor.strategy | fsdp
engine=fsdp engine.ulysses_sequence_parallel_size=2 | actor.megatron.context_parallel_size | 2
engine.optimizer_offload=True | actor.megatron.optimizer_offload | true
data.train_batch_size=96 | sft.batch_size | 96
data.max_length=4096 | sft.max_length | 4096
data.max_token_len_per_gpu=4096 engine.ulysses_sequence_parallel_size=2 | actor.ppo_max_token_len_per_gpu | 8192
data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=4 | actor.ppo_micro_batch_size_per_gpu | 4
optim.lr_warmup_steps=10 | actor.optim.lr_warmup_steps | 10
optim.lr=1e-5 optim.min_lr_ratio=0.1 optim.lr_scheduler_type=cosine | actor.optim.min_lr | 1.0e-06
optim.min_lr=1e-6 optim.lr_decay_style=cosine | actor.optim.lr_decay_style | cosine
optim.clip_grad=0.5 | actor.max_grad_norm | 0.5
optim.betas=[0.9,0.95] | actor.optim.betas | [0.9, 0.95]
trainer.max_ckpt_to_keep=3 | trainer.max_checkpoints_to_keep | 3
trainer.total_epochs=2 | sft.epochs | 2
# verl's defaults
optim.weight_decay=0.1 | model.dtype | bfloat16
optim.weight_decay=0.1 | actor.strategy | fsdp
optim.weight_decay=0.1 | sft.batch_size | 256
optim.weight_decay=0.1 | actor.optim.lr | 0.001
"""


@pytest.mark.parametrize(("words", "key", "value"), rows_of(SFT_SETS))
def test_a_word_of_verls_supervised_trainer_sets_what_it_says(words: str, key: str, value: str) -> None:
    config, _ = load_config([*SFT, *words.replace("@experts", EXPERTS).split()], command="sft")
    found, wanted = value_of(config, key), yaml.safe_load(value)
    assert found == (pytest.approx(wanted) if isinstance(wanted, float) else wanted)


def test_words_that_verls_supervised_trainer_cannot_have_here_are_refused() -> None:
    words = (
        "engine.qat.enable=True",
        "data.prompt_dict_keys=[question]",
        "engine=veomni",
        "data.messages_key=turns",
        "data.train_max_samples=100",
    )
    with pytest.raises(ConfigError) as caught:
        load_config([*SFT, *words, "engine.new_switch=True"], command="sft")
    assert [sentence.partition(": ")[0] for sentence in caught.value.sentences] == [*words, "engine.new_switch=True"]


def test_verls_supervised_trainer_has_the_dtype_that_is_said_and_resumes_all() -> None:
    base = ["sft.train_files=[a.jsonl]", "model.path=m"]
    words = ["data.train_files=[a.jsonl]", "model.path=m", "model.fsdp_config.model_dtype=bf16"]
    assert load_config(words, command="sft")[0].model.dtype == "bfloat16"
    assert load_config([*words[:2], "engine.dtype=bfloat16"], command="sft")[0].model.dtype == "bfloat16"
    assert load_config(base, command="sft")[0].model.dtype == "float32"
    (sentence,) = refusals("data.train_files=[a.jsonl]", "checkpoint.load_contents=[model]", command="sft")
    assert "expected [model,optimizer,extra]" in sentence
