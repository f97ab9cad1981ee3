"""How the actor's weights get to the servers: targets and options that are the same for every push."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PushSettings:
    """Targets and options of pushes that are the same for every push."""

    urls: tuple[str, ...]
    token: str = field(repr=False)
    dtype: str = "float32"  # of the servers' weights
    bucket_bytes: int | None = None  # of two buckets; None: from the model's size
    timeout_s: float = 120.0
    pause_mode: str = "retract"  # what happens to running requests during a push: retract | in_place | abort
    adapters_kept: int = 0  # adapters that a server keeps; 0: servers get whole weights with merged adapters
    transport: str = "auto"  # of the weights to a server: shared | sharded | gathered | auto
    check_every: int = 0  # pushes between checks by whole tensors or an exported folder, see Pusher; 0: none
    export_folder: str | None = None  # of these comparisons; None: a temporary folder, for servers on this machine
    # GPUs of trainer and servers, as the fields of a weights.push.gpu_handles.Gpus; None: unknown.
    gpus: dict[str, Any] | None = None
