"""The models of a run: made from the configuration, loaded, and onloaded to shared GPUs for the training phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megarl.algo.finite import BadNumber
from megarl.arch.routed_experts import INDEXED_KEYS, ROUTED_EXPERTS
from megarl.config import Config, model_config
from megarl.config.validate.rewards import names_of
from megarl.group import Group
from megarl.metrics.computing.timer import Timer
from megarl.roles.frozen import RewardModel
from megarl.roles.handles import Actor, Critic, Role, Trainable
from megarl.roles.settings import LoadSettings, Packing
from megarl.samples.float32 import is_finite
from megarl.samples.ragged import names_in_batch
from megarl.samples.sample import SUPPORT, Sample
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

MODEL = "model"  # the name of the reward model's score among the extra numbers of a sample


@dataclass(frozen=True)
class Roles:
    """The policy; the critic and the reference if the algorithm needs them; teachers; a reward model on ranks."""

    actor: Actor
    critic: Critic | None = None
    reference: Role | None = None
    reward_model: RewardModel | None = None
    teachers: Teachers | None = None
    residents: tuple[Role, ...] = ()  # some of them stays on the GPUs for the training phase, if servers share these

    @property
    def trainable(self) -> dict[str, Actor | Critic]:
        """The roles that a checkpoint contains."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def scored(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        """The groups with the reward model's scores of their samples added to the rewards, and to the extra numbers.

        It reads the last row of a sample: the prompt and all that was generated, or its view of the end of an episode.
        Samples without its stand-in stay as they are: of data sources with another reward, and episodes with their own.
        Raises BadNumber, naming the sample, for a score that is not finite.
        """
        samples = [sample for group in groups for sample in group if MODEL in sample.reward_extra]
        if self.reward_model is None or not samples:
            return groups
        weight, scores = self.reward_model.weight, self.reward_model.scores([s.rows[-1].token_ids for s in samples])
        found = iter(scores)
        return [
            [_with_score(s, next(found), weight) if MODEL in s.reward_extra else s for s in group] for group in groups
        ]

    def offload(self) -> None:
        """Offload the residents at the end of the training phase."""
        for role in self.residents:
            role.offload()


def _with_score(sample: Sample, score: float, weight: float) -> Sample:
    if not is_finite(score):
        raise BadNumber(f"the reward model's score of the sample {sample.prompt.uid} is {score}; expected a number")
    extra = {**sample.reward_extra, MODEL: score}
    return replace(sample, reward=sample.reward + weight * score, reward_extra=extra)


def make_roles(
    config: Config, algorithm: Algorithm, group_of: Callable[[Any], Group], teachers: Teachers | None = None
) -> Roles:
    """Roles without weights; `group_of` returns the ranks for the configuration of a role."""
    temperature, shares = config.rollout.temperature, config.trainer.share_prefixes
    support = names_in_batch(SUPPORT) if config.narrows_sampling else ()
    replay = config.actor.router_replay
    experts = (ROUTED_EXPERTS,) if replay != "off" else ()
    has_indexers = model_config(config, "actor").get("index_topk") is not None
    keys = (INDEXED_KEYS,) if replay == "rollout" and has_indexers else ()
    actor = Actor(
        "actor",
        group_of(config.actor),
        Packing(config.actor.ppo_max_token_len_per_gpu, config.actor.ppo_micro_batch_size_per_gpu, shares),
        temperature,
        inputs=(*support, *experts, *keys),
        update_settings=algorithm.actor,
    )
    critic = None
    reference = None
    reward_model = None
    if algorithm.critic:
        critic = Critic(
            "critic",
            group_of(config.critic),
            Packing(config.critic.ppo_max_token_len_per_gpu, config.critic.ppo_micro_batch_size_per_gpu, shares),
            update_settings=algorithm.critic,
        )
    if config.uses_reference:
        reference = Role(
            REFERENCE,
            group_of(config.ref),
            Packing(config.ref.ppo_max_token_len_per_gpu, config.ref.ppo_micro_batch_size_per_gpu, shares),
            temperature,
            inputs=support,
        )
    if config.scores_on_ranks:
        longest = config.ref.ppo_max_token_len_per_gpu
        reward_model = RewardModel(
            "reward_model",
            group_of(config.ref),
            # Its sequences have one token more.
            Packing(longest and longest + 1, config.ref.ppo_micro_batch_size_per_gpu, shares),
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
        LoadSettings(
            dtype,
            optim=optim_settings(config.actor, optimizer_steps(config, config.actor, num_steps - critic_warmup)),
            plugins=tuple(plugins(config)),
            lora=lora,
            engine=engine_settings(config.actor),
            reads_weights=lora is not None or not resumes,
            router_replay=config.actor.router_replay != "off",
            mtp=config.actor.mtp,
        ),
    )
    if roles.critic:
        optim = optim_settings(config.critic, optimizer_steps(config, config.critic, num_steps))
        engine = engine_settings(config.critic)
        settings = LoadSettings(dtype, optim, engine=engine, reads_weights=not resumes)
        roles.critic.load(model_folder(config.critic.model.path), settings)
    frozen = LoadSettings(dtype, engine=engine_settings(config.ref))
    if roles.reference:
        roles.reference.load(model_folder(config.ref.model.path), frozen)
    if roles.reward_model:
        roles.reward_model.load(model_folder(config.reward.model.path, "reward.model.path"), frozen)
    if roles.teachers:
        folders = {n: model_folder(keys.model.path, f"teachers.{n}.model.path") for n, keys in config.teachers.items()}
        for name, model in roles.teachers.on_ranks.items():
            model.load(folders[name], LoadSettings(dtype, engine=engine_settings(config.teachers[name])))
        if config.divergence_of_vocabulary:
            roles.actor.load_heads(list(folders.values()))


@contextmanager
def training_phase(roles: Roles, server_manager: ServerManager, timer: Timer) -> Iterator[None]:
    """The training phase on shared GPUs: servers release memory, roles are onloaded, and offloaded at the end.

    The servers need a push afterwards.  Does nothing if servers have their own GPUs.
    """
    if not server_manager.shares_gpus:
        yield
        return
    with timer("turn"):
        server_manager.release_memory()
        # Copies share a link: moments, which are needed later, come last.
        for moments in (False, True):
            for role in roles.residents:
                role.onload(by_default=True, moments=moments)
    yield
    with timer("turn"):
        roles.offload()
