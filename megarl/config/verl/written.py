"""Words of verl that set nothing here: dropped with a line, dropped for some values only, or refused.

A name with `*` stands for the words of a group that have no row of their own.  Of these a value that asks for something
is refused (`aliases.converted`).
"""

from __future__ import annotations

from megarl.config.tables import rows
from megarl.config.verl.taken import Rule, each, nothing, only, plain

_FSDP = "*.fsdp_config *.fsdp"
FSDP_OF_ROLES = "actor.fsdp_config critic.fsdp_config critic.model.fsdp_config ref.fsdp_config"
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

_NO_CODE = "no code of a model's folder is run, and the families that are known here need none"
_SAME_WEIGHTS = "the architecture is that of the model's config.json: expected a folder whose config.json says so"
_NO_DROPOUT = "0 | there is no dropout | expected 0"
_LOGITS = "a server would draw from other logits than those of which the trainer computes log-probs"
_OWN_FUNCTION = "expected reward.fn=FILE.py:function"
AGENT = "expected agent.fn=FILE.py:function (docs/agents.md)"
TOOLS = "expected agent.fn=tools:FILE.py:Class, a class whose methods are the tools (docs/agents.md)"
RANKS = "teachers compute on the trainer's ranks; teachers.NAME.engine=server gives them servers"

