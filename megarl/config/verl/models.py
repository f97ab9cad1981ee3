"""Rules for words about models: actor, critic and reference, their optimizers, their layout, adapters."""

from __future__ import annotations

from typing import Any

from megarl.config.verl import dtypes, learning
from megarl.config.verl.learning import DEFAULT_LR
from megarl.config.verl.taken import (
    Command,
    Rule,
    Taken,
    each,
    harmless,
    named,
    nothing,
    of_switch,
    refused,
    set_to,
    switch,
    truth,
    unless,
)
from megarl.projections import ALL, LINEARS

ADAPTERS = "adapters train by Megatron, not by FSDP"
FUSED = "Megatron's fused kernels are used wherever this machine has them"


def _scheduler(key: str, value: Any, command: Command) -> Taken:
    """In verl the older word warmup_style overrules it."""
    group = key.rpartition(".")[0]
    if command.get(f"{group}.warmup_style") is not None:
        return Taken(note=f"{group}.warmup_style counts")
    return Taken(((f"{group}.lr_decay_style", value),))


def _checkpointing(key: str, value: Any, command: Command) -> Taken:
    """verl's switch recomputes whole layers, and its Megatron engine does not read it."""
    if command.is_whole and by_megatron(command):
        return Taken(note="verl's Megatron engine recomputes what override_transformer_config.recompute_* says")
    group = "critic.megatron" if key.startswith("critic.") else "actor.megatron"
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Taken(tuple((f"{group}.{name}", choice if value else None) for name, choice in full.items()))


def by_megatron(command: Command) -> bool:
    """Does the command lay its models out for Megatron?"""
    words = ("model_engine", "engine", "actor.strategy")
    return "megatron" in map(command.get, words) or any(".megatron." in key for key in command.words)


def has_adapters(command: Command) -> bool:
    """Does the command ask for LoRA?"""
    return any(command.get(key) for key in ("actor.lora.rank", "model.lora_rank", "model.lora.rank"))


def _if_adapters(rule: Rule) -> Rule:
    """Without a rank, what adapters would be counts for nothing."""

    def chosen(key: str, value: Any, command: Command) -> Taken:
        off = command.is_whole and not has_adapters(command)
        return Taken(note="there are no adapters: all weights are trained") if off else rule(key, value, command)

    return chosen


