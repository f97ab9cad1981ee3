"""Parameters of each kind of rank, summed over the table of weights, and FLOPs per token.

A rank's parameters depend only on its pipeline stage: the ranks of a stage hold equal parts.  Experts are counted
separately, because they are sharded over other ranks than the rest.  Biases of routers that no optimizer changes are
no parameters.  FLOPs are the basis of all predicted times:

    linear      2 operations per parameter that the token uses: of experts only the chosen ones
    mixers      attention's per key, causal: half of the sequence, or the keys that an indexer chooses and its scores
                of all; of layers with a state the same for every token (arch/layers.py)
    head        2 operations per number of the vocabulary's table
    backward    twice the forward pass
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from megarl.arch.layers import HFConfig, Layer, layers_of
from megarl.arch.layout import Layout, padded_vocab_size
from megarl.arch.model_types import known
from megarl.arch.mtp import TRAINED_MTP
from megarl.weights.mapping.blocks import Role, decoder
from megarl.weights.mapping.families import FAMILIES, VOCAB_MULTIPLE, family_of, layer_of, stacks_for
from megarl.weights.mapping.mtp import mtp_layers
from megarl.weights.mapping.names import GatedQKV, GateUp, Op, ShardCoordinate


class Parameters(NamedTuple):
    """Example: Parameters(dense=1_543_714_304, experts=0)."""

    dense: int  # mixers, norms, feed-forwards, routers, shared experts, embedding and head
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, eq=False)
class Kind:
    """The layers of a model that are alike."""

    layer: Layer
    ops: tuple[Op, ...]  # the parameters of one of them, without those of experts that are as the first
    _counted: dict[tuple[int, int, int], Parameters] = field(default_factory=dict)

    def parameters(self, layout: Layout = Layout()) -> Parameters:  # noqa: B008
        """Of one layer, on each rank."""
        sizes = layout.tp, layout.ep, layout.expert_tp
        if sizes not in self._counted:
            here = ShardCoordinate(tp=layout.tp, etp=layout.expert_tp)
            dense, one = (
                sum(prod(op.shape_at(here)) for op in self.ops if (op.expert is None) is is_dense)
                for is_dense in (True, False)
            )
            experts = self.layer.experts
            self._counted[sizes] = Parameters(dense, experts.count // layout.ep * one if experts else 0)
        return self._counted[sizes]

    def of(self, *modules: str) -> int:
        """Parameters of a layer under modules of Megatron's, routed experts not among them."""
        held = (op for op in self.ops if op.expert is None and any(f".{name}." in op.param for name in modules))
        return sum(prod(op.shard_shape(1)) for op in held)

    @cached_property
    def mixer_params(self) -> int:
        """With all norms of the layer."""
        return self.parameters().dense - self.of("mlp")

    @cached_property
    def chosen_params(self) -> int:
        """Of the experts that a token chooses."""
        experts = self.layer.experts
        return self.parameters().experts // experts.count * experts.chosen if experts else 0

    @cached_property
    def matrices(self) -> int:
        """Of a feed-forward, or of an expert: two, or three with a gate."""
        return 3 if any(isinstance(op, GateUp) for op in self.ops) else 2

    @cached_property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalised."""
        return any(op.param.endswith("q_layernorm.weight") for op in self.ops)

    @cached_property
    def gates_heads(self) -> bool:
        """Whether attention's output is scaled by a gate."""
        return any(isinstance(op, GatedQKV) for op in self.ops)


class _Same:
    """A config.json, as a key: one that is the same object, which nobody changes."""

    def __init__(self, hf: HFConfig) -> None:
        self.hf = hf

    def __hash__(self) -> int:
        return id(self.hf)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.hf is self.hf


def kinds_of(hf: HFConfig, mtp: int = 0) -> tuple[Kind, ...]:
    """The kind of each layer, and of `mtp` MTP layers behind them."""
    return (*_kinds(_Same(hf)), *[_mtp_kind(_Same(hf))] * mtp) if mtp else _kinds(_Same(hf))


@lru_cache(maxsize=64)
def _kinds(same: _Same) -> tuple[Kind, ...]:
    hf, made = same.hf, dict[Layer, Kind]()
    layers = layers_of(hf)
    for at, layer in enumerate(layers):
        if layer not in made:
            made[layer] = Kind(layer, tuple(op for op in layer_of(hf, at) if op.expert is None or op.expert[0] == 0))
    return tuple(made[layer] for layer in layers)


@lru_cache(maxsize=64)
def _mtp_kind(same: _Same) -> Kind:
    """As the last layer, with a projection and norms of its own."""
    ops = mtp_layers({**same.hf, TRAINED_MTP: "joint"}, layer_of)
    first = (op for op in ops if op.param.startswith("mtp.layers.0."))
    return Kind(_kinds(same)[-1].layer, tuple(op for op in first if op.expert is None or op.expert[0] == 0))


def check(hf: HFConfig) -> None:
    """Raises: ValueError of one sentence for a config.json of another family, or with layers that are not planned, or
    without a needed number.
    """
    kind = known(hf.get("model_type"), FAMILIES)
    try:
        whole({key: value for key, value in hf.items() if value is not None})
    except KeyError as missing:
        said = f"config.json: there is no {missing.args[0]}; expected the config of a {kind} model"
        raise ValueError(said) from None


