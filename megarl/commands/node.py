"""`megarl node`: an additional machine of a run, which starts ranks and servers for the driver on machine 0."""

from __future__ import annotations

import os

from rich.console import Console

from megarl.auth import needed_token
from megarl.commands.this_machine import NODE_ADDRESS
from megarl.config import Config
from megarl.machines.agent import Agent
from megarl.processes.signals import ASKS, handled


def main(config: Config) -> int:
    """Returns when the run has ended without an error; raises RuntimeError (DriverLost) otherwise."""
    trainer = config.trainer
    if not 0 < trainer.node_rank < trainer.nnodes:
        raise ValueError(
            f"trainer.node_rank={trainer.node_rank}: expected 1 to {trainer.nnodes - 1}, the machine 0 runs `megarl "
            "train`"
        )
    token = needed_token(os.environ, f"trainer.node_rank={trainer.node_rank}")
    address = f"{trainer.master_addr}:{trainer.master_port}"
    Console(stderr=True).print(f"node {trainer.node_rank} of {trainer.nnodes}, at the orders of {address}")
    agent = Agent(trainer.node_rank, address, token, source=os.environ.get(NODE_ADDRESS))
    with handled(dict.fromkeys(ASKS, agent.take_signal)):
        agent.serve()
    return 0
