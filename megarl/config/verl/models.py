"""Rules for words about models: actor, critic and reference, their optimizers, their layout, adapters."""

from __future__ import annotations

from typing import Any

from megarl.config.verl import dtypes
from megarl.config.verl.taken import Command, Rule, Taken, harmless, named, nothing, refused, set_to, switch, unless

DEFAULT_LR = {"actor": 1e-6, "critic": 1e-5}
DEFAULT_TOKENS = {"actor": 16384, "critic": 32768}  # verl's, of a micro-batch; the reference has the actor's
ADAPTERS = "adapters train by Megatron, not by FSDP"
FUSED = "Megatron's fused kernels are used wherever this machine has them"


def _cut_by_count(key: str, value: Any, command: Command) -> Taken:
    """A number of sequences per micro-batch, which verl does not read with use_dynamic_bsz."""
    if value is None or not _is_dynamic(key, command):
        return Taken(((key, value),))
    note = "use_dynamic_bsz=true: micro-batches are cut by tokens"
    if _other(key, "max_token_len_per_gpu", command) is not None:
        return Taken(note=note)
    role = key.partition(".")[0]
    tokens = f"{role}.{_kind(key)}_max_token_len_per_gpu"
    limit = DEFAULT_TOKENS.get(role) or command.get("actor.ppo_max_token_len_per_gpu") or DEFAULT_TOKENS["actor"]
    return Taken(((tokens, limit),), f"{note}, verl's default {tokens}={limit}")


def _cut_by_tokens(key: str, value: Any, command: Command) -> Taken:
    """A number of tokens per micro-batch, which counts with use_dynamic_bsz only."""
    counted = [_other(key, name, command) for name in ("micro_batch_size_per_gpu", "micro_batch_size")]
    is_verls = command.is_whole or any(word.endswith("use_dynamic_bsz") for word in command.words)
    if is_verls and not _is_dynamic(key, command) and any(count is not None for count in counted):
        return Taken(note="use_dynamic_bsz=false: micro-batches are cut by sequences")
    return Taken(((key, value),))


def _other(key: str, name: str, command: Command) -> Any:
    """The word beside `key` that ends with this name: ppo_... or log_prob_..."""
    return command.get(f"{key.partition('.')[0]}.{_kind(key)}_{name}")


def _kind(key: str) -> str:
    return "ppo" if ".ppo_" in key else "log_prob"


def _is_dynamic(key: str, command: Command) -> bool:
    role = key.partition(".")[0]
    own = f"{role}.use_dynamic_bsz" if role in DEFAULT_LR else f"{role}.log_prob_use_dynamic_bsz"
    return bool(command.get(own, command.is_on("actor.use_dynamic_bsz")))


def _min_lr(key: str, value: Any, command: Command) -> Taken:
    role = key.partition(".")[0]
    if value is None:
        return Taken(note="the learning rate decays to 0")
    return Taken(((f"{role}.optim.min_lr", value * command.get(f"{role}.optim.lr", DEFAULT_LR[role])),))


