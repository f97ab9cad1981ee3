"""What a run is made of, started in one place and ended in reverse order whatever happens.

Servers and ranks start side by side; roles that share a layout share a Group, a role with a layout of its own gets one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from megarl import checkpoint
from megarl.algo.kl import make_kl_controller
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.registry import load_plugins
from megarl.config import Config, from_yaml, to_yaml
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import Prompts
from megarl.group import Group
from megarl.mcore.setup import Layout
from megarl.metrics.jsonl import drop_after
from megarl.metrics.timer import Timer
from megarl.metrics.trackers import Trackers, make_trackers
from megarl.rewards.pool import RewardPool
from megarl.roles.handles import Actor, Critic, Packing, Reference, Servers, Update
from megarl.rollout import supervisor
from megarl.rollout.feed import Feed
from megarl.rollout.launch import EngineLaunch
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.stream import Stream


class Run:
    """Use as a context manager.  Example: with Run(config) as run: run.actor.push(run.servers, version=0)"""

    actor: Actor
    critic: Critic | None = None
    reference: Reference | None = None
    servers: Servers
    stream: Stream
    feed: Feed
    trackers: Trackers

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dir = config.trainer.run_dir
        self.model_path = model_folder(config.model.path)
        load_plugins(config.algorithm.plugins)
        data = config.data
        self.prompts = read_prompts(config, data.train_files, overlong=data.overlong_prompts)
        val = read_prompts(config, data.val_files, overlong=data.overlong_prompts) if data.val_files else None
        self.val_prompts = val.all(data.val_max_samples) if val else []
        self.num_filtered = self.prompts.num_filtered + (val.num_filtered if val else 0)
        steps = config.trainer.total_training_steps
        self.num_steps = steps or config.trainer.total_epochs * len(self.prompts) // config.data.train_batch_size
        if self.num_steps < 1:
            raise ValueError(
                f"data.train_batch_size={config.data.train_batch_size}: one epoch has {len(self.prompts)} prompts; "
                "want a smaller batch, more epochs, or trainer.total_training_steps"
            )
        self.warmup = config.trainer.critic_warmup if config.uses_critic else 0
        if self.warmup >= self.num_steps:
            raise ValueError(
                f"trainer.critic_warmup={self.warmup}: want fewer than the {self.num_steps} steps of the run"
            )
        kl = config.algorithm.kl_ctrl
        self.kl = make_kl_controller(kl.type, kl_coef=kl.kl_coef, target_kl=kl.target_kl, horizon=kl.horizon)
        self.resumed_from = checkpoint.find(config.trainer.resume_mode, self.checkpoints)
        self.first_step = self.resumed_from.step if self.resumed_from else 0
        self._groups: dict[Layout, Group] = {}
        self._stack = ExitStack()

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def trainable(self) -> dict[str, Actor | Critic]:
        """The roles that a checkpoint holds."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if isinstance(error, RuntimeError):
                self.check()  # a dead server explains a failed call better than the call does
        finally:
            self._stack.close()

    def check(self) -> None:
        """Raises ServerDied, with the end of its log, where a server has ended."""
        self._processes.check()

    def _start(self) -> None:
        config = self.config
        self.dir.mkdir(parents=True, exist_ok=True)
        self._say_what_resumes()
        (self.dir / "config.yaml").write_text(to_yaml(config))
        resume_step = self.first_step if self.resumed_from else None
        drop_after(self.dir / "samples.jsonl", resume_step)
        self.trackers = start_trackers(config, self.num_steps, resume_step)
        self._stack.callback(self.trackers.close)
        self.timer = Timer(on_stage=self.trackers.stage)

        self.trackers.stage("starting ranks")
        self._make_roles()
        self.trackers.stage("starting servers")
        token = secrets.token_hex(16)
        self._processes = self._stack.enter_context(make_servers(config, token))
        self._processes.start()
        self.servers = Servers(
            urls=tuple(self._processes.urls),
            token=token,
            dtype=config.rollout.dtype,
            bucket_bytes=config.rollout.bucket_bytes,
            timeout_s=config.rollout.request_timeout_s,
            pause_mode="in_place" if config.rollout.ahead else "retract",
        )
        for group in self._groups.values():
            group.start()
        self._load_roles()
        if self.resumed_from is not None:
            checkpoint.restore(self.resumed_from, self.trainable)
            self.prompts.load_state_dict(self.resumed_from.state["prompts"])
            self.kl.load_state_dict(self.resumed_from.state["kl"])
        self._start_stream(token)

    def _say_what_resumes(self) -> None:
        """Tell from where the run goes on and which settings differ; a finished run is not presented under new ones."""
        if self.resumed_from is None:
            return
        file, console = self.dir / "config.yaml", Console(stderr=True, soft_wrap=True)
        changed = changes(from_yaml(file.read_text()), self.config) if file.exists() else []
        if changed and self.first_step >= self.num_steps:
            raise ValueError(
                f"{self.dir} is finished, with other settings ({', '.join(changed)}); want another "
                "trainer.experiment_name, more steps, or trainer.resume_mode=disable"
            )
        for change in changed:
            console.print(f"warning: changed since the run began: {change}", markup=False, highlight=False)
        console.print(f"going on from step {self.first_step} ({self.resumed_from.folder})", highlight=False)

    def _make_roles(self) -> None:
        config = self.config
        critic, reference = config.critic, config.ref
        temperature = config.rollout.temperature
        self.actor = Actor(
            "actor",
            self._group_of(config.actor.megatron),
            Packing(config.actor.ppo_max_token_len_per_gpu, config.actor.ppo_micro_batch_size_per_gpu),
            temperature,
            update_settings=_actor_update(config),
        )
        if config.uses_critic:
            self.critic = Critic(
                "critic",
                self._group_of(critic.megatron),
                Packing(critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu),
                update_settings=_critic_update(config),
            )
        if config.uses_reference:
            self.reference = Reference(
                "ref",
                self._group_of(reference.megatron),
                Packing(reference.log_prob_max_token_len_per_gpu, reference.log_prob_micro_batch_size_per_gpu),
                temperature,
            )

    def _group_of(self, megatron: Any) -> Group:
        layout = layout_of(megatron)
        if layout not in self._groups:
            group = make_group(self.config, layout, f"ranks_{len(self._groups)}")
            self._groups[layout] = self._stack.enter_context(group)
        return self._groups[layout]

    def _load_roles(self) -> None:
        config = self.config
        dtype, plugins = config.model.dtype, config.algorithm.plugins
        steps_a = optimizer_steps(config, config.actor, self.num_steps - self.warmup)
        self.actor.load(self.model_path, dtype=dtype, optim=optim_settings(config.actor, steps_a), plugins=plugins)
        if self.critic:
            optim = optim_settings(config.critic, optimizer_steps(config, config.critic, self.num_steps))
            self.critic.load(model_folder(config.critic.model.path), dtype=dtype, optim=optim)
        if self.reference:
            self.reference.load(model_folder(config.ref.model.path), dtype=dtype)

    def _start_stream(self, token: str) -> None:
        config = self.config
        self.stream = make_stream(config, self.servers.urls, token)
        self._stack.callback(self.stream.close)
        self.feed = Feed(
            self.stream,
            self.prompts,
            num_prompts=config.data.train_batch_size,
            n=config.rollout.n,
            params=SamplingParams(
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                top_k=config.rollout.top_k,
                max_new_tokens=config.data.max_response_length,
                sampling_seed=config.rollout.seed,
            ),
            ahead=config.rollout.ahead,
            first_step=self.first_step,
            num_steps=self.num_steps,
        )

    def save(self, step: int, position: dict[str, Any], totals: dict[str, Any]) -> None:
        """A checkpoint after `step` iterations; `position` is that of the prompts behind them.

        The random state is the seed: completions, orders and shuffles are functions of it and the step or prompt,
        and with dropout at 0 no rank draws a random number.
        """
        state = {"prompts": position, "kl": self.kl.state_dict(), "totals": totals, "seed": self.config.trainer.seed}
        keep = self.config.trainer.max_checkpoints_to_keep
        checkpoint.save(self.checkpoints, step, self.trainable, state, keep=keep)


