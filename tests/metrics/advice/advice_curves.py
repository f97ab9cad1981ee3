"""Curves that are recorded while they are made: runs of a toy that learns through the loss layer itself.

The policy is a table of logits, prompt by place; an answer is right as far as its first tokens are those of the
prompt's target, whose last is the end.  Everything after the logits is the product's: estimate, correct, step_columns,
the two losses, the statistics.  A fault is a setting of the toy, as it is one of a run.
"""

from collections import deque
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megarl.algo import (
    ActorLoss,
    Correction,
    CriticLoss,
    correct,
    estimate,
    leave_out_old,
    overlong_filter,
    step_columns,
)
from megarl.metrics.computing.stats import batch_stats, finalise
from megarl.samples.batch import Batch, Stat, Stats, merge_stats

PROMPTS, PLACES, VOCABULARY, END = 12, 6, 8, 0
Metrics = dict[str, float]
EPISODES = ("agent/episodes", "agent/errors", "agent/timeouts", "agent/refused")
SCHEDULE = {"idle_share": 0.02, "finished_waiting": 3, "iterations_waiting": 0.25, "in_flight": 24, "stale_prefix": 0}
# rollout/* of a healthy run
SCHEDULE |= {"tokens_wasted_share": 0.01, "tokens_wasted_share/stale": 0.001, "tokens_wasted_share/unscored": 0.001}


@dataclass(frozen=True)
class Toy:
    """Settings of a run; the defaults are healthy.  A pair (step, value) holds from that step on, or in it alone."""

    steps: int = 60
    lr: float = 0.05
    lr_jump: tuple[int, float] = (10_000, 0.0)  # in that step alone
    critic_lr: float = 0.05
    epochs: int = 2
    n: int = 8
    estimator: str = "gae"  # the critic learns with gae only
    kl_in_reward: bool = False
    certainty: float = 1.0  # of the target's logits at the start
    end_bias: float = 1.5  # of the logit that ends an answer
    ahead: int = 0  # steps that the policy which writes is behind
    max_age: int | None = None  # of a token that counts
    server_noise: float = 0.0  # of the logits of the policy that writes
    trainer_noise: float = 0.0  # of the trainer's first pass
    reward_scale: float = 1.0
    reward_turns: int = 10_000  # from this step on the rewards have the wrong sign
    jolts: tuple[int, ...] = ()  # steps in which the rewards count 100 times
    cliprange_value: float | None = 0.5
    correction: Correction = Correction()
    overlong_filtering: bool = False
    loss: tuple[tuple[str, Any], ...] = ()  # fields of ActorLoss
    lost: int = 0  # prompts that no server answered, in every step
    dropped_share: float = 0.0  # of the groups, by dynamic sampling
    reward_s: float = 0.1  # of a step of 10 seconds
    episodes: tuple[int, int, int, int] = (64, 0, 0, 0)  # of agents; errors, late ones, refused requests
    schedule: tuple[tuple[str, float], ...] = ()  # of SCHEDULE, where the run has others


@dataclass
class State:
    toy: Toy
    generator: torch.Generator
    target: Tensor  # [PROMPTS, PLACES]
    logits: Tensor
    values: Tensor  # [PROMPTS, PLACES]
    reference: Tensor


