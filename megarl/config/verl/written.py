"""Words of verl that set nothing here: those that change no result, and those of which only verl's default can be had.

Every word has its whole name: a group may stand for several (`*`), a name never does.
"""

from __future__ import annotations

import yaml

from megarl.config.verl.taken import Rule, each, harmless, nothing

_FSDP = "*.fsdp_config *.fsdp"
SERVED = (  # options of a server that verl starts for a model that scores or teaches
    "name dtype enforce_eager cudagraph_capture_sizes free_cache_engine data_parallel_size expert_parallel_size "
    "pipeline_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs load_format layered_summon "
    "scheduling_policy full_determinism seed multi_stage_wake_up limit_images enable_chunked_prefill "
    "enable_prefix_caching disable_log_stats skip_tokenizer_init ignore_eos do_sample n prompt_length response_length"
)
_TOOL = "tool_config"
_VLLM = (  # options of time and memory
    "swap_space disable_mm_preprocessor_cache mm_processor_cache_gb limit_mm_per_prompt enable_expert_parallel "
    "attention_backend block_size async_scheduling disable_custom_all_reduce disable_cascade_attn cudagraph_mode "
    "compilation_config compilation_config.cudagraph_mode compilation_config.cudagraph_capture_sizes "
    "num_gpu_blocks_override max_num_seqs max_model_len enforce_eager seed enable_sleep_mode"
)

# GROUPS | NAMES | what is so here, whatever the value is
_CHANGES_NOTHING = f"""
* | _target_ | a class of verl's own
* | use_remove_padding pad_to_length pad_to_length_bucket pad_bshd_to_minibatch_max | \
sequences are always packed and never padded
* | entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing | \
entropies are always computed by parts of the vocabulary
* | use_torch_compile use_liger tiled_mlp.enabled tiled_mlp.num_shards | changes time and memory only
* | rollout_n | all completions are learnt
* | fused_kernel_options.impl_backend | log-probs and entropies are always computed by parts of the vocabulary
*.checkpoint | save_contents strict | a save has weights, optimizer and all that an exact resume needs
*.optim | lr_wsd_decay_style lr_wsd_decay_steps | no schedule here reads it
{_FSDP} | wrap_policy.min_num_params wrap_policy.transformer_layer_cls_to_wrap reshard_after_forward fsdp_size \
forward_prefetch use_orig_params use_no_sync_for_gradient_accumulation | \
strategy=fsdp shards everything over all data-parallel ranks
*.megatron | dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient | \
a save is read in any layout
*.megatron | grad_offload | gradients go where parameters go, with param_offload
*.megatron | use_mbridge vanilla_mbridge | weights are always read from and written to Hugging Face folders
*.megatron | use_dist_checkpointing | checkpoints are always written shard by shard
*.overlong_buffer *.overlong_buffer_cfg | log | the penalty is always logged, as reward/overlong_penalty
actor | calculate_sum_pi_squared sum_pi_squared_checkpointing | \
computed by parts of the vocabulary, where algorithm.adv_estimator reads it
critic | forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu | \
values are computed with the micro-batches of the critic's training
critic | nccl_timeout | as the actor's
rollout | log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu | \
old log-probs are computed with the micro-batches of the actor's training
rollout | scheduling_policy moe_load_balance_metrics_interval | changes no result
rollout | free_cache_engine enable_sleep_mode | rollout.placement=shared makes servers sleep while the trainer works
rollout.checkpoint_engine | backend engine_kwargs | rollout.push chooses how weights travel
rollout.trace | project_name experiment_name backend token2text max_samples_per_step_per_worker | \
answers of every step are kept in samples.jsonl
rollout.prometheus | port file served_model_name | \
prometheus in trainer.logger serves metrics, at trainer.prometheus_port
rollout.engine_kwargs.vllm | {_VLLM} | there is no vLLM here
rollout rollout.skip | skip_dump_dir dump_dir steps action | completions are always generated
skip.rollout skip.rollout_tq skip.async_rollout | dump_dir steps action | completions are always generated
data | image_key image_patch_size video_key audio_key return_multi_modal_inputs | only text is read
data | filter_overlong_prompts_workers | the prompts of a file are always encoded together
algorithm.pf_ppo | reweight_method weight_pow | samples are never drawn again
algorithm.filter_groups | max_inflight_gen_batches | changes time only
async_training | use_trainer_do_validate concurrent_samples_per_replica | changes time only
reward.reward_model.rollout reward_model.rollout | {SERVED} | the server of the reward model decides
transfer_queue | enable metrics.enabled metrics.port backend.storage_backend | \
changes no result: rows travel from the driver to the ranks
transfer_queue.backend.SimpleStorage | total_storage_size num_data_storage_units | there is no transfer queue
transfer_queue.backend.MooncakeStore | auto_init metadata_server master_server_address local_hostname protocol \
global_segment_size local_buffer_size device_name | there is no transfer queue
ray_init ray_kwargs ray_kwargs.ray_init | num_cpus timeline_json_file | there is no Ray
global_profiler | profile_continuous_steps save_path relocate_results finish_hook_cmd finish_hook_all_ranks \
finish_hook_ranks | trainer.profile.* says what is profiled
global_profiler.global_tool_config | nsys.discrete torch_memory.trace_alloc_max_entries torch_memory.stack_depth \
torch_memory.memory_snapshot_num_steps torch_memory.context torch_memory.stacks torch_memory.kw_args \
precision_debugger.config_path precision_debugger.steps precision_debugger.stages precision_debugger.strict | \
trainer.profile.* says what is profiled
global_profiler.global_tool_config.nsys.controller_nsight_options \
global_profiler.global_tool_config.nsys.worker_nsight_options | trace cuda-memory-usage cuda-graph-trace \
capture-range capture-range-end kill | trainer.profile.* says what is profiled
"""