def changes(before: Config, now: Config) -> list[str]:
    """Settings that differ, as `key old -> new`, but for those that only say how long and where to."""
    old, new = flat(asdict(before)), flat(asdict(now))
    free = ("trainer.total_training_steps", "trainer.total_epochs", "trainer.logger", "trainer.resume_mode")
    return [f"{key} {old.get(key)} -> {new[key]}" for key in new if old.get(key) != new[key] and key not in free]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def model_folder(path: str) -> str:
    """A folder as it is; a hub name becomes the folder of its snapshot, downloaded where there is a network."""
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download  # pulls in a network stack that a local run does not need

    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
    except Exception as error:  # no network, no such name, no right to it: the hub has an exception for each
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"model.path={path}: neither a folder nor a name that the hub gives ({reason})") from error


def layout_of(megatron: Any) -> Layout:
    """The keys of an `actor.megatron` group as the room `mcore` names them."""
    return Layout(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )


def make_group(config: Config, layout: Layout, name: str) -> Group:
    trainer = config.trainer
    return Group(
        name,
        trainer.num_ranks,
        layout,
        log_dir=trainer.run_dir / "logs" / name,
        device=trainer.device,
        seed=trainer.seed,
        call_timeout_s=trainer.call_timeout_s,
    )


def start_trackers(config: Config, num_steps: int, resume_step: int | None) -> Trackers:
    trainer = config.trainer
    plain = {"config": to_yaml(config)}
    return make_trackers(
        trainer.logger, trainer.run_dir, trainer.project_name, trainer.experiment_name, plain, num_steps,
        resume_step=resume_step,
    )  # fmt: skip