def _warmup(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    return Taken(((key, 0 if value in (-1, None) else value),))


def _decay_steps(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    role = key.partition(".")[0]
    return Taken(((f"{role}.optim.lr_decay_steps", None if value in (-1, None) else value),))


def _checkpointing(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """verl's switch recomputes whole layers."""
    group = "critic.megatron" if key.startswith("critic.") else "actor.megatron"
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Taken(tuple((f"{group}.{name}", choice if value else None) for name, choice in full.items()))


def _loss_mode(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """verl sets bypass_mode itself; rollout_correction.loss_type is then the loss."""
    if value != "bypass_mode":
        return Taken((("algorithm.policy_loss_fn", value),))
    if command.is_on("algorithm.rollout_correction.bypass_mode"):
        return Taken(note="algorithm.rollout_correction.bypass_mode and its loss_type say so")
    return Taken(refusal="expected algorithm.rollout_correction.bypass_mode=true, and its loss_type")


def has_adapters(command: Command) -> bool:
    """Does the command ask for LoRA?"""
    return any(command.get(key) for key in ("actor.lora.rank", "model.lora_rank", "model.lora.rank"))


def _strategy(key: str, value: Any, command: Command) -> Taken:
    if value not in ("fsdp", "fsdp2"):
        return Taken(((key, value),))
    if key == "actor.strategy" and command.is_whole and has_adapters(command):
        return Taken(((key, "megatron"),), f"{key}=megatron: {ADAPTERS}")
    return Taken(((key, "fsdp"),))


def _offload_policy(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    role = key.partition(".")[0]
    if not value:
        return Taken(note="nothing is offloaded by it")
    names = ("param_offload",) if role == "ref" else ("param_offload", "optimizer_offload")
    settings = tuple((f"{role}.megatron.{name}", True) for name in names)
    return Taken(settings, "offloaded while the role is idle, by " + " and ".join(name for name, _ in settings))


def load_contents(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """What a resume loads of a save; by default, as in verl, a reference to what was saved."""
    if command.get("trainer.resume_mode") == "disable":
        return Taken(note="nothing is resumed")
    names = value if isinstance(value, list) else []
    if value is None or "save_contents" in str(value) or {"model", "optimizer", "extra"} <= set(names):
        return Taken(note="a resume loads all of a save")
    return Taken(
        refusal="a resume loads all of a save: expected [model,optimizer,extra], or, for weights alone, "
        "trainer.resume_mode=disable and model.path=FOLDER of these weights"
    )


def _fusion(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    return Taken(note=FUSED) if value is True else Taken(((key, value),))


_ROLE_KEYS = ["actor", "critic", "ref"]
_FUSIONS = (
    *("apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("bias_swiglu_fusion", "gradient_accumulation_fusion", "moe_permute_fusion", "moe_grouped_gemm"),
    "persist_layer_norm",
)
_ROUTER_LOSSES: dict[str, tuple[Any, ...]] = {
    "moe_router_load_balancing_type": ("none",),
    "moe_aux_loss_coeff": (0, 0.0),
    "moe_z_loss_coeff": (0, 0.0, None),
}
_SAME_WEIGHTS = "the architecture is that of the model's config.json: expected a folder whose config.json says so"
_NOT_QUANTIZED = "weights in training are not quantized"
_NO_CODE = "no code of a model's folder is run: expected false, and a family of models that is known here"

RULES: dict[str, Rule] = {
    # micro-batches
    **{f"{role}.ppo_micro_batch_size{end}": _cut_by_count for role in DEFAULT_LR for end in ("", "_per_gpu")},
    **{f"{role}.ppo_max_token_len_per_gpu": _cut_by_tokens for role in DEFAULT_LR},
    **{f"ref.log_prob_micro_batch_size{end}": _cut_by_count for end in ("", "_per_gpu")},
    "ref.log_prob_max_token_len_per_gpu": _cut_by_tokens,
    "critic.forward_*": nothing("values are computed with the micro-batches of the critic's training"),
    # losses
    "actor.use_torch_compile": nothing("changes time only"),
    "ref.use_torch_compile": nothing("changes time only"),
    "*.use_fused_kernels": nothing("log-probs and entropies never exist for the whole vocabulary at once, in any case"),
    "*.fused_kernel_options.*": nothing("log-probs and entropies are always computed by parts of the vocabulary"),
    "*.entropy_from_logits_with_chunking": nothing("entropies are always computed by parts of the vocabulary"),
    "*.entropy_checkpointing": nothing("entropies are always computed by parts of the vocabulary"),
    "actor.calculate_entropy": nothing("the entropy is always computed"),
    "actor.*sum_pi_squared*": nothing("computed by parts of the vocabulary, where algorithm.adv_estimator reads it"),
    "actor.policy_loss.loss_mode": _loss_mode,
    **{
        f"{role}.shuffle": harmless(False, why="mini-batches keep the order of prompts", otherwise="expected false")
        for role in DEFAULT_LR
    },
    **{f"{role}.data_loader_seed": nothing("mini-batches keep the order of prompts") for role in DEFAULT_LR},
    "actor.freeze_vision_tower": nothing("only text is read, and no weight of a vision tower is trained"),
    "actor.tis_imp_ratio_cap": lambda key, value, command: (  # noqa: ARG005
        Taken(note="no weight, as by default")
        if value in (-1, None)
        else Taken(
            (
                ("algorithm.rollout_correction.level", "token"),
                ("algorithm.rollout_correction.truncate", value),
            )
        )
    ),
    "actor.router_replay.mode": named("actor.router_replay", {"disabled": "off", "R2": "old", "R3": "rollout"}),
    "critic.enable": nothing("whether there is a critic follows from algorithm.adv_estimator"),
    "critic.rollout_n": nothing("the critic learns all completions"),
    **{f"{role}.strategy": _strategy for role in _ROLE_KEYS},
    # optimizers
    "*.optim.lr_warmup_steps": _warmup,
    "*.optim.lr_warmup_steps_ratio": harmless(
        0, 0.0, None, why="there is no warm-up", otherwise="expected optim.lr_warmup_steps=STEPS, in optimizer steps"
    ),
    "*.optim.warmup_style": named("{role}.optim.lr_decay_style", {}),
    "*.optim.lr_scheduler_type": named("{role}.optim.lr_decay_style", {}),
    "*.optim.min_lr_ratio": _min_lr,
    "*.optim.total_training_steps": _decay_steps,
    "*.optim.lr_warmup_init": harmless(0, 0.0, why="the warm-up begins at 0", otherwise="expected 0"),
    "*.optim.weight_decay_incr_style": harmless("constant", why="it never changes", otherwise="expected constant"),
    "*.optim.lr_wsd_*": nothing("no schedule here reads it"),
    "*.optim.use_checkpoint_opt_param_scheduler": nothing("the schedule is that of the command, at the step reached"),
    "*.optim.num_cycles": harmless(0.5, why="cosine is half a period", otherwise="expected 0.5"),
    "*.optim.optimizer": named("{role}.optim.name", {"adam": "adamw", "AdamW": "adamw", "Adam": "adamw"}),
    "*.optim.optimizer_impl": harmless("torch.optim", why="Megatron's optimizer", otherwise="expected torch.optim"),
    "*.optim.override_optimizer_config.use_precision_aware_optimizer": nothing(
        "master weights and moments are float32, as its defaults are"
    ),
    # layout
    **dtypes.RULES,
    "*.fsdp_config.offload_policy": _offload_policy,
    "*.fsdp_config.seed": nothing("trainer.seed seeds every role"),
    "*.fsdp_config.strategy": nothing("actor.strategy says so"),
    "*.fsdp_config.full_determinism": harmless(False, why="nothing asks for it", otherwise="expected false"),
    "*.fsdp_config.forward_only": nothing("follows from the role"),
    "*.fsdp_config.use_torch_compile": nothing("changes time only"),
    "*.megatron.seed": nothing("trainer.seed seeds every role"),
    "*.megatron.forward_only": nothing("follows from the role"),
    "*.megatron.dist_checkpointing_path": unless(
        (None,), "weights come from model.path", refused("weights come from Hugging Face folders: expected model.path")
    ),
    "*.megatron.dist_checkpointing_prefix": nothing("weights come from model.path"),
    "*.megatron.override_mcore_model_config": harmless({}, why="it is empty", otherwise=_SAME_WEIGHTS),
    "*.override_transformer_config.attention_backend": nothing("attention takes the fastest kernel of this machine"),
    "*.override_transformer_config.deallocate_pipeline_outputs": nothing("a stage frees on GPUs what it has sent"),
    "*.override_transformer_config.moe_enable_deepep": nothing("moe_token_dispatcher_type=flex sends by DeepEP"),
    "*.override_transformer_config.moe_router_dtype": harmless(
        "fp32", why="routers compute in float32", otherwise="routers compute in float32: expected fp32"
    ),
    **{f"*.override_transformer_config.{name}": _fusion for name in _FUSIONS},
    **{
        f"*.override_transformer_config.{name}": harmless(
            *off, why="rewards alone train the router", otherwise=f"rewards alone train the router: expected {off[0]}"
        )
        for name, off in _ROUTER_LOSSES.items()
    },
    # models
    "model.enable_gradient_checkpointing": _checkpointing,
    "critic.model.enable_gradient_checkpointing": _checkpointing,
    "*model.enable_activation_offload": nothing("activations are recomputed, not offloaded"),
    "*model.use_shm": nothing("the folder is read where it is"),
    "*model.use_remove_padding": nothing("sequences are always packed and never padded"),
    "*megatron.use_remove_padding": nothing("sequences are always packed and never padded"),
    "*model.use_liger": nothing("changes time only"),
    "*model.trust_remote_code": harmless(False, why=_NO_CODE.split(":")[0], otherwise=_NO_CODE),
    "*model.external_lib": unless((None,), "there is none", named("algorithm.plugins", {})),
    "*model.hf_config_path": unless((None,), "the model's own config.json", refused(_SAME_WEIGHTS)),
    "*model.custom_chat_template": unless(
        (None,), "the tokenizer's own", refused("expected it as chat_template.jinja in the folder model.tokenizer_path")
    ),
    "critic.model.tokenizer_path": nothing("the critic reads the actor's tokens"),
    "*model.override_config*.max_position_embeddings": nothing("positions are rotary: no table of them has to grow"),
    "*model.override_config*.attn_implementation": nothing("attention takes the fastest kernel of this machine"),
    "*model.override_config*.*_dropout": harmless(0, 0.0, why="there is no dropout", otherwise="expected 0"),
    "*model.override_config*.moe_config.freeze_moe_router": harmless(
        False, why="routers are trained", otherwise="routers are always trained: expected false"
    ),
    "*model.override_config.model_config": harmless({}, why="it is empty", otherwise=_SAME_WEIGHTS),
    "*model.override_config": harmless({}, why="it is empty", otherwise=_SAME_WEIGHTS),
    "*model.override_config.*": refused(_SAME_WEIGHTS),
    "model.tiled_mlp.*": nothing("changes memory only"),
    "*.mtp.enable": harmless(False, why="one token is predicted", otherwise="one token is predicted: expected false"),
    "*.mtp.*": nothing("one token is predicted"),
    "actor.qat.enable": harmless(False, why=_NOT_QUANTIZED, otherwise=f"{_NOT_QUANTIZED}: expected false"),
    "actor.qat.*": nothing(_NOT_QUANTIZED),
    "model.lora_adapter_path": unless(
        (None,), "adapters begin at zero", refused("expected model.path of a folder into which the adapter is merged")
    ),
    "*model.exclude_modules": unless((None,), "none", refused("expected the others in actor.lora.targets")),
    "critic.model.lora_*": harmless(0, why="the critic is trained whole", otherwise="only the actor has adapters"),
    # saves and profiles
    "*.checkpoint.async_save": named("trainer.async_save", {}),
    "*.checkpoint.load_contents": load_contents,
    "*.checkpoint.*": nothing("a save has weights, optimizer and all that an exact resume needs"),
    "*.profiler.*": harmless(
        *(False, None, [], {}),
        why="nothing is profiled",
        otherwise="expected trainer.profile.steps and trainer.profile.ranks",
    ),
    "hybrid_engine": switch(set_to(("rollout.placement", "shared")), set_to(("rollout.placement", "separate"))),
    "nccl_timeout": named("trainer.call_timeout_s", {}),
}

RENAMED: dict[str, tuple[str, int | str | None]] = {
    "actor.grad_clip": ("actor.max_grad_norm", None),
    "actor.optim.clip_grad": ("actor.max_grad_norm", None),
    "critic.grad_clip": ("critic.max_grad_norm", None),
    "critic.optim.clip_grad": ("critic.max_grad_norm", None),
    "model.lora_rank": ("actor.lora.rank", None),
    "model.lora.rank": ("actor.lora.rank", None),
    "model.lora_alpha": ("actor.lora.alpha", None),
    "model.lora.alpha": ("actor.lora.alpha", None),
    "model.target_modules": ("actor.lora.targets", None),
    "actor.megatron.seed": ("trainer.seed", None),
}
RENAMED |= {
    f"{role}{place}.ulysses_sequence_parallel_size": (f"{role}.megatron.context_parallel_size", None)
    for role in _ROLE_KEYS
    for place in ("", ".fsdp_config")
}
RENAMED |= {
    f"{role}.megatron.override_transformer_config.moe_token_dispatcher_type": (
        f"{role}.megatron.moe_token_dispatcher_type",
        None,
    )
    for role in _ROLE_KEYS
}
