"""The names that a key may hold.

The names of losses, estimators, KL terms, aggregations and rewards are read from the decorators of the functions,
without importing torch.  The others are written here; a test compares them with the tables in the code.
"""

from __future__ import annotations

from megarl.plugins.declared import REQUIRED, constant, declared

_LOSSES = declared("register_policy_loss", "algo/losses")
POLICY_LOSSES = tuple(_LOSSES)
LOSSES_WITHOUT_RATIO = tuple(name for name, loss in _LOSSES.items() if not loss.options.get("uses_ratio", True))
LOSSES_WITHOUT_OLD = tuple(name for name, loss in _LOSSES.items() if not loss.options.get("uses_old", True))
LOSSES_WITH_SELECTION = tuple(name for name, loss in _LOSSES.items() if "selected" in loss.inputs)
AGG_MODE_OF_LOSS = {name: loss.options["agg_mode"] for name, loss in _LOSSES.items() if "agg_mode" in loss.options}
_CLIPS: dict[str, str] = constant("algo/hyperparameters.py", "CLIP_KEYS")
CLIPS_OF_LOSS: dict[str, dict[str, float]] = {  # loss -> {the last name of the key of a clip that it has: its default}
    name: {key: loss.settings[clip] for clip, key in _CLIPS.items() if clip in loss.settings}
    for name, loss in _LOSSES.items()
}
POLICY_LOSS_ARGS: dict[str, dict[str, bool]] = {  # loss -> {its entry of algorithm.policy_loss_args: has it a default?}
    name: {key: default != REQUIRED for key, default in loss.settings.items() if key not in _CLIPS}
    for name, loss in _LOSSES.items()
}

_ESTIMATORS = declared("register_adv_est", "algo/advantages")
ADV_ESTIMATORS = tuple(_ESTIMATORS)
# These compare the completions of a prompt, so they need rollout.n > 1.
GROUP_ESTIMATORS = tuple(name for name, estimator in _ESTIMATORS.items() if "group_ids" in estimator.inputs)
ESTIMATORS_WITHOUT_CRITIC = tuple(name for name, estimator in _ESTIMATORS.items() if "values" not in estimator.inputs)
SETTINGS_OF_ESTIMATOR = {name: tuple(estimator.settings) for name, estimator in _ESTIMATORS.items()}
ESTIMATORS_WITH_REWARD_WEIGHTS = tuple(
    name for name, estimator in _ESTIMATORS.items() if "reward_weights" in estimator.settings
)

# What the actor's forward pass at the start of an iteration computes, and an estimator reads.
POLICY_COLUMNS = ("old_log_probs", "sum_pi_squared", "full_kl")
READ_BY_ESTIMATOR = {name: set(estimator.inputs) for name, estimator in _ESTIMATORS.items()}

_KL = declared("register_kl", "algo/kl.py")
_FULL: str = constant("algo/registry.py", "FULL")
FULL_KL = (_FULL, f"{_FULL}+")  # exact KL over the vocabulary, not an estimate from the sampled tokens
KL_PENALTIES = (*_KL, _FULL)  # the reward has no gradient, so "+" would have no effect
KL_ESTIMATORS = KL_PENALTIES + tuple(f"{name}+" for name in KL_PENALTIES)  # "+": that value, the gradient of k2
KL_WITHOUT_GRADIENT = tuple(name for name, kl in _KL.items() if kl.options.get("zero_gradient"))  # in expectation
KL_CONTROLLERS: tuple[str, ...] = constant("algo/kl.py", "KL_CONTROLLERS")

_AGG_MODES = declared("register_agg_mode", "algo/aggregate.py")
AGG_MODES = tuple(_AGG_MODES)
AGG_MODES_OF = {name: mode.names for name, mode in _AGG_MODES.items()}  # all names of the same aggregation
AGG_MODES_WITH_SCALE = tuple(name for name, mode in _AGG_MODES.items() if mode.options.get("needs_scale"))

DIVERGENCES = tuple(declared("register_divergence", "algo/divergences.py"))
DISTILL_FORMS = ("loss", "reward")
NO_ADVANTAGES = "none"  # the advantage estimator of runs that learn from teachers alone

