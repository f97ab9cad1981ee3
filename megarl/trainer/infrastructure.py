"""What survives a restart of the ranks: the other nodes, the rollout servers and their router."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Self

import torch

from megarl.config import Config
from megarl.group.failures import OutOfMemory, PortsBlocked
from megarl.io.auth import given_token, needed_token, server_token
from megarl.io.terminal import say
from megarl.machines.joining import JoinListener
from megarl.machines.member import NodeLeft
from megarl.machines.nodes import NodeLost, Nodes, announce, forget
from megarl.processes.failure_report import write_report
from megarl.processes.restarts import Restarts
from megarl.servers.router import Router
from megarl.servers.server_process import MachineGone
from megarl.servers.supervisor import Servers
from megarl.trainer.servers.abilities import ServerInfoByUrl, ask_servers
from megarl.trainer.servers.colocation import Colocation, uses_gpus
from megarl.trainer.servers.make_servers import (
    check_gpus,
    look_after,
    make_reward_server,
    make_servers,
    make_teacher_servers,
)


@contextmanager
def _on_machines() -> Iterator[None]:
    """Raises NodeLost where a machine is lost while servers are started."""
    try:
        yield
    except MachineGone as error:
        raise NodeLost(f"servers could not be started: {error}") from error


class Infrastructure:
    """Example: with Infrastructure(config) as infrastructure: servers = infrastructure.serve()"""

    nodes: Nodes | None = None  # None: the run uses this machine only
    router: Router | None = None  # with rollout.router: generation requests go to it
    door: JoinListener | None = None  # with rollout.join: servers join and leave the run there
    reward_url: str | None = None  # of the reward model's server, if the run starts one
    _begun: Servers | None = None  # that are starting
    _servers: Servers | None = None

    def __init__(self, config: Config, *, trains: bool = True, serves: bool = True) -> None:
        """`trains`, `serves`: the run has a trainer, has servers; without a trainer servers may use all GPUs.

        Raises ValueError if this machine has too few GPUs for its servers.
        """
        self.config, self._trains = config, trains
        if serves:
            check_gpus(config, trains=trains)
        nnodes = config.trainer.nnodes
        why = f"trainer.nnodes={nnodes}: the machines of a run must know each other"
        if trains and config.rollout.join:
            why = f"rollout.join={config.rollout.join}: servers that join must know the run"
        is_alone = nnodes == 1 and not (trains and config.rollout.join)
        given = given_token(os.environ) if is_alone else needed_token(os.environ, why)
        self._token = given or secrets.token_hex(16)
        self.server_token = server_token(os.environ, self._token)
        # For servers that share the trainer's GPUs; None: servers have their own GPUs.
        shared, timeout_s = config.rollout.placement == "shared", config.rollout.request_timeout_s
        self.colocation = Colocation(self.server_token, timeout_s=timeout_s) if shared else None
        self.teacher_servers: dict[str, Servers] = {}  # that the run starts for teachers, by their names
        self._num_restarts = 0  # in all
        self._restarts, self._furthest = Restarts(), 0  # since the run last came further than ever; its last step then
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.config.trainer.nnodes > 1:
                trainer = self.config.trainer
                self.nodes = Nodes(
                    trainer.nnodes,
                    trainer.n_gpus_per_node,
                    trainer.master_addr,  # where the other nodes connect
                    trainer.master_port,
                    self._token,
                    spares=trainer.spare_nodes,
                    silence_s=trainer.silence_s,
                )
                stack.enter_context(self.nodes)
                if self.config.trainer.master_port is None:
                    announce(self.config.trainer.run_dir, self.nodes.port)
                    stack.callback(forget, self.config.trainer.run_dir)
                self._wait_for_nodes()
            if self._trains and self.config.rollout.join:
                self.door = stack.enter_context(JoinListener(self.config.rollout.join, self._token))
            if not uses_gpus(self.config):
                # Ranks and servers need the cores.  A pool of threads here would wake for each small tensor, and wait
                # in loops for the next one: that took 1.6 ms of each torch.repeat_interleave, beside ranks on two
                # cores.
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is not None:
            self._begun.stop()
        self._stack.__exit__(kind, error, trace)  # reports the reason to the other nodes

    def _wait_for_nodes(self) -> None:
        if (nodes := self.nodes) is not None:
            nodes.wait(on_wait=say, on_replaced=lambda sentence: say(f"warning: {sentence}"))

    def spawn_servers(self) -> None:
        """Start the processes of the servers, which load their model while the caller goes on; `serve` waits for them.

        Does nothing if they run, or are being started.  Raises NodeLost if a machine is lost.
        """
        if self._servers is not None or self._begun is not None:
            return
        servers = make_servers(self.config, self.server_token, self.nodes, trains=self._trains)
        with _on_machines():
            servers.spawn()
        self._begun = servers

    def serve(self) -> Servers:
        """The servers, started on the first call, with their router, which begins without any server.

        With them the server of a reward model, and those of teachers, if the run needs them.  A later call starts
        servers again that have ended, for example with their machine, and goes on without those that do not start.
        Raises NodeLost if a machine is lost meanwhile, ServerDied if no server is left.
        """
        if self._servers is not None:
            self._revive(self._servers)
        if self._servers is None:
            with ExitStack() as stack:
                self.spawn_servers()
                assert self._begun is not None, "they were begun"
                servers, self._begun = stack.enter_context(self._begun), None
                with _on_machines():
                    servers.start()
                router = stack.enter_context(self._make_router()) if self.config.rollout.router else None
                if router is not None:
                    router.start([])
                    servers.watch_too(router.check)
                reward_server = make_reward_server(self.config, self.server_token)
                if reward_server is not None:
                    stack.enter_context(reward_server).start()
                    servers.watch_too(partial(look_after, reward_server, "the reward model"))
                    self.reward_url = reward_server.urls[0]
                taught = make_teacher_servers(self.config, self.server_token) if self._trains else {}
                for name, server in taught.items():
                    stack.enter_context(server).start()
                    servers.watch_too(partial(look_after, server, f"teachers.{name}"))
                    self.teacher_servers[name] = server
                self._servers, self.router = servers, router
                self._stack.push(stack.pop_all())
        return self._servers

    def _revive(self, servers: Servers) -> None:
        before = dict(zip(servers.urls, servers.pids, strict=True))
        try:
            for reason in servers.revive():
                say(f"warning: the run goes on without a server: {reason}")
        except MachineGone as error:
            raise NodeLost(f"servers could not be started again: {error}") from error
        if self.colocation is not None:
            now = dict(zip(servers.urls, servers.pids, strict=True))
            for url, pid in before.items():
                if now.get(url) != pid:  # a new process holds all its memory, whatever the one before had released
                    self.colocation.forget(url)

    def ask_servers(self) -> ServerInfoByUrl:
        """The /server_info of the servers; one that does not answer is restarted; the run continues with the others.

        Raises ServerDied if no server is left.
        """
        assert self._servers is not None, "there are no servers yet"
        while True:
            answers, silent = ask_servers(self._servers.serving, self.server_token)
            for url, reason in silent.items():
                say(f"warning: {url} is out of service: {reason}")
                self._servers.restart(url, reason)
                if self.colocation is not None:
                    self.colocation.forget(url)
            if answers:
                return answers
            self._servers.wait_for_one()

    def _make_router(self) -> Router:
        log, rollout = self.config.trainer.run_dir / "logs" / "router.log", self.config.rollout
        return Router(self.server_token, log, request_timeout_s=rollout.request_timeout_s, python=rollout.sglang.python)

    def allow_restart(self, error: Exception, step: int) -> None:
        """Count a failure of the ranks; raises it again after trainer.max_restarts restarts that made no progress.

        Where memory ended, one restart may help, as others on the machine may have taken it.  Ports that were blocked
        from the start stay so.  `step`: finished iterations; more than at any failure before are progress.
        Returns when all machines are connected, so that the ranks can be restarted.  A machine that left is no failure.
        """
        if isinstance(error, NodeLeft):
            say(f"warning: {error}")
            return self._wait_for_nodes()
        allowed = self.config.trainer.max_restarts or 0
        if step > self._furthest:
            self._furthest, self._restarts.count = step, 0
        if isinstance(error, OutOfMemory):
            allowed = min(allowed, 1)
        elif isinstance(error, PortsBlocked) and not self._num_restarts:
            allowed = 0
        self._restarts.most = allowed
        if self._restarts.are_used_up:
            raise error
        self._restarts.count += 1
        self._num_restarts += 1
        where = write_report(error, self.config.trainer.run_dir / "logs" / f"restart_{self._num_restarts}.txt")
        count = f"{self._restarts.count} of {allowed} without a new step"
        say(f"warning: {error}", f"the ranks are started again ({count}); {where}")
        self._wait_for_nodes()
