"""Rules for words about models: actor, critic and reference, their optimizers, their layout, adapters."""

from __future__ import annotations

from typing import Any

from megarl.arch.projections import ALL, LINEARS
from megarl.config.verl import learning
from megarl.config.verl.taken import (
    Command,
    Rule,
    Taken,
    as_it_is,
    counts_if,
    each,
    named,
    nothing,
    of_switch,
    plain,
    set_to,
    switch,
    truth,
    unless,
)
from megarl.config.verl.written import FSDP_OF_ROLES

ADAPTERS = "adapters train by Megatron, not by FSDP"

# verl has a number format of weights for each role, and a run here has one.
_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_COMPUTED = ("dtype", "mixed_precision.param_dtype")  # names in a group of verl's FSDP
_FOLLOWERS = ("critic", "ref")


def _computed(key: str, value: Any, command: Command) -> Taken:
    """The format in which a role computes: model.dtype, which all roles share."""
    ours = _DTYPES.get(str(value))
    if ours is None:
        return Taken(note="model.dtype counts") if value is None else Taken(refusal="expected float32 or bfloat16")
    if key.partition(".")[0] not in _FOLLOWERS:
        return Taken((("model.dtype", ours),))
    if ours == _of_the_actor(command):
        return Taken(note="all roles compute in model.dtype, which is the same")
    return Taken(refusal="all roles compute in one dtype: expected model.dtype")


def _of_the_actor(command: Command) -> str | None:
    """The format of the run; None where the command does not say, since a recipe may."""
    words = ("model.dtype", "actor.megatron.dtype", *(f"actor.fsdp_config.{name}" for name in _COMPUTED))
    typed = next((command.get(word) for word in words if command.get(word) is not None), None)
    return _DTYPES.get(str(typed), "bfloat16" if command.is_whole else None)


def _stored(key: str, value: Any, command: Command) -> Taken:
    """The format that verl's FSDP shards; where it is float32, verl computes in another one."""
    if value in ("fp32", "float32", None):
        return Taken(note="the optimizer keeps weights in float32, and model.dtype computes")
    return _computed(key, value, command)


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


def _truncation(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    if value in (-1, None):
        return Taken(note="no weight, as by default")
    correction = learning.CORRECTION
    return Taken(((f"{correction}.level", "token"), (f"{correction}.truncate", value)))


def _fusion(key: str, value: Any, command: Command) -> Taken:  # noqa: ARG001
    note = "Megatron's fused kernels are used wherever this machine has them"
    return Taken(note=note) if truth(value) else Taken(((key, value),))


_FUSIONS = (
    "apply_rope_fusion masked_softmax_fusion bias_activation_fusion bias_dropout_fusion bias_swiglu_fusion "
    "gradient_accumulation_fusion moe_permute_fusion moe_grouped_gemm persist_layer_norm"
)
_REPLAYS = {"disabled": "off", "R2": "old", "R3": "rollout"}
_OF_ADAPTERS: dict[str, Rule] = {
    **each("model", "lora_alpha lora.alpha", named("actor.lora.alpha")),
    **each("model", "target_modules lora.target_modules", _targets),
    **plain("""
model.lora | type | lora | LoRA | adapters are LoRA's: expected lora
model.lora | dropout | 0 | there is no dropout | expected 0
"""),
}

RULES: dict[str, Rule] = {
    **learning.RULES,
    "actor.tis_imp_ratio_cap": _truncation,
    **each("actor actor.megatron", "router_replay.mode", named("actor.router_replay", _REPLAYS)),
    **each("actor critic ref", "strategy", _strategy),
    "*.optim.override_optimizer_config": unless((None,), "it is empty", as_it_is),
    "*.optim.warmup_style": unless((None,), "lr_scheduler_type says it", named("{role}.optim.lr_decay_style")),
    "*.optim.lr_scheduler_type": _scheduler,
    "*.optim.optimizer": named("{role}.optim.name", {"adam": "adamw", "AdamW": "adamw", "Adam": "adamw"}),
    **each(FSDP_OF_ROLES, " ".join(_COMPUTED), _computed),
    **each(FSDP_OF_ROLES, "model_dtype", _stored),
    **each("actor critic ref", "megatron.dtype", _computed),
    **each("*.fsdp_config *.fsdp", "offload_policy", of_switch(_offload_policy)),
    **each("actor.fsdp_config actor.megatron", "seed", _seed),
    **each("actor critic ref", "megatron.sequence_parallel", _sequence_parallel),
    "*.megatron.use_megatron_fsdp": switch(
        set_to(("actor.strategy", "fsdp"), note="actor.strategy=fsdp"), nothing("actor.strategy says so")
    ),
    "*.override_transformer_config.recompute_modules": _recomputed,
    **each("*.override_transformer_config", _FUSIONS, _fusion),
    **each("model critic.model", "enable_gradient_checkpointing", of_switch(_checkpointing)),
    "*model.external_lib": unless((None,), "there is none", named("algorithm.plugins")),
    **counts_if(
        lambda command: not command.is_whole or has_adapters(command),
        "there are no adapters: all weights are trained",
        _OF_ADAPTERS,
    ),
    "actor.checkpoint.async_save": switch(
        set_to(("trainer.async_save", True)),
        set_to(("trainer.async_save", False), note="trainer.async_save=false: steps wait for a save"),
    ),
    "*.checkpoint.load_contents": load_contents,
    "hybrid_engine": of_switch(named("rollout.placement", {True: "shared", False: "separate"})),
    "nccl_timeout": named("trainer.call_timeout_s"),
}