# Rows as `plain` reads them.
_PLAIN = f"""
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
ray_init ray_kwargs ray_kwargs.ray_init | num_cpus timeline_json_file | megarl starts no Ray
global_profiler | profile_continuous_steps save_path relocate_results finish_hook_cmd finish_hook_all_ranks \
finish_hook_ranks | trainer.profile.* says what is profiled
global_profiler.global_tool_config | nsys.discrete torch_memory.trace_alloc_max_entries torch_memory.stack_depth \
torch_memory.memory_snapshot_num_steps torch_memory.context torch_memory.stacks torch_memory.kw_args \
precision_debugger.config_path precision_debugger.steps precision_debugger.stages precision_debugger.strict | \
trainer.profile.* says what is profiled
global_profiler.global_tool_config.nsys.controller_nsight_options \
global_profiler.global_tool_config.nsys.worker_nsight_options | trace cuda-memory-usage cuda-graph-trace \
capture-range capture-range-end kill | trainer.profile.* says what is profiled
# models
* | use_fused_kernels | log-probs and entropies never exist for the whole vocabulary at once, in any case
actor | calculate_entropy | the entropy is always computed
actor critic | shuffle | false | mini-batches keep the order of prompts | expected false
actor critic | data_loader_seed | mini-batches keep the order of prompts
actor | freeze_vision_tower | only text is read, and no weight of a vision tower is trained
critic | enable | whether there is a critic follows from algorithm.adv_estimator
critic | rollout_n | the critic learns all completions
*model | enable_activation_offload | activations are recomputed, not offloaded
*model | use_shm | the folder is read where it is
*model data | trust_remote_code | {_NO_CODE}
*model | hf_config_path | null | the model's own config.json | {_SAME_WEIGHTS}
*model | custom_chat_template | null | the tokenizer's own | \
expected it as chat_template.jinja in the folder model.tokenizer_path
critic.model | tokenizer_path | the critic reads the actor's tokens
*model.override_config* | max_position_embeddings | \
the number in the model's config.json counts instead, for the longest sequence and for YaRN: change it there
*model.override_config* | attn_implementation | attention takes the fastest kernel of this machine
*model.override_config* | attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop | {_NO_DROPOUT}
*model.override_config* | moe_config.freeze_moe_router | false | routers are trained | \
routers are always trained: expected false
*model | override_config.model_config override_config | {{}} | it is empty | {_SAME_WEIGHTS}
*model.override_config | * | | | {_SAME_WEIGHTS}
# optimizers
*.optim | use_checkpoint_opt_param_scheduler | the schedule is that of the command, at the step reached
*.optim *.optim.override_optimizer_config | use_precision_aware_optimizer | \
master weights and moments are float32, as its defaults are
# layouts, saves and profiles
{FSDP_OF_ROLES} | mixed_precision.reduce_dtype | fp32, float32, null | gradients are summed in float32
{FSDP_OF_ROLES} | mixed_precision.buffer_dtype | fp32, float32, null | rotary tables are float32
{FSDP_OF_ROLES} | mixed_precision | null, {{}} | model.dtype counts | expected its param_dtype
{_FSDP} | strategy | actor.strategy says so
{_FSDP} | full_determinism | false | nothing asks for it | expected false
{_FSDP} *.megatron | forward_only | follows from the role
{_FSDP} *.megatron | seed | trainer.seed seeds every role
{_FSDP} | * | strategy=fsdp shards everything over all data-parallel ranks
*.megatron | dist_checkpointing_path | null, '' | weights come from model.path | \
weights come from Hugging Face folders: expected model.path
*.megatron | dist_checkpointing_prefix | weights come from model.path
*.megatron | override_mcore_model_config | {{}} | it is empty | {_SAME_WEIGHTS}
*.override_transformer_config | attention_backend | attention takes the fastest kernel of this machine
*.override_transformer_config | deallocate_pipeline_outputs | a stage frees on GPUs what it has sent
*.override_transformer_config | attention_dropout hidden_dropout | {_NO_DROPOUT}
*.override_transformer_config | moe_enable_deepep | moe_token_dispatcher_type=flex sends by DeepEP
*.override_transformer_config | moe_router_dtype | fp32 | routers compute in float32
*.override_transformer_config | moe_router_load_balancing_type | none | rewards alone train the router
*.override_transformer_config | moe_aux_loss_coeff | 0 | rewards alone train the router
*.override_transformer_config | moe_z_loss_coeff | 0, null | rewards alone train the router
 | *.checkpoint.async_save *.megatron.dtype critic.nccl_timeout | as the actor's
*.profiler | * | | | expected trainer.profile.steps and trainer.profile.ranks
# adapters
model | lora_adapter_path lora.adapter_path | null | adapters begin at zero | \
expected model.path of a folder into which the adapter is merged
model | exclude_modules lora.exclude_modules | null, [] | none | expected the others in actor.lora.targets
model.lora | merge | actor.lora.push says what servers get
model.lora | dropout_position a2a_experimental dtype | \
changes no result: adapters have no dropout, and model.dtype
model.lora | lora_A_init_method | the first matrix is drawn, the second one is 0
model.lora | lora_B_init_method | zero | the second matrix begins at 0 | expected zero
model.lora | freeze_vision_model freeze_vision_projection freeze_language_model | \
adapters alone are trained, and only text is read
# servers
rollout | mode | servers always answer many requests at once
rollout | calculate_log_probs | every token carries the log-prob that the server computed
rollout | enforce_eager | changes time only; rollout.sglang.args has --disable-cuda-graph
rollout | cudagraph_capture_sizes | changes time only
rollout | enable_chunked_prefill | SGLang always prefills by chunks
rollout | max_num_batched_tokens | changes time only; rollout.sglang.args has --chunked-prefill-size
rollout | enable_prefix_caching | changes time only: SGLang shares prefixes
rollout | max_model_len | follows from data.max_prompt_length and data.max_response_length
rollout | load_format | servers get the trainer's weights before they answer
rollout | layered_summon | weights travel in buckets, never as a whole
rollout | disable_log_stats | logs of servers are in the run's folder
rollout | skip_tokenizer_init | servers read and return token ids
rollout | multi_stage_wake_up | weights and cache return one after the other
rollout | enable_rollout_routing_replay | servers report experts where actor.router_replay reads them
rollout | skip_rollout | false | completions are always generated
rollout | do_sample | true | completions are always drawn | expected true
rollout | ignore_eos | false | a completion ends with its end | expected false
rollout | data_parallel_size | 1 | a server is cut by tensors alone | \
expected rollout.num_servers, or rollout.attention_dp inside of a server
rollout | pipeline_model_parallel_size | 1 | a server is cut by tensors alone | \
expected 1, and rollout.tensor_model_parallel_size
rollout | repetition_penalty | 1, null | no penalty | {_LOGITS}: expected 1
rollout | presence_penalty frequency_penalty | 0, null | no penalty | {_LOGITS}: expected 0
rollout | min_p | 0, null | no bound | only rollout.top_p and rollout.top_k narrow what is drawn: expected 0
rollout.val_kwargs | top_k | -1, null | evaluation draws from all tokens | evaluation has no top_k: expected -1
rollout.engine_kwargs | vllm* | there is no vLLM here
rollout.engine_kwargs | trtllm* | there is no TensorRT-LLM here
rollout.engine_kwargs | sglang | {{}}, null | it is empty | expected rollout.sglang.args
rollout.agent | num_workers | rollout.num_collectors follows from the number of servers
rollout.agent | default_agent_loop | single_turn_agent, null | completions are plain unless agent.fn is set | {AGENT}
rollout.agent | agent_loop_config_path agent_loop_manager_class | null | there is no loop of one's own | {AGENT}
rollout.agent | custom_async_server.* | null | servers are ours | expected rollout.urls of servers that run already
rollout.checkpoint_engine | * | rollout.push chooses how weights travel
rollout.multi_turn | tool_config_path function_tool_path | null | there are no tools | {TOOLS}
rollout.multi_turn | interaction_config_path | null | there are no agents | {TOOLS}
rollout.multi_turn | tokenization_sanity_check_mode | the tokens that a server generated are trained as such
# data
data | return_raw_chat return_raw_input_ids | rows keep their messages
data | return_full_prompt | samples.jsonl has the whole prompt
data | use_shm | files are read where they are
data | gen_batch_size | filter_groups asks for as many further prompts as groups were dropped
data | val_batch_size | the evaluation asks for all its prompts at once
data | dataloader_num_workers | prompts are encoded once, at the start
data | validation_shuffle | the order of an evaluation changes no score
data | reward_fn_key | data_source | reward.fn=auto reads data_source | expected data_source, the field of a row
data | custom_cls.* | null | the reader of rows is ours | expected rows in JSONL or parquet
data | sampler.* | null | prompts are shuffled by data.seed | expected data.shuffle alone
data | datagen.* | null | prompts come from files | expected data.train_files
data | tool_config_path function_tool_path | null | there are no tools | \
expected agent.fn=tools:FILE.py:Class (docs/agents.md)
# algorithms
algorithm.rollout_correction | rollout_token_veto_threshold | null | no token vetoes its sequence
algorithm | use_pf_ppo | false | samples count alike | expected false
# the run
 | model_engine actor.model_engine | dp, fsdp, megatron | actor.strategy says so | expected dp or megatron
trainer | log_val_generations validation_data_dir | answers of evaluations are kept in samples.jsonl
trainer | rollout_data_dir | answers of every step are kept in samples.jsonl
trainer | balance_batch | ranks always get equal shares of tokens
trainer | max_critic_ckpt_to_keep | a save holds actor and critic
trainer | remove_previous_ckpt_in_save | false | earlier saves stay | expected trainer.max_checkpoints_to_keep=1
trainer | default_hdfs_dir | null | saves stay in the run's folder | expected null
trainer | del_local_ckpt_after_load | false | saves stay | expected false
trainer | esi_redundant_time | SIGTERM saves, within trainer.term_grace_s
trainer | use_legacy_worker_impl | there is one implementation
trainer | use_v1 | there is one trainer
trainer | val_only | false | it trains | expected `megarl evaluate` with these words
 | ray_*.env_vars.* | | | expected it in the environment of the command
 | ray_* trainer.ray_wait_register_center_timeout | megarl starts no Ray
transfer_queue | * | there is no transfer queue
global_profiler | * | trainer.profile.* says what is profiled
# rewards
custom_reward_function reward.custom_reward_function | reward_kwargs* | | | \
expected defaults of the function's own parameters
reward | reward_manager.module.* | null, custom_reward_manager | there is none | {_OWN_FUNCTION}
reward_model.reward_kwargs reward.reward_kwargs | * | | | {_OWN_FUNCTION}, with defaults of its own parameters
reward_model.sandbox_fusion reward.sandbox_fusion sandbox_fusion | memory_limit_mb | \
reward.memory_mb is of a process here, and not of a sandbox
reward_model.sandbox_fusion reward.sandbox_fusion sandbox_fusion | max_concurrent | \
each of reward.num_workers processes asks one at a time
reward_model | model.input_tokenizer | a reward model on a server reads text, with its own tokenizer
reward_model | use_reward_loop launch_reward_fn_async | rewards are always computed while others generate
reward_model | strategy micro_batch_size micro_batch_size_per_gpu max_length use_dynamic_bsz \
forward_max_token_len_per_gpu ulysses_sequence_parallel_size model.fsdp_config.param_offload \
model.fsdp_config.fsdp_size model.fsdp_config.wrap_policy.min_num_params model.use_remove_padding model.use_shm \
model.use_fused_kernels model.trust_remote_code model.external_lib | the server of the reward model decides
reward_model.megatron reward_model.model | * | the server of the reward model decides
reward | reward_model.* | | | expected a key of reward.model, which says what scores and where it is served
# distillation
distillation.distillation_loss | use_chunked_topk chunked_topk_chunk_size | changes time and memory only
distillation | teacher_key | data_source | a row's data_source chooses its teacher | \
expected data_source, or distill.route
distillation.teacher_models.*.inference | {SERVED} gpu_memory_utilization tensor_model_parallel_size engine_kwargs | \
{RANKS}
distillation.teacher_models.*.inference | temperature | rollout.temperature counts
"""

