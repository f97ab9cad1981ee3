"""The names a key may hold.

They are written here as strings, so that a configuration is checked without torch; a test compares them with the tables
of functions they stand for.
"""

_PPO = ("ppo", "vanilla", "grpo")  # three names of one loss
_GMPO = ("gmpo", "geo_mean")  # two names of one
_PUBLISHED = ("gpg", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov")
POLICY_LOSSES = (*_PPO, "reinforce", *_GMPO, *_PUBLISHED)
LOSSES_WITHOUT_CLIP = ("reinforce", "gpg", "sapo", "dro", "kl_cov")
LOSSES_WITH_DUAL_CLIP = _PPO
LOSSES_WITHOUT_RATIO = ("reinforce", "gpg", "dro")  # of probabilities, in their gradient
LOSSES_WITHOUT_OLD = ("reinforce", "gpg")  # know nothing of the policy that wrote
SEQ_MEAN_WANTED = ("gspo", *_GMPO)  # were published with the mean over sequences of token means
POLICY_LOSS_ARGS: dict[str, tuple[str, ...]] = {  # what a loss takes from algorithm.policy_loss_args
    "sapo": ("tau_pos", "tau_neg"),
    "dppo_tv": ("dppo_ratio_cap",),
    "dppo_kl": ("dppo_ratio_cap",),
    "dro": ("beta",),
    "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
}
POLICY_LOSS_ARGS_NEEDED = {"dro": ("beta",)}  # without a default

# These compare the completions of one prompt, so they need rollout.n > 1.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "gdpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "optimal_token_baseline",
)
ESTIMATORS_WITHOUT_CRITIC = (*GROUP_ESTIMATORS, "remax", "reinforce_plus_plus")
ADV_ESTIMATORS = ("gae", *ESTIMATORS_WITHOUT_CRITIC)
ESTIMATORS_WITH_GAMMA = ("gae", "reinforce_plus_plus", "optimal_token_baseline")
ESTIMATORS_WITH_STD = ("grpo", "grpo_passk", "gdpo")  # may divide by the standard deviation of the group

FULL_KL = ("full", "full+")  # of whole distributions rather than of the tokens that were chosen
_KL_VALUES = ("kl", "k1", "mse", "k2", "low_var_kl", "k3", "abs", "full")
KL_ESTIMATORS = _KL_VALUES + tuple(f"{name}+" for name in _KL_VALUES)  # "+": that value, the gradient of k2
KL_PENALTIES = _KL_VALUES  # in the reward nothing is differentiated: "+" would change nothing
KL_WITHOUT_GRADIENT = ("kl", "k1")  # as a loss: the expected gradient is zero
KL_CONTROLLERS = ("fixed", "adaptive")

METRICS_OF_VERL = ("seq_reward", "seq_final_reward")  # of dynamic sampling; here rewards are numbers of whole samples

CORRECTION_LEVELS = ("token", "sequence", "geometric")
REJECT_BY = ("ratio", "k1", "k2", "k3")
REJECT_LEVELS = ("token", "sequence")

AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum-norm",
    "prompt-mean-token-mean",
    "token_level",  # token-mean
    "sample_level",  # seq-mean-token-mean
)
AGG_MODES_OF_SEQ_MEAN = ("seq-mean-token-mean", "sample_level")
AGG_MODES_WITH_SCALE = ("seq-mean-token-sum-norm", "token-sum-norm")

OPTIMIZERS = ("adamw", "sgd", "muon")
DEFAULT_MOMENTUM = {"adamw": 0.0, "sgd": 0.0, "muon": 0.95}
LR_DECAY_STYLES = ("constant", "linear", "cosine")
STRATEGIES = ("megatron", "fsdp", "none")  # fsdp: Megatron-FSDP; none: a single rank without a wrapper
TRANSFORMERS = ("auto", "local", "transformer_engine")
RECOMPUTE_GRANULARITIES = ("selective", "full")
RECOMPUTE_METHODS = ("uniform", "block")
PLACEMENTS = ("separate", "shared")
ENGINES = ("cpu", "sglang")
PUSHES = ("auto", "gathered", "shared", "sharded")
LORA_PUSHES = ("merged", "adapter")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REWARDS = ("exact", "gsm8k", "gsm8k_strict", "math", "choice")
REWARD_ERRORS = ("zero", "stop")
OVERLONG_PROMPTS = ("error", "filter")
LOGGERS = ("console", "jsonl", "tensorboard", "wandb")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")
RESUME_MODES = ("auto", "disable")  # or the folder of a checkpoint
COMMANDS = ("train", "sft", "evaluate", "doctor", "config", "node", "serve")
