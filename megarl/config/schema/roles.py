"""Keys of the models: the policy (actor), its critic and reference, its teachers, and their layouts and optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from megarl.arch.megatron_fields import CPU_OFFLOAD, MTP_LOSS_SCALE
from megarl.arch.projections import ALL
from megarl.config import names
from megarl.config.schema.data import Folder, Gpus, Keyed, Served, Typed
from megarl.config.schema.record import (
    BASIC,
    EXPERT,
    OWN,
    RL,
    Below1,
    Betas,
    Choices,
    Count,
    DualClip,
    If,
    InsideUnit,
    Natural,
    NotNegative,
    Positive,
    Share,
    Targets,
    follows,
    key,
)

RANKS = If("the role has ranks")
LEARNS = If("the role learns")
SHARDED = If("the role learns", "ROLE.strategy != fsdp")
COPIES = If("the role learns", "ROLE.strategy != fsdp", "there are several copies")
CLIP = If("there is a policy loss", "the loss reads it")
BOTH_CLIPS = If(*CLIP, ".clip_ratio_low == null or .clip_ratio_high == null")
OF_A_STEP = If("a step gives old log-probs")
WRAPPED = If("the role learns", "ROLE.strategy == megatron")
_WITH_SCALE = " | ".join(names.AGG_MODES_WITH_SCALE)
SCALED = If(
    f".loss_agg_mode == {_WITH_SCALE} or critic.loss_agg_mode == {_WITH_SCALE}"
)  # the critic's S is the actor's
TEACHES = If(".form == loss")
MIXES = If(".form == loss", ".divergence == jsd")
KL_LOSS = If(".use_kl_loss == true")
ADAPTS = If(".rank != 0")
DECAYS = If(".lr_decay_style != constant")
STAGE = "null = even stages; of other roles, the actor's if both have as many pipeline ranks"


@dataclass
class Megatron:
    tensor_model_parallel_size: Count = key(1, "ranks that share each matrix", BASIC)
    pipeline_model_parallel_size: Count = key(1, "ranks that share the layers", BASIC)
    context_parallel_size: Count = key(1, "ranks that share each sequence")
    sequence_parallel: bool = key(False, "split activations outside the matrices over the tensor-parallel ranks")
    use_distributed_optimizer: bool = key(False, "shard the optimizer's state over the data-parallel ranks", SHARDED)
    virtual_pipeline_model_parallel_size: Count | None = key(
        None, f"interleaved stages of each pipeline rank; {STAGE}", OWN
    )
    num_layers_in_first_pipeline_stage: Count | None = key(None, f"layers of the first pipeline rank; {STAGE}", OWN)
    num_layers_in_last_pipeline_stage: Count | None = key(None, f"layers of the last pipeline rank; {STAGE}", OWN)
    expert_model_parallel_size: Count | None = key(None, "ranks that share the experts of a layer; null = 1")
    expert_tensor_parallel_size: Count | None = key(
        None, "ranks that share each expert; null = tensor_model_parallel_size"
    )
    # The keys below change memory and time only, never a result.
    transformer_impl: str = key(
        "auto", "auto = transformer_engine for bfloat16, if it is installed", Choices(names.TRANSFORMERS)
    )
    moe_token_dispatcher_type: str = key(
        "auto", "flex is DeepEP; auto = flex if deep_ep is there and fits, else alltoall", Choices(names.DISPATCHERS)
    )
    recompute_granularity: str | None = key(
        None, "selective recomputes core attention, full whole layers", Choices(names.RECOMPUTE_GRANULARITIES), LEARNS
    )
    recompute_method: str | None = key(
        None, "full recomputes groups of layers, or a stage's first layers", Choices(names.RECOMPUTE_METHODS), LEARNS
    )
    recompute_num_layers: Count | None = key(
        None, "with full: layers per group (uniform), recomputed layers per stage (block)", LEARNS
    )
    overlap_grad_reduce: bool = key(False, "reduce gradients during the backward pass", COPIES)
    overlap_param_gather: bool = key(
        False, "gather the distributed optimizer's parameters during the forward pass", COPIES
    )
    param_offload: bool = key(False, "offload parameters and gradients to host memory while the role is idle")
    optimizer_offload: bool = key(False, "offload the optimizer state to host memory while the role is idle", LEARNS)
    override_transformer_config: dict[str, Any] = key(
        {}, "further fields of Megatron's TransformerConfig, as {batch_p2p_sync:false}", EXPERT, OWN
    )
    override_ddp_config: dict[str, Any] = key(
        {}, "fields of Megatron's DistributedDataParallelConfig, as {bucket_size:40000000}", WRAPPED, EXPERT, OWN
    )


@dataclass
class Optim:
    name: str = key("adamw", "muon is for matrices, with adamw for the rest", Choices(names.OPTIMIZERS))
    lr: Positive = key(
        1e-6,
        "peak learning rate; not the critic's; `megarl sft` and `rm` have 0.05 / hidden_size, `dpo` a tenth of it; "
        "adapters of `sft` and `dpo` ten times as much",
        BASIC,
    )
    betas: Betas = key([0.9, 0.999], "decay of adamw's two moments", If(".name != sgd"))
    eps: Positive = key(1e-8, "added to the square root of the second moment", If(".name != sgd"), EXPERT)
    weight_decay: NotNegative = key(0.01, "decoupled weight decay, per unit of learning rate")
    momentum: Below1 | None = key(
        None, "momentum of sgd and muon; null = 0 for sgd, 0.95 for muon", If(".name != adamw")
    )
    lr_warmup_steps: Natural = key(0, "steps of the warm-up from 0 to lr")
    lr_decay_style: str = key(
        "constant", "decay of the learning rate after the warm-up", Choices(names.LR_DECAY_STYLES)
    )
    lr_decay_steps: Count | None = key(None, "steps until min_lr, warm-up included; null = the whole run", DECAYS)
    min_lr: NotNegative = key(0.0, "learning rate at the end of the decay", DECAYS)
    override_optimizer_config: dict[str, Any] = key(
        {}, "fields of Megatron's OptimizerConfig, as {optimizer_cpu_offload:true,optimizer_offload_fraction:1}", EXPERT
    )

    @property
    def on_host(self) -> bool:
        """Whether adam runs on the host, where its moments are."""
        return bool(self.override_optimizer_config.get(CPU_OFFLOAD))


@dataclass
class Weights(Folder):
    config: dict[str, Any] = key(
        {},
        "values of its config.json until the folder exists; empty = model.config of the same path",
        If("the folder is missing"),
    )


@dataclass
class Model(Typed, Weights):
    tokenizer_path: str = key(II("model.path"), "Hugging Face folder or hub name of the tokenizer")
    preset: str = key("", "file of configs/model that `model=NAME` selected")


@dataclass
class Lora:
    rank: Natural = key(0, "rank of each adapter; 0 = no LoRA, all weights are trained", BASIC)
    alpha: Positive = key(32.0, "the adapter is scaled by alpha / rank", ADAPTS)
    targets: Targets = key(
        [ALL], "matrices with an adapter, by their Hugging Face names; all-linear = all of the layers", ADAPTS
    )
    push: str = key(
        "merged", "whether servers get merged weights or the adapter (sglang only)", Choices(names.LORA_PUSHES), ADAPTS
    )


@dataclass
class Role:
    """What every model on ranks has."""

    strategy: str = key(
        "megatron", "fsdp is Megatron-FSDP; none = one rank, no wrapper", Choices(names.STRATEGIES), RANKS
    )
    num_ranks: Count | None = key(
        None, "number of the trainer's ranks that hold the role; null = all from first_rank on", RANKS
    )
    first_rank: Natural = key(0, "first rank that holds the role; ranks of its own, if not the actor's", RANKS)
    # How a step is split into micro-batches, which does not change the result; at most one of the two is set.
    ppo_micro_batch_size_per_gpu: Count | None = key(
        None, "sequences of a micro-batch on one rank; null = no split by count, or the actor's", RANKS, OWN
    )
    ppo_max_token_len_per_gpu: Count | None = key(
        None,
        "tokens of a micro-batch on one rank; null = no split by tokens, or the actor's; 16384 if neither is set",
        RANKS,
        BASIC,
        OWN,
    )
    megatron: Megatron = key(Megatron, "parallel layout, recomputation, overlap and offload", RANKS)


@dataclass
class Learner(Role):
    ppo_mini_batch_size: Count = key(
        II("data.train_batch_size"), "prompts per optimizer step, over all ranks", RL, BASIC
    )
    ppo_epochs: Count = key(1, "passes over one iteration's samples", RL, BASIC)
    loss_agg_mode: str = key(
        "token-mean", "how token losses are aggregated to one number", Choices(names.AGG_MODES), RL
    )
    loss_scale_factor: Positive = key(II("data.max_response_length"), "constant S of the two *-norm modes", SCALED, RL)
    max_grad_norm: Positive = key(1.0, "the gradient is scaled down to this norm")
    optim: Optim = key(Optim, "optimizer and learning rate", OWN)


@dataclass
class Actor(Learner):
    old_log_prob_freq: Natural = key(
        100, "iterations between passes that check old log-probs; 1 = always, 0 = never", OF_A_STEP, RL, EXPERT
    )
    clip_ratio: InsideUnit | None = key(
        None, "clip range on both sides of 1; null = the loss's own default (ppo: 0.2)", BOTH_CLIPS, RL, BASIC
    )
    clip_ratio_low: Share | None = key(None, "clip range below 1; null = clip_ratio", CLIP, RL)
    clip_ratio_high: Positive | None = key(None, "clip range above 1; null = clip_ratio", CLIP, RL)
    clip_ratio_c: DualClip = key(
        None, "dual clip, above 1; off = none; null = the loss's own default (ppo: 3)", CLIP, RL
    )
    entropy_coeff: NotNegative = key(0.0, "weight of the entropy bonus", RL)
    use_kl_loss: bool = key(False, "add kl_loss_coef * KL(policy, reference) to the loss", RL, BASIC)
    kl_loss_coef: NotNegative = key(0.001, "weight of the KL term in the loss", KL_LOSS, RL)
    kl_loss_type: str = key(
        "low_var_kl", "estimator of the KL term in the loss", Choices(names.KL_ESTIMATORS, is_open=True), KL_LOSS, RL
    )
    kl_importance: bool = key(
        False, "multiply the KL term by the importance ratio, which makes it unbiased off-policy", KL_LOSS, RL
    )
    router_replay: str = key(
        "off",
        "experts (and keys of indexers) are the server's, or experts of the pass of old log-probs",
        Choices(names.ROUTER_REPLAYS),
        RL,
    )
    mtp: str = key("off", "train the MTP layers, which predict further tokens: apart or jointly", Choices(names.MTP))
    lora: Lora = key(Lora, "adapters")

    @property
    def mtp_coef(self) -> float:
        """The weight of the loss of MTP layers, Megatron's field; 0 without them."""
        return 0.0 if self.mtp == "off" else float(self.megatron.override_transformer_config.get(MTP_LOSS_SCALE, 0.1))