# GROUPS | SWITCH=OFF | NAMES below the switch, which count for nothing while it is off | what is so here
_SWITCHED_OFF = f"""
*.qat | enable=false | mode group_size ignore_patterns activation_observer quantization_config_path | \
weights in training are not quantized
*.disaggregation | enabled=false | prefill_replicas decode_replicas decode_tensor_model_parallel_size \
transfer_backend bootstrap_port ib_device | a server prefills and decodes
*.mtp | enable=false | enable_train enable_rollout detach_encoder mtp_loss_scaling_factor speculative_algorithm \
speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens method num_speculative_tokens | \
one token is predicted
*.profiler | enable=false | tool all_ranks ranks save_path relocate_results finish_hook_cmd finish_hook_all_ranks \
finish_hook_ranks {_TOOL}.nsys.discrete {_TOOL}.nsys.name {_TOOL}.npu.contents {_TOOL}.npu.level \
{_TOOL}.npu.analysis {_TOOL}.npu.discrete {_TOOL}.npu.profile_token_start {_TOOL}.npu.profile_token_end \
{_TOOL}.npu.name {_TOOL}.torch.contents {_TOOL}.torch.discrete {_TOOL}.torch.profile_token_start \
{_TOOL}.torch.profile_token_end {_TOOL}.torch.schedule.skip_first {_TOOL}.torch.schedule.wait \
{_TOOL}.torch.schedule.warmup {_TOOL}.torch.schedule.active {_TOOL}.torch.schedule.repeat {_TOOL}.torch.name \
{_TOOL}.torch_memory.trace_alloc_max_entries {_TOOL}.torch_memory.stack_depth \
{_TOOL}.torch_memory.memory_snapshot_num_steps {_TOOL}.torch_memory.name {_TOOL}.precision_debugger.config_path \
{_TOOL}.precision_debugger.steps {_TOOL}.precision_debugger.stages {_TOOL}.precision_debugger.strict \
{_TOOL}.precision_debugger.name | trainer.profile.steps and trainer.profile.ranks say what is profiled
*.megatron | dynamic_context_parallel=false | max_seqlen_per_dp_cp_rank | \
ranks of context parallelism are those of actor.megatron.context_parallel_size
async_training | use_dynamic_resource_scheduling=false | dynamic_schedule_policy dynamic_schedule_deactivate_ratio \
dynamic_schedule_enable_rebalance | a GPU stays the trainer's or a server's
trainer.v1 | trainer_mode=sync | colocate_async.num_warmup_batches separate_async.num_warmup_batches \
separate_async.parameter_sync_step separate_async.hybrid_rollout.enable_switch \
separate_async.hybrid_rollout.switch_threshold_ratio separate_async.hybrid_rollout.adaptive_switch_threshold \
separate_async.hybrid_rollout.switch_threshold_step_up separate_async.hybrid_rollout.switch_threshold_step_down \
separate_async.hybrid_rollout.switch_threshold_release_steps separate_async.hybrid_rollout.switch_cost_window_size \
sampler.max_off_policy_threshold sampler.max_off_policy_strategy | \
rollout.ahead says how far generation may be in front
skip.rollout skip.rollout_tq skip.async_rollout rollout.skip | enable=false | | completions are always generated
critic.model.lora | rank=0 | type merge alpha dropout target_modules exclude_modules dropout_position \
lora_A_init_method lora_B_init_method a2a_experimental dtype adapter_path freeze_vision_model \
freeze_vision_projection freeze_language_model | only the actor has adapters
critic.model | lora_rank=0 | lora_alpha lora_adapter_path target_modules exclude_modules | only the actor has adapters
"""

