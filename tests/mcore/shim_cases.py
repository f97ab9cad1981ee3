"""What stock Megatron does on this machine before and after each shim and fix; run as a process of its own.

python shim_cases.py FILE writes {"without shims" | "with shims" | "without fixes" | "with fixes": {name: error}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from optimizer_cases import Three
from torch.overrides import TorchFunctionMode

from megarl.layout import Layout
from megarl.mcore import cpu, fixes
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training


def current_device() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding(kv_channels=8, rotary_percent=1.0)(4)


def device_named_cuda() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    FP32Optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), OptimizerConfig(), lambda *_: None)


def type_names() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    clip_grad_by_total_norm_fp32([param], 1.0, 2.0)


def tensor_cuda() -> None:
    torch.ones(2).cuda()


def pin_memory() -> None:
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    get_pos_emb_on_this_cp_rank(torch.zeros(4, 1, 1, 2), 0, group)


def synchronize() -> None:
    torch.cuda.synchronize()  # Megatron's pipelines call it (p2p_communication:398)


def generator() -> None:
    from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda y: y * y, False, x).sum().backward()


def streams() -> None:
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    torch.cuda.Event().record()


def splits_as_numbers() -> None:
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    found = dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not torch.is_tensor(found), "gloo's all-to-all takes no tensor for its splits"


def mesh_of_cuda() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from torch.distributed.tensor import DTensor, Shard

    mesh = mcore_fsdp_adapter.DeviceMesh.from_group(dist.group.WORLD, device_type="cuda", mesh_dim_names=("dp",))
    DTensor.from_local(torch.ones(2), mesh, [Shard(0)])


def number_of_the_device() -> None:
    assert torch.device(f"cuda:{torch.cuda.current_device()}").index == 0  # megatron_fsdp:184
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"


SHIMS = [
    current_device, device_named_cuda, type_names, tensor_cuda, pin_memory, synchronize, generator, streams,
    splits_as_numbers, mesh_of_cuda, number_of_the_device,
]  # fmt: skip


def moe_router() -> None:
    from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction

    RouterGatingLinearFunction.apply(torch.ones(2, 4), torch.ones(3, 4), None, torch.float32)


def latent_attention() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="LayerNorm").submodules.self_attention
    spec.submodules.core_attention = torch.nn.Identity  # Megatron's own knows no size of values
    build_module(spec, config=config, layer_number=1)


def fsdp_linears() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    assert not isinstance(torch.nn.Linear(1, 1), (mcore_fsdp_adapter.TELinear,))


def _sharded_adam() -> tuple[Three, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    three = Three(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
    model = wrap_for_training([three], Layout(use_distributed_optimizer=True))
    return three, Optimizer(model, OptimSettings("adamw")).inner.chained_optimizers[0]


def adam_state_to_load_into() -> None:
    _, optimizer = _sharded_adam()
    optimizer.state_dict()


def _put_moments(step: dict[str, torch.Tensor], *, grad_enabled: bool) -> None:
    three, optimizer = _sharded_adam()
    optimizer.step()
    moments = {name: torch.zeros(2) for name in ("param", "exp_avg", "exp_avg_sq")}
    with torch.set_grad_enabled(grad_enabled):
        optimizer._set_main_param_and_optimizer_states(three.matrix, moments | step)


def adam_state_without_a_step() -> None:
    _put_moments({}, grad_enabled=False)


def adam_state_outside_no_grad() -> None:
    _put_moments({"step": torch.ones(())}, grad_enabled=True)


def adam_counts_for_each_parameter() -> None:
    _, optimizer = _sharded_adam()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    counters = {id(state["step"]) for state in optimizer.optimizer.state.values()}
    assert len(counters) == 2, f"2 parameters share {len(counters)} counter"


class _Slices(TorchFunctionMode):
    """Counts what is cut out of tensors."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.__getitem__
        return func(*args, **(kwargs or {}))


def rope_of_many_sequences() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    ends, group = torch.arange(17, dtype=torch.int32) * 3, parallel_state.get_context_parallel_group()
    with _Slices() as slices:
        rope_utils._apply_rotary_pos_emb_thd(torch.ones(48, 1, 4), ends, torch.ones(3, 1, 1, 4), cp_group=group)
    assert slices.count < 16, f"{slices.count} slices for 16 sequences"


FIXES = [
    moe_router, latent_attention, fsdp_linears, adam_state_to_load_into, adam_state_without_a_step,
    adam_state_outside_no_grad, adam_counts_for_each_parameter, rope_of_many_sequences,
]  # fmt: skip


def errors(cases: list[Callable[[], None]]) -> dict[str, str]:
    """Name -> what it raised; empty where it went through."""
    found = {}
    for case in cases:
        try:
            case()
            found[case.__name__] = ""
        except Exception as error:
            found[case.__name__] = f"{type(error).__name__}: {error}"
    return found


def main(out: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found: dict[str, Any] = {"without shims": errors(SHIMS)}
    cpu.activate()
    once = torch.cuda.current_device, len(torch.overrides._get_current_function_mode_stack())
    cpu.activate()
    found["twice"] = once == (torch.cuda.current_device, len(torch.overrides._get_current_function_mode_stack()))
    found["with shims"] = errors(SHIMS)
    found["present"] = {check.__name__: check() for check, _ in fixes.FIXES}
    found["without fixes"] = errors(FIXES)
    fixes.apply()
    fixes.apply()
    found["with fixes"] = errors(FIXES)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
