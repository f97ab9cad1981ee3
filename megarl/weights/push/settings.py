"""How the actor's weights get to the servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PushSettings:
    """Targets and options of pushes that are the same for every push.

    Every `check_every`-th push (0: none), servers that get slices get whole tensors too, as the first time.  A server
    whose digests cannot be computed, such as one with quantized weights, loads the model from a folder at its first
    push and every `check_every`-th one, and must then have the same checksums as after the push; it is dropped if that
    is not possible the first time.  The folder is written for such servers only: `export_folder`, which all servers
    must be able to read; None: a temporary folder, for servers on this machine only, which is deleted again.
    """

    urls: tuple[str, ...]
    token: str = field(repr=False)
    dtype: str | None = None  # of the servers' weights; None: the trainer's
    bucket_bytes: int | None = None  # of the two buckets that exist at a time; None: by model and free memory
    timeout_s: float = 120.0  # of every single wait
    # What happens to running requests during a push: retract | in_place | abort.  in_place: they go on, with new
    # weights and their old KV cache.
    pause_mode: str = "retract"
    adapters_kept: int = 0  # adapters that a server keeps; 0: servers get whole weights with merged adapters
    drafts: bool = False  # servers draft with the policy's MTP layers, and get these too
    transport: str = "auto"  # of the weights to a server: shared | sharded | gathered | auto
    check_every: int = 0
    export_folder: str | None = None
    # GPUs of trainer and servers, as the fields of a weights.push.gpu_handles.Gpus; None: unknown.
    gpus: dict[str, Any] | None = None
