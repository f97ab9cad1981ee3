"""What stock Megatron does on this machine before and after each shim and fix; run as a process of its own.

python shim_cases.py FILE writes {"without shims" | "with shims" | "without fixes" | "with fixes": {name: error}}.
"""

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

from megarl.arch.layout import Layout
from megarl.mcore import cpu, fixes
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training

# Name -> what does it, and the error without the shim or fix.
SHIMS: dict[str, tuple[Callable[[], None], str]] = {}
FIXES: dict[str, tuple[Callable[[], None], str]] = {}
NO_CUDA = "CUDA|NVIDIA"  # of a build for CUDA: that there is no driver


def case_of(table: dict[str, Any], error: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(case: Callable[[], None]) -> Callable[[], None]:
        table[case.__name__] = (case, error)
        return case

    return add


@case_of(SHIMS, NO_CUDA)
def current_device() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding(kv_channels=8, rotary_percent=1.0)(4)


@case_of(SHIMS, NO_CUDA)
def device_named_cuda() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    FP32Optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), OptimizerConfig(), lambda *_: None)


@case_of(SHIMS, "AssertionError")
def type_names() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    clip_grad_by_total_norm_fp32([param], 1.0, 2.0)


@case_of(SHIMS, NO_CUDA)
def tensor_cuda() -> None:
    torch.ones(2).cuda()


@case_of(SHIMS, "pin|NVIDIA")
def pin_memory() -> None:
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    get_pos_emb_on_this_cp_rank(torch.zeros(4, 1, 1, 2), 0, group)


@case_of(SHIMS, NO_CUDA)
def synchronize() -> None:
    torch.cuda.synchronize()  # Megatron's pipelines call it (p2p_communication:398)


@case_of(SHIMS, NO_CUDA)
def generator() -> None:
    from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda y: y * y, False, x).sum().backward()


@case_of(SHIMS, NO_CUDA)
def streams() -> None:
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    torch.cuda.Event().record()


@case_of(SHIMS, "AssertionError: gloo's all-to-all takes no tensor for its splits")
def splits_as_numbers() -> None:
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    found = dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not torch.is_tensor(found), "gloo's all-to-all takes no tensor for its splits"


@case_of(SHIMS, NO_CUDA)
def mesh_of_cuda() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from torch.distributed.tensor import DTensor, Shard

    mesh = mcore_fsdp_adapter.DeviceMesh.from_group(dist.group.WORLD, device_type="cuda", mesh_dim_names=("dp",))
    DTensor.from_local(torch.ones(2), mesh, [Shard(0)])


@case_of(SHIMS, NO_CUDA)
def number_of_the_device() -> None:
    assert torch.device(f"cuda:{torch.cuda.current_device()}").index == 0  # megatron_fsdp:184
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"


@case_of(FIXES, "NameError: name 'te_general_gemm' is not defined")
def moe_router() -> None:
    from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction

    RouterGatingLinearFunction.apply(torch.ones(2, 4), torch.ones(3, 4), None, torch.float32)


@case_of(FIXES, r"TypeError: isinstance\(\) arg 2 must be a type")
def latent_attention() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="LayerNorm").submodules.self_attention
    spec.submodules.core_attention = torch.nn.Identity  # Megatron's own knows no size of values
    build_module(spec, config=config, layer_number=1)


@case_of(FIXES, r"TypeError: isinstance\(\) arg 2 must be a type")
def fsdp_linears() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    assert not isinstance(torch.nn.Linear(1, 1), getattr(mcore_fsdp_adapter, "TELinear", ()))


def _sharded_adam() -> tuple[Three, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    three = Three(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
    model = wrap_for_training([three], Layout(use_distributed_optimizer=True))
    return three, Optimizer(model, OptimSettings("adamw")).inner.chained_optimizers[0]


@case_of(FIXES, "AssertionError")
def adam_state_to_load_into() -> None:
    _, optimizer = _sharded_adam()
    optimizer.state_dict()


def _put_moments(step: dict[str, torch.Tensor], *, grad_enabled: bool) -> None:
    three, optimizer = _sharded_adam()
    optimizer.step()
    moments = {name: torch.zeros(2) for name in ("param", "exp_avg", "exp_avg_sq")}
    with torch.set_grad_enabled(grad_enabled):
        optimizer._set_main_param_and_optimizer_states(three.matrix, moments | step)


@case_of(FIXES, "KeyError: 'step'")
def adam_state_without_a_step() -> None:
    _put_moments({}, grad_enabled=False)


@case_of(FIXES, "a view of a leaf Variable that requires grad")
def adam_state_outside_no_grad() -> None:
    _put_moments({"step": torch.ones(())}, grad_enabled=True)


@case_of(FIXES, "AssertionError: 2 parameters share 1 counter")
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


@case_of(FIXES, "slices for 16 sequences")
def rope_of_many_sequences() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    ends, group = torch.arange(17, dtype=torch.int32) * 3, parallel_state.get_context_parallel_group()
    with _Slices() as slices:
        rope_utils._apply_rotary_pos_emb_thd(torch.ones(48, 1, 4), ends, torch.ones(3, 1, 1, 4), cp_group=group)
    assert slices.count < 16, f"{slices.count} slices for 16 sequences"


def errors(cases: dict[str, tuple[Callable[[], None], str]]) -> dict[str, str]:
    """Name -> what it raised; empty where it went through."""
    found = {}
    for name, (case, _) in cases.items():
        try:
            case()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
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
