"""`megarl node`: an additional machine of a run, which starts ranks and servers for the driver on machine 0."""

from __future__ import annotations

import os
from collections.abc import Callable

from megarl.commands.this_machine import NODE_ADDRESS
from megarl.config import Config
from megarl.config.schema import Trainer
from megarl.io.auth import needed_token
from megarl.io.job_signals import ASKS
from megarl.io.terminal import say
from megarl.machines.agent import Agent
from megarl.machines.nodes import announced
from megarl.processes.signals import handled


def main(config: Config) -> int:
    """Returns when the run has ended without an error; raises RuntimeError (DriverLost) otherwise."""
    trainer = config.trainer
    rank = trainer.node_rank or 0
    if not 0 < rank < trainer.num_machines:
        raise ValueError(
            f"trainer.node_rank={rank}: expected 1 to {trainer.num_machines - 1}, the machine 0 runs `megarl train`"
        )
    token = needed_token(os.environ, f"trainer.node_rank={rank}")
    role = "a spare machine" if rank >= trainer.nnodes else f"machine {rank}"
    driver = driver_of(trainer)
    at = f"{trainer.master_addr}, whose port is in {trainer.run_dir}" if callable(driver) else driver
    say(f"{role} of {trainer.nnodes}, at the orders of {at}")
    if trainer.master_addr == Trainer().master_addr:
        say(f"warning: trainer.master_addr={trainer.master_addr}: that is this machine; expected that of machine 0")
    source = os.environ.get(NODE_ADDRESS)
    agent = Agent(rank, driver, token, source=source, silence_s=trainer.silence_s, say=say)
    with handled(dict.fromkeys(ASKS, agent.take_signal)):
        agent.serve()
    return 0


def driver_of(trainer: Trainer) -> str | Callable[[], str]:
    """The driver's address, or how to find it, where no port is named."""
    if trainer.master_port is not None:
        return f"{trainer.master_addr}:{trainer.master_port}"
    return lambda: f"{trainer.master_addr}:{announced(trainer.run_dir)}"
