"""Every key of a run, with its type, its default and its meaning: one dataclass per group.

A default written `II("other.key")` follows that key unless it is set; null on the command line or in a file means
"follow" for such a key.  `load_config` and `resolved` put the final values in, so that readers see plain numbers.
Sizes of batches count prompts unless the comment says otherwise; a length counts tokens; `_s` is seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import II

from megarl.config.names import ESTIMATORS_WITHOUT_CRITIC


@dataclass
class Data:
    train_files: list[str] = field(default_factory=list)  # JSONL files or `datasets` folders: the prompts to learn on
    val_files: list[str] = field(default_factory=list)  # the same, for the evaluation; empty = no evaluation
    prompt_key: str = "prompt"  # field of a row: a string or chat messages (GSM8K's `question` is found by itself)
    ground_truth_key: str = "ground_truth"  # field of a row handed to the reward (GSM8K's `answer` likewise)
    train_batch_size: int = 256  # prompts per iteration; each gets rollout.n completions
    max_prompt_length: int = 1024  # longest prompt, in tokens
    max_response_length: int = 512  # longest completion, in tokens
    shuffle: bool = True  # a new order of the prompts in every epoch
    seed: int = II("trainer.seed")  # of that order
    overlong_prompts: str = "error"  # error | filter: a prompt longer than max_prompt_length
    system_prompt: str | None = None  # put before the messages of every prompt; null = none
    val_max_samples: int | None = None  # evaluate on the first so many prompts; null = all


@dataclass
class Model:
    path: str = ""  # Hugging Face folder or hub name of the policy at the start (and of the reference)
    tokenizer_path: str = II("model.path")  # where the tokenizer is
    dtype: str = "float32"  # float32 | bfloat16, of the weights in training


@dataclass
class Optim:
    name: str = "adamw"  # adamw | sgd
    lr: float = 1e-6  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # adamw: decay of its two moments
    eps: float = 1e-8  # adamw: added to the root of the second moment
    weight_decay: float = 0.01  # decoupled, per unit of learning rate
    momentum: float = 0.0  # sgd only
    lr_warmup_steps: int = 0  # optimizer steps from 0 up to lr
    lr_decay_style: str = "constant"  # constant | linear | cosine, after the warm-up
    lr_decay_steps: int | None = None  # optimizer steps until min_lr, warm-up included; null = the whole run
    min_lr: float = 0.0  # where the decay ends


@dataclass
class CriticOptim(Optim):
    lr: float = 1e-5  # a fresh value head learns faster than a trained policy


@dataclass
class Megatron:
    tensor_model_parallel_size: int = 1  # ranks that share every matrix
    pipeline_model_parallel_size: int = 1  # ranks that share the layers
    context_parallel_size: int = 1  # ranks that share a sequence
    sequence_parallel: bool = False  # split the activations outside the matrices over the tensor-parallel ranks
    use_distributed_optimizer: bool = False  # shard the optimizer's state over the data-parallel ranks
    virtual_pipeline_model_parallel_size: int | None = None  # interleaved pipeline stages; only null or 1 yet
    expert_model_parallel_size: int | None = None  # ranks to which the experts are dealt; null = 1
    expert_tensor_parallel_size: int | None = None  # ranks that share an expert; null = as tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass
class FollowsActor(Megatron):
    """The layout of the critic and of the reference: the actor's, key by key, unless set."""

    tensor_model_parallel_size: int = II("actor.megatron.tensor_model_parallel_size")
    pipeline_model_parallel_size: int = II("actor.megatron.pipeline_model_parallel_size")
    context_parallel_size: int = II("actor.megatron.context_parallel_size")
    sequence_parallel: bool = II("actor.megatron.sequence_parallel")
    use_distributed_optimizer: bool = II("actor.megatron.use_distributed_optimizer")
    virtual_pipeline_model_parallel_size: int | None = II("actor.megatron.virtual_pipeline_model_parallel_size")
    expert_model_parallel_size: int | None = II("actor.megatron.expert_model_parallel_size")
    expert_tensor_parallel_size: int | None = II("actor.megatron.expert_tensor_parallel_size")


