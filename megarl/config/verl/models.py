"""Rules for words about models: actor, critic and reference, their optimizers, their layout, adapters."""

from __future__ import annotations

from math import ceil
from typing import Any

from megarl.config import names
from megarl.config.verl import dtypes
from megarl.config.verl.taken import (
    Command,
    Rule,
    Taken,
    each,
    harmless,
    named,
    nothing,
    refused,
    set_to,
    switch,
    unless,
)
from megarl.projections import ALL, LINEARS

DEFAULT_LR = {"actor": 1e-6, "critic": 1e-5}
DEFAULT_TOKENS = {"actor": 16384, "critic": 32768}  # verl's, of a micro-batch; the reference has the actor's
BATCH, MINI_BATCH = "data.train_batch_size", "actor.ppo_mini_batch_size"
DEFAULT_SIZES = {BATCH: 1024, MINI_BATCH: 256}
CORRECTION = "algorithm.rollout_correction"
BY_SEQUENCE, SEQUENCES = ("geo_mean", "gmpo", "sapo"), "seq-mean-token-mean"  # verl's losses with an own aggregation
_CAP = "dppo_ratio_cap"  # of DPPO, which verl reads from clip_ratio_c
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
    limit *= _context_size(role, command)
    return Taken(((tokens, limit),), f"{note}, verl's default {tokens}={limit}")


def _cut_by_tokens(key: str, value: Any, command: Command) -> Taken:
    """A number of tokens per micro-batch, which counts with use_dynamic_bsz only."""
    counted = [_other(key, name, command) for name in ("micro_batch_size_per_gpu", "micro_batch_size")]
    is_verls = command.is_whole or any(word.endswith("use_dynamic_bsz") for word in command.words)
    if is_verls and not _is_dynamic(key, command) and any(count is not None for count in counted):
        return Taken(note="use_dynamic_bsz=false: micro-batches are cut by sequences")
    size = _context_size(key.partition(".")[0], command)
    if size == 1 or not isinstance(value, int):
        return Taken(((key, value),))
    whole = f"verl counts the share of one of {size} ranks of context parallelism, here whole sequences count"
    return Taken(((key, value * size),), f"{key}={value * size}: {whole}")


def _context_size(role: str, command: Command) -> int:
    """The ranks over which verl divides a sequence, and by which it multiplies the tokens of a micro-batch."""
    places = (
        "megatron.context_parallel_size",
        "ulysses_sequence_parallel_size",
        "fsdp_config.ulysses_sequence_parallel_size",
    )
    found = [command.get(f"{who}.{place}") for who in (role, "actor") for place in places]
    return next((size for size in found if isinstance(size, int) and size > 0), 1) if command.is_whole else 1


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


def _in_optimizer_steps(name: str, unset: int | None) -> Rule:
    """A number of steps of a schedule: verl moves it once an iteration, and here every optimizer step does."""

    def rule(key: str, value: Any, command: Command) -> Taken:
        role = key.partition(".")[0]
        ours, times = f"{role}.optim.{name}", _steps_of_an_iteration(role, command)
        if value in (-1, None) or times == 1 or not isinstance(value, int):
            return Taken(((ours, unset if value in (-1, None) else value),))
        return Taken(
            ((ours, value * times),), f"{ours}={value * times}: verl counts iterations, of {times} optimizer steps each"
        )

    return rule


def _warmup_ratio(key: str, value: Any, command: Command) -> Taken:
    """A share of the whole run, whose length only the command can tell before its data are read."""
    role, total = key.partition(".")[0], command.get("trainer.total_training_steps")
    if value in (0, None):
        return Taken(note="there is no warm-up")
    ours = f"{role}.optim.lr_warmup_steps"
    if not isinstance(total, int):
        return Taken(refusal=f"expected {ours}=STEPS, in optimizer steps, or trainer.total_training_steps as well")
    steps = int(value * total) * _steps_of_an_iteration(role, command)
    return Taken(((ours, steps),), f"{ours}={steps}")