def optimizer_steps(config: Config, role: Any, num_iterations: int) -> int:
    """Optimizer steps of a role in so many iterations."""
    return max(1, num_iterations * role.ppo_epochs * -(-config.data.train_batch_size // role.ppo_mini_batch_size))


def optim_settings(role: Any, total_steps: int) -> dict[str, Any]:
    """The `optim` group of a role as mcore.optimizer.OptimSettings names it."""
    optim = role.optim
    return {
        "name": optim.name,
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "momentum": optim.momentum,
        "max_grad_norm": role.max_grad_norm,
        "warmup_steps": optim.lr_warmup_steps,
        "decay_style": optim.lr_decay_style,
        "decay_steps": optim.lr_decay_steps or total_steps,
        "min_lr": optim.min_lr,
    }


def _actor_update(config: Config) -> Update:
    actor = config.actor
    loss = ActorLoss(
        policy_loss=config.algorithm.policy_loss_fn,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        entropy_coeff=actor.entropy_coeff,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        kl_importance=actor.kl_importance,
    )
    return _update(actor, loss)


def _critic_update(config: Config) -> Update:
    return _update(config.critic, CriticLoss(config.critic.cliprange_value))


def _update(role: Any, loss: ActorLoss | CriticLoss) -> Update:
    return Update(
        loss=loss,
        prompts_per_step=role.ppo_mini_batch_size,
        epochs=role.ppo_epochs,
        agg_mode=role.loss_agg_mode,
        loss_scale_factor=role.loss_scale_factor,
    )


def make_servers(config: Config, token: str) -> supervisor.Servers:
    """The rollout servers of a run, not yet started, with the weights of model.path."""
    rollout = config.rollout
    launch = EngineLaunch(
        rollout.engine,
        model_folder(config.model.path),
        host=rollout.host,
        dtype=rollout.dtype,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        max_running_requests=rollout.max_running_requests,
        max_total_tokens=rollout.max_total_tokens,
        random_seed=rollout.seed,
    )
    return supervisor.Servers([launch] * rollout.num_servers, token, config.trainer.run_dir / "logs")


def make_stream(config: Config, urls: Sequence[str], token: str) -> Stream:
    """The collector of a run, started."""
    reward = config.reward
    return Stream(
        urls=urls,
        token=token,
        tokenizer_path=model_folder(config.model.tokenizer_path),
        make_scorer=partial(RewardPool, reward.fn, reward.num_workers, reward.timeout_s, reward.on_error),
        timeout_s=config.rollout.request_timeout_s,
        log_path=config.trainer.run_dir / "logs" / "collector.log",
    )


def read_prompts(config: Config, files: Sequence[str], *, overlong: str) -> Prompts:
    """The prompts of these files as the run tokenises them."""
    data = config.data
    return Prompts(
        files,
        load_tokenizer(model_folder(config.model.tokenizer_path)),
        prompt_key=data.prompt_key,
        ground_truth_key=data.ground_truth_key,
        max_prompt_length=data.max_prompt_length,
        shuffle=data.shuffle,
        seed=data.seed,
        overlong=overlong,
        system_prompt=data.system_prompt,
    )