@cache
def run(toy: Toy) -> list[Metrics]:
    """The metrics of each step."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(1, VOCABULARY, (PROMPTS, PLACES), generator=g)
    target[torch.arange(PROMPTS), torch.arange(PROMPTS) % 3 + 1] = END
    logits = torch.randn(PROMPTS, PLACES, VOCABULARY, generator=g)
    logits.scatter_add_(2, target.unsqueeze(2), torch.full((PROMPTS, PLACES, 1), toy.certainty))
    logits[:, :, END] += toy.end_bias
    values = torch.zeros(PROMPTS, PLACES).requires_grad_()
    state = State(toy, g, target, logits.requires_grad_(), values, logits.detach().clone())
    actor = torch.optim.Adam([state.logits], lr=toy.lr, betas=(0.9, 0.99))
    critic = torch.optim.Adam([state.values], lr=toy.critic_lr, betas=(0.9, 0.99))
    past = deque([state.logits.detach().clone()], maxlen=toy.ahead + 1)
    out = []
    for step in range(toy.steps):
        actor.param_groups[0]["lr"] = toy.lr_jump[1] if step == toy.lr_jump[0] else toy.lr
        out.append(_step(state, step, past[0], len(past) - 1, actor, critic))
        past.append(state.logits.detach().clone())
    return out


def _step(
    state: State, step: int, writer: Tensor, lag: int, actor: torch.optim.Optimizer, critic: torch.optim.Optimizer
) -> Metrics:
    toy = state.toy
    noise = torch.randn(writer.shape, generator=state.generator)
    batch, place = _answers(state, writer + toy.server_noise * noise, step, lag)
    noise = torch.randn(writer.shape, generator=state.generator)
    old = _columns(state.logits + toy.trainer_noise * noise, batch, place)[0].detach()
    ref = _columns(state.reference, batch, place)[0]
    batch = batch.with_columns(old_log_probs=old, ref_log_probs=ref, values=_values(state, batch, place).detach())
    if toy.overlong_filtering:
        batch, _ = overlong_filter(batch)
    kl = {"use_kl_in_reward": toy.kl_in_reward, "kl_coef": 0.001}
    batch, stats = estimate(batch, adv_estimator=toy.estimator, **kl)
    batch, of_ages = leave_out_old(batch, version=step, max_age=toy.max_age)
    batch, found = correct(batch, toy.correction, version=step)
    stats |= of_ages | found
    update = partial(_update, batch, step)
    steps = []
    for _ in range(toy.epochs):
        if toy.estimator == "gae":
            loss = CriticLoss(toy.cliprange_value)
            steps.append(update("critic", loss, critic, {"values": _values(state, batch, place)}))
        log_probs, entropy = _columns(state.logits, batch, place)
        loss = ActorLoss(**{"use_kl_loss": True, "kl_loss_coef": 0.001, **dict(toy.loss)})
        steps.append(update("actor", loss, actor, {"log_probs": log_probs, "entropy": entropy}))
    of_collector = {"rollout/lost": float(toy.lost), "rollout/dropped_share": toy.dropped_share}
    of_collector |= {f"rollout/{name}": float(value) for name, value in (SCHEDULE | dict(toy.schedule)).items()}
    of_collector |= dict(zip(EPISODES, map(float, toy.episodes), strict=True))
    of_collector |= {"timing_s/reward": toy.reward_s, "timing_s/step": 10.0}
    merged = merge_stats(steps)
    first = next((s["actor/ppo_kl"] for s in steps if "actor/ppo_kl" in s), None)
    merged |= {} if first is None else {"actor/first_ppo_kl": first}
    return finalise(stats | merged) | batch_stats(batch, version=step) | of_collector


def _answers(state: State, logits: Tensor, step: int, lag: int) -> tuple[Batch, Tensor]:
    """A scored batch, and the row of the table that each of its tokens is drawn from; -1: a prompt's."""
    toy = state.toy
    prompt = torch.arange(PROMPTS).repeat_interleave(toy.n)
    drawn = torch.multinomial(logits.softmax(-1).reshape(-1, VOCABULARY), toy.n, replacement=True,
                              generator=state.generator)  # fmt: skip
    answer = drawn.reshape(PROMPTS, PLACES, toy.n).transpose(1, 2).reshape(-1, PLACES)
    ends = (answer == END).long()
    before = (ends.cumsum(1) - ends) == 0
    lengths = before.sum(1)
    right = ((answer == state.target[prompt]) & before).long().cumprod(1).sum(1)
    needed = (state.target[prompt] == END).long().argmax(1) + 1
    score = right.clamp(max=needed).float() / needed * toy.reward_scale
    if step >= toy.reward_turns:
        score = toy.reward_scale - 2 * score
    if step in toy.jolts:
        score = score * 100
    inside = torch.cat([torch.ones(len(prompt), 1, dtype=torch.bool), before], 1)
    at = prompt.unsqueeze(1) * PLACES + torch.arange(PLACES)
    place = torch.cat([torch.full((len(prompt), 1), -1), at], 1)[inside]
    tokens = torch.cat([prompt.unsqueeze(1), answer], 1)[inside]
    mask = (place >= 0).float()
    rows = {
        "score": score,
        "group": prompt,
        "truncated": (lengths == PLACES) & (answer[:, -1] != END),
        "version_min": torch.full((len(prompt),), step - lag),
    }
    # Weights changed while an answer was written: its second half is a step younger.
    versions = torch.where(place % PLACES < PLACES // 2, step - lag, step - lag + min(lag, 1)).int()
    columns = {"response_mask": mask, "versions": torch.where(place >= 0, versions, -1)}
    batch = Batch(tokens, lengths + 1, columns, rows)
    return batch.with_columns(rollout_log_probs=_columns(logits, batch, place)[0].detach()), place


def _columns(logits: Tensor, batch: Batch, place: Tensor) -> tuple[Tensor, Tensor]:
    """log_probs [N] and entropy [N]."""
    logs = logits.log_softmax(-1).reshape(-1, VOCABULARY)[place.clamp(min=0)]
    token = torch.where(place >= 0, batch.tokens, 0)
    live = batch.columns["response_mask"] if "response_mask" in batch.columns else (place >= 0).float()
    return logs.gather(1, token.unsqueeze(1)).squeeze(1) * live, -(logs.exp() * logs).sum(1)


def _values(state: State, batch: Batch, place: Tensor) -> Tensor:
    return state.values.reshape(-1)[place.clamp(min=0)]


def _update(
    of_batch: Batch,
    seed: int,
    kind: str,
    loss: ActorLoss | CriticLoss,
    optimizer: torch.optim.Optimizer,
    outputs: dict[str, Tensor],
) -> Stats:
    """One optimizer step, as a role takes it."""
    batch = step_columns(of_batch, loss=loss, agg_mode="token-mean", seed=seed)
    if not batch.columns["weight"].any():
        return {f"{kind}/skipped_steps": Stat("sum", 1.0)}
    found = loss(batch, outputs)
    optimizer.zero_grad()
    found.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    numbers = {"grad_norm": float(norm), "lr": optimizer.param_groups[0]["lr"]}
    means = {f"{kind}/{name}": Stat("mean", number) for name, number in numbers.items()}
    return found.stats | means | {f"{kind}/skipped_steps": Stat("sum", 0.0)}
