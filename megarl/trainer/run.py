"""Starts the parts of a run: ranks, servers and collector; ends them in reverse order, also after an error.

The servers belong to the infrastructure and outlive a restart of the ranks.  Roles with the same layout on the same
ranks share a Group; a role with another layout gets its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from megarl.algo.finite import BadNumber
from megarl.config import Config, to_yaml
from megarl.config.idle import idle
from megarl.config.placement import pushes_over_nccl
from megarl.data.ledger import Ledger
from megarl.durable_files import write_text
from megarl.group import Group
from megarl.layout import Layout
from megarl.metrics.evaluation.audit import Audit
from megarl.metrics.jsonl import drop_after
from megarl.metrics.report import SAMPLES, VISITS
from megarl.metrics.timeline import TIMELINE, Timeline
from megarl.metrics.timer import Timer
from megarl.metrics.tokens import TOKENS, TokenLog
from megarl.metrics.trackers.console import note, warn
from megarl.metrics.trackers.trackers import Trackers
from megarl.plugins import load_plugins
from megarl.rewards.scorer import Rewards
from megarl.rollout.collector.collector_client import CollectorError, Collectors
from megarl.rollout.prefetch import Prefetcher
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.trust import Trusts
from megarl.sample import Sample
from megarl.servers import supervisor
from megarl.servers.nccl import check_one_nccl
from megarl.servers.router import Routed
from megarl.servers.server_process import ServerDied
from megarl.servers.sglang_environment import sglang_python
from megarl.trainer.algorithm import check_vocabularies, make_algorithm
from megarl.trainer.bad_numbers import ROLLBACKS, BadNumbers, left_out, spikes_of, watch
from megarl.trainer.build import (
    engine_columns,
    make_group,
    make_token_log,
    model_folder,
    num_iterations,
    ranks_address,
    read_prompts,
    shortened,
    start_trackers,
    world_of,
)
from megarl.trainer.checkpoint import checkpoint
from megarl.trainer.checkpoint.manifest import Damaged
from megarl.trainer.checkpoint.resume import announce, check_is_known, generated_with, take_over
from megarl.trainer.checkpoint.retention import Retention
from megarl.trainer.checkpoint.saver import Saver
from megarl.trainer.checks.machine import lacks_memory, memory_on_cpu
from megarl.trainer.checks.reward_rows import check_audited, check_truths, say_chosen
from megarl.trainer.checks.reward_trial import RewardTrial
from megarl.trainer.collectors import check_agents, check_rewards, make_collectors, make_rewards
from megarl.trainer.evaluation.evaluate import EVALUATIONS, Evaluator, read_audit
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.observed.lost_work import lost_at_an_end
from megarl.trainer.observed.profile import check_profile
from megarl.trainer.observed.step_metrics import StepMetrics
from megarl.trainer.reward_model import check_reward_model
from megarl.trainer.roles import Roles, load_roles, make_roles
from megarl.trainer.servers.abilities import check_newcomer, dp_ranks_of, fitting
from megarl.trainer.servers.colocation import ALL, GENERATION, check_shared_gpus, uses_gpus
from megarl.trainer.servers.loads import ServerLoads
from megarl.trainer.servers.membership import Memberships
from megarl.trainer.servers.pushes import canary, canary_tokens, keeps_kv, push_settings
from megarl.trainer.servers.server_manager import Push, ServerManager
from megarl.trainer.teachers import check_taught, check_teachers, make_teachers
from megarl.weights.verify.canary import Canary

_LEAVE_RANKS_WELL = (BadNumber, CollectorError, ServerDied)  # so that a save they write is finished first


class Run:
    """Use as a context manager.

    Example: with Infrastructure(config) as infrastructure, Run(config, infrastructure) as run: ...
    """

    roles: Roles
    server_manager: ServerManager
    collectors: Collectors
    ledger: Ledger
    prefetcher: Prefetcher
    evaluator: Evaluator
    timer: Timer
    timeline: Timeline
    audit: Audit
    token_log: TokenLog | None
    step_metrics: StepMetrics
    trackers: Trackers
    bad_numbers: BadNumbers
    saver: Saver | None = None  # set when there are roles to save

    def __init__(
        self, config: Config, infrastructure: Infrastructure, resume: checkpoint.Checkpoint | None = None
    ) -> None:
        """`resume`: the checkpoint to resume from; None: the one that trainer.resume_mode selects."""
        self.config, self._infrastructure, self._resume = config, infrastructure, resume
        self.dir = config.trainer.run_dir
        self.model_path = model_folder(config.model.path)
        if config.rollout.engine == "sglang" and (not config.rollout.urls or config.rollout.router):
            python = sglang_python(config.rollout.sglang.python)  # raises if it is missing
            if uses_gpus(config) and pushes_over_nccl(config):
                check_one_nccl(python)
        check_shared_gpus(config)
        if sentence := lacks_memory(memory_on_cpu(config, "train")):
            warn(sentence)
        load_plugins(config.algorithm.plugins)
        check_rewards(config)
        if reason := check_agents(config):
            warn(reason)
        self.algorithm = make_algorithm(config)
        if self.algorithm.reference or self.algorithm.actor.reference:
            check_vocabularies(self.model_path, model_folder(config.ref.model.path), config)
        check_reward_model(config, self.algorithm)
        check_teachers(config)
        if resume is None:  # else this was done at the start
            for line in idle(config):
                note(line)
            with RewardTrial(config) as trial:
                self._read(trial)
        else:
            self._read()
        check_taught(config, self.prompts.data_sources)
        self.saves_waiting = self._is_saveable()
        self.num_steps = num_iterations(config, len(self.prompts), self.algorithm.critic_warmup)
        self.resumed_from = resume or checkpoint.find(
            config.trainer.resume_mode, self.checkpoints, warn, verify=config.trainer.verify_resume
        )
        if self.resumed_from is not None:
            check_is_known(self.resumed_from)
        self.first_step = self.finished_steps = self.resumed_from.step if self.resumed_from else 0
        self.generated_with = generated_with(config, greedy=self.algorithm.wants_greedy)
        self._groups: dict[tuple[Layout, int, int], Group] = {}  # layout, first rank, ranks
        self._error: BaseException | None = None  # with which it ends
        self._stack = ExitStack()

    def _read(self, trial: RewardTrial | None = None) -> None:
        """Read all prompts, and try the rewards on some of them."""
        data = self.config.data
        self.prompts = read_prompts(self.config, data.train_files, max_rows=data.train_max_samples)
        val = read_prompts(self.config, data.val_files) if data.val_files else None
        self.val_prompts = val.all(data.val_max_samples) if val else []
        self.val_sets = val.sets(data.val_max_samples) if val else []
        check_audited(self.config, len(self.val_prompts))
        self.shortened = {"prompts_filtered": self.prompts.num_filtered, "prompts_cut": self.prompts.num_cut}
        if val is not None:
            filtered = val.left_out(data.val_max_samples)
            self.shortened |= {"val_prompts_filtered": filtered, "val_prompts_cut": val.num_cut}
        if trial is not None:
            lines = [shortened("data.train_files", self.config, self.prompts)]
            lines += [shortened("data.val_files", self.config, val, data.val_max_samples)] if val else []
            for line in filter(None, lines):
                warn(line)
            read = [self.prompts, *([val] if val else [])]
            say_chosen(self.config, [question for prompts in read for question in prompts.questions], note)
            check_truths(self.config, read)
            num_rows = self.config.reward.try_rows
            trial.check([*self.prompts.some(num_rows), *(val.some(num_rows) if val else ())])

    def _is_saveable(self) -> bool:
        """Whether a checkpoint can hold what waits.  Raises ValueError if it cannot, and the run saves of its own."""
        try:
            self.prompts.check_saveable()
        except ValueError:
            if self.config.trainer.saves:
                raise
            return False  # a save that a signal asks for leaves it out, and it is generated again
        return True

    @property
    def groups(self) -> list[Group]:
        """All worlds of ranks."""
        return list(self._groups.values())

    @property
    def drains(self) -> bool:
        """Whether a push waits for what is generated."""
        return self.config.rollout.ahead > 0 and self.config.rollout.update == "drain"

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def last_save(self) -> checkpoint.Checkpoint | None:
        """The newest checkpoint that this run has finished, or from which it was restarted."""
        return (self.saver.last if self.saver else None) or self._resume

    def save_before(self, error: Damaged) -> checkpoint.Checkpoint:
        """The newest whole checkpoint before the one of which the ranks have found a file damaged.

        Raises the error if trainer.resume_mode names this one, ValueError if there is no earlier one.
        """
        assert self.resumed_from is not None, "a run that resumes from nothing finds nothing damaged"
        return checkpoint.save_before(self.resumed_from, error, self.config.trainer, warn)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._error = error
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._error = error
        try:
            if self.saver is not None and isinstance(error, _LEAVE_RANKS_WELL):
                self.saver.settle()
        finally:
            self._stack.close()

    def _start(self) -> None:
        config = self.config
        self.dir.mkdir(parents=True, exist_ok=True)
        if self.resumed_from is not None:
            announce(self.resumed_from, config, self.num_steps)
        elif (self.dir / "summary.json").exists():
            warn(f"{self.dir}: the finished run there is replaced; another trainer.experiment_name keeps it")
        drop_after(self.dir / ROLLBACKS, self.first_step)
        data, gone = self.prompts.fingerprint, left_out(self.dir)
        ledger, waiting = take_over(self.resumed_from, data, self.generated_with, warn, gone)
        self.bad_numbers = BadNumbers(config.trainer.on_nonfinite, self.dir, epochs=config.actor.ppo_epochs)
        write_text(self.dir / "config.yaml", to_yaml(config))
        resume_step = self.first_step if self.resumed_from else None
        for name in (SAMPLES, VISITS, TOKENS, TIMELINE):
            drop_after(self.dir / name, resume_step)
        # The evaluation after the step of the save is made again.
        drop_after(self.dir / EVALUATIONS, resume_step, also=lambda row: row["step"] == resume_step)
        self.audit = read_audit(self.dir / EVALUATIONS)
        self.timeline = Timeline(self.dir, lambda: [c for group in self._groups.values() for c in group.take_calls()])
        self.token_log = make_token_log(config)
        self.trackers = start_trackers(config, self.num_steps, resume_step)
        self._stack.callback(lambda: self.trackers.close(self._error))
        self.timer = Timer(on_stage=self.trackers.stage)

        self.trackers.stage("starting ranks")
        site = self._infrastructure
        token, started = site.server_token, site.teacher_servers
        teachers = make_teachers(config, self._group_of, self.num_steps, token=token, started=started)
        if teachers is not None:
            self._stack.callback(teachers.close)
        self.roles = make_roles(config, self.algorithm, self._group_of, teachers)
        site.spawn_servers()
        takes_turns = site.colocation is not None  # with the servers, which then load first
        if not takes_turns:
            self._load_roles()
        self.trackers.stage("starting servers")
        processes = site.serve()
        if teachers is not None:
            keys, longest = config.longest
            teachers.require_room(longest, keys)
        told = site.ask_servers()
        abilities, dp_ranks = fitting(told, config, drains=self.drains), dp_ranks_of(told)
        router = site.router
        salted = keeps_kv(config) and all(ability.cache_salt for ability in abilities)
        caches: dict[str, Any] = {"salted": salted, "dp_ranks": dp_ranks}
        self._start_collectors([router.url] if router else processes.urls, token, caches)
        self.ledger, self.prefetcher = ledger, self._make_prefetcher(ledger, waiting)
        asked = Routed(router, self.collectors) if router else self.collectors
        self.server_manager = self._make_server_manager(processes, asked, caches)
        self.server_manager.release_memory()
        if takes_turns:
            self._load_roles()
        trained = {"actor": config.actor} | ({"critic": config.critic} if self.algorithm.critic else {})
        names = {role: self._group_of(node).device_name for role, node in trained.items()}
        self.step_metrics = StepMetrics(config, len(self.prompts), names)
        check_profile(config.trainer.profile, self.num_steps, self.groups)
        if lost := lost_at_an_end(config, self._group_of(config.actor).device_name, self.num_steps):
            warn(lost)
        own = [url for url in processes.urls if url not in processes.joined]
        self.roles.actor.connect(push_settings(config, own, token))
        trainer, roles = config.trainer, self.roles.trainable
        origin = self.resumed_from.origin if self.resumed_from else None
        how: dict[str, Any] = {"in_background": trainer.async_save, "warn": warn, "origin": origin}
        how["limit_s"] = trainer.call_timeout_s
        self.saver = Saver(self.checkpoints, roles, Retention.of(config), **how)
        if self.resumed_from is not None:
            checkpoint.restore(self.resumed_from, roles, verify=trainer.verify_resume)
            self.algorithm.kl.load_state_dict(self.resumed_from.state["kl"])
        watch(self.roles.trainable, self.bad_numbers, config, self.resumed_from)
        self.roles.offload()
        (self.dir / "summary.json").unlink(missing_ok=True)  # only a finished run has one

    def _load_roles(self) -> None:
        """Start the ranks, and load what they train."""
        for group in self._groups.values():
            group.start()
        self.trackers.stage("loading models")
        resumes = self.resumed_from is not None
        load_roles(self.roles, self.config, self.num_steps, self.algorithm.critic_warmup, resumes=resumes)
        if why := self.roles.actor.lacks_transformer_engine:
            warn(
                f"Transformer-Engine is not used, since {why}: Megatron's local layers are slower and take more memory "
                "than `megarl plan` says; install it, or set transformer_impl=local"
            )

    def _make_server_manager(
        self, processes: supervisor.Servers, asked: Trusts, caches: Mapping[str, Any]
    ) -> ServerManager:
        """Servers on shared GPUs get the canary when they have resumed their KV cache, all others with the push."""
        ids = canary_tokens(self.config, self.prompts)
        door, colocation, lora = self._infrastructure.door, self._infrastructure.colocation, self.config.actor.lora
        token = self._infrastructure.server_token
        check = partial(check_newcomer, config=self.config, token=token, drains=self.drains, **caches)
        loads = self._stack.enter_context(ServerLoads(self._infrastructure.server_token))
        how: dict[str, Any] = {"unfit": self.collectors.take_unfit, "check": check, "loads": loads}
        if colocation is None:
            how["members"] = Memberships(door, processes, self.collectors, check) if door else None
            return ServerManager(processes, asked, self._pusher(ids), warn, **how)
        return ServerManager(
            processes,
            asked,
            self._pusher(None),
            warn,
            colocation,
            **how,
            canary=lambda: Canary.from_json(canary(self.config, self.roles.actor, ids)),
            lends=GENERATION if lora.rank and lora.push == "adapter" else ALL,  # adapter pushes do not restore the base
        )

    def _pusher(self, ids: list[int] | None) -> Push:
        """The function that pushes the actor's weights to some servers; `ids`: the canary's tokens, None: no canary."""
        how = lambda: None if ids is None else canary(self.config, self.roles.actor, ids)  # noqa: E731
        return lambda only, version: self.roles.actor.push(version, only=only, canary=how())

    def _group_of(self, role: Any) -> Group:
        """The Group of a role's configuration, shared by all roles of the same layout on the same ranks."""
        world = world_of(role)
        if world not in self._groups:
            nodes, name = self._infrastructure.nodes, f"ranks_{len(self._groups)}"
            address = "127.0.0.1" if nodes else ranks_address(self.config)
            group = make_group(self.config, role, name, nodes=nodes, address=address, serves=True)
            self._groups[world] = self._stack.enter_context(group)
        return self._groups[world]

    def _start_collectors(self, urls: Sequence[str], token: str, caches: Mapping[str, Any]) -> None:
        config = self.config
        self.collectors = make_collectors(
            config,
            urls,
            token,
            reward_url=self._infrastructure.reward_url,
            fenced=True,
            reports_unfit=self._infrastructure.router is None,  # of a router nobody knows which server failed
            **caches,
            columns=engine_columns(config),
        )
        self._stack.callback(self.collectors.close)
        self.evaluator = Evaluator(self.collectors, self.val_prompts, config, self.val_sets)

    def _make_prefetcher(self, ledger: Ledger, waiting: Mapping[int, list[Sample]]) -> Prefetcher:
        config, rollout = self.config, self.config.rollout
        return Prefetcher(
            self.collectors,
            ledger,
            self.prompts,
            num_prompts=config.data.train_batch_size,
            n=rollout.n,
            params=SamplingParams(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_new_tokens=config.data.max_response_length,
                sampling_seed=rollout.seed,
            ),
            # In time slices one more iteration is there, so that the servers have work for the whole slice.
            ahead=rollout.ahead if rollout.turn_s is None else 1,
            order=rollout.order,
            turn_s=rollout.turn_s,
            first_step=self.first_step,
            num_steps=self.num_steps,
            waiting=waiting,
            greedy=self.algorithm.wants_greedy,
            keep=self.algorithm.keep,
        )

    def maker_of_rewards(self, **how: Any) -> Callable[[], Rewards]:
        """Makes the rewards of the run once more, for answers that no collector asked for.  `how`: as of Rewards."""
        site = self._infrastructure
        make = make_rewards(self.config, 1, reward_url=site.reward_url, token=site.server_token)
        return partial(make, **how)

    def describe_save(self, totals: dict[str, Any]) -> None:
        """Complete the checkpoint that `saver` has started, before the next iteration is begun.

        The seed is the whole random state: completions, orders and shuffles depend only on it and the step or visit,
        and ranks draw no random numbers because dropout is 0.
        """
        algorithm, waiting = self.algorithm, self.prefetcher.waiting if self.saves_waiting else {}
        state: dict[str, Any] = {"ledger": self.ledger.state_dict(), "kl": algorithm.kl.state_dict()}
        state["spikes"] = spikes_of(self.roles.trainable)
        state |= {"generated_with": self.generated_with, "totals": totals, "seed": algorithm.seed}
        assert self.saver is not None, "the run has not started"
        self.saver.describe(state, waiting)