# GROUPS | NAME=DEFAULT ..., verl's | what is so here
_DEFAULTS = f"""
*.optim | muon_momentum=0.95 muon_nesterov=false muon_split_qkv=true muon_scale_mode=spectral \
muon_coefficient_type=quintic muon_num_ns_steps=5 muon_tp_mode=blockwise muon_fp32_matmul_prec=medium \
muon_extra_scale_factor=1.0 muon_scalar_optimizer=adam muon_match_adamw_update_rms=false | \
actor.optim.name=muon has actor.optim.momentum alone
*.optim | main_grads_dtype=fp32 exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 | gradients and moments are float32
*.optim | use_layer_wise_distributed_optimizer=false zero_indexed_step=true \
lr_warmup_init=0.0 weight_decay_incr_style=constant \
optimizer_impl=torch.optim | the optimizer is Megatron's
*.optim | num_cycles=0.5 | a cosine falls once, half a cycle, from actor.optim.lr to actor.optim.min_lr
*.checkpoint | mbridge_config={{}} | weights are always read from and written to Hugging Face folders
{" ".join(f"{group}.turbo_config.distributed" for group in _FSDP.split())} | fully_shard_parallel_size=16 \
tensor_parallel_size=1 expert_parallel_size=1 expert_fully_shard_parallel_size=1 ulysses_parallel_size=1 \
fsdp_plan.param_dtype=bf16 fsdp_plan.reduce_dtype=fp32 fsdp_plan.output_dtype=bf16 \
fsdp_plan.fsdp_implementation=native fsdp_plan.num_to_forward_prefetch=1 fsdp_plan.num_to_backward_prefetch=1 | \
there is no Turbo here, and actor.megatron.* lays the model out
*.router_replay | record_file=null replay_file=null | experts are replayed in memory
critic.megatron.router_replay ref.megatron.router_replay | mode=disabled | actor.router_replay is for all roles
rollout | full_determinism=false quantization_config_file=null router_config_path=null \
multi_turn.num_repeat_rollouts=null over_sample_rate=0 | servers have no such setting
rollout | logprobs_mode=processed_logprobs | log-probs are those of what was drawn from
rollout.checkpoint_engine | custom_backend_module=null | rollout.push chooses how weights travel
data | mm_processor_kwargs={{}} | only text is read
reward.reward_model.rollout reward_model.rollout | temperature=1.0 top_k=-1 top_p=1 quantization=null \
quantization_config_file=null mtp=null engine_kwargs={{}} | the server of the reward model decides
reward_model | reward_loop_source=null reward_loop_module_path=null reward_loop_class_name=null | \
a reward is reward.fn=FILE.py:function
trainer | checkpoint_callback_class=null | nothing is called beside a save
trainer.v1 | sync={{}} sampler.sync_refill_failed_groups=false sampler.custom_sampler.path=null \
sampler.custom_sampler.name=null sampler.sampler_kwargs={{}} | prompts are shuffled by data.seed
ray_init.runtime_env ray_kwargs.ray_init.runtime_env | py_executable=null | there is no Ray
"""


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("|")] for row in table.strip().splitlines()]


def _default(groups: str, word: str, why: str) -> dict[str, Rule]:
    """The rule of NAME=DEFAULT: this value and null are dropped with a line, all others are refused."""
    name, _, text = word.partition("=")
    return each(groups, name, harmless(yaml.safe_load(text), None, why=why, otherwise=f"{why}: expected {text}"))


RULES: dict[str, Rule] = {}
for _groups, _names, _why in _rows(_CHANGES_NOTHING):
    RULES |= each(_groups, _names, nothing(_why))
for _groups, _switch, _names, _why in _rows(_SWITCHED_OFF):
    RULES |= _default(_groups, _switch, _why) | each(_groups, _names, nothing(_why))
for _groups, _words, _why in _rows(_DEFAULTS):
    for _word in _words.split():
        RULES |= _default(_groups, _word, _why)