@dataclass
class Lora:
    rank: int = 0  # of the update of each matrix; 0 = all weights are trained
    alpha: float = 32.0  # the update is scaled by alpha / rank
    targets: list[str] = field(  # matrices that get one, by their Hugging Face names
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    push: str = "merged"  # merged (into the weights that the servers hold) | adapter (beside them; sglang only)


@dataclass
class Actor:
    strategy: str = "megatron"  # megatron | none (the same engine on one rank)
    ppo_mini_batch_size: int = II("data.train_batch_size")  # prompts per optimizer step, over all ranks
    # How a step is cut into micro-batches; at most one of the three is set, and none of them changes the result.
    ppo_micro_batch_size: int | None = None  # sequences over all data-parallel ranks; resolved into the next key
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences on one rank; null = not cut by count
    ppo_max_token_len_per_gpu: int | None = None  # tokens on one rank; null = not cut by tokens; 16384 if none is set
    ppo_epochs: int = 1  # passes over one iteration's samples
    clip_ratio: float | None = None  # both sides of the clip; null = the loss's own default (ppo: 0.2)
    clip_ratio_low: float | None = None  # the side below 1; null = clip_ratio
    clip_ratio_high: float | None = None  # the side above 1; null = clip_ratio
    clip_ratio_c: float | str | None = None  # dual clip, above 1; off = none; null = the loss's own default (ppo: 3)
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    use_kl_loss: bool = False  # add kl_loss_coef * KL(policy, reference) to the loss
    kl_loss_coef: float = 0.001  # its weight
    kl_loss_type: str = "low_var_kl"  # its estimator
    kl_importance: bool = False  # multiply it by the probability ratio, which makes it unbiased off-policy
    loss_agg_mode: str = "token-mean"  # how token losses become one number
    loss_scale_factor: float = II("data.max_response_length")  # the constant S of the two *-norm modes
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm
    optim: Optim = field(default_factory=Optim)
    lora: Lora = field(default_factory=Lora)
    megatron: Megatron = field(default_factory=Megatron)


@dataclass
class CriticModel:
    path: str = II("model.path")  # Hugging Face folder the critic starts from; its head starts at zero


@dataclass
class Critic:
    strategy: str = II("actor.strategy")  # as the actor's
    model: CriticModel = field(default_factory=CriticModel)
    ppo_mini_batch_size: int = II("actor.ppo_mini_batch_size")  # prompts per optimizer step, over all ranks
    ppo_micro_batch_size: int | None = None  # these three as the actor's; all null = the actor's choice
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences on one rank
    ppo_max_token_len_per_gpu: int | None = None  # tokens on one rank
    ppo_epochs: int = II("actor.ppo_epochs")  # passes over one iteration's samples
    cliprange_value: float | None = 0.5  # how far a value may move from its old one; null = no clip
    loss_agg_mode: str = II("actor.loss_agg_mode")  # how token losses become one number
    loss_scale_factor: float = II("actor.loss_scale_factor")  # the constant S of the two *-norm modes
    max_grad_norm: float = II("actor.max_grad_norm")  # the gradient is scaled down to this norm
    optim: CriticOptim = field(default_factory=CriticOptim)
    megatron: FollowsActor = field(default_factory=FollowsActor)


@dataclass
class RefModel:
    path: str = II("model.path")  # Hugging Face folder of the reference policy


@dataclass
class Ref:
    strategy: str = II("actor.strategy")  # as the actor's
    model: RefModel = field(default_factory=RefModel)
    log_prob_micro_batch_size: int | None = None  # these three as the actor's ppo_*; all null = the actor's choice
    log_prob_micro_batch_size_per_gpu: int | None = None  # sequences on one rank
    log_prob_max_token_len_per_gpu: int | None = None  # tokens on one rank
    megatron: FollowsActor = field(default_factory=FollowsActor)


@dataclass
class ValKwargs:
    temperature: float = 0.0  # of the evaluation's completions; 0 = greedy
    top_p: float = 1.0  # their nucleus
    n: int = 1  # completions per evaluation prompt; their scores are averaged


@dataclass
class SGLang:
    python: str | None = None  # interpreter of its environment; null = .venv-sglang/bin/python
    args: list[str] = field(default_factory=list)  # further words of its command line, as they are


@dataclass
class Rollout:
    engine: str = "cpu"  # cpu | sglang: which program writes the completions
    sglang: SGLang = field(default_factory=SGLang)
    n: int = 1  # completions per prompt: the size of a group
    temperature: float = 1.0  # of the softmax; the trainer's log-probs are scaled by it too
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability; 1 = all
    top_k: int = -1  # sample from the k likeliest tokens; -1 = all
    tensor_model_parallel_size: int = 1  # GPUs of one server
    num_servers: int = 1  # servers, each with a whole copy of the model
    ahead: int = 0  # iterations the rollout may run ahead of the training; 0 = on-policy
    max_running_requests: int = 512  # completions a server writes at a time
    max_total_tokens: int | None = None  # tokens of a server's KV cache; null = what the requests above may need
    dtype: str = II("model.dtype")  # of the server's weights
    request_timeout_s: float = 120.0  # a completion that takes longer is asked for again, elsewhere
    host: str = "127.0.0.1"  # where servers listen
    seed: int = II("trainer.seed")  # of the completions
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    bucket_bytes: int = 67108864  # weights are sent to the servers in pieces of this size
    push: str = "auto"  # gathered | shared | sharded: the way of the weights; auto = the fastest that works here
    check_every: int = 100  # pushes between comparisons with what servers read from an exported folder; 0 = none
    max_restarts: int = 3  # a server that died oftener stays out


@dataclass
class KLControl:
    type: str = "fixed"  # fixed | adaptive
    kl_coef: float = 0.001  # weight of the KL penalty in the reward, at the start
    horizon: int = 10000  # adaptive: over so many sequences the weight changes by a fifth at most
    target_kl: float = 0.1  # adaptive: the KL it steers to


@dataclass
class RolloutCorrection:
    level: str | None = None  # token | sequence | geometric: where (trainer / server) becomes a weight; null = nowhere
    truncate: float | None = 2.0  # the weight is at most this; null = not
    mask_low: float | None = None  # the weight is 0 where it is below this; null = not masked
    mask_high: float | None = None  # and above this
    normalize: bool = False  # weights to mean 1 over an optimizer step, after all cuts
    reject_by: str | None = None  # ratio | k1 | k2 | k3: what is measured to take tokens out of a step; null = nothing
    reject_level: str = "token"  # token | sequence: whose measure it is, and what is taken out
    reject_low: float | None = None  # taken out below this; null = no bound
    reject_high: float | None = None  # and above this
    bypass: bool = False  # the loss's own ratio is against the server's log-probs rather than the trainer's old ones


@dataclass
class FilterGroups:
    enable: bool = False  # drop groups whose completions all have the same metric: they teach nothing
    metric: str = "score"  # score (the reward), or the name of a further number of the reward function
    refill: bool = True  # ask for more prompts until data.train_batch_size groups are there; false = train on the rest
    max_num_gen_batches: int = 10  # generation batches of one iteration; if they do not fill it, the run stops


@dataclass
class OverlongBuffer:
    enable: bool = False  # lower the score of completions that come near data.max_response_length
    len: int | None = None  # over so many last tokens the penalty grows from 0 ...
    penalty_factor: float = 1.0  # ... to this


@dataclass
class Algorithm:
    policy_loss_fn: str = "ppo"  # the policy loss
    policy_loss_args: dict[str, float] = field(default_factory=dict)  # its own numbers, beside the clips of the actor
    adv_estimator: str = "gae"  # how rewards become advantages
    adv_estimator_args: dict[str, Any] = field(default_factory=dict)  # further values for a plug-in's estimator
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # gae: 0 trusts the critic, 1 trusts the rewards
    norm_adv_by_std_in_grpo: bool = True  # grpo: divide by the group's standard deviation; false = Dr.GRPO
    # gdpo: weight of each number that the reward function returns; the key `reward` is the reward itself
    reward_weights: dict[str, float] = field(default_factory=dict)
    advantage_clip: float | None = None  # advantages are clamped to this size; null = not
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy, reference) from every token's reward
    kl_penalty: str = "kl"  # its estimator
    kl_ctrl: KLControl = field(default_factory=KLControl)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)
    overlong_filtering: bool = False  # completions that the length limit ended teach nothing, and are counted nowhere
    plugins: list[str] = field(default_factory=list)  # modules or files that register losses, estimators, KLs, rewards


