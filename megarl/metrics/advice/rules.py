"""The rules of the advice: known problems, the metrics that show them, and the keys to change.

Thresholds are valid for all losses, because they are shares, nats, or relative to the run's own history.
megarl/algo/README.md explains the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.metrics.advice import signals
from megarl.metrics.advice.advice import Rule


def in_turns(config: Mapping[str, Any]) -> bool:
    return config.get("rollout", {}).get("turn_s") is not None


def drains(config: Mapping[str, Any]) -> bool:
    rollout = config.get("rollout", {})
    return rollout.get("ahead", 0) > 0 and rollout.get("update") == "drain"


def scores_on_ranks(config: Mapping[str, Any]) -> bool:
    """Whether a reward model has its pass on the ranks: a stage of the step, which these keys do not shorten."""
    return config.get("reward", {}).get("model", {}).get("engine") == "megatron"


def has_advantages(config: Mapping[str, Any]) -> bool:
    """Whether the policy loss has a gradient; where only teachers teach by a loss, all its advantages are 0."""
    teaches_by_reward = config.get("distill", {}).get("form") == "reward"
    return config.get("algorithm", {}).get("adv_estimator") != "none" or teaches_by_reward


SCORE = ("critic/score/mean", "critic/score/max", "critic/score/min")

RULES: tuple[Rule, ...] = (
    # the policy changes too fast, or not at all
    Rule(
        "policy_loss_rises",
        ("actor/pg_loss", "critic/advantages/std", "critic/score/mean"),
        20,
        signals.policy_loss_rises,
        "the policy loss rises while the score falls; try actor.optim.lr 10 times smaller, and see whether the rewards "
        "are on the scale you meant (critic/score/*; algorithm.advantage_clip bounds their effect)",
    ),
    Rule(
        "drifts_against_advantages",
        ("actor/pg_loss", "actor/pg_loss_level", "actor/drift_good", "actor/drift_bad"),
        10,
        signals.drifts_against_advantages,
        "the policy loss is above its level (actor/pg_loss_level) because each iteration makes the answers that were "
        "better than expected less likely and the worse ones likelier (actor/drift_good and actor/drift_bad are below "
        "0): something is stronger than the advantages; lower actor.entropy_coeff, actor.kl_loss_coef or "
        "actor.optim.lr",
    ),
    Rule(
        "loss_contradicts_ratio",
        ("actor/pg_loss", "actor/pg_loss_level", "actor/drift_good", "actor/drift_bad"),
        10,
        signals.loss_contradicts_ratio,
        "the policy loss is below its level (actor/pg_loss_level), as if the policy followed the advantages, but the "
        "answers that were better than expected become less likely and the worse ones likelier (actor/drift_good and "
        "actor/drift_bad are below 0); if algorithm.policy_loss_fn is a function of yours, its sign may be wrong, else "
        "lower actor.entropy_coeff or actor.optim.lr",
    ),
    Rule(
        "score_falls",
        SCORE,
        40,
        signals.score_falls,
        "the score has been falling for {steps} steps; try actor.optim.lr 10 times smaller, or actor.use_kl_loss=true",
    ),
    Rule(
        "ratio_explodes",
        ("actor/ratio_mean", "actor/ratio_std"),
        3,
        signals.ratio_explodes,
        "the ratio of new to old probabilities is far from 1; try actor.optim.lr 10 times smaller, or fewer optimizer "
        "steps an iteration (actor.ppo_epochs, a larger actor.ppo_mini_batch_size)",
        applies=has_advantages,
    ),
    Rule(
        "clipped_often",
        ("actor/pg_clipfrac",),
        5,
        signals.above(0.3),
        "over 30 % of the tokens are clipped and learn nothing; lower actor.optim.lr or actor.ppo_epochs, or widen "
        "actor.clip_ratio if the ratio is otherwise calm",
        applies=has_advantages,
    ),
    Rule(
        "clipped_below",
        ("actor/pg_clipfrac_lower",),
        5,
        signals.above(0.01),
        "over 1 % of the tokens are bad ones that became likelier by actor.clip_ratio_c times; lower actor.optim.lr, "
        "and look at rollout_corr/log_prob_gap_mean",
        applies=has_advantages,
    ),
    Rule(
        "policy_kl_spikes",
        ("actor/ppo_kl",),
        20,
        signals.spikes(10, at_least=0.05),
        "the policy jumped within one iteration (actor/ppo_kl); set actor.use_kl_loss=true or raise "
        "actor.kl_loss_coef, or lower actor.optim.lr",
        applies=has_advantages,
    ),
    Rule(
        "gradient_spikes",
        ("actor/grad_norm",),
        20,
        signals.spikes(10, at_least=1.0, how_often=2),
        "the gradient norm is again 10 times its usual size; set actor.max_grad_norm near its usual size, set "
        "actor.use_kl_loss=true, or lower actor.optim.lr",
    ),
    Rule(
        "entropy_collapses",
        ("actor/entropy", *SCORE),
        50,
        signals.entropy_collapses,
        "the entropy fell to a fifth within {steps} steps and the score rises no longer; raise actor.clip_ratio_high "
        "(0.28), set actor.entropy_coeff (0.001 to 0.01), or take algorithm.policy_loss_fn=clip_cov or kl_cov",
    ),
    Rule(
        "entropy_explodes",
        ("actor/entropy",),
        30,
        signals.entropy_explodes,
        "the entropy has more than doubled in {steps} steps, the policy becomes noise; lower actor.entropy_coeff or "
        "actor.optim.lr",
    ),
    Rule(
        "reference_kl_runs_away",
        ("actor/kl_loss",),
        20,
        signals.runs_away(to=1.0, times=3),
        "the policy leaves the reference by over 1 nat a token; raise actor.kl_loss_coef or lower actor.optim.lr",
    ),
    Rule(
        "reward_kl_runs_away",
        ("actor/reward_kl_penalty",),
        20,
        signals.runs_away(to=1.0, times=3),
        "the policy leaves the reference by over 1 nat a token; raise algorithm.kl_ctrl.kl_coef, or let "
        "algorithm.kl_ctrl.type=adaptive steer it to algorithm.kl_ctrl.target_kl",
    ),
    Rule(
        "nothing_moves",
        ("actor/kl_loss", "critic/score/mean"),
        50,
        signals.nothing_moves,
        "in {steps} steps the policy has hardly moved and the score not at all; try actor.optim.lr 10 times larger",
    ),
    # the value function
    Rule(
        "value_loss_flat",
        ("critic/vf_loss", "critic/vf_explained_var", "critic/returns/std"),
        50,
        signals.value_loss_flat,
        "the value loss has not fallen for {steps} steps and the values explain nothing of the returns; raise "
        "critic.optim.lr, and see whether critic/values/* can reach critic/returns/* within critic.cliprange_value",
    ),
    Rule(
        "values_mislead",
        ("critic/vf_loss", "critic/vf_explained_var", "critic/returns/std"),
        20,
        signals.values_mislead,
        "for {steps} steps the values have been worse than a constant (critic/vf_explained_var); lower "
        "critic.optim.lr, let trainer.critic_warmup train the critic first, and see whether the rewards changed their "
        "scale",
    ),
    Rule(
        "values_clipped",
        ("critic/vf_clipfrac",),
        10,
        signals.above(0.3),
        "over 30 % of the values want to move further than critic.cliprange_value lets them; raise it to the scale of "
        "the returns, or set it to null",
    ),
    # the rewards and their learning signal
    Rule(
        "rewards_all_equal",
        ("critic/score/max", "critic/score/min"),
        5,
        signals.all_equal,
        "every answer of 5 steps had the same reward, so nothing is learnt; look at samples.jsonl and reward.fn, and "
        "at rollout.temperature if the answers are all the same too; if all are right, take harder prompts",
    ),
    Rule(
        "groups_all_equal",
        ("algorithm/groups_all_equal",),
        10,
        signals.above(0.7),
        "in over 70 % of the prompt groups all rewards are equal, which teaches nothing; set "
        "algorithm.filter_groups.enable=true, raise rollout.n, or choose prompts of another difficulty",
    ),
    Rule(
        "groups_dropped",
        ("rollout/dropped_share",),
        5,
        signals.above(0.8),
        "dynamic sampling throws over 80 % of the groups away; choose prompts of another difficulty (data.train_files) "
        "or raise rollout.n",
    ),
    Rule(
        "advantages_large",
        ("critic/advantages/std",),
        5,
        signals.above(5.0),
        "the advantages spread over more than 5, and the loss with them; scale the rewards (reward.fn), or set "
        "algorithm.advantage_clip",
    ),
    Rule(
        "answers_cut_off",
        ("response_length/clip_ratio",),
        5,
        signals.above(0.3),
        "over 30 % of the answers are cut off at the limit; raise data.max_response_length, or set "
        "algorithm.overlong_filtering=true or algorithm.overlong_buffer.enable=true",
    ),
    Rule(
        "steps_skipped",
        ("actor/skipped_steps",),
        10,
        signals.often(0.3),
        "optimizer steps are skipped because no token is left to learn from; loosen "
        "algorithm.rollout_correction.reject_high, set algorithm.filter_groups.refill=true, or look at "
        "algorithm.overlong_filtering",
    ),
    # the server's policy differs from the trainer's
    Rule(
        "rollout_gap",
        ("rollout_corr/log_prob_gap_mean", "off_policy/version_lag/max"),
        3,
        signals.gap_without_lag,
        "server and trainer disagree about the same weights by over 0.05 nats a token; compare rollout.dtype with "
        "model.dtype, set rollout.check_every=1; "
        "algorithm.rollout_correction.level=token makes up for a part",
    ),
    Rule(
        "few_samples_count",
        ("rollout_corr/ess", "off_policy/version_lag/max"),
        5,
        signals.few_count,
        "less than 70 % of the tokens count (rollout_corr/ess) though the weights are the newest; see rollout.dtype "
        "and set algorithm.rollout_correction.level=token",
    ),
    Rule(
        "samples_too_old",
        ("rollout_corr/ess", "off_policy/version_lag/mean"),
        5,
        signals.too_old,
        "less than 70 % of the tokens count (rollout_corr/ess), because older weights generated them; lower "
        "rollout.ahead or set algorithm.rollout_correction.level=token",
    ),
    Rule(
        "moved_before_training",
        ("actor/first_ppo_kl",),
        1,  # it is exact, and may be measured every actor.old_log_prob_freq iterations only
        signals.away_from_0(0.01),
        "two passes over the same weights differ (actor/first_ppo_kl is not 0), so the ratio starts wrong; see "
        "model.dtype (with algorithm.rollout_correction.bypass=true it is the gap to the server, and may be)",
    ),
    Rule(
        "correction_cuts",
        ("rollout_corr/share_cut",),
        5,
        signals.above(0.2),
        "rollout correction cuts the weight of over 20 % of the tokens; lower rollout.ahead, or see "
        "algorithm.rollout_correction.truncate and mask_low, mask_high",
    ),
    Rule(
        "correction_rejects",
        ("rollout_corr/share_rejected",),
        5,
        signals.above(0.2),
        "rollout correction takes over 20 % of the tokens out; lower rollout.ahead, or loosen "
        "algorithm.rollout_correction.reject_low and reject_high",
    ),
    Rule(
        "correction_missing",
        ("rollout_corr/is_on", "rollout_corr/ess", "off_policy/version_lag/mean"),
        5,
        signals.uncorrected,
        "older weights generated the tokens, by which over 5 % of them are lost (rollout_corr/ess), and nothing "
        "corrects for it; set algorithm.rollout_correction.level=token, or algorithm.rollout_correction.bypass=true",
    ),
    # the schedule of rollout and training
    Rule(
        "ahead_too_small",
        ("rollout/idle_share", "rollout/finished_waiting", "rollout/in_flight"),
        10,
        signals.waits_for_rollout,
        "the trainer waits for completions in over 10 % of its time (rollout/idle_share) and none is ever ready; raise "
        "rollout.ahead, or add servers (rollout.num_servers) if they are full (rollout/servers_idle_share)",
        applies=lambda config: not in_turns(config) and not drains(config),
    ),
    Rule(
        "rewards_slow",
        ("timing_s/reward", "timing_s/step"),
        10,
        signals.waits_for_rewards,
        "everything is generated and only rewards are waited for in over 10 % of the time (timing_s/reward); raise "
        "reward.num_workers or, of an async reward, reward.concurrency, make the reward faster, or raise rollout.ahead",
        applies=lambda config: not scores_on_ranks(config),
    ),
    Rule(
        "drain_waits",
        ("rollout/idle_share", "rollout/in_flight"),
        10,
        signals.waits_for_drain,
        "pushes wait for what is generated in over 10 % of the time (rollout/idle_share), and a larger rollout.ahead "
        "does not change that; set rollout.update=in_place, or add servers (rollout.num_servers)",
        applies=drains,
    ),
    Rule(
        "turn_too_long",
        ("rollout/iterations_waiting",),
        10,
        # Taken in order=finished as soon as it is there, an iteration leaves nothing behind.
        signals.above(0.5),
        "the next iteration is more than half finished when the servers' turn ends (rollout/iterations_waiting), so "
        "the trainer waits for more than it takes; lower rollout.turn_s",
        applies=lambda config: in_turns(config) and config["rollout"].get("order") == "finished",
    ),
    Rule(
        "ahead_too_large",
        ("rollout/iterations_waiting",),
        10,
        signals.above(1.0),
        "more than an iteration of finished groups always waits (rollout/iterations_waiting) and only becomes older; "
        "lower rollout.ahead",
    ),
    Rule(
        "prefix_stale",
        ("rollout/stale_prefix", "rollout/tokens_wasted_share/stale"),
        3,
        signals.often_stale,
        "requests that wait in a server during a push find KV in its cache that may be of older weights, and are "
        "asked again, which wastes over 5 % of the tokens (rollout/stale_prefix, rollout/tokens_wasted_share); lower "
        "rollout.max_in_flight, so that few wait, or set rollout.update=retract",
    ),
    Rule(
        "tokens_wasted",
        ("rollout/tokens_wasted_share",),
        5,
        signals.above(0.1),
        "over 10 % of the tokens are generated and never trained (rollout/tokens_wasted_share, and by cause below it); "
        "look at the logs of the servers, raise rollout.request_timeout_s, or lower rollout.piece_tokens",
    ),
    Rule(
        "answers_unscored",
        ("rollout/tokens_wasted_share/unscored",),
        3,
        signals.above(0.05),
        "a reward fails on so many answers that over 5 % of the tokens are left out (rollout/tokens_wasted_share), and "
        "the rest is a biased choice; the collector's log has its errors, reward.timeout_s is its limit, and "
        "reward.on_error=zero counts 0 where the answer is to blame",
    ),
    Rule(
        "episodes_fail",
        ("agent/episodes", "agent/errors", "agent/timeouts"),
        3,
        signals.episodes_fail,
        "over a tenth of the episodes fail or take too long, and the rest is a biased choice; the collector's log has "
        "their errors, agent.timeout_s and agent.memory_mb are their limits, and agent.on_error=zero counts them as 0",
    ),
    Rule(
        "requests_refused",
        ("agent/refused",),
        3,
        signals.above(0),
        "requests of the agents are refused in every step (agent/refused), whether an agent catches that or not; the "
        "collector's log has the sentences, and agent.ignore lets the run's values replace fields",
    ),
    Rule(
        "rollouts_lost",
        ("rollout/lost",),
        5,
        signals.above(0),
        "prompts are lost in every step; raise rollout.request_timeout_s or lower rollout.max_running_requests, and "
        "look at the logs of the servers",
    ),
)
