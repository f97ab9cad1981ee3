"""Rules for words about what is learnt in a step: micro-batches, learning-rate schedules, policy losses."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from megarl.config import names
from megarl.config.verl.taken import Command, Rule, Taken, each, nothing, of_number, of_switch

DEFAULT_LR = {"actor": 1e-6, "critic": 1e-5}
DEFAULT_TOKENS = {"actor": 16384, "critic": 32768}  # verl's, of a micro-batch; the reference has the actor's
BATCH, MINI_BATCH = "data.train_batch_size", "actor.ppo_mini_batch_size"
DEFAULT_SIZES = {BATCH: 1024, MINI_BATCH: 256}
CORRECTION = "algorithm.rollout_correction"
BY_SEQUENCE, SEQUENCES = ("geo_mean", "gmpo", "sapo"), "seq-mean-token-mean"  # verl's losses with an own aggregation
CLAMPED = "low_var_kl_clamped"
_PACKED = "sequences are always packed, by ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu"
CAP = "dppo_ratio_cap"  # of DPPO, which verl reads from clip_ratio_c


def _cut_by_count(key: str, value: Any, command: Command) -> Taken:
    """A number of sequences per micro-batch, which verl does not read with use_dynamic_bsz."""
    if value is None or not _is_dynamic(key, command):
        return Taken(((_ours(key), value),))
    note = "use_dynamic_bsz=true: micro-batches are cut by tokens"
    if _other(key, "max_token_len_per_gpu", command) is not None:
        return Taken(note=note)
    role = key.partition(".")[0]
    tokens = f"{role}.ppo_max_token_len_per_gpu"
    actors = command.counted("actor.ppo_max_token_len_per_gpu", DEFAULT_TOKENS["actor"])
    limit = DEFAULT_TOKENS.get(role, actors) * _context_size(role, command)
    return Taken(((tokens, limit),), f"{note}, verl's default {tokens}={limit}")


def _cut_by_tokens(key: str, value: Any, command: Command) -> Taken:
    """A number of tokens per micro-batch, which counts with use_dynamic_bsz only."""
    counted = [_other(key, name, command) for name in ("micro_batch_size_per_gpu", "micro_batch_size")]
    is_verls = command.is_whole or any(word.endswith("use_dynamic_bsz") for word in command.words)
    if is_verls and not _is_dynamic(key, command) and any(count is not None for count in counted):
        return Taken(note="use_dynamic_bsz=false: micro-batches are cut by sequences")
    size, ours = _context_size(key.partition(".")[0], command), _ours(key)
    if size == 1 or type(value) is not int:
        return Taken(((ours, value),))
    whole = f"verl counts the share of one of {size} ranks of context parallelism, here whole sequences count"
    return Taken(((ours, value * size),), f"{ours}={value * size}: {whole}")


def _cut_over_ranks(key: str, value: Any, command: Command) -> Taken:
    """A number of sequences over all data-parallel ranks, which verl gave up for a number on each."""
    ours = f"{key}_per_gpu"
    if value is None:
        return Taken(note="a number on each rank counts")
    if _is_dynamic(key, command):
        return _cut_by_count(ours, value, command)
    if not command.is_whole or type(value) is not int:
        return Taken(refusal=f"expected {_ours(ours)}, the sequences on one rank")
    role = key.partition(".")[0]
    ranks = command.counted("trainer.nnodes", 1) * command.counted("trainer.n_gpus_per_node", 8)
    model = [command.counted(f"{role}.megatron.{size}_model_parallel_size", 1) for size in ("tensor", "pipeline")]
    copies = max(1, ranks // (prod(model) * _context_size(role, command)))
    each = max(1, value // copies)
    return Taken(((_ours(ours), each),), f"{_ours(ours)}={each}" if copies > 1 else "")


def _ours(key: str) -> str:
    """verl has its own names of these keys for a reference."""
    return key.replace(".log_prob_", ".ppo_")


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
    return command.is_on(own if own in command.words else "actor.use_dynamic_bsz")


def _min_lr_ratio(key: str, value: Any, command: Command) -> Taken:
    role = key.partition(".")[0]
    ours = f"{role}.optim.min_lr"
    if not value and command.get(ours):
        return Taken(note=f"{ours} counts")
    lr = command.get(f"{role}.optim.lr")
    lr = lr if type(lr) in (int, float) else DEFAULT_LR[role]  # that of another type has its own fault
    return Taken(((ours, (value or 0.0) * lr),))


def _min_lr(key: str, value: Any, command: Command) -> Taken:
    """verl's default 0 stands beside a ratio, which its trainer with FSDP reads instead."""
    if not value and command.get(f"{key}_ratio"):
        return Taken(note="min_lr_ratio counts")
    return Taken(((key, value),))


def _in_optimizer_steps(name: str, unset: int | None, other: str) -> Rule:
    """A number of steps of a schedule: verl moves it once an iteration, and here every optimizer step does.

    Where it is unset, another word may say it.
    """

    def rule(key: str, value: Any, command: Command) -> Taken:
        role = key.partition(".")[0]
        ours, times = f"{role}.optim.{name}", _steps_of_an_iteration(role, command)
        if value in (-1, None, unset):
            said = command.get(f"{role}.optim.{other}") not in (-1, 0, None)
            return Taken(note=f"{role}.optim.{other} counts") if said else Taken(((ours, unset),))
        if times == 1 or type(value) is not int:
            return Taken(((ours, value),))
        return Taken(
            ((ours, value * times),), f"{ours}={value * times}: verl counts iterations, of {times} optimizer steps each"
        )

    return rule