def _steps_of_an_iteration(role: str, command: Command) -> int:
    """Optimizer steps of verl between two steps of its schedule; 1 for a command of our own."""
    epochs = command.get(f"{role}.ppo_epochs", command.get("actor.ppo_epochs", 1))
    mini = command.get(f"{role}.ppo_mini_batch_size", command.get(MINI_BATCH, DEFAULT_SIZES[MINI_BATCH]))
    batch = command.get(BATCH, DEFAULT_SIZES[BATCH])
    if command.has("async_training."):  # its trainer takes so many mini-batches at a time
        mini, batch = 1, command.get("async_training.require_batches", 1)
    sizes = (epochs, mini, batch)
    if not command.is_whole or command.is_sft or not all(isinstance(size, int) and size > 0 for size in sizes):
        return 1
    return epochs * ceil(batch / mini)


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


def policy_loss(command: Command) -> str:
    """The loss that verl computes: with bypass_mode that of loss_type, whatever loss_mode says."""
    if command.is_on(f"{CORRECTION}.bypass_mode"):
        return "reinforce" if command.get(f"{CORRECTION}.loss_type") == "reinforce" else "ppo"
    return str(command.get("actor.policy_loss.loss_mode", command.get("algorithm.policy_loss_fn", "ppo")))


def _loss_mode(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    """verl sets bypass_mode itself; rollout_correction.loss_type is then the loss."""
    bypass = command.is_on(f"{CORRECTION}.bypass_mode")
    if value == "bypass_mode" or (bypass and command.is_whole):
        said = f"{CORRECTION}.bypass_mode and its loss_type say so: {policy_loss(command)}"
        return (
            Taken(note=said) if bypass else Taken(refusal=f"expected {CORRECTION}.bypass_mode=true, and its loss_type")
        )
    return Taken((("algorithm.policy_loss_fn", value),))


def _clip(key: str, value: Any, command: Command) -> Taken:
    """A clip of a loss that has it; verl's losses do not read the others."""
    loss, name = policy_loss(command), key.partition(".")[2]
    if not command.is_whole or loss not in names.POLICY_LOSSES:
        return Taken(((key, value),))
    if name == "clip_ratio_c" and _CAP in names.POLICY_LOSS_ARGS[loss]:
        return Taken(((f"algorithm.policy_loss_args.{_CAP}", value),))
    if not any(clip.startswith(name) for clip in names.CLIPS_OF_LOSS[loss]):
        return Taken(note=f"the loss {loss} has no such clip")
    if name == "clip_ratio_low" and isinstance(value, int | float) and value > 1:
        return Taken(((key, 1.0),), f"{key}=1: a ratio is positive, so that neither bounds it from below")
    return Taken(((key, value),))


def _loss_arg(name: str) -> Rule:
    """A setting of one loss."""

    def rule(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
        loss = policy_loss(command)
        if command.is_whole and (value is None or name not in names.POLICY_LOSS_ARGS.get(loss, (name,))):
            return Taken(note=f"the loss {loss} does not read it")
        return Taken(((f"algorithm.policy_loss_args.{name}", value),))

    return rule


def _aggregation(key: str, value: Any, command: Command) -> Taken:
    """How verl aggregates, which some of its losses decide themselves."""
    forced = SEQUENCES if command.is_whole and policy_loss(command) in BY_SEQUENCE else value
    told = f"{key}={forced}: verl's loss {policy_loss(command)} reads no other" if forced != value else ""
    return Taken(((key, forced),), told)


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
    if value is not True or not command.is_whole or next((found for found in sizes if found is not None), 1) != 1:
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


_LOSS_ARGS = {
    **{f"{group}.{name}": name for group in ("actor", "actor.policy_loss") for name in ("tau_pos", "tau_neg")},
    **{f"actor.policy_loss.clip_cov_{name}": f"clip_cov_{name}" for name in ("ratio", "lb", "ub")},
    **{f"actor.policy_loss.{name}": name for name in ("kl_cov_ratio", "ppo_kl_coef")},
    "actor.policy_loss.dro_beta": "beta",
}
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
    # micro-batches
    **{f"{role}.ppo_micro_batch_size{end}": _cut_by_count for role in DEFAULT_LR for end in ("", "_per_gpu")},
    **{f"{role}.ppo_max_token_len_per_gpu": _cut_by_tokens for role in DEFAULT_LR},
    **{f"ref.log_prob_micro_batch_size{end}": _cut_by_count for end in ("", "_per_gpu")},
    "ref.log_prob_max_token_len_per_gpu": _cut_by_tokens,
    # losses
    "*.use_fused_kernels": nothing("log-probs and entropies never exist for the whole vocabulary at once, in any case"),
    "actor.calculate_entropy": nothing("the entropy is always computed"),
    "actor.policy_loss.loss_mode": _loss_mode,
    "actor.loss_agg_mode": _aggregation,
    **each("actor", "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c", _clip),
    **{key: _loss_arg(name) for key, name in _LOSS_ARGS.items()},
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
    "*.optim.lr_warmup_steps": _in_optimizer_steps("lr_warmup_steps", 0),
    "*.optim.lr_warmup_steps_ratio": _warmup_ratio,
    "*.optim.override_optimizer_config": lambda key, value, command: (  # noqa: ARG005
        Taken(note="it is empty") if value is None else Taken(((key, value),))
    ),
    "*.optim.warmup_style": unless((None,), "lr_scheduler_type says it", named("{role}.optim.lr_decay_style", {})),
    "*.optim.lr_scheduler_type": named("{role}.optim.lr_decay_style", {}),
    "*.optim.min_lr_ratio": _min_lr,
    "*.optim.total_training_steps": _in_optimizer_steps("lr_decay_steps", None),
    "*.optim.lr_decay_steps": _in_optimizer_steps("lr_decay_steps", None),
    "*.optim.use_checkpoint_opt_param_scheduler": nothing("the schedule is that of the command, at the step reached"),
    "*.optim.optimizer": named("{role}.optim.name", {"adam": "adamw", "AdamW": "adamw", "Adam": "adamw"}),
    **each(
        "*.optim *.optim.override_optimizer_config",
        "use_precision_aware_optimizer",
        nothing("master weights and moments are float32, as its defaults are"),
    ),
    # layout
    **dtypes.RULES,
    **each(_FSDP, "offload_policy", _offload_policy),
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
    "model.enable_gradient_checkpointing": _checkpointing,
    "critic.model.enable_gradient_checkpointing": _checkpointing,
    "*model.enable_activation_offload": nothing("activations are recomputed, not offloaded"),
    "*model.use_shm": nothing("the folder is read where it is"),
    "*model.trust_remote_code": nothing(NO_CODE),
    "*model.external_lib": unless((None,), "there is none", named("algorithm.plugins", {})),
    "*model.hf_config_path": unless((None,), "the model's own config.json", refused(_SAME_WEIGHTS)),
    "*model.custom_chat_template": unless(
        (None,), "the tokenizer's own", refused("expected it as chat_template.jinja in the folder model.tokenizer_path")
    ),
    "critic.model.tokenizer_path": nothing("the critic reads the actor's tokens"),
    "*model.override_config*.max_position_embeddings": nothing("positions are rotary: no table of them has to grow"),
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
    "actor.checkpoint.async_save": lambda key, value, command: Taken(  # noqa: ARG005
        (("trainer.async_save", value),), "" if value else "trainer.async_save=false: steps wait for a save"
    ),
    "*.checkpoint.async_save": nothing("as the actor's"),
    "*.checkpoint.load_contents": load_contents,
    "*.profiler.*": refused("expected trainer.profile.steps and trainer.profile.ranks"),
    **each(_FSDP, "*", nothing("strategy=fsdp shards everything over all data-parallel ranks")),
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
    **{key: ("algorithm.policy_loss_args", name) for key, name in _LOSS_ARGS.items()},
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