def _targets(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """Megatron's names of linears as those of the projections in them."""
    linears = value if isinstance(value, list) else [value]
    everything = set(linears) >= {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    projections = [projection for linear in linears for projection in LINEARS.get(linear, (linear,))]
    return Taken((("actor.lora.targets", [ALL] if everything else projections),))


def _sequence_parallel(key: str, value: Any, command: Command) -> Taken:
    """verl's default is true, and counts with tensor parallelism only."""
    size = "tensor_model_parallel_size"
    sizes = [command.get(f"{role}.megatron.{size}") for role in (key.partition(".")[0], "actor")]
    if not truth(value) or not command.is_whole or next((found for found in sizes if found is not None), 1) != 1:
        return Taken(((key, value),))
    return Taken(((key, False),), f"{key}=false: {size} is 1")


def _recomputed(key: str, value: Any, command: Command) -> Taken:
    """Modules that verl's default lists, also where nothing or whole layers are recomputed."""
    granularity = command.get(f"{key.rpartition('.')[0]}.recompute_granularity")
    if command.is_whole and granularity != "selective":
        return Taken(note="recompute_granularity is not selective")
    return Taken(((key, value),))


def _seed(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """Of a role; a run here has one seed."""
    if command.get("trainer.seed") is not None:
        return Taken(note="trainer.seed seeds every role")
    return Taken((("trainer.seed", value),), f"trainer.seed={value} seeds every role")


def _strategy(key: str, value: Any, command: Command) -> Taken:
    if value == "megatron" and command.is_on("actor.megatron.use_megatron_fsdp"):
        return Taken(note="use_megatron_fsdp=true: Megatron-FSDP")
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
    return Taken(note=FUSED) if truth(value) else Taken(((key, value),))


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
NO_CODE = "no code of a model's folder is run, and the families that are known here need none"
_NO_DROPOUT = harmless(0, 0.0, why="there is no dropout", otherwise="expected 0")
_DROPOUTS = "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop"
_REPLAYS = {"disabled": "off", "R2": "old", "R3": "rollout"}
_FSDP = "*.fsdp_config *.fsdp"
_NO_ADAPTER = "expected model.path of a folder into which the adapter is merged"

RULES: dict[str, Rule] = {
    **learning.RULES,
    "*.use_fused_kernels": nothing("log-probs and entropies never exist for the whole vocabulary at once, in any case"),
    "actor.calculate_entropy": nothing("the entropy is always computed"),
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
    **each("actor actor.megatron", "router_replay.mode", named("actor.router_replay", _REPLAYS)),
    "critic.enable": nothing("whether there is a critic follows from algorithm.adv_estimator"),
    "critic.rollout_n": nothing("the critic learns all completions"),
    **{f"{role}.strategy": _strategy for role in _ROLE_KEYS},
    # optimizers
    "*.optim.override_optimizer_config": lambda key, value, command: (  # noqa: ARG005
        Taken(note="it is empty") if value is None else Taken(((key, value),))
    ),
    "*.optim.warmup_style": unless((None,), "lr_scheduler_type says it", named("{role}.optim.lr_decay_style", {})),
    "*.optim.lr_scheduler_type": _scheduler,
    "*.optim.use_checkpoint_opt_param_scheduler": nothing("the schedule is that of the command, at the step reached"),
    "*.optim.optimizer": named("{role}.optim.name", {"adam": "adamw", "AdamW": "adamw", "Adam": "adamw"}),
    **each(
        "*.optim *.optim.override_optimizer_config",
        "use_precision_aware_optimizer",
        nothing("master weights and moments are float32, as its defaults are"),
    ),
    # layout
    **dtypes.RULES,
    **each(_FSDP, "offload_policy", of_switch(_offload_policy)),
    **each(_FSDP, "strategy", nothing("actor.strategy says so")),
    **each(_FSDP, "full_determinism", harmless(False, why="nothing asks for it", otherwise="expected false")),
    **each(f"{_FSDP} *.megatron", "forward_only", nothing("follows from the role")),
    **each("actor.fsdp_config actor.megatron", "seed", _seed),
    **each(f"{_FSDP} *.megatron", "seed", nothing("trainer.seed seeds every role")),
    **each("actor critic ref", "megatron.sequence_parallel", _sequence_parallel),
    "*.megatron.use_megatron_fsdp": switch(
        set_to(("actor.strategy", "fsdp"), note="actor.strategy=fsdp"), nothing("actor.strategy says so")
    ),
    "*.megatron.dist_checkpointing_path": unless(
        (None, ""),
        "weights come from model.path",
        refused("weights come from Hugging Face folders: expected model.path"),
    ),
    "*.megatron.dist_checkpointing_prefix": nothing("weights come from model.path"),
    "*.megatron.override_mcore_model_config": harmless({}, why="it is empty", otherwise=_SAME_WEIGHTS),
    "*.override_transformer_config.attention_backend": nothing("attention takes the fastest kernel of this machine"),
    "*.override_transformer_config.deallocate_pipeline_outputs": nothing("a stage frees on GPUs what it has sent"),
    "*.override_transformer_config.recompute_modules": _recomputed,
    **each("*.override_transformer_config", "attention_dropout hidden_dropout", _NO_DROPOUT),
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
    **each("model critic.model", "enable_gradient_checkpointing", of_switch(_checkpointing)),
    "*model.enable_activation_offload": nothing("activations are recomputed, not offloaded"),
    "*model.use_shm": nothing("the folder is read where it is"),
    "*model.trust_remote_code": nothing(NO_CODE),
    "*model.external_lib": unless((None,), "there is none", named("algorithm.plugins", {})),
    "*model.hf_config_path": unless((None,), "the model's own config.json", refused(_SAME_WEIGHTS)),
    "*model.custom_chat_template": unless(
        (None,), "the tokenizer's own", refused("expected it as chat_template.jinja in the folder model.tokenizer_path")
    ),
    "critic.model.tokenizer_path": nothing("the critic reads the actor's tokens"),
    "*model.override_config*.max_position_embeddings": nothing(
        "the number in the model's config.json counts instead, for the longest sequence and for YaRN: change it there"
    ),
    "*model.override_config*.attn_implementation": nothing("attention takes the fastest kernel of this machine"),
    **each("*model.override_config*", _DROPOUTS, _NO_DROPOUT),
    "*model.override_config*.moe_config.freeze_moe_router": harmless(
        False, why="routers are trained", otherwise="routers are always trained: expected false"
    ),
    "*model.override_config.model_config": harmless({}, why="it is empty", otherwise=_SAME_WEIGHTS),
    "*model.override_config": harmless({}, why="it is empty", otherwise=_SAME_WEIGHTS),
    "*model.override_config.*": refused(_SAME_WEIGHTS),
    # adapters
    **each(
        "model", "lora_adapter_path lora.adapter_path", unless((None,), "adapters begin at zero", refused(_NO_ADAPTER))
    ),
    **each(
        "model",
        "exclude_modules lora.exclude_modules",
        unless((None, []), "none", refused("expected the others in actor.lora.targets")),
    ),
    **each("model", "lora_alpha lora.alpha", _if_adapters(named("actor.lora.alpha", {}))),
    **each("model", "target_modules lora.target_modules", _if_adapters(_targets)),
    "model.lora.type": _if_adapters(harmless("lora", why="LoRA", otherwise="adapters are LoRA's: expected lora")),
    "model.lora.merge": nothing("actor.lora.push says what servers get"),
    "model.lora.dropout": _if_adapters(_NO_DROPOUT),
    **each(
        "model.lora",
        "dropout_position a2a_experimental dtype",
        nothing("changes no result: adapters have no dropout, and model.dtype"),
    ),
    "model.lora.lora_A_init_method": nothing("the first matrix is drawn, the second one is 0"),
    "model.lora.lora_B_init_method": harmless("zero", why="the second matrix begins at 0", otherwise="expected zero"),
    **each(
        "model.lora",
        "freeze_vision_model freeze_vision_projection freeze_language_model",
        nothing("adapters alone are trained, and only text is read"),
    ),
    # saves and profiles
    "actor.checkpoint.async_save": switch(
        set_to(("trainer.async_save", True)),
        set_to(("trainer.async_save", False), note="trainer.async_save=false: steps wait for a save"),
    ),
    "*.checkpoint.async_save": nothing("as the actor's"),
    "*.checkpoint.load_contents": load_contents,
    "*.profiler.*": refused("expected trainer.profile.steps and trainer.profile.ranks"),
    **each(_FSDP, "*", nothing("strategy=fsdp shards everything over all data-parallel ranks")),
    "hybrid_engine": switch(set_to(("rollout.placement", "shared")), set_to(("rollout.placement", "separate"))),
    "nccl_timeout": named("trainer.call_timeout_s", {}),
}

RENAMED: dict[str, tuple[str, int | str | None]] = {
    **learning.RENAMED,
    "actor.grad_clip": ("actor.max_grad_norm", None),
    "actor.optim.clip_grad": ("actor.max_grad_norm", None),
    "critic.grad_clip": ("critic.max_grad_norm", None),
    "critic.optim.clip_grad": ("critic.max_grad_norm", None),
    "model.lora_rank": ("actor.lora.rank", None),
    "model.lora.rank": ("actor.lora.rank", None),
    "model.lora_alpha": ("actor.lora.alpha", None),
    "model.lora.alpha": ("actor.lora.alpha", None),
    "model.target_modules": ("actor.lora.targets", None),
}
RENAMED |= {
    f"{role}{place}.ulysses_sequence_parallel_size": (f"{role}.megatron.context_parallel_size", None)
    for role in _ROLE_KEYS
    for place in ("", ".fsdp_config", ".fsdp")
}
RENAMED |= {
    f"{role}.megatron.override_transformer_config.moe_token_dispatcher_type": (
        f"{role}.megatron.moe_token_dispatcher_type",
        None,
    )
    for role in _ROLE_KEYS
}
