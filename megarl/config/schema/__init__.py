"""Every key of a run, with its type, its default and its meaning: one dataclass per group.

A default written `II("other.key")` follows that key unless it is set; null on the command line or in a file means
"follow" for such a key.  `load_config` and `resolved` put the final values in, so that readers see plain numbers.
Sizes of batches count prompts unless the comment says otherwise; a length counts tokens; `_s` is seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.arch.sglang_options import asks_to_draft
from megarl.config.names import ESTIMATORS_WITHOUT_CRITIC, FULL_KL, MEGATRON
from megarl.config.schema.algorithm import Algorithm
from megarl.config.schema.data import Data, Dpo, Reward, Sft
from megarl.config.schema.record import DPO, OF_ROWS, RL, RL_EVALUATE, RL_SFT, If, key
from megarl.config.schema.roles import Actor, Critic, Distill, Megatron, Model, Optim, Ref, Teacher
from megarl.config.schema.rollout import Agent, Rollout
from megarl.config.schema.trainer import Trainer
from megarl.io.sockets import is_loopback

__all__ = ["Algorithm", "Config", "Megatron", "Optim"]


@dataclass
class Config:
    """A whole run.  Example: config.actor.optim.lr, config.trainer.run_dir."""

    data: Data = key(Data, "files of prompts, batch size, lengths", RL_EVALUATE)
    model: Model = key(Model, "the policy at the start: a Hugging Face folder or hub name")
    actor: Actor = key(Actor, "its loss, optimizer and layout (actor.optim.*, actor.megatron.*)", RL_SFT)
    critic: Critic = key(
        Critic,
        "the same for the value model; follows the actor unless set, but for critic.optim.*",
        If("there is a critic"),
        RL,
    )
    ref: Ref = key(Ref, "the reference policy of the KL terms", If("there is a reference"), RL)
    teachers: dict[str, Teacher] = key(
        {}, "models from which the policy learns, each with a name of its own (teachers.NAME.*)", RL
    )
    distill: Distill = key(
        Distill, "how it learns from them: a divergence as loss, or log-probs as reward", If("teachers != {}"), RL
    )
    rollout: Rollout = key(Rollout, "what generates the completions, and how they are sampled", RL_EVALUATE)
    algorithm: Algorithm = key(Algorithm, "policy loss, advantages, KL in the reward, plug-ins", RL)
    reward: Reward = key(Reward, "what scores a completion", RL_EVALUATE)
    agent: Agent = key(
        Agent,
        "episodes of several turns with tools, in place of plain completions",
        If("there are agents"),
        RL_EVALUATE,
    )
    trainer: Trainer = key(Trainer, "names, ranks, steps, checkpoints, trackers")
    sft: Sft = key(Sft, "rows of the stages beside RL (megarl sft, dpo, rm)", OF_ROWS)
    dpo: Dpo = key(Dpo, "loss on pairs of answers (megarl dpo)", DPO)

    @property
    def uses_critic(self) -> bool:
        """Does the advantage estimator need values?  True for a plug-in's: that is known only after it is loaded."""
        return self.algorithm.adv_estimator not in ESTIMATORS_WITHOUT_CRITIC

    @property
    def has_agents(self) -> bool:
        """Are there episodes instead of plain completions?"""
        return self.agent.fn is not None or bool(self.agent.command)

    @property
    def longest(self) -> tuple[str, int]:
        """The key, or keys, of the longest sample, and its length in tokens."""
        if self.has_agents and self.agent.max_tokens is not None:
            return "agent.max_tokens", self.agent.max_tokens
        together = self.data.max_prompt_length + self.data.max_response_length
        return "data.max_prompt_length + data.max_response_length", together

    @property
    def longest_evaluated(self) -> tuple[str, int]:
        """The same of evaluations, whose completions have a limit of their own; 0 tokens without one."""
        if not self.data.val_files:
            return "data.val_files", 0
        if self.has_agents:
            return self.longest
        together = self.data.max_prompt_length + self.rollout.val_kwargs.max_response_length
        return "data.max_prompt_length + rollout.val_kwargs.max_response_length", together

    @property
    def longest_served(self) -> tuple[str, int]:
        """The same of what servers generate, in training or in an evaluation."""
        return max(self.longest, self.longest_evaluated, key=lambda found: found[1])

    @property
    def uses_reference(self) -> bool:
        """Is there a KL term, in the loss or in the reward?"""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def narrows_sampling(self) -> bool:
        """Are the tokens that are learnt drawn from a part of the distribution?"""
        return self.rollout.top_p < 1 or self.rollout.top_k != -1

    @property
    def teacher_roles(self) -> tuple[str, ...]:
        """The groups of keys of all teachers: teachers.NAME."""
        return tuple(f"teachers.{name}" for name in self.teachers)

    @property
    def teachers_on_ranks(self) -> tuple[str, ...]:
        """Those of teachers that run on the trainer's ranks."""
        return tuple(role for role in self.teacher_roles if self.role(role).engine == MEGATRON)

    def role(self, name: str) -> Any:
        """The keys of a role: "actor", "critic", "ref" or "teachers.NAME"."""
        group, _, entry = name.partition(".")
        return self.teachers[entry] if group == "teachers" else getattr(self, group)

    @property
    def divergence_of_vocabulary(self) -> str:
        """The setting that compares the policy with teachers over the whole vocabulary; "" if none does."""
        is_whole = self.teachers and self.distill.form == "loss" and self.distill.top_k is None
        return "distill.top_k=null" if is_whole else ""

    @property
    def scores_on_ranks(self) -> bool:
        """Does a reward model score on the trainer's ranks?"""
        rewards = (*self.reward.fn, *self.reward.by_data_source.values())
        return "model" in rewards and self.reward.model.engine == MEGATRON

    @property
    def adapters_kept(self) -> int:
        """Adapters that a server keeps: those of running completions, and the new one; 0: it gets merged weights."""
        lora = self.actor.lora
        return self.rollout.ahead + 2 if lora.rank > 0 and lora.push == "adapter" else 0

    @property
    def drafts(self) -> bool:
        """Whether servers draft with the policy's own MTP layers, which pushes bring them."""
        return self.actor.mtp != "off" and asks_to_draft(self.rollout.sglang.args)

    @property
    def compares_servers(self) -> bool:
        """Whether a collector has several servers, or may get them, so that it can find a slow one."""
        rollout = self.rollout
        num_servers = len(rollout.urls) or rollout.num_servers
        return not rollout.router and (rollout.join is not None or num_servers > (rollout.num_collectors or 1))

    @property
    def serves_other_machines(self) -> bool:
        """May its servers listen at an address that other machines reach?"""
        return self.trainer.nnodes > 1 or self.rollout.join is not None or not is_loopback(self.rollout.host)

    @property
    def first_push_is_whole(self) -> bool:
        """Does the first push bring every weight of a server as it is computed with?  Not for adapters, nor for fp8."""
        return not self.adapters_kept and self.rollout.quantization == "none"

    @property
    def full_kl(self) -> str:
        """The setting that compares the full distributions of actor and reference at each token; "" if none does."""
        if self.actor.use_kl_loss and self.actor.kl_loss_type in FULL_KL:
            return f"actor.kl_loss_type={self.actor.kl_loss_type}"
        in_reward = self.algorithm.use_kl_in_reward and self.algorithm.kl_penalty in FULL_KL
        return f"algorithm.kl_penalty={self.algorithm.kl_penalty}" if in_reward else ""
