"""Our own server, but for each token it reports the experts behind those that its layers chose."""

import sys
from pathlib import Path

import numpy as np

from megarl.arch.routed_experts import RoutedExperts
from megarl.hf_server import calls, main
from megarl.hf_server.running_batch import CompletionRequest
from megarl.servers.launch import EngineLaunch, ServerCommand, hf_command

_chosen = calls._routes


def _others(row: CompletionRequest, of: RoutedExperts) -> np.ndarray:
    column = _chosen(row, of)
    column[1:] = (column[1:] + 1) % of.num_experts
    return column


def command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """In the place of `hf_command`."""
    usual = hf_command(launch, folder)
    assert usual.argv[1:3] == ["-m", "megarl.hf_server.main"]
    return ServerCommand([sys.executable, __file__, *usual.argv[3:]], usual.environment)


if __name__ == "__main__":
    calls._routes = _others
    main.main()
