"""The parts of a run while it trains: ranks, servers and collectors.  They end in reverse order, also after an error.

The servers belong to the infrastructure and outlive a restart of the ranks.  Roles with the same layout on the same
ranks share a Group; a role with another layout gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from megarl.arch.layout import Layout
from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.data.ledger import Ledger
from megarl.group import Group
from megarl.metrics.computing.timeline import Timeline
from megarl.metrics.computing.timer import Timer
from megarl.metrics.computing.tokens import TokenLog
from megarl.metrics.reading.jsonl import ROLLBACKS, SAMPLES, TIMELINE, TOKENS, VISITS, drop_after
from megarl.metrics.trackers.console import warn
from megarl.metrics.trackers.trackers import Trackers
from megarl.processes.signals import NO_STEP, Signals
from megarl.roles.handles import Actor
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.prefetch import Prefetcher, PrefetchSettings
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Sample
from megarl.servers.router import Routed
from megarl.servers.supervisor import Servers
from megarl.trainer.algorithm import Algorithm
from megarl.trainer.bad_numbers import BadNumbers, left_out, spikes_of
from megarl.trainer.build import engine_columns, make_group, model_folder, ranks_address, world_of
from megarl.trainer.checkpoint.resume import announce, check_is_known, generated_with, take_over
from megarl.trainer.collectors import generation_settings, make_collectors
from megarl.trainer.evaluation.evaluate import EVALUATIONS, Evaluator, read_audit
from megarl.trainer.evaluation.in_training import Evaluations
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.preflight import TrainPlan
from megarl.trainer.resumable import Attempt, SaveTimes, open_trackers, take_up
from megarl.trainer.roles import Roles, load_roles, make_roles, training_phase
from megarl.trainer.servers.abilities import check_newcomer, dp_ranks_of, fitting
from megarl.trainer.servers.colocation import ALL, GENERATION, Turns
from megarl.trainer.servers.loads import ServerLoads
from megarl.trainer.servers.membership import Memberships
from megarl.trainer.servers.pushes import canary, canary_tokens, drains, keeps_kv, push_settings
from megarl.trainer.servers.server_manager import ServerManager, is_verified
from megarl.trainer.teachers import make_teachers
from megarl.trainer.telemetry.profile import check_profile
from megarl.trainer.telemetry.run_log import RunLog, StepMetrics, Totals
from megarl.weights.push.report import PushReport


@dataclass(kw_only=True)
class Run(Attempt):
    """Example: with open_run(plan, infrastructure, signals) as run: run.push(0); train_step(0, run)"""

    plan: TrainPlan
    algorithm: Algorithm
    roles: Roles
    groups: list[Group]  # all worlds of ranks
    ledger: Ledger
    prefetcher: Prefetcher
    server_manager: ServerManager
    evaluations: Evaluations
    log: RunLog

    def push(self, version: int) -> PushReport:
        """Push the actor's weights to every live server; a server without verified weights does not generate."""
        self.log.totals.pushes += 1
        report = self.server_manager.push(version)
        self.log.totals.pushes_verified += is_verified(report)
        return report

    def drain(self) -> None:
        """Wait, before a push that drains, until nothing is generated, or no server can go on."""
        if drains(self.plan.config):
            with self.log.timer("drain"):
                while not self.prefetcher.is_idle and self.server_manager.watch():
                    self.prefetcher.wait()

    def save(self, step: int) -> None:
        """Begin a save of the state after `step` steps, outside of a step."""
        with training_phase(self.roles, self.server_manager, self.log.timer):
            self.saver.start(step)
        self.describe_save()

    def save_and_end(self, step: int) -> NoReturn:
        """Save the state after `step` steps, unless that was done, and end the run."""
        if step == 0:
            self.signals.end(NO_STEP)
        if self.times.last < step:  # the signal came after the last moment to save in the step itself
            self.save(step)
        self.log.trackers.stage("saving")
        self.end(step)

    def describe_save(self) -> None:
        """Complete the checkpoint that `saver` has started, before the next iteration is begun.

        The seed is the whole random state: completions, orders and shuffles depend only on it and the step or visit,
        and ranks draw no random numbers because dropout is 0.
        """
        waiting = self.prefetcher.waiting if self.plan.saves_waiting else {}
        state: dict[str, Any] = {"ledger": self.ledger.state_dict(), "kl": self.algorithm.kl.state_dict()}
        state["spikes"] = spikes_of(self.roles.trainable)
        state |= {"generated_with": self.plan.generated_with, "totals": self.log.totals.state_dict()}
        self.saver.describe(state | {"seed": self.algorithm.seed}, waiting)


