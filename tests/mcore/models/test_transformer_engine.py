"""Transformer-Engine's modules stand where ours do, under the same names; seen on a host that does not have it."""

from typing import Any

import pytest
import torch
from layer_specs import module_of
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions import transformer_engine_spec_provider as te_provider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.mcore.models import execution as engine_module
from megarl.mcore.models.attention import SDPAttention
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.layers import block_spec
from megarl.mcore.models.pointwise import Norm
from megarl.mcore.models.transformer_engine import local_name, mark_shards, without_extra_state
from megarl.mcore.versions import parts_of


def layers(engine: ExecutionOptions) -> tuple[Any, Any, Any]:
    """A dense layer, one with experts, and the final norm."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        qk_layernorm=True,
        normalization="RMSNorm",
        num_moe_experts=4,
        moe_layer_freq=[0, 1],
        moe_grouped_gemm=engine.transformer_settings()["moe_grouped_gemm"],
        add_bias_linear=False,
    )
    block = block_spec(config, engine=engine)
    dense, sparse = (spec.submodules for spec in block.layer_specs)
    return dense, sparse, block.layer_norm


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "has_transformer_engine", lambda: True)
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        monkeypatch.setattr(te_provider, name, type(name, (), {}))


def test_our_modules_without_it() -> None:
    dense, sparse, final = layers(ExecutionOptions(transformer_impl="local"))
    attention = dense.self_attention.submodules
    assert (attention.linear_qkv, attention.linear_proj) == (ColumnParallelLinear, RowParallelLinear)
    assert attention.core_attention is SDPAttention
    assert {dense.input_layernorm, dense.pre_mlp_layernorm, attention.q_layernorm, final} == {Norm}
    assert module_of(parts_of(sparse.mlp).experts) is SequentialMLP


@pytest.mark.usefixtures("installed")
def test_its_modules_in_the_same_places() -> None:
    dense, sparse, final = layers(ExecutionOptions())
    attention, mlp = dense.self_attention.submodules, parts_of(dense.mlp)
    assert (attention.linear_qkv, attention.linear_proj) == (te.TEColumnParallelLinear, te.TERowParallelLinear)
    assert (mlp.linear_fc1, mlp.linear_fc2) == (te.TEColumnParallelLinear, te.TERowParallelLinear)
    assert attention.core_attention is te.TEDotProductAttention
    norms = (dense.input_layernorm, dense.pre_mlp_layernorm, attention.q_layernorm, attention.k_layernorm, final)
    assert all(norm is te.TENorm for norm in norms)
    experts = parts_of(sparse.mlp).experts
    assert module_of(experts) is TEGroupedMLP
    assert parts_of(experts).linear_fc1 is te_provider.TEColumnParallelGroupedLinear
    assert parts_of(experts).linear_fc2 is te_provider.TERowParallelGroupedLinear


@pytest.mark.usefixtures("installed")
def test_no_norm_hides_in_a_linear() -> None:
    """Where Megatron's own spec has nothing, ours has the norm: `input_layernorm.weight` keeps its name."""
    dense, sparse, _ = layers(ExecutionOptions())
    assert IdentityOp not in (dense.input_layernorm, dense.pre_mlp_layernorm, sparse.pre_mlp_layernorm)
    assert dense.sharded_state_dict_keys_map["input_layernorm."] == "self_attention.linear_qkv.layer_norm_"


def test_names_of_grouped_experts_by_hand() -> None:
    layer = "decoder.layers.7.mlp"
    assert local_name(f"{layer}.experts.linear_fc1.weight12") == f"{layer}.experts.local_experts.12.linear_fc1.weight"
    assert local_name(f"{layer}.experts.linear_fc2.bias0") == f"{layer}.experts.local_experts.0.linear_fc2.bias"
    for name in (
        *("embedding.word_embeddings.weight", f"{layer}.linear_fc1.weight", f"{layer}.router.weight"),
        *(f"{layer}.shared_experts.linear_fc1.weight", f"{layer}.experts.local_experts.3.linear_fc1.weight"),
    ):
        assert local_name(name) == name, "others stay"


def test_a_state_of_weights_only() -> None:
    state = {"a.weight": 1, "a._extra_state": 2, "experts.linear_fc1._extra_state3": 3, "b.bias": 4}
    assert without_extra_state(state) == {"a.weight": 1, "b.bias": 4}


def test_cuts_of_experts_are_those_of_local_layers() -> None:
    """[out, in]: the first linear is cut along its outputs, with its bias, and the second along its inputs."""
    experts = torch.nn.Module()
    for linear, names in (("linear_fc1", ("weight0", "weight1", "bias0")), ("linear_fc2", ("weight0", "bias0"))):
        experts.add_module(linear, torch.nn.Module())
        for name in names:
            getattr(experts, linear).register_parameter(name, torch.nn.Parameter(torch.zeros(2, 2)))
    mlp = torch.nn.ModuleDict({"experts": experts, "router": torch.nn.Linear(2, 2)})
    mark_shards(torch.nn.ModuleDict({"mlp": mlp}))
    found = {
        name: param.partition_dim
        for name, param in mlp.named_parameters()
        if getattr(param, "tensor_model_parallel", False)
    }
    first = dict.fromkeys(("experts.linear_fc1.weight0", "experts.linear_fc1.weight1", "experts.linear_fc1.bias0"), 0)
    assert found == first | {"experts.linear_fc2.weight0": 1}
