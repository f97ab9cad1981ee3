"""The calls of `handles.py` to `worker.py`, whose methods have their names, and the answers that are read by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.pairs import PairLoss
from megarl.algo.spikes import Limits
from megarl.group.message import Message
from megarl.roles.settings import LoadSettings
from megarl.samples.batch import Stat
from megarl.weights.mapping.blocks import Role as Kind
from megarl.weights.push.settings import PushSettings
from megarl.weights.verify.canary import Canary


@dataclass(frozen=True)
class OfRole(Message):
    """A call that is about one role."""

    role: str

    @property
    def label(self) -> str:
        return f"{self.method()} {self.role}"


@dataclass(frozen=True)
class Load(OfRole):
    """Build the role's model from an HF folder, or on the base of another role."""

    kind: Kind
    folder: str
    settings: LoadSettings


@dataclass(frozen=True)
class Loaded:
    """A model on its ranks."""

    hidden_size: int
    can_share: bool  # common prefixes
    device: str  # cpu | cuda
    lacks_transformer_engine: str  # on a GPU: why there is no Transformer-Engine; "" elsewhere, or if there is


@dataclass(frozen=True)
class LoadHeads(OfRole):
    """Read the heads of the role's teachers from HF folders, cut as its own."""

    folders: tuple[str, ...]


@dataclass(frozen=True)
class Offload(OfRole):
    """Offload the role to host memory.  Later calls onload what they need."""

    by_default: bool  # only what its options offload; else all of it


@dataclass(frozen=True)
class Onload(OfRole):
    """Onload the role; it stays on the device until Offload.  Its moments come beside what is called next."""

    by_default: bool  # only what its options leave on the device
    moments: bool | None  # of that these alone, or, if False, all but these; None: all


@dataclass(frozen=True)
class Pass(OfRole):
    """A pass over the sequences that each replica gets."""

    temperature: float
    shares_prefixes: bool
    reference: str | None  # the role of the full KL


@dataclass(frozen=True)
class Columns(Pass):
    """The columns `names` of every token: see `Outputs`, and ROUTED_EXPERTS."""

    names: tuple[str, ...]
    top_k: int  # how many of the most likely tokens
    vocab_size: int | None  # of the first tokens only


@dataclass(frozen=True)
class Update(Pass):
    """One optimizer step on a mini-batch, of which each replica gets a share."""

    loss: ActorLoss | CriticLoss | PairLoss
    num_tokens: int  # of all shares, prompts included
    limits: Limits | None
    notes: tuple[str, ...]  # columns of its forward pass that come back, at the weights before the step


@dataclass(frozen=True)
class Updated:
    """What came of an optimizer step, as in mcore.training.step.Step."""

    stats: dict[str, Stat]
    grad_norm: float
    lr: float
    loss: float
    made: bool
    bad: dict[str, Any] | None  # the details of the first number of the replica's sequences that is not finite
    where: list[str | None]  # if the norm is not finite, by rank: a parameter whose gradient is not


@dataclass(frozen=True)
class Connect(OfRole):
    """Set how Push reaches the servers; once in the life of these ranks."""

    settings: PushSettings


@dataclass(frozen=True)
class Push(OfRole):
    """Push the weights, or only the adapters, to the servers and verify them; rank 0 answers with a PushReport.

    Nothing is pushed if a weight is not finite: "where" has then, by rank, a parameter.
    """

    version: int
    only: tuple[str, ...] | None  # these urls; None: all
    canary: Canary | None


@dataclass(frozen=True)
class Save(OfRole):
    """Write a checkpoint."""

    folder: str
    in_background: bool


@dataclass(frozen=True)
class IsSaved(OfRole):
    """Whether a rank writes no more of the last save, and why it could not write it."""


@dataclass(frozen=True)
class Faults(Message):
    """The damaged files among a rank's share of those of a checkpoint."""

    folder: str


@dataclass(frozen=True)
class Restore(OfRole):
    """Read a checkpoint."""

    folder: str


@dataclass(frozen=True)
class Export(OfRole):
    """Write the model as an HF folder."""

    folder: str
    adapter: str | None  # also write the adapters there, as a PEFT folder


@dataclass(frozen=True)
class Sizes(OfRole):
    """Shape and type of each tensor of the role in an HF folder."""


@dataclass(frozen=True)
class Read(OfRole):
    """Fill a role that is not trained from a folder: see `read_weights`."""

    format: str
    folder: str
    base: str


@dataclass(frozen=True)
class Digests(OfRole):
    """The digests of the tensors of an HF folder, or, if it is None, of the role."""

    folder: str | None


@dataclass(frozen=True)
class Profile(Message):
    """Start to profile on these ranks, or stop and write it; "files": what a rank wrote."""

    ranks: tuple[int, ...]
    tool: str
    memory: bool
    folder: str | None  # None: start