@dataclass
class Reward:
    fn: str = "exact"  # exact | gsm8k | gsm8k_strict | math | choice | path/file.py:function
    num_workers: int = 1  # processes that compute rewards
    timeout_s: float = 5.0  # one reward may take this long
    on_error: str = "zero"  # zero | stop: what an exception or a time-out of the reward means
    shuffle: bool = False  # give rewards to the wrong samples: a control experiment that must not learn


@dataclass
class Trainer:
    project_name: str = "megarl"  # for the trackers
    experiment_name: str = "run"  # the run's folder inside default_local_dir
    default_local_dir: str = "runs"  # where runs are written
    total_training_steps: int | None = None  # iterations; null = total_epochs
    total_epochs: int = 1  # passes over the prompts
    nnodes: int = 1  # machines
    node_rank: int = 0  # which of them this is
    n_gpus_per_node: int = 1  # training ranks per machine; processes, where there is no GPU
    device: str = "auto"  # auto | cpu | cuda
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl"])  # console jsonl tensorboard wandb
    save_freq: int = -1  # iterations between checkpoints; -1 = none
    test_freq: int = -1  # iterations between evaluations; -1 = none
    val_before_train: bool = True  # evaluate before the first iteration
    resume_mode: str = "auto"  # auto (the newest checkpoint of this run) | disable | folder of a checkpoint
    critic_warmup: int = 0  # iterations in which only the critic learns
    seed: int = 0  # of everything random: weights, order of the data, completions
    check_export: bool = False  # at the end, score the written hf/ with transformers' own generation too (small models)
    max_checkpoints_to_keep: int = 2  # older ones are removed
    prepare: str | None = None  # module whose prepare(config) makes the model folder when it is missing
    call_timeout_s: float = 600.0  # a call to the ranks that takes longer stops the run

    @property
    def num_ranks(self) -> int:
        """Training ranks over all machines."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def run_dir(self) -> Path:
        """The folder everything about this run is written to."""
        return Path(self.default_local_dir) / self.experiment_name


@dataclass
class Sft:
    train_files: list[str] = field(default_factory=list)  # JSONL files with prompts and the responses to imitate
    prompt_key: str = "prompt"  # field of a row: not learnt
    response_key: str = "response"  # field of a row: learnt
    epochs: int = 1  # passes over the files
    batch_size: int = 64  # sequences per optimizer step
    max_length: int = 1024  # longest prompt and response together, in tokens


@dataclass
class Config:
    """A whole run.  Example: config.actor.optim.lr, config.trainer.run_dir."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)
    ref: Ref = field(default_factory=Ref)
    rollout: Rollout = field(default_factory=Rollout)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward: Reward = field(default_factory=Reward)
    trainer: Trainer = field(default_factory=Trainer)
    sft: Sft = field(default_factory=Sft)

    @property
    def uses_critic(self) -> bool:
        """Does the advantage estimator need values?  Of a plug-in's nobody knows before it is loaded: it may."""
        return self.algorithm.adv_estimator not in ESTIMATORS_WITHOUT_CRITIC

    @property
    def uses_reference(self) -> bool:
        """Is there a KL term, in the loss or in the reward?"""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward
