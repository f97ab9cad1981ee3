"""Keys that would have no effect under the chosen settings.

A user who types `algorithm.lam=0.9` for GRPO expects an effect; silently ignoring it wastes a run.  Only the command
line is checked: a recipe may contain values for choices that are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from megarl.config import names
from megarl.config.old_log_probs import why_own_pass
from megarl.config.schema import Config
from megarl.config.settings import Setting
from megarl.config.unused_keys_of_roles import UnusedKeys, optim_rows, role_rows, teacher_rows
from megarl.config.validate.layouts import ROLES
from megarl.config.validate.rewards import names_of, trained_names


def _is_none_of(config: Config, estimators: tuple[str, ...]) -> bool:
    """A built-in estimator, and none of these; the needs of a plug-in's estimator are not known here."""
    return config.algorithm.adv_estimator in set(names.ADV_ESTIMATORS) - set(estimators)


def _has_no_advantages(config: Config) -> bool:
    """Every advantage is 0: teachers teach by the loss alone."""
    return config.algorithm.adv_estimator == names.NO_ADVANTAGES and config.distill.form == "loss"


def _has_no_policy_loss(config: Config) -> bool:
    """Losses that clip are products with the advantage."""
    clips = set(names.POLICY_LOSSES) - set(names.LOSSES_WITHOUT_CLIP)
    return _has_no_advantages(config) and config.algorithm.policy_loss_fn in clips


_LOSS = "algorithm.policy_loss_fn={c.algorithm.policy_loss_fn}"
_ESTIMATOR = "algorithm.adv_estimator={c.algorithm.adv_estimator}"
_CORRECTION = "algorithm.rollout_correction"

TABLE = (
    UnusedKeys(
        "critic.* trainer.critic_warmup",
        "algorithm.adv_estimator={c.algorithm.adv_estimator} needs no critic",
        lambda c: not c.uses_critic,
    ),
    UnusedKeys("algorithm.lam", f"{_ESTIMATOR} has no lambda", lambda c: _is_none_of(c, names.ESTIMATORS_WITH_LAMBDA)),
    UnusedKeys(
        "algorithm.gamma",
        f"{_ESTIMATOR} scores whole completions",
        lambda c: _is_none_of(c, names.ESTIMATORS_WITH_GAMMA),
    ),
    UnusedKeys(
        "algorithm.norm_adv_by_std_in_grpo",
        f"{_ESTIMATOR} divides by no deviation of a group that could be left out",
        lambda c: _is_none_of(c, names.ESTIMATORS_WITH_STD),
    ),
    UnusedKeys(
        "algorithm.reward_weights",
        f"{_ESTIMATOR} compares one reward",
        lambda c: _is_none_of(c, names.ESTIMATORS_WITH_REWARD_WEIGHTS),
    ),
    UnusedKeys(
        "ref.*",
        "actor.use_kl_loss and algorithm.use_kl_in_reward are both false, so there is no reference",
        lambda c: not c.uses_reference and not c.scores_on_ranks,
    ),
    UnusedKeys(
        "ref.model.*",
        "actor.use_kl_loss and algorithm.use_kl_in_reward are both false, so there is no reference",
        lambda c: not c.uses_reference,
    ),
    UnusedKeys("distill.*", "there are no teachers", lambda c: not c.teachers),
    UnusedKeys(
        "distill.divergence distill.beta distill.top_k",
        "distill.form=reward compares log-probs of the sampled tokens alone",
        lambda c: c.distill.form == "reward",
    ),
    UnusedKeys(
        "distill.beta",
        "distill.divergence={c.distill.divergence} has no mixture",
        lambda c: c.distill.divergence != "jsd",
    ),
    UnusedKeys(
        "distill.decay_steps",
        "distill.decay_style=constant never decays",
        lambda c: c.distill.decay_style == "constant",
    ),
    UnusedKeys("algorithm.advantage_clip", f"{_ESTIMATOR}: every advantage is 0", _has_no_advantages),
    UnusedKeys(
        f"actor.clip_ratio actor.clip_ratio_* {_CORRECTION}.level {_CORRECTION}.truncate {_CORRECTION}.mask_* "
        f"{_CORRECTION}.normalize {_CORRECTION}.bypass",
        f"{_ESTIMATOR}: every advantage is 0, and so is the policy loss",
        _has_no_policy_loss,
    ),
    UnusedKeys(
        "actor.kl_loss_coef actor.kl_loss_type actor.kl_importance",
        "actor.use_kl_loss=false",
        lambda c: not c.actor.use_kl_loss,
    ),
    UnusedKeys(
        "algorithm.kl_penalty algorithm.kl_ctrl.*",
        "algorithm.use_kl_in_reward=false",
        lambda c: not c.algorithm.use_kl_in_reward,
    ),
    UnusedKeys(
        "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
        "algorithm.kl_ctrl.type=fixed",
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
    ),
    UnusedKeys(
        "actor.clip_ratio actor.clip_ratio_*",
        f"{_LOSS} has no clip",
        lambda c: c.algorithm.policy_loss_fn in names.LOSSES_WITHOUT_CLIP,
    ),
    UnusedKeys(
        "actor.clip_ratio_c",
        f"{_LOSS} has no dual clip",
        lambda c: (
            c.algorithm.policy_loss_fn in names.POLICY_LOSSES
            and c.algorithm.policy_loss_fn not in names.LOSSES_WITH_DUAL_CLIP
        ),
    ),
    UnusedKeys(
        "actor.clip_ratio",
        "actor.clip_ratio_low and actor.clip_ratio_high are both set",
        lambda c: c.actor.clip_ratio_low is not None and c.actor.clip_ratio_high is not None,
    ),
    UnusedKeys(
        "actor.old_log_prob_freq",
        "each iteration makes a forward pass for its old log-probs; trainer.check_only=true says why",
        lambda c: why_own_pass(c) is not None,
    ),
    UnusedKeys(
        "actor.loss_scale_factor",
        "actor.loss_agg_mode={c.actor.loss_agg_mode} has no constant",
        lambda c: not {c.actor.loss_agg_mode, c.critic.loss_agg_mode} & set(names.AGG_MODES_WITH_SCALE),
    ),
    UnusedKeys(
        "critic.loss_scale_factor",
        "critic.loss_agg_mode={c.critic.loss_agg_mode} has no constant",
        lambda c: c.critic.loss_agg_mode not in names.AGG_MODES_WITH_SCALE,
    ),
    UnusedKeys(
        f"{_CORRECTION}.truncate {_CORRECTION}.mask_* {_CORRECTION}.normalize",
        f"{_CORRECTION}.level=null, so there is no weight",
        lambda c: c.algorithm.rollout_correction.level is None,
    ),
    UnusedKeys(
        f"{_CORRECTION}.reject_level {_CORRECTION}.reject_low {_CORRECTION}.reject_high",
        f"{_CORRECTION}.reject_by=null, so nothing is taken out",
        lambda c: c.algorithm.rollout_correction.reject_by is None,
    ),
    UnusedKeys(
        "algorithm.filter_groups.metric algorithm.filter_groups.refill algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.enable=false",
        lambda c: not c.algorithm.filter_groups.enable,
    ),
    UnusedKeys(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.refill=false asks once",
        lambda c: not c.algorithm.filter_groups.refill,
    ),
    UnusedKeys(
        "algorithm.overlong_buffer.len algorithm.overlong_buffer.penalty_factor",
        "algorithm.overlong_buffer.enable=false",
        lambda c: not c.algorithm.overlong_buffer.enable,
    ),
    UnusedKeys(
        "actor.lora.alpha actor.lora.targets actor.lora.push",
        "actor.lora.rank=0 trains all weights",
        lambda c: c.actor.lora.rank == 0,
    ),
    UnusedKeys(
        "rollout.sglang.*", "rollout.engine={c.rollout.engine} is not sglang", lambda c: c.rollout.engine == "hf"
    ),
    UnusedKeys(
        "rollout.num_servers rollout.host rollout.tls",
        "rollout.urls names servers that run already",
        lambda c: bool(c.rollout.urls),
    ),
    UnusedKeys(
        "rollout.host",
        "with trainer.nnodes={c.trainer.nnodes} servers listen at the addresses of their machines",
        lambda c: c.trainer.nnodes > 1,
    ),
    UnusedKeys(
        "rollout.tls",
        "servers at rollout.host={c.rollout.host} use http unless it is always, because no other machine reaches them",
        lambda c: c.rollout.tls != "always" and not c.serves_other_machines,
    ),
    UnusedKeys("rollout.slow_factor", "no collector has two servers to compare", lambda c: not c.compares_servers),
    UnusedKeys("rollout.update", "rollout.ahead=0, so nothing runs during a push", lambda c: c.rollout.ahead == 0),
    UnusedKeys(
        "rollout.max_age rollout.order",
        "rollout.ahead=0, so an iteration waits for all that was begun, and the weights that train wrote every token",
        lambda c: c.rollout.ahead == 0 and c.rollout.turn_s is None,
    ),
    UnusedKeys(
        "rollout.memory_fraction rollout.first_gpu",
        "trainer.device=cpu uses no GPU",
        lambda c: c.trainer.device == "cpu",
    ),
    UnusedKeys(
        "ref.megatron.use_distributed_optimizer ref.megatron.overlap_* ref.megatron.recompute_* "
        "ref.megatron.optimizer_offload ref.megatron.override_ddp_config",
        "a reference is not trained",
        lambda c: True,  # noqa: ARG005
    ),
    UnusedKeys(
        "teachers.*.megatron.use_distributed_optimizer teachers.*.megatron.overlap_* teachers.*.megatron.recompute_* "
        "teachers.*.megatron.optimizer_offload teachers.*.megatron.override_ddp_config",
        "a teacher is not trained",
        lambda c: True,  # noqa: ARG005
    ),
    *(row for role in ROLES for row in role_rows(role)),
    *optim_rows("actor", lambda c: c.actor.optim),
    *optim_rows("critic", lambda c: c.critic.optim),
    UnusedKeys(
        "rollout.val_kwargs.top_p",
        "rollout.val_kwargs.temperature=0 is greedy",
        lambda c: c.rollout.val_kwargs.temperature == 0,
    ),
    UnusedKeys(
        "data.val_max_samples trainer.eval_beside rollout.val_kwargs.*",
        "data.val_files is empty, so nothing is evaluated",
        lambda c: not c.data.val_files,
    ),
    UnusedKeys(
        "trainer.test_freq trainer.val_before_train",
        "there are no val_files, so nothing is evaluated",
        lambda c: not (c.data.val_files or c.sft.val_files),  # of which a command reads one
    ),
    UnusedKeys("reward.judge.*", "no reward is called judge", lambda c: "judge" not in names_of(c)),
    UnusedKeys("reward.model.*", "no reward is called model", lambda c: "model" not in names_of(c)),
    UnusedKeys(
        "reward.model.url reward.model.api_key_env reward.model.first_gpu reward.model.memory_fraction",
        "reward.model.engine=megatron asks no server",
        lambda c: c.scores_on_ranks,
    ),
    UnusedKeys(
        "reward.model.first_gpu reward.model.memory_fraction",
        "reward.model.url names a server that runs already",
        lambda c: c.reward.model.url is not None,
    ),
    UnusedKeys(
        "reward.model.api_key_env",
        "reward.model.url=null: the run starts a server, and knows its key",
        lambda c: c.reward.model.url is None,
    ),
    UnusedKeys(
        "reward.num_workers reward.timeout_s reward.try_rows",
        "no reward runs in a process of its own",
        lambda c: names_of(c).keys() <= set(names.REWARD_SERVICES),
    ),
    UnusedKeys("reward.weights", "there is one reward", lambda c: len(trained_names(c)) == 1),
    UnusedKeys(
        "reward.concurrency reward.per_minute reward.retries reward.request_timeout_s reward.start_timeout_s",
        "no reward is async",
        lambda c: all(fn in names.REWARDS for fn in names_of(c)),
    ),
    UnusedKeys(
        "reward.sandbox",
        "no reward runs code of the model",
        lambda c: names_of(c).keys() <= {*names.REWARDS, *names.REWARD_SERVICES} - set(names.REWARDS_OF_CODE),
    ),
    UnusedKeys("agent.[!fc]*", "agent.fn=null and agent.command=[]: completions are plain", lambda c: not c.has_agents),
    UnusedKeys("reward.try_rows", "agents write whole episodes, which no row stands for", lambda c: c.has_agents),
    UnusedKeys("agent.args", "agent.command has no keyword arguments", lambda c: bool(c.agent.command)),
    UnusedKeys(
        "agent.num_processes agent.memory_mb agent.file_mb",
        "agent.fn={c.agent.fn} runs in no process of its own",
        lambda c: str(c.agent.fn).partition(":")[0] in names.AGENT_ADAPTERS,
    ),
    UnusedKeys("data.seed", "data.shuffle=false", lambda c: not c.data.shuffle),
    UnusedKeys(
        "trainer.total_epochs",
        "trainer.total_training_steps={c.trainer.total_training_steps} decides (null leaves it to the epochs)",
        lambda c: c.trainer.total_training_steps is not None,
    ),
    UnusedKeys(
        "trainer.prometheus_port",
        "trainer.logger has no prometheus",
        lambda c: "prometheus" not in c.trainer.logger,
    ),
    UnusedKeys(
        "trainer.profile.ranks trainer.profile.tool trainer.profile.memory",
        "trainer.profile.steps=[]: nothing is profiled",
        lambda c: not c.trainer.profile.steps,
    ),
    UnusedKeys("trainer.check_export", "data.val_files=[]", lambda c: not c.data.val_files),
    UnusedKeys("trainer.keep_best", "data.val_files=[]: there are no scores", lambda c: not c.data.val_files),
    UnusedKeys("trainer.keep_best", "trainer.test_freq=-1: there are no scores", lambda c: c.trainer.test_freq < 1),
    UnusedKeys("trainer.verify_resume", "trainer.resume_mode=disable", lambda c: c.trainer.resume_mode == "disable"),
    UnusedKeys(
        "trainer.node_rank trainer.master_addr trainer.master_port trainer.spare_nodes",
        "trainer.nnodes=1",
        lambda c: c.trainer.nnodes == 1,
    ),
)