def _warmup_ratio(key: str, value: Any, command: Command) -> Taken:
    """A share of the whole run, whose length only the command knows before its data are read."""
    role, total = key.partition(".")[0], command.get("trainer.total_training_steps")
    ours = f"{role}.optim.lr_warmup_steps"
    if command.get(ours) not in (-1, 0, None):
        return Taken(note=f"{ours} counts")
    if value in (0, None):
        return Taken(((ours, 0),))
    if not isinstance(total, int):
        return Taken(refusal=f"expected {ours}=STEPS, in optimizer steps, or trainer.total_training_steps as well")
    steps = int(value * total) * _steps_of_an_iteration(role, command)
    return Taken(((ours, steps),), f"{ours}={steps}")


def _steps_of_an_iteration(role: str, command: Command) -> int:
    """Optimizer steps of verl between two steps of its schedule; 1 for a command of our own."""
    if not command.is_whole or command.is_sft:
        return 1
    epochs = command.counted(f"{role}.ppo_epochs", command.counted("actor.ppo_epochs", 1))
    if command.has("async_training."):  # its trainer takes so many mini-batches at a time
        return epochs * command.counted("async_training.require_batches", 1)
    mini = command.counted(f"{role}.ppo_mini_batch_size", command.counted(MINI_BATCH, DEFAULT_SIZES[MINI_BATCH]))
    return epochs * ceil(command.counted(BATCH, DEFAULT_SIZES[BATCH]) / mini)


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
    if name == "clip_ratio_c" and CAP in names.POLICY_LOSS_ARGS[loss]:
        return Taken(((f"algorithm.policy_loss_args.{CAP}", value),))
    if not any(clip.startswith(name) for clip in names.CLIPS_OF_LOSS[loss]):
        return Taken(note=f"the loss {loss} has no such clip")
    if name == "clip_ratio_low" and isinstance(value, int | float) and value > 1:
        return Taken(((key, 1.0),), f"{key}=1: a ratio is positive, so that neither bounds it from below")
    return Taken(((key, value),))


def _loss_arg(key: str, value: Any, command: Command) -> Taken:
    """A setting of one loss."""
    loss, name = policy_loss(command), key.rpartition(".")[2].removeprefix("dro_")
    if command.is_whole and (value is None or name not in names.POLICY_LOSS_ARGS.get(loss, (name,))):
        return Taken(note=f"the loss {loss} does not read it")
    return Taken(((f"algorithm.policy_loss_args.{name}", value),))


def _aggregation(key: str, value: Any, command: Command) -> Taken:
    """How verl aggregates, which some of its losses decide themselves."""
    forced = SEQUENCES if command.is_whole and policy_loss(command) in BY_SEQUENCE else value
    told = f"{key}={forced}: verl's loss {policy_loss(command)} reads no other" if forced != value else ""
    return Taken(((key, forced),), told)


def _kl(key: str, value: Any, command: Command) -> Taken:
    """verl's third estimator of a KL is at most 10."""
    name = str(value).removesuffix("+")
    if not command.is_whole or name not in ("low_var_kl", "k3"):
        return Taken(((key, value),))
    ours = f"{CLAMPED}{'+' * str(value).endswith('+')}"
    return Taken(((key, ours),), f"{key}={ours}: verl's is at most 10, and has no gradient there")


_LOSS_ARGS = "tau_pos tau_neg clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta"

RULES: dict[str, Rule] = {
    # micro-batches
    **each("*", "use_dynamic_bsz log_prob_use_dynamic_bsz", of_switch(nothing(_PACKED))),
    **each("actor critic", "ppo_micro_batch_size", of_number(_cut_over_ranks)),
    "ref.log_prob_micro_batch_size": of_number(_cut_over_ranks),
    **each("actor critic", "ppo_micro_batch_size_per_gpu", _cut_by_count),
    **each("actor critic", "ppo_max_token_len_per_gpu", _cut_by_tokens),
    "ref.log_prob_micro_batch_size_per_gpu": _cut_by_count,
    "ref.log_prob_max_token_len_per_gpu": _cut_by_tokens,
    "actor.policy_loss.loss_mode": _loss_mode,
    "actor.loss_agg_mode": _aggregation,
    **dict.fromkeys(("actor.kl_loss_type", "algorithm.kl_penalty"), _kl),
    **each("actor", "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c", _clip),
    **each("actor", "tau_pos tau_neg", _loss_arg),
    **each("actor.policy_loss", _LOSS_ARGS, _loss_arg),
    "*.optim.lr_warmup_steps": _in_optimizer_steps("lr_warmup_steps", 0, other="lr_warmup_steps_ratio"),
    "*.optim.lr_warmup_steps_ratio": of_number(_warmup_ratio),
    **each("actor critic", "optim.min_lr_ratio", of_number(_min_lr_ratio)),
    **each("actor critic", "optim.min_lr", _min_lr),
    "*.optim.total_training_steps": _in_optimizer_steps("lr_decay_steps", None, other="lr_decay_steps"),
    "*.optim.lr_decay_steps": _in_optimizer_steps("lr_decay_steps", None, other="total_training_steps"),
}
