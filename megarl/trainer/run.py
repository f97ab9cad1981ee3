"""Starts the parts of a run: ranks, servers and collector; ends them in reverse order, also after an error.

The servers belong to the infrastructure and outlive a restart of the ranks.  Roles with the same layout on the same
ranks share a Group; a role with another layout gets its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from megarl.config import Config, from_yaml, layout_of, to_yaml
from megarl.config.placement import gpu_seats
from megarl.group import Group
from megarl.layout import Layout
from megarl.metrics.jsonl import drop_after
from megarl.metrics.timer import Timer
from megarl.metrics.trackers import Trackers
from megarl.plugins import load_plugins
from megarl.rewards import REWARDS, load_reward
from megarl.roles.handles import PushSettings
from megarl.rollout.client import ServerClient
from megarl.rollout.collector_client import CollectorClient
from megarl.rollout.prefetch import Prefetcher
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.trust import Trusts
from megarl.sample import Batch
from megarl.servers import supervisor
from megarl.servers.router import Routed
from megarl.servers.sglang_environment import sglang_python
from megarl.trainer import checkpoint
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.build import (
    make_collector,
    make_group,
    model_folder,
    ranks_address,
    read_prompts,
    start_trackers,
)
from megarl.trainer.colocation import ALL, GENERATION, check_shared_gpus
from megarl.trainer.evaluate import Evaluator
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.roles import Roles, load_roles, make_roles, trainers_turn
from megarl.trainer.server_manager import Push, ServerManager
from megarl.weights.verify.canary import Canary

# Maximum difference of a server's log-probs of the canary: its kernels and its order of summation are different.
# Tensors in the wrong place, which the canary has to detect, cause differences of 1 and more.
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
CANARY_TOKENS = 64


class Run:
    """Use as a context manager.

    Example: with Infrastructure(config) as infrastructure, Run(config, infrastructure) as run: ...
    """

    roles: Roles
    server_manager: ServerManager
    collector: CollectorClient
    prefetcher: Prefetcher
    evaluator: Evaluator
    timer: Timer
    trackers: Trackers

    def __init__(
        self, config: Config, infrastructure: Infrastructure, resume: checkpoint.Checkpoint | None = None
    ) -> None:
        """`resume`: the checkpoint to resume from; None: the one that trainer.resume_mode selects."""
        self.config, self._infrastructure = config, infrastructure
        self.dir = config.trainer.run_dir
        self.model_path = model_folder(config.model.path)
        if config.rollout.engine == "sglang" and (not config.rollout.urls or config.rollout.router):
            sglang_python(config.rollout.sglang.python)  # raises if it is missing
        check_shared_gpus(config)
        load_plugins(config.algorithm.plugins)
        if not isinstance(REWARDS.get(config.reward.fn), str):  # a user's function from a file or a plug-in
            load_reward(config.reward.fn)
        self.algorithm = make_algorithm(config)
        if self.algorithm.reference or self.algorithm.actor.reference:
            check_vocabularies(self.model_path, model_folder(config.ref.model.path), config)
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
                "use a smaller batch, more epochs, or trainer.total_training_steps"
            )
        warmup = self.algorithm.critic_warmup
        if warmup >= self.num_steps:
            raise ValueError(
                f"trainer.critic_warmup={warmup}: expected fewer than the {self.num_steps} steps of the run"
            )
        self.resumed_from = resume or checkpoint.find(config.trainer.resume_mode, self.checkpoints)
        self.last_save = resume
        self.first_step = self.resumed_from.step if self.resumed_from else 0
        self._groups: dict[tuple[Layout, int, int], Group] = {}  # layout, first rank, ranks
        self._stack = ExitStack()

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._stack.close()

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
        self.roles = make_roles(config, self.algorithm, self._group_of)
        self.trackers.stage("starting servers")
        token, processes = self._infrastructure.server_token, self._infrastructure.serve()
        if config.rollout.ahead:
            check_version_spans(processes.urls, token)
        router = self._infrastructure.router
        self._start_collector([router.url] if router else processes.urls, token)
        asked = Routed(router, self.collector) if router else self.collector
        self.server_manager = self._make_server_manager(processes, asked)
        for group in self._groups.values():
            group.start()
        self.server_manager.release_memory()
        load_roles(self.roles, config, self.num_steps, self.algorithm.critic_warmup)
        if self.roles.actor.lacks_transformer_engine:
            self._warn(
                "Transformer-Engine is not installed: Megatron's local layers are slower and take more memory than "
                "`megarl plan` says; install it, or set transformer_impl=local"
            )
        self.roles.actor.connect(self._push_settings(processes.urls, token))
        if self.resumed_from is not None:
            checkpoint.restore(self.resumed_from, self.roles.trainable)
            self.prompts.load_state_dict(self.resumed_from.state["prompts"])
            self.algorithm.kl.load_state_dict(self.resumed_from.state["kl"])
        self.roles.offload()
        (self.dir / "summary.json").unlink(missing_ok=True)  # only a finished run has one

    def _make_server_manager(self, processes: supervisor.Servers, asked: Trusts) -> ServerManager:
        """Servers on shared GPUs get the canary when they have resumed their KV cache, all others with the push."""
        longest = min(CANARY_TOKENS, self.config.data.max_prompt_length + self.config.data.max_response_length)
        words = (token for prompt in self.prompts.all(CANARY_TOKENS) for token in prompt.token_ids)
        ids = list(islice(words, longest))
        colocation, lora = self._infrastructure.colocation, self.config.actor.lora
        if colocation is None:
            return ServerManager(processes, asked, self._pusher(ids), self._warn)
        return ServerManager(
            processes,
            asked,
            self._pusher(None),
            self._warn,
            colocation,
            canary=lambda: Canary.from_json(self._canary(ids)),
            lends=GENERATION if lora.rank and lora.push == "adapter" else ALL,  # adapter pushes do not restore the base
        )

    def _pusher(self, ids: list[int] | None) -> Push:
        """The function that pushes the actor's weights to some servers; `ids`: the canary's tokens, None: no canary."""
        canary = lambda: None if ids is None else self._canary(ids)  # noqa: E731
        return lambda only, version: self.roles.actor.push(version, only=only, canary=canary())

    def _push_settings(self, urls: Sequence[str], token: str) -> PushSettings:
        """How the ranks reach the servers; only adapters are pushed if actor.lora.push=adapter."""
        rollout, lora = self.config.rollout, self.config.actor.lora
        return PushSettings(
            urls=tuple(urls),
            token=token,
            dtype=rollout.dtype,
            bucket_bytes=rollout.bucket_bytes,
            # A push waits for a server several times, and must end before the call of the ranks times out.
            timeout_s=min(rollout.request_timeout_s, self.config.trainer.call_timeout_s / 6),
            pause_mode="in_place" if rollout.ahead else "retract",
            # Adapters of running completions, and the new one.
            adapters_kept=rollout.ahead + 2 if lora.rank and lora.push == "adapter" else 0,
            transport=rollout.push,
            check_every=rollout.check_every,
            gpus=gpu_seats(self.config, urls),
        )

    def _canary(self, ids: list[int]) -> dict[str, Any]:
        """A prompt and its log-probs under the actor, which every server has to reproduce after a push."""
        batch = Batch(torch.tensor(ids), torch.tensor([len(ids)]), {})
        log_probs = self.roles.actor.log_probs(batch, temperature=1.0)[1:].tolist()
        return {"prompt_ids": ids, "log_probs": log_probs, "tolerance": CANARY_TOLERANCE[self.config.rollout.dtype]}

    def _warn(self, sentence: str) -> None:
        Console(stderr=True, soft_wrap=True).print(f"warning: {sentence}", markup=False, highlight=False)

    def _say_what_resumes(self) -> None:
        """Print the step to resume from and the settings that differ.

        Raises ValueError for a finished run with other settings: its results must not appear under the new ones.
        """
        if self.resumed_from is None:
            return
        file, console = self.dir / "config.yaml", Console(stderr=True, soft_wrap=True)
        changed = checkpoint.changes(from_yaml(file.read_text()), self.config) if file.exists() else []
        if changed and self.first_step >= self.num_steps:
            raise ValueError(
                f"{self.dir} is finished, with other settings ({', '.join(changed)}); use another "
                "trainer.experiment_name, more steps, or trainer.resume_mode=disable"
            )
        for change in changed:
            console.print(f"warning: changed since the run began: {change}", markup=False, highlight=False)
        console.print(f"going on from step {self.first_step} ({self.resumed_from.folder})", highlight=False)

    def _group_of(self, role: Any) -> Group:
        """The Group of a role's configuration, shared by all roles of the same layout on the same ranks."""
        world = layout_of(role.megatron), role.first_rank, role.num_ranks
        if world not in self._groups:
            nodes, name = self._infrastructure.nodes, f"ranks_{len(self._groups)}"
            address = "127.0.0.1" if nodes else ranks_address(self.config)
            group = make_group(self.config, role, name, nodes=nodes, address=address)
            self._groups[world] = self._stack.enter_context(group)
        return self._groups[world]

    def _start_collector(self, urls: Sequence[str], token: str) -> None:
        config = self.config
        self.collector = make_collector(config, urls, token, fenced=True)
        self._stack.callback(self.collector.close)
        self.prefetcher = Prefetcher(
            self.collector,
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
            greedy=self.algorithm.wants_greedy,
            keep=self.algorithm.keep,
        )
        self.evaluator = Evaluator(self.collector, self.val_prompts, config)

    def save(self, step: int, position: dict[str, Any], totals: dict[str, Any]) -> None:
        """Save a checkpoint after `step` iterations; `position`: the position in the prompts after them.

        The seed is the whole random state: completions, orders and shuffles depend only on it and the step or prompt,
        and ranks draw no random numbers because dropout is 0.
        """
        algorithm = self.algorithm
        state = {"prompts": position, "kl": algorithm.kl.state_dict(), "totals": totals, "seed": algorithm.seed}
        keep = self.config.trainer.max_checkpoints_to_keep
        with trainers_turn(self.roles, self.server_manager, self.timer):
            self.last_save = checkpoint.save(self.checkpoints, step, self.roles.trainable, state, keep=keep)
        if self.server_manager.shares_gpus:  # the servers have released the weights of their last push
            self.server_manager.push(step)


def check_vocabularies(policy: str, reference: str, config: Config) -> None:
    """Raises ValueError if the models of two folders have different vocabulary sizes, so that no full KL exists."""
    ours, theirs = (json.loads((Path(f) / "config.json").read_text())["vocab_size"] for f in (policy, reference))
    if ours != theirs:
        compared = f"a full KL compares them token for token with the {ours} of model.path={config.model.path}"
        raise ValueError(
            f"ref.model.path={config.ref.model.path}: its vocabulary has {theirs} tokens, and {compared}; "
            "expected a model with the same vocabulary"
        )


def check_version_spans(urls: Sequence[str], token: str) -> None:
    """Raises ValueError for a server that does not report the weights version of each token.

    With rollout.ahead > 0 a push may come in the middle of a completion.
    """
    for url in urls:
        engine = ServerClient(url, token)
        spans = engine.abilities.version_spans
        engine.close()
        if not spans:
            raise ValueError(
                "rollout.ahead: this SGLang tells only one version a completion; expected 0, or 0.5.20 and newer"
            )