def whole(hf: HFConfig, role: str = "actor", mtp: int = 0) -> int:
    """Parameters of the model as its authors count them: not sharded, not padded, no duplicates; with MTP layers."""
    ends = sum(prod(shape) for op in _ends(hf, role) for shape in op.hf_shapes.values())
    return ends + sum(kind.parameters().total for kind in kinds_of(hf, mtp))


def of_stage(hf: HFConfig, layout: Layout, stage: int, role: str = "actor", mtp: int = 0) -> Parameters:
    """Parameters of each rank of pipeline stage `stage`.  role: only a critic has a value head.  mtp: MTP layers."""
    embedding, *last = _ends(hf, role)
    is_last = stage == layout.pp - 1
    held = [embedding] if stage == 0 or (is_last and (embedding.copies or mtp)) else []  # of tied tables a copy
    held += last if is_last else []
    dense, experts = sum(prod(op.shard_shape(layout.tp)) for op in held), 0
    for kind, count in kinds_of_stage(hf, layout, stage, mtp).items():
        each = kind.parameters(layout)
        dense, experts = dense + count * each.dense, experts + count * each.experts
    return Parameters(dense, experts)


def _ends(hf: HFConfig, role: str) -> list[Op]:
    """Embedding, final norm, and head if it has a table of its own."""
    named: Role = "critic" if role == "critic" else "actor"
    return decoder(hf, named, VOCAB_MULTIPLE, (), names=family_of(hf).around_layers)


def layers_of_stage(hf: HFConfig, layout: Layout, stage: int, mtp: int = 0) -> list[int]:
    """Indices of the stage's layers, MTP layers last.  Interleaved: first chunks of all stages come before second."""
    parts = [layers // layout.vpp for layers in layout.stage_layers(hf["num_hidden_layers"])]
    turn, before = sum(parts), sum(parts[:stage])
    firsts = range(before, before + layout.vpp * turn, turn)
    behind = range(layout.vpp * turn, layout.vpp * turn + (mtp if stage == layout.pp - 1 else 0))
    return [*(layer for first in firsts for layer in range(first, first + parts[stage])), *behind]


def kinds_of_stage(hf: HFConfig, layout: Layout, stage: int, mtp: int = 0) -> dict[Kind, int]:
    """The kinds of the stage's layers, and how many there are of each."""
    kinds = kinds_of(hf, mtp)
    return Counter(kinds[layer] for layer in layers_of_stage(hf, layout, stage, mtp))


def largest_tensor(hf: HFConfig) -> int:
    """Numbers of the largest tensor of a folder: the embedding, a matrix of a layer, or a stack of experts."""
    return _largest(_Same(hf))


@lru_cache(maxsize=64)
def _largest(same: _Same) -> int:
    ops = [*_ends(same.hf, "actor"), *(op for kind in set(kinds_of(same.hf)) for op in kind.ops)]
    shapes = [shape for op in ops for shape in op.hf_shapes.values()]
    return max(prod(shape) for shape in (*shapes, *(stack.shape for stack in stacks_for(same.hf))))


@dataclass(frozen=True)
class Shape:
    """Per token, of the unsharded model."""

    hidden: int
    kinds: dict[Kind, int]  # how many layers there are of each kind
    head_params: int  # once more for each MTP layer, as they use it too
    table_params: int  # the embedding and, if it is another table, the head

    @cached_property
    def num_layers(self) -> float:
        """Those that are one thing count half."""
        return sum(count * kind.layer.halves for kind, count in self.kinds.items()) / 2

    @cached_property
    def mixer_params(self) -> int:
        """Of all layers, with their norms."""
        return sum(count * kind.mixer_params for kind, count in self.kinds.items())

    @cached_property
    def active_params(self) -> int:
        """Parameters that a token uses, including the head, without the embedding."""
        layers = self.kinds.items()
        return sum(count * (kind.parameters().dense + kind.chosen_params) for kind, count in layers) + self.head_params


def shape_of(hf: HFConfig, role: str = "actor", mtp: int = 0) -> Shape:
    """role: a critic has no vocabulary head.  mtp: MTP layers."""
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    return Shape(
        hidden=hidden,
        kinds=Counter(kinds_of(hf, mtp)),
        head_params=0 if role == "critic" else (1 + mtp) * padded_vocab_size(vocab, 1) * hidden,
        table_params=vocab * hidden * (1 if role == "critic" or hf.get("tie_word_embeddings") else 2),
    )


def forward_flops(shape: Shape, tokens: float, context: float) -> float:
    """FLOPs of a forward pass over `tokens` in sequences whose lengths have sum(l^2)/sum(l) = context."""
    mixers = [(kind.layer.mixer, count) for kind, count in shape.kinds.items()]
    beside = sum(
        count * (one.key_flops(context) + one.choice_flops(context) + one.token_flops) for one, count in mixers
    )
    return tokens * (2 * shape.active_params + beside)
