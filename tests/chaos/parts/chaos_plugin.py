"""A plug-in for runs under chaos: by order, replies and losses are spoilt, ranks hang, disks are full."""

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

from chaos_claims import take
from torch import Tensor

from megarl.algo import register_policy_loss
from megarl.algo.losses.clipped import ppo
from megarl.servers.launch import EngineLaunch, ServerCommand, hf_command
from megarl.servers.server_process import ENGINES


def command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """In the place of `hf_command`: the same server, started by chaos_server.py."""
    usual = hf_command(launch, folder)
    assert usual.argv[1:3] == ["-m", "megarl.hf_server.main"]
    program = str(Path(__file__).with_name("chaos_server.py"))
    return ServerCommand([sys.executable, program, *usual.argv[3:]], usual.environment)


ENGINES["hf"] = command


@register_policy_loss("fragile_ppo")
def fragile_ppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor, **clips: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO; of the rank that takes an order, the loss of one micro-batch is NaN or huge, or it never comes."""
    loss, info = ppo(log_probs, old_log_probs, advantages, mask, segment_ids, **clips)
    kind = take("loss")
    if kind == "wait":  # other ranks wait for it in a collective
        threading.Event().wait()
    while kind == "loop":
        continue
    factor = {None: 1.0, "nan": float("nan"), "huge": 1e30, "spike": 1e6}[kind]
    return loss * factor, info


def full_disk(file: Path) -> Any:
    """In the place of `seal`, which ranks call for each file of a save that they have written."""
    if take("disk"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    return _seal(file)


if files := sys.modules.get("megarl.mcore.checkpoint.files"):  # on ranks only
    _seal, files.seal = files.seal, full_disk  # type: ignore[attr-defined]
