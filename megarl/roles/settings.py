"""How a role is loaded, packed and trained: what the driver hands to its handles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.pairs import PairLoss


@dataclass(frozen=True)
class Packing:
    """How sequences are packed into micro-batches; never changes a result.

    A sequence is a row; for a loss with one ratio per sequence it is a sample, whose rows stay together.
    """

    max_tokens: int | None = 16384  # tokens per micro-batch
    max_sequences: int | None = None  # or sequences per micro-batch
    share_prefixes: str = "off"  # auto | on | off: see data/prefix_tree.py; auto: on CPUs, where the ranks can


@dataclass(frozen=True)
class Update:
    """How a batch is split into optimizer steps, and their loss."""

    loss: ActorLoss | CriticLoss | PairLoss
    prompts_per_step: int
    epochs: int = 1
    agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    normalize: bool = False  # scale the weights of rollout correction to mean 1 over a step
    bypass: bool = False  # the ratio uses the server's log-probs
    reference: str | None = None  # the reference role for the full KL


@dataclass(frozen=True)
class LoadSettings:
    """How a role's model is built.  Example: LoadSettings("bfloat16", lora={"rank": 16, "alpha": 32, ...})"""

    dtype: str = "float32"
    optim: dict[str, Any] | None = None  # None: it is not trained
    plugins: tuple[str, ...] = ()
    # Freezes the model and trains adapters: {"rank": 16, "alpha": 32, "targets": ["q_proj", ...], "seed": 0}.
    lora: dict[str, Any] | None = None
    # The fields of mcore.models.execution.ExecutionOptions that differ from the defaults; where prefixes must be
    # shared, its `auto` layers are local.
    engine: dict[str, Any] = field(default_factory=dict)
    reads_weights: bool = True  # False: a restore follows, which brings all of them, and the folder's are not read
    # The name of a loaded role of the group with the same folder and `dtype`, which is frozen or trains adapters: this
    # role shares its base and its engine (`engine` empty, or the same), and has adapters of its own, or none.
    base: str | None = None
    router_replay: bool = False  # the experts of tokens can be given and noted
    mtp: str = "off"  # detached | joint: MTP layers are a part of the model
