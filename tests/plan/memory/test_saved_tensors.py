"""What autograd keeps for the backward pass of a layer, tensor by tensor, against the planner's numbers per token."""

from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from memory_ranks import Case, gradients
from preset_files import hf_of
from spawn import Ranks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megarl.layout import Layout
from megarl.mcore.models.fusions import fusions
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.execution import ExecutionOptions
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.plan.memory.memory import kept_numbers, locally_kept

TOKENS, HIDDEN, WIDTH = 10, 8, 32


class Kept(saved_tensors_hooks):
    """Bytes of the storages that are kept, each once; those of `parameters` do not count."""

    def __init__(self, parameters: Any) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._sizes: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that no address is used twice
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())


class Linear(nn.Linear):
    """Keeps its input, as Transformer-Engine's linear does, and gives back a bias as Megatron's modules do."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def feed_forward(*, fused: bool) -> MLP:
    """Megatron's own, with linears that need no process group."""
    made = MLP.__new__(MLP)
    nn.Module.__init__(made)
    made.activation_func = F.silu
    made.config = SimpleNamespace(
        use_te_activation_func=False, bias_activation_fusion=fused, gated_linear_unit=True, activation_func=F.silu,
        activation_func_clamp_value=None, activation_func_fp8_input_store=False, glu_linear_offset=0.0,
        cpu_offloading=False, cpu_offloading_activations=False,
    )  # fmt: skip
    made.linear_fc1, made.linear_fc2 = Linear(HIDDEN, 2 * WIDTH, bias=False), Linear(WIDTH, HIDDEN, bias=False)
    return made


@pytest.mark.parametrize(("fused", "times"), [(True, 3), (False, 5)])
@pytest.mark.parametrize("of_expert", [False, True])
def test_a_gated_feed_forward_keeps_three_widths_fused_and_five_apart(fused: bool, times: int, of_expert: bool) -> None:
    model = feed_forward(fused=fused)
    tokens = torch.randn(TOKENS, *[] if of_expert else [1], HIDDEN, requires_grad=True)
    scale = torch.rand(TOKENS, requires_grad=True) if of_expert else None  # the router's probabilities
    with torch.compiler.set_stance("force_eager"), Kept(model.parameters()) as kept:
        model(tokens, per_token_scale=scale)
    apart = of_expert and not fused  # the product before it is scaled, too
    scales = 0 if scale is None else TOKENS
    assert kept.num_bytes == 4 * (TOKENS * (HIDDEN + (times + apart) * WIDTH) + scales)


def test_the_layers_of_transformer_engine_are_planned_with_the_fused_activation() -> None:
    hf = hf_of("qwen3_mini")
    widths = {"intermediate_size": hf["intermediate_size"] + 100}
    assert kept_numbers(hf | widths, Layout(), False) - kept_numbers(hf, Layout(), False) == 3 * 100
    assert locally_kept(hf | widths, Layout(), False) - locally_kept(hf, Layout(), False) == 3 * 100
    of_gpu = {"gpu": True, "transformer_engine": True, "permutation": True, "accumulation": True}
    assert fusions(**of_gpu, latent_attention=False)["bias_activation_fusion"]


def kept_of(case: Case) -> int:
    """Bytes that a training pass of this rank keeps, of the local layers, in float32."""
    layout = Layout()
    make_groups(layout)
    engine = ExecutionOptions(transformer_impl="local")
    model = wrap_for_training(build_model(case.hf, layout, dtype="float32", engine=engine), layout, engine)
    with Kept([parameter for chunk in model for parameter in chunk.parameters()]) as kept:
        gradients(case, layout, model)
    destroy_groups()
    return kept.num_bytes


@pytest.mark.dist
@pytest.mark.parametrize("preset", ["qwen2_5_mini", "qwen3_mini"])
def test_a_local_layer_keeps_what_is_planned(preset: str) -> None:
    hf = hf_of(preset)
    few, many = (Case("kept", hf | {"num_hidden_layers": layers}) for layers in (1, 3))
    with Ranks(1) as ranks:
        (less,), (more,) = (ranks.run(kept_of, case) for case in (few, many))
    measured = (more - less) / 2 / 4 / few.tokens
    assert locally_kept(hf, Layout(), False) == measured