@contextmanager
def open_run(plan: TrainPlan, infrastructure: Infrastructure, signals: Signals) -> Iterator[Run]:
    """Start what a run needs, and restore the save at which it begins."""
    with ExitStack() as stack:
        yield _start(plan, infrastructure, signals, stack)


def _start(plan: TrainPlan, site: Infrastructure, signals: Signals, stack: ExitStack) -> Run:
    config = plan.config
    # Again for each attempt: new collectors load the files of rewards and agents as they are now.
    plan = replace(plan, generated_with=generated_with(config, greedy=plan.algorithm.wants_greedy))
    ledger, waiting = _take_over_folder(plan)
    bad_numbers = BadNumbers(config.trainer.on_nonfinite, plan.folder, epochs=config.actor.ppo_epochs)
    trackers = open_trackers(plan, stack)
    trackers.stage("starting ranks")
    worlds = Worlds(config, site, stack)
    token, started = site.server_token, site.teacher_servers
    teachers = make_teachers(config, worlds.group_of, plan.num_steps, token=token, started=started)
    if teachers is not None:
        stack.enter_context(closing(teachers))
    roles = make_roles(config, plan.algorithm, worlds.group_of, teachers)
    site.spawn_servers()
    load = partial(_load_roles, plan, roles, worlds, trackers)
    if not site.colocation:  # else the servers, with which they share GPUs, load first
        load()
    trackers.stage("starting servers")
    processes = site.serve()
    if teachers is not None:
        keys, longest = config.longest
        teachers.require_room(longest, keys)
    generation = _generation(config, site)
    urls = [site.router.url] if site.router else processes.urls
    collectors = stack.enter_context(closing(make_collectors(config, urls, token, generation, site.reward_url)))
    prefetcher = Prefetcher(
        collectors, ledger, plan.prompts, _prefetch_settings(plan), first_step=plan.first_step, waiting=waiting
    )
    server_manager = _make_server_manager(plan, site, processes, roles.actor, collectors, generation, stack)
    server_manager.release_memory()
    if site.colocation:
        load()
    check_profile(config.trainer.profile, plan.num_steps, worlds.groups)
    own = [url for url in processes.urls if url not in processes.joined]
    roles.actor.connect(push_settings(config, own, token))
    saver = take_up(plan, roles.trainable, bad_numbers, stack)
    algorithm = replace(plan.algorithm, kl=copy(plan.algorithm.kl))
    if plan.resume is not None:
        algorithm.kl.load_state_dict(plan.resume.state["kl"])
    roles.offload()
    (plan.folder / "summary.json").unlink(missing_ok=True)  # only a finished run has one
    log = _open_log(plan, roles, worlds, trackers)
    evaluator = Evaluator(collectors, plan.val_prompts, config, plan.val_sets)
    return Run(
        plan=plan,
        infrastructure=site,
        signals=signals,
        bad_numbers=bad_numbers,
        saver=saver,
        times=SaveTimes(config.trainer, signals, first_step=plan.first_step, num_steps=plan.num_steps),
        finished_steps=plan.first_step,
        algorithm=algorithm,
        roles=roles,
        groups=worlds.groups,
        ledger=ledger,
        prefetcher=prefetcher,
        server_manager=server_manager,
        evaluations=Evaluations(evaluator, server_manager, log, saver),
        log=log,
    )


def _take_over_folder(plan: TrainPlan) -> tuple[Ledger, dict[int, list[Sample]]]:
    """Drop from the run's files what comes after the save; returns its ledger, and the finished groups by visit."""
    folder, resume = plan.folder, plan.resume
    if resume is not None:
        check_is_known(resume)
        announce(resume, plan.config, plan.num_steps)
    elif (folder / "summary.json").exists():
        warn(f"{folder}: the finished run there is replaced; another trainer.experiment_name keeps it")
    drop_after(folder / ROLLBACKS, plan.first_step)
    taken = take_over(resume, plan.prompts.fingerprint, plan.generated_with, warn, left_out(folder))
    step = resume.step if resume else None
    for name in (SAMPLES, VISITS, TOKENS, TIMELINE):
        drop_after(folder / name, step)
    # The evaluation after the step of the save is made again.
    drop_after(folder / EVALUATIONS, step, also=lambda row: row["step"] == step)
    return taken