CORRECTION_LEVELS: tuple[str, ...] = constant("algo/correction.py", "LEVELS")
REJECT_BY: tuple[str, ...] = constant("algo/correction.py", "REJECT_BY")
REJECT_LEVELS: tuple[str, ...] = constant("algo/correction.py", "REJECT_LEVELS")
REWARDS = tuple(declared("register_reward", "rewards/functions"))
REWARD_SERVICES: tuple[str, ...] = constant("rewards/load.py", "SERVICES")
REWARDS_OF_CODE = ("code", "code_strict")  # they run code of the model
RIGHT_OR_WRONG = {"auto", "exact", "gsm8k", "gsm8k_strict", "gsm8k_verl", "math", "math_verl", "choice"}  # 1 or 0

METRICS_OF_VERL = ("seq_reward", "seq_final_reward")  # of dynamic sampling; here rewards belong to whole samples

OPTIMIZERS = ("adamw", "sgd", "muon")
DEFAULT_MOMENTUM = {"adamw": 0.0, "sgd": 0.0, "muon": 0.95}
LR_DECAY_STYLES = ("constant", "linear", "cosine")
STRATEGIES = ("megatron", "fsdp", "none")  # fsdp: Megatron-FSDP; none: a single rank without a wrapper
DISPATCHERS = ("auto", "alltoall", "flex")  # Megatron refuses allgather for rows of different lengths
TRANSFORMERS = ("auto", "local", "transformer_engine")
ROUTER_REPLAYS = ("off", "old", "rollout")
MTP = ("off", "detached", "joint")
SHARES = ("auto", "on", "off")
RECOMPUTE_GRANULARITIES = ("selective", "full")
RECOMPUTE_METHODS = ("uniform", "block")
PLACEMENTS = ("separate", "shared")
ENGINES = ("hf", "sglang")
AUTO = "auto"
QUANTIZATIONS = ("none", "fp8")
PUSHES = ("auto", "gathered", "shared", "sharded")
ORDERS = ("finished", "prompts")
TLS = ("auto", "always", "never")
UPDATES = ("in_place", "retract", "drain")
LORA_PUSHES = ("merged", "adapter")
MEGATRON = "megatron"
REWARD_MODEL_ENGINES = ("server", MEGATRON)
TEACHER_ENGINES = (MEGATRON, "server")
REWARD_ERRORS: tuple[str, ...] = constant("rewards/scorer.py", "ON_ERROR")
AGENT_HISTORIES: tuple[str, ...] = constant("agents/conversation.py", "HISTORIES")
_FIELDS = [line.split("|") for line in constant("agents/fields.py", "TABLE").strip().splitlines()]
AGENT_IGNORED = tuple(name for rule, _, names, *_ in _FIELDS if rule.strip() == "run" for name in names.split())
AGENT_ADAPTERS: tuple[str, ...] = tuple(constant("agents/load.py", "ADAPTERS"))
TOOL_PARSERS = (
    *("auto", "hermes", "qwen3_coder", "glm", "minimax_m2", "kimi_k2"),
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "llama3", "mistral", "harmony", "none"),
)
OVERLONG = ("error", "filter", *constant("data/prompts.py", "CUTS"))
PAIR_LOSSES: tuple[str, ...] = constant("algo/losses/pairs.py", "PAIR_LOSSES")
SFT_ANSWERS: tuple[str, ...] = constant("data/fields.py", "ANSWERS")
_TRACKERS = declared("register_tracker", "metrics/trackers")
LOGGERS = tuple(sorted(_TRACKERS))
PACKAGES_OF_LOGGER: dict[str, tuple[str, ...]] = {
    name: tracker.options.get("packages", ()) for name, tracker in _TRACKERS.items()
}
PROFILERS = ("torch", "nvtx")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")
STOP, SKIP, ROLLBACK = "stop", "skip", "rollback"
ON_NONFINITE = (STOP, SKIP, ROLLBACK)
RESUME_MODES = ("auto", "disable")  # or the folder of a checkpoint
SUPERVISED = ("sft", "dpo", "rm")  # commands that train on the rows of sft.train_files
COMMANDS = ("train", *SUPERVISED, "evaluate", "doctor", "config", "node", "serve")