@dataclass
@follows("actor", Actor)
class Critic(Learner):
    optim: Optim = key(lambda: Optim(lr=1e-5), "optimizer and learning rate")
    model: Weights = key(lambda: Weights(path=II("model.path")), "the critic at the start")
    cliprange_value: Positive | None = key(0.5, "how far a value may move from its old value; null = no clip")


@dataclass
@follows("actor", Actor)
class Ref(Role):
    model: Weights = key(lambda: Weights(path=II("model.path")), "the reference", If("there is a reference"))


@dataclass
class TeacherServer(Gpus, Keyed, Served):
    num_gpus: Count = key(1, "GPUs of the server that the run starts", If("the run starts the servers"))


@dataclass
@follows("actor", Actor)
class Teacher(Role):
    model: Weights = key(Weights, "the teacher; its tokenizer must be the policy's")
    engine: str = key(
        "megatron", "the run's ranks, as its layout says, or a server of rollout.engine", Choices(names.TEACHER_ENGINES)
    )
    server: TeacherServer = key(TeacherServer, "servers of the teacher", If(".engine == server"))
    data_sources: list[str] = key(
        [], "data_source's of the prompts that it teaches; empty = all that no other teacher teaches"
    )
    coef: NotNegative = key(1.0, "multiplies distill.coef for this teacher's samples")


@dataclass
class Distill:
    form: str = key(
        "loss", "a divergence from the teacher, or its log-probs, added to the advantages", Choices(names.DISTILL_FORMS)
    )
    divergence: str = key(
        "reverse_kl", "divergence of the policy from the teacher at each token", Choices(names.DIVERGENCES), TEACHES
    )
    beta: InsideUnit = key(0.5, "share of the teacher in jsd's mixture: near 0 forward KL, near 1 reverse KL", MIXES)
    top_k: Count | None = key(
        None, "compare the teacher's k likeliest tokens and the sum of the others; null = the vocabulary", TEACHES
    )
    coef: NotNegative = key(1.0, "weight of the divergence in the loss, or of the reward in the advantages")
    end_coef: NotNegative | None = key(None, "coef at the end of the decay; null = coef")
    decay_style: str = key("constant", "how coef goes to end_coef", Choices(names.LR_DECAY_STYLES))
    decay_steps: Count | None = key(
        None, "iterations until end_coef; null = the whole run", If(".decay_style != constant")
    )
    route: str | None = key(
        None, "path/file.py:function: prompt -> the name of its teacher, or None; instead of data_sources"
    )
