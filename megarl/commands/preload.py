"""Which programs of a command are forked from the fork server, and what it imports for them."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Config
from megarl.config.names import SUPERVISED
from megarl.processes.programs import preload

_CHILD, _RANK, _SERVER = "megarl.processes.child", "megarl.roles.worker", "megarl.hf_server.main"
_COLLECTING = ("megarl.rollout.collector.collector", "megarl.rewards.worker")  # what children of a run import
_IMPORTED = {
    "train": (_CHILD, *_COLLECTING, _SERVER, _RANK),
    **dict.fromkeys(SUPERVISED, (_RANK,)),
    "evaluate": (_CHILD, *_COLLECTING, _SERVER),
}


def preload_for(command: str, config: Config) -> None:
    """Begin to import what the processes of a command need; only without GPUs, whose drivers survive no fork."""
    device = config.trainer.device
    if command not in _IMPORTED or device == "cuda" or (device == "auto" and _has_gpus()):
        return
    imported = [name for name in _IMPORTED[command] if name != _SERVER or config.rollout.engine == "hf"]
    preload((_CHILD, _SERVER, _RANK), imported)


def _has_gpus() -> bool:
    """Without torch, whose import takes seconds, in which the fork server imports it itself."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
