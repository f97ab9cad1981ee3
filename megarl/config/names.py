"""The names a key may hold.

They are written here as strings, so that a configuration is checked without torch; tests/test_config.py compares them
with the tables of functions they stand for.
"""

POLICY_LOSSES = ("ppo", "vanilla", "grpo", "reinforce")  # vanilla and grpo are other names of ppo
LOSSES_WITHOUT_CLIP = ("reinforce",)

ADV_ESTIMATORS = ("gae", "grpo")
ESTIMATORS_WITHOUT_CRITIC = ("grpo",)
GROUP_ESTIMATORS = ("grpo",)  # compare the completions of one prompt, so they need rollout.n > 1

_KL_VALUES = ("kl", "k1", "mse", "k2", "low_var_kl", "k3", "abs")
KL_ESTIMATORS = _KL_VALUES + tuple(f"{name}+" for name in _KL_VALUES)  # "+": that value, the gradient of k2
KL_PENALTIES = _KL_VALUES  # in the reward nothing is differentiated: "+" would change nothing
KL_WITHOUT_GRADIENT = ("kl", "k1")  # as a loss: the expected gradient is zero
KL_CONTROLLERS = ("fixed", "adaptive")

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
AGG_MODES_WITH_SCALE = ("seq-mean-token-sum-norm", "token-sum-norm")

OPTIMIZERS = ("adamw", "sgd")
LR_DECAY_STYLES = ("constant", "linear", "cosine")
STRATEGIES = ("megatron", "none")  # none: the same engine on a single rank
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
COMMANDS = ("train", "sft", "evaluate", "doctor", "config")