# GROUPS | SWITCH=OFF | NAMES below the switch, which count for nothing while it is off | what is so here
_SWITCHED_OFF = f"""
*.qat | enable=false | mode group_size ignore_patterns activation_observer quantization_config_path | \
weights in training are not quantized
*.disaggregation | enabled=false | prefill_replicas decode_replicas decode_tensor_model_parallel_size \
transfer_backend bootstrap_port ib_device | a server prefills and decodes
*.mtp | enable=false | enable_train enable_rollout detach_encoder mtp_loss_scaling_factor speculative_algorithm \
speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens method num_speculative_tokens | \
actor.mtp says whether MTP layers are trained
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
ray_init.runtime_env ray_kwargs.ray_init.runtime_env | py_executable=null | megarl starts no Ray
"""


RULES: dict[str, Rule] = plain(_PLAIN)
for _groups, _switch, _names, _why in rows(_SWITCHED_OFF):
    _name, _, _off = _switch.partition("=")
    RULES |= each(_groups, _name, only(f"{_off}, null", _why)) | each(_groups, _names, nothing(_why))
for _groups, _words, _why in rows(_DEFAULTS):
    for _word in _words.split():
        _name, _, _default = _word.partition("=")
        RULES |= each(_groups, _name, only(f"{_default}, null", _why))