# Keys that a command never reads.
UNREAD = {
    "train": "sft.*",
    "sft": (
        "algorithm.* critic.* ref.* teachers.* distill.* rollout.* reward.* agent.* actor.ppo_mini_batch_size "
        "actor.ppo_epochs actor.old_* actor.clip_ratio* actor.entropy_coeff actor.use_kl_loss actor.kl_* actor.loss_* "
        "actor.router_replay data.*_files data.*_key data.*_batch_size data.max_* data.overlong_prompts data.shuffle "
        "data.*_max_samples trainer.eval_beside trainer.keep_best trainer.critic_warmup trainer.prepare "
        "trainer.check_export trainer.total_epochs trainer.token_samples"
    ),
    "evaluate": (
        "actor.* algorithm.[!p]* algorithm.policy_* critic.* ref.* teachers.* distill.* sft.* "
        "data.train_max_samples trainer.on_nonfinite trainer.spike_sigma trainer.token_samples trainer.profile.* "
        "trainer.eval_beside trainer.save_* trainer.term_grace_s trainer.max_restarts "
        "trainer.start_timeout_s trainer.call_factor trainer.call_floor_s trainer.*silence_s trainer.spare_nodes "
        "rollout.n rollout.temperature rollout.top_p rollout.top_k rollout.ahead rollout.order rollout.update "
        "rollout.max_age rollout.turn_s rollout.push rollout.bucket_bytes rollout.check_every rollout.slow_factor"
    ),
}
COMMANDS_THAT_RUN_NOTHING = ("doctor", "node", "serve")


def without_effect(config: Config, typed: Iterable[Setting], command: str) -> Iterator[str]:
    """One sentence for each typed setting without an effect."""
    if command in COMMANDS_THAT_RUN_NOTHING:
        return
    rows = (*TABLE, *(row for role in config.teacher_roles for row in teacher_rows(role)))
    for setting in typed:
        if _matches(setting.key, UNREAD.get(command, "")):
            yield f"{setting.text}: has no effect, because `megarl {command}` does not read it"
        elif row := next((row for row in rows if _matches(setting.key, row.keys) and row.when(config)), None):
            yield f"{setting.text}: has no effect, because {row.because.format(c=config)}"


def _matches(key: str, patterns: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns.split())
