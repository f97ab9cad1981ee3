"""The models of a run: made from the configuration, loaded, and onloaded to shared GPUs for the training phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megarl.config import Config
from megarl.config.validate.rewards import names_of
from megarl.group import Group
from megarl.metrics.timer import Timer
from megarl.ragged import names_in_batch
from megarl.roles.handles import Actor, Critic, Packing, Reference, Role, Trainable
from megarl.roles.reward_model import RewardModel
from megarl.routed_experts import ROUTED_EXPERTS
from megarl.sample import SUPPORT
from megarl.trainer.algorithm import REFERENCE, Algorithm
from megarl.trainer.build import (
    engine_settings,
    lora_settings,
    model_folder,
    optim_settings,
    optimizer_steps,
    plugins,
)
from megarl.trainer.servers.server_manager import ServerManager
from megarl.trainer.teachers import Teachers


@dataclass(frozen=True)
class Roles:
    """The policy; the critic and the reference if the algorithm needs them; teachers; a reward model on ranks."""

    actor: Actor
    critic: Critic | None = None
    reference: Reference | None = None
    reward_model: RewardModel | None = None
    teachers: Teachers | None = None
    residents: tuple[Role, ...] = ()  # some of them stays on the GPUs for the training phase, if servers share these

    @property
    def trainable(self) -> dict[str, Actor | Critic]:
        """The roles that a checkpoint contains."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def offload(self) -> None:
        """Offload the residents at the end of the training phase."""
        for role in self.residents:
            role.offload()


def make_roles(
    config: Config, algorithm: Algorithm, group_of: Callable[[Any], Group], teachers: Teachers | None = None
) -> Roles:
    """Roles without weights; `group_of` returns the ranks for the configuration of a role."""
    temperature, shares = config.rollout.temperature, config.trainer.share_prefixes
    support = names_in_batch(SUPPORT) if config.narrows_sampling else ()
    experts = (ROUTED_EXPERTS,) if config.actor.router_replay != "off" else ()
    actor = Actor(
        "actor",
        group_of(config.actor),
        Packing(config.actor.ppo_max_token_len_per_gpu, config.actor.ppo_micro_batch_size_per_gpu, shares),
        temperature,
        inputs=(*support, *experts),
        update_settings=algorithm.actor,
    )
    critic, reference, reward_model = None, None, None
    if algorithm.critic:
        critic = Critic(
            "critic",
            group_of(config.critic),
            Packing(config.critic.ppo_max_token_len_per_gpu, config.critic.ppo_micro_batch_size_per_gpu, shares),
            update_settings=algorithm.critic,
        )
    if config.uses_reference:
        reference = Reference(
            REFERENCE,
            group_of(config.ref),
            Packing(config.ref.log_prob_max_token_len_per_gpu, config.ref.log_prob_micro_batch_size_per_gpu, shares),
            temperature,
            inputs=support,
        )
    if config.scores_on_ranks:
        longest = config.ref.log_prob_max_token_len_per_gpu
        reward_model = RewardModel(
            "reward_model",
            group_of(config.ref),
            # Its sequences have one token more.
            Packing(longest and longest + 1, config.ref.log_prob_micro_batch_size_per_gpu, shares),
            weight=config.reward.weights.get("model", 1.0) if len(names_of(config)) > 1 else 1.0,
        )
    made: list[tuple[Role | None, Any]] = [(actor, config.actor), (critic, config.critic), (reference, config.ref)]
    made.append((reward_model, config.ref))
    made += [(model, config.teachers[name]) for name, model in teachers.on_ranks.items()] if teachers else []
    shared = config.rollout.placement == "shared"
    residents = tuple(role for role, keys in made if role and shared and _stays(role, keys.megatron))
    return Roles(actor, critic, reference, reward_model, teachers, residents)


def _stays(role: Role, megatron: Any) -> bool:
    """Whether some of the role is on the GPUs between its calls."""
    return not (megatron.param_offload and (megatron.optimizer_offload or not isinstance(role, Trainable)))


def load_roles(roles: Roles, config: Config, num_steps: int, critic_warmup: int, *, resumes: bool) -> None:
    """Load the weights of their folders, and make optimizers for a run of `num_steps` steps.

    `resumes`: a checkpoint is restored next.  It has all weights of what is trained but the base of adapters.
    """
    dtype, lora = config.model.dtype, lora_settings(config)
    roles.actor.load(
        model_folder(config.model.path),
        dtype=dtype,
        optim=optim_settings(config.actor, optimizer_steps(config, config.actor, num_steps - critic_warmup)),
        plugins=plugins(config),
        lora=lora,
        engine=engine_settings(config.actor),
        reads_weights=lora is not None or not resumes,
        router_replay=config.actor.router_replay != "off",
    )
    if roles.critic:
        optim = optim_settings(config.critic, optimizer_steps(config, config.critic, num_steps))
        engine = engine_settings(config.critic)
        critic = model_folder(config.critic.model.path)
        roles.critic.load(critic, dtype=dtype, optim=optim, engine=engine, reads_weights=not resumes)
    if roles.reference:
        engine = engine_settings(config.ref)
        roles.reference.load(model_folder(config.ref.model.path), dtype=dtype, engine=engine)
    if roles.reward_model:
        folder = model_folder(config.reward.model.path or "", "reward.model.path")
        roles.reward_model.load(folder, dtype=dtype, engine=engine_settings(config.ref))
    if roles.teachers:
        folders = {n: model_folder(keys.model.path, f"teachers.{n}.model.path") for n, keys in config.teachers.items()}
        for name, model in roles.teachers.on_ranks.items():
            model.load(folders[name], dtype=dtype, engine=engine_settings(config.teachers[name]))
        if config.divergence_of_vocabulary:
            roles.actor.load_heads(list(folders.values()))


@contextmanager
def trainers_turn(roles: Roles, server_manager: ServerManager, timer: Timer) -> Iterator[None]:
    """The training phase on shared GPUs: servers release memory, roles are onloaded, and offloaded at the end.

    The servers need a push afterwards.  Does nothing if servers have their own GPUs.
    """
    if not server_manager.shares_gpus:
        yield
        return
    with timer("turn"):
        server_manager.release_memory()
        # Copies share a link: moments, for which nobody waits yet, come last.
        for moments in (False, True):
            for role in roles.residents:
                role.onload(by_default=True, moments=moments)
    yield
    with timer("turn"):
        roles.offload()
