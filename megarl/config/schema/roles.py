"""Keys of the models: the policy (actor), its critic and its reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II

from megarl.config.schema.megatron import FollowsActor, Megatron
from megarl.config.schema.optim import CriticOptim, Optim
from megarl.projections import ALL


@dataclass
class Model:
    path: str = ""  # Hugging Face folder or hub name of the initial policy (and of the reference)
    tokenizer_path: str = II("model.path")  # Hugging Face folder or hub name of the tokenizer
    dtype: str = "float32"  # float32 | bfloat16, of the weights in training
    preset: str = ""  # the file of configs/model that `model=NAME` selected
    config: dict[str, Any] = field(default_factory=dict)  # values of config.json, for checks before the folder exists


@dataclass
class Lora:
    rank: int = 0  # rank of each adapter; 0 = no LoRA, all weights are trained
    alpha: float = 32.0  # the adapter is scaled by alpha / rank
    targets: list[str] = field(  # matrices with an adapter, by their Hugging Face names; all-linear = all of the layers
        default_factory=lambda: [ALL]
    )
    push: str = "merged"  # merged (servers get the merged weights) | adapter (servers get the adapter; sglang only)


@dataclass
class Actor:
    strategy: str = "megatron"  # megatron | fsdp (Megatron-FSDP) | none (one rank, no wrapper)
    num_ranks: int | None = None  # number of the trainer's ranks that hold the role; null = all from first_rank on
    first_rank: int = 0  # the first rank that holds the role
    ppo_mini_batch_size: int = II("data.train_batch_size")  # prompts per optimizer step, over all ranks
    # How a step is split into micro-batches; at most one of the three is set, and none of them changes the result.
    ppo_micro_batch_size: int | None = None  # sequences over all data-parallel ranks; resolved into the next key
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences on one rank; null = no split by count
    ppo_max_token_len_per_gpu: int | None = None  # tokens on one rank; null = no split by tokens; 16384 if none is set
    ppo_epochs: int = 1  # passes over one iteration's samples
    old_log_prob_freq: int = 100  # iterations between passes for old log-probs that a step gives; 1 = always, 0 = never
    clip_ratio: float | None = None  # clip range on both sides of 1; null = the loss's own default (ppo: 0.2)
    clip_ratio_low: float | None = None  # clip range below 1; null = clip_ratio
    clip_ratio_high: float | None = None  # clip range above 1; null = clip_ratio
    clip_ratio_c: float | str | None = None  # dual clip, above 1; off = none; null = the loss's own default (ppo: 3)
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    use_kl_loss: bool = False  # add kl_loss_coef * KL(policy, reference) to the loss
    kl_loss_coef: float = 0.001  # weight of the KL term in the loss
    kl_loss_type: str = "low_var_kl"  # estimator of the KL term in the loss
    kl_importance: bool = False  # multiply the KL term by the importance ratio, which makes it unbiased off-policy
    loss_agg_mode: str = "token-mean"  # how token losses are aggregated to one number
    loss_scale_factor: float = II("data.max_response_length")  # the constant S of the two *-norm modes
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm
    router_replay: str = "off"  # off | rollout | old: experts are those of the server | of the pass of old log-probs
    optim: Optim = field(default_factory=Optim)
    lora: Lora = field(default_factory=Lora)
    megatron: Megatron = field(default_factory=Megatron)


@dataclass
class StartModel:
    path: str = II("model.path")  # Hugging Face folder of the role's initial weights; a critic's head starts at zero
    config: dict[str, Any] = field(
        default_factory=dict
    )  # values of its config.json; empty = model.config, if the path is the same


@dataclass
class Critic:
    strategy: str = II("actor.strategy")  # as the actor's
    num_ranks: int | None = II("actor.num_ranks")  # as the actor's
    first_rank: int = II("actor.first_rank")  # as the actor's; another one gives the role ranks of its own
    model: StartModel = field(default_factory=StartModel)
    ppo_mini_batch_size: int = II("actor.ppo_mini_batch_size")  # prompts per optimizer step, over all ranks
    ppo_micro_batch_size: int | None = None  # these three as the actor's; all null = the actor's choice
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences on one rank
    ppo_max_token_len_per_gpu: int | None = None  # tokens on one rank
    ppo_epochs: int = II("actor.ppo_epochs")  # passes over one iteration's samples
    cliprange_value: float | None = 0.5  # how far a value may move from its old value; null = no clip
    loss_agg_mode: str = II("actor.loss_agg_mode")  # how token losses are aggregated to one number
    loss_scale_factor: float = II("actor.loss_scale_factor")  # the constant S of the two *-norm modes
    max_grad_norm: float = II("actor.max_grad_norm")  # the gradient is scaled down to this norm
    optim: CriticOptim = field(default_factory=CriticOptim)
    megatron: FollowsActor = field(default_factory=FollowsActor)


@dataclass
class Ref:
    strategy: str = II("actor.strategy")  # as the actor's
    num_ranks: int | None = II("actor.num_ranks")  # as the actor's
    first_rank: int = II("actor.first_rank")  # as the actor's; another one gives the role ranks of its own
    model: StartModel = field(default_factory=StartModel)
    log_prob_micro_batch_size: int | None = None  # these three as the actor's ppo_*; all null = the actor's choice
    log_prob_micro_batch_size_per_gpu: int | None = None  # sequences on one rank
    log_prob_max_token_len_per_gpu: int | None = None  # tokens on one rank
    megatron: FollowsActor = field(default_factory=FollowsActor)