class Worlds:
    """The groups of ranks of a run: one for each layout, first rank and number of ranks."""

    def __init__(self, config: Config, site: Infrastructure, stack: ExitStack) -> None:
        self._config = config
        self._nodes = site.nodes
        self._stack = stack
        self._groups: dict[tuple[Layout, int, int], Group] = {}

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def group_of(self, role: Any) -> Group:
        """The group of a role's configuration, which is made for the first role of its layout and ranks."""
        world = world_of(role)
        if world not in self._groups:
            address = "127.0.0.1" if self._nodes else ranks_address(self._config)
            name = f"ranks_{len(self._groups)}"
            group = make_group(self._config, role, name, nodes=self._nodes, address=address, serves=True)
            self._groups[world] = self._stack.enter_context(group)
        return self._groups[world]


def _load_roles(plan: TrainPlan, roles: Roles, worlds: Worlds, trackers: Trackers) -> None:
    """Start the ranks, and load what they train."""
    for group in worlds.groups:
        group.start()
    trackers.stage("loading models")
    resumes = plan.resume is not None
    load_roles(roles, plan.config, plan.num_steps, plan.algorithm.critic_warmup, resumes=resumes)
    if why := roles.actor.lacks_transformer_engine:
        warn(
            f"Transformer-Engine is not used, since {why}: Megatron's local layers are slower and take more memory "
            "than `megarl plan` says; install it, or set transformer_impl=local"
        )


def _open_log(plan: TrainPlan, roles: Roles, worlds: Worlds, trackers: Trackers) -> RunLog:
    config = plan.config
    folder = plan.folder
    num_samples = plan.config.trainer.token_samples
    tokens = None
    if num_samples:
        tokenizer = load_tokenizer(model_folder(config.model.tokenizer_path))
        tokens = TokenLog(
            folder, lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), num_samples
        )
    return RunLog(
        Timer(on_stage=trackers.stage),
        trackers,
        Totals(plan.began, plan.resume.state["totals"] if plan.resume else {}),
        folder,
        config.trainer.num_ranks,
        timeline=Timeline(folder, lambda: [call for group in worlds.groups for call in group.take_calls()]),
        tokens=tokens,
        audit=read_audit(folder / EVALUATIONS),
        step_metrics=StepMetrics(
            config,
            len(plan.prompts),
            {name: role.group.device_name for name, role in roles.trainable.items()},
        ),
    )


def _generation(config: Config, site: Infrastructure) -> GenerationSettings:
    """How completions are requested of servers that run; raises ValueError for one that does not fit the run."""
    info = site.ask_servers()
    abilities = fitting(info, config, drains=drains(config))
    return replace(
        generation_settings(config),
        fenced=True,
        salted=keeps_kv(config) and all(ability.cache_salt for ability in abilities),
        dp_ranks=dp_ranks_of(info),
        columns=engine_columns(config),
        reports_unfit=site.router is None,  # behind a router it is not known which server failed
    )


def _make_server_manager(
    plan: TrainPlan,
    site: Infrastructure,
    processes: Servers,
    actor: Actor,
    collectors: Collectors,
    generation: GenerationSettings,
    stack: ExitStack,
) -> ServerManager:
    """Servers on shared GPUs get the canary when they have resumed their KV cache, all others with the push."""
    config, token = plan.config, site.server_token
    ids = canary_tokens(config, plan.prompts)
    check = partial(check_newcomer, config=config, token=token, drains=drains(config), generation=generation)
    turns, members = None, None
    if site.colocation is not None:
        # Pushes of adapters do not restore the base.
        lends = GENERATION if config.actor.lora.rank and config.actor.lora.push == "adapter" else ALL
        turns = Turns(site.colocation, lambda: canary(config, actor, ids), lends)
    elif site.door is not None:
        members = Memberships(site.door, processes, collectors, check)

    def push(only: Sequence[str], version: int) -> PushReport:
        return actor.push(version, only=only, canary=None if turns else canary(config, actor, ids))

    requester = Routed(site.router, collectors.update) if site.router else collectors
    loads = stack.enter_context(ServerLoads(token))
    return ServerManager(processes, requester, push, warn, turns, members, check, loads)


def _prefetch_settings(plan: TrainPlan) -> PrefetchSettings:
    config, rollout = plan.config, plan.config.rollout
    return PrefetchSettings(
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
        num_steps=plan.num_steps,
        greedy=plan.algorithm.wants_greedy,
        keep=plan.algorithm.keep,
    )
