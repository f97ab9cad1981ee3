"""What autograd keeps for the backward pass of a model's layers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.plan.memory_ranks import Case, gradients
from megarl.arch.layout import Layout
from megarl.arch.megatron_fields import RECOMPUTED
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training


class Kept(saved_tensors_hooks):
    """Bytes of the storages that are kept, each once; those of `parameters` do not count."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def num_bytes(self) -> int:
        """As of now: what is computed again has given its storage back meanwhile."""
        return sum(storage.nbytes() for storage in self._storages.values())


def with_again(engine: ExecutionOptions, again: tuple[str, ...]) -> ExecutionOptions:
    """The engine that computes these modules of a layer again."""
    modules = {RECOMPUTED: [*again]}
    return replace(engine, recompute_granularity="selective", override_transformer_config=modules) if again else engine


def kept_by_a_layer(hf: dict[str, Any], engine: ExecutionOptions) -> float:
    """Numbers in float32 that the second and the third layer keep of a token, on a world of one rank."""
    key = "layers_block_type" if "layers_block_type" in hf else "layer_types"
    kinds = hf.get(key, [])[:1]
    few, many = (Case("kept", hf | {"num_hidden_layers": layers, key: kinds * layers or None}) for layers in (1, 3))
    return (_kept(many, engine) - _kept(few, engine)) / 2 / 4 / few.tokens


def _kept(case: Case, engine: ExecutionOptions) -> int:
    """Bytes that the forward pass keeps at its end."""
    layout = Layout()
    make_groups(layout)
    model = wrap_for_training(build_model(case.hf, layout, dtype="float32", engine=engine), layout, engine)
    kept, found = Kept(parameter for chunk in model for parameter in chunk.parameters()), list[int]()
    (last,) = (module for name, module in model[0].named_modules() if name.endswith("final_layernorm"))
    last.register_forward_pre_hook(lambda *_: found.append(kept.num_bytes))
    with kept:
        gradients(case, layout, model)
    destroy_groups()
    return found[0]
