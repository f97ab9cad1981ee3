"""What the rank of test_model_columns.py runs: columns and gradients of whole models beside those of whole logits."""

from __future__ import annotations

from typing import Any

import torch
from chunks import named_parameters, parameters
from logprobs_plain import plain_columns
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from megarl.algo.loss import ActorLoss
from megarl.batch import Batch, LossOutput, MicroBatch
from megarl.layout import Layout
from megarl.mcore.logprobs.logprobs import NAMES
from megarl.mcore.models.lora import LoraSettings, apply_lora
from megarl.mcore.models.model import Model, build_model, output_weight, unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import make_row
from megarl.mcore.training.step import Outputs, backward, forward_only

CPU, LAYOUT = torch.device("cpu"), Layout()
HF: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "vocab_size": 45,
}
G = torch.Generator().manual_seed(0)
TOKENS, LENGTHS = torch.randint(0, 44, (17,), generator=G), torch.tensor([5, 12])
FACTORS = torch.randn(4, 17, generator=G)
Pairs = dict[str, tuple[Tensor, Tensor]]  # what we give, and what is right


def run(case: str, *args: Any) -> Any:
    """One of the functions below, in groups of its own."""
    make_groups(LAYOUT)
    try:
        return globals()[case](*args)
    finally:
        destroy_groups()


def actor(*, tied: bool = True, seed: int = 1, dtype: str = "float32", vocab_size: int = 45) -> Model:
    torch.manual_seed(seed)
    hf = {**HF, "tie_word_embeddings": tied, "vocab_size": vocab_size}
    model = build_model(hf, LAYOUT, dtype=dtype)
    with torch.no_grad():  # Megatron's initial weights are small: every softmax would be flat
        for param in parameters(model):
            param.mul_(3)
    return model


def micros(**columns: Tensor) -> list[MicroBatch]:
    return [MicroBatch(Batch(TOKENS, LENGTHS, columns))]


def weighted(_: Any, columns: dict[str, Tensor]) -> LossOutput:
    """sum of FACTORS times the columns."""
    stacked = torch.stack([columns[name] for name in NAMES if name in columns])
    return LossOutput((stacked * FACTORS[: len(stacked)]).sum(), {})


def plain(model: Model, reference: Model | None = None) -> dict[str, Tensor]:
    """In the graph of the model's own parameters."""
    row = make_row(micros()[0], LAYOUT, CPU)

    def sides(model: Model) -> tuple[Tensor, Tensor]:
        hidden = model[0](row.tokens, row.positions, None, packed_seq_params=row.packed)
        return hidden[0], output_weight(model[0])

    frozen = None if reference is None else [side.detach() for side in sides(reference)]
    found = plain_columns(*sides(model), row.labels, 45, 0.8, frozen)
    return {name: row.column(column) for name, column in found.items()}


def whole_gradients(tied: bool, overlap: bool) -> Pairs:
    """With all four columns; `overlap`: DDP reduces while the backward pass runs."""
    model, reference = actor(tied=tied), actor(tied=False, seed=2)
    params = dict(named_parameters(model))
    expected = torch.autograd.grad(weighted(None, plain(model, reference)).loss, list(params.values()))
    if not overlap:
        return _in_buffers(wrap_for_training(model, LAYOUT), NAMES, params, expected, reference)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    config: Any = model[0].config
    wrapped = DistributedDataParallel(config, settings, model[0])
    config.no_sync_func, config.finalize_model_grads_func = wrapped.no_sync, finalize_model_grads
    return _in_buffers([wrapped], NAMES, params, expected, reference)


def adapters_gradients() -> tuple[Pairs, bool]:
    """Of a model whose base is frozen; and whether the head's weight was left alone."""
    model = actor(tied=False)
    apply_lora(model, LoraSettings(2, 4.0))
    with torch.no_grad():
        for name, param in named_parameters(model):
            if name.endswith(".B"):
                param.normal_()
    params = {name: p for name, p in named_parameters(model) if p.requires_grad}
    expected = torch.autograd.grad(weighted(None, plain(model)).loss, list(params.values()))
    pairs = _in_buffers(wrap_for_training(model, LAYOUT), NAMES[:3], params, expected, None)
    weight = output_weight(model[0])
    return pairs, weight.grad is None and not hasattr(weight, "main_grad")


def _in_buffers(
    wrapped: Model, names: tuple[str, ...], params: dict[str, Any], expected: Any, reference: Model | None
) -> Pairs:
    outputs = Outputs(LAYOUT, 45, 0.8, names)
    backward(wrapped, micros(), outputs, weighted, num_tokens=17, device=CPU, reference=reference)
    return {
        name: (params[name].main_grad.clone(), theirs.float()) for name, theirs in zip(params, expected, strict=True)
    }


def columns(names: tuple[str, ...], dtype: str) -> Pairs:
    """Of a model in this type, beside the definition at the float32 model's."""
    found = forward_only(
        actor(dtype=dtype), micros(), Outputs(LAYOUT, 45, 0.8, names), CPU, actor(seed=2, dtype=dtype)
    )[0]
    expected = plain(actor(), actor(seed=2))
    return {name: (column, expected[name].detach().float()) for name, column in found.items()}


def head() -> dict[str, Any]:
    model = actor(tied=False)
    layer, calls = unwrap(model[0]).output_layer, []
    layer.register_forward_pre_hook(lambda *args: calls.append(args))
    forward_only(model, micros(), Outputs(LAYOUT, 45), CPU)
    return {
        "parameters": [name for name, _ in named_parameters(model) if "output" in name],
        "checkpoint": [name for name in unwrap(model[0]).sharded_state_dict() if name == "output_layer.weight"],
        "calls": len(calls),
    }


def place_of_bad_logit(bad: float) -> tuple[str, int, int]:
    """The last hidden states of the seventh token of the second sequence are not finite."""
    model = actor(tied=False)

    def spoil(_: Any, __: Any, hidden: Tensor) -> Tensor:
        return hidden.index_fill(0, torch.tensor([5 + 6]), bad)

    unwrap(model[0]).decoder.final_layernorm.register_forward_hook(spoil)
    columns = {name: torch.zeros(17) for name in ("old_log_probs", "advantages")}
    columns |= {"response_mask": torch.ones(17), "weight": torch.full((17,), 1 / 17)}
    columns["response_mask"][[0, 5]] = 0.0
    wrapped, batch = wrap_for_training(model, LAYOUT), micros(**columns)
    outputs = Outputs(LAYOUT, 45, names=("log_probs", "entropy"))
    found = backward(wrapped, batch, outputs, ActorLoss("ppo"), num_tokens=17, device=CPU).bad
    assert found is not None
    return found.column, found.sequence, found.token


def refusal(names: tuple[str, ...], role: str, ref_vocab_size: int | None) -> str:
    reference = None if ref_vocab_size is None else actor(vocab_size=ref_vocab_size)
    try:
        forward_only(build_model(HF, LAYOUT, role=role), micros(), Outputs(LAYOUT, 45, names=names), CPU, reference)
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")
