"""Parts of a training step on one GPU, each alone: what launch/one_gpu.sh measures first.

    python benchmarks/step/bench_gpu_parts.py add             a weight's gradient: a product added to float32
    python benchmarks/step/bench_gpu_parts.py attention       a packed row: padded buckets, and without padding
    python benchmarks/step/bench_gpu_parts.py large_job       one rank of 64: memory of each phase beside the planner's
    python benchmarks/step/bench_gpu_parts.py pinning         pinned host memory; copies beside products
    python benchmarks/step/bench_gpu_parts.py fragmentation   what the allocator keeps over 200 rows of changing length

With --quick also on a CPU, in seconds.  A way that does not exist here is a row that says why.
"""

from __future__ import annotations

import argparse
import inspect
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.common.machine import timed
from benchmarks.common.tensor_memory import watched
from benchmarks.plan.memory_ranks import ADAMW, PARTS, Case, micros_of, predicted, recomputed
from benchmarks.step.bench_step import SIZES, model_config
from benchmarks.step.loops import Ours, make_work
from megarl.algo.loss import ActorLoss
from megarl.arch.hf_config import completed
from megarl.arch.layout import KEYS, Layout
from megarl.config import config_dir
from megarl.mcore import cpu
from megarl.mcore.logprobs.main_grad import add_product_
from megarl.mcore.models.attention import PackedParams, SDPAttention, pad_plan
from megarl.mcore.models.execution import ExecutionOptions, has_transformer_engine
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import backend_of, destroy_groups, make_groups
from megarl.mcore.training import host_memory
from megarl.mcore.training.offload import OffloadBuffer
from megarl.mcore.training.optimizer import Optimizer, wrap_for_training
from megarl.mcore.training.step import Outputs, backward
from megarl.plan.memory import communicator_bytes

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# Preset, its layout, layers, ranks of the job, sequences of a row and their length, dtype.
JOBS: dict[str, tuple[str, str, int, int, int, int, str]] = {
    "dense": ("llama3_1_70b", "32x141", 20, 64, 4, 4096, "bfloat16"),
    "experts": ("qwen3_30b_a3b", "64x80", 24, 64, 4, 4096, "bfloat16"),
    "quick_dense": ("llama3_mini", "4xcpu", 2, 8, 2, 16, "float32"),
    "quick_experts": ("qwen3_moe_mini", "2xcpu", 2, 4, 2, 16, "float32"),
}


def add(options: argparse.Namespace) -> page.Result:
    """target [V, H] float32 += gradients of logits [T, V]^T hidden [T, H]."""
    shapes = [(32, 16, 64)] if options.quick else [(16384, 2048, 32768), (16384, 4096, 152064)]

    def in_place(target: Tensor, left: Tensor, right: Tensor) -> None:
        torch.addmm(target, left, right, out_dtype=torch.float32, out=target)

    def wide_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        target += torch.mm(left, right, out_dtype=torch.float32)

    def plain(target: Tensor, left: Tensor, right: Tensor) -> None:
        target += left @ right

    ways = {
        "addmm(out_dtype, out=)": in_place,
        "mm(out_dtype), add": wide_product,
        "product, add": plain,
        "as a run does it": add_product_,
    }
    rows = []
    for tokens, hidden, vocab in shapes:
        right = torch.randn(tokens, hidden, device=options.device).bfloat16()
        left = torch.randn(tokens, vocab, device=options.device, dtype=torch.bfloat16).T
        shape = {"tokens": tokens, "hidden": hidden, "vocabulary": vocab}
        rows += [shape | {"way": name} | _tried(_sum_of, way, left, right, options) for name, way in ways.items()]
    return page.Result("gpu_add", options.device, {}, rows, title="A product added to float32")


def _sum_of(way: Callable[..., None], left: Tensor, right: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """`way` adds left [V, T] @ right [T, H]."""
    target = torch.ones(len(left), right.size(1), device=options.device)
    way(target, left, right)
    error = (target[:64].double() - 1 - left[:64].double() @ right.double()).abs().max().item()
    seconds = _seconds(lambda: way(target, left, right), options)
    flops = 2.0 * left.numel() * right.size(1)
    return {"ms": 1e3 * seconds, "TFLOP/s": 1e-12 * flops / seconds, "largest error": error}


def attention(options: argparse.Namespace) -> page.Result:
    """One packed row of 16 sequences, forward, and forward and backward."""
    draw = random.Random(0)
    lengths = [draw.randint(*((2, 12) if options.quick else (256, 1792))) for _ in range(16)]
    plan = pad_plan(lengths)
    plan = replace(plan, slots=plan.slots.to(options.device))
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=options.device)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    config = SimpleNamespace(
        window_size=None,
        window_attn_skip_freq=None,
        softmax_type="vanilla",
        num_attention_heads=1,
        tensor_model_parallel_size=1,
        attention_dropout=0.0,
    )
    alone: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    ours = SDPAttention(config, 1, AttnMaskType.padding_causal, "self", pg_collection=alone)
    packed = PackedParams(qkv_format="thd", pad=plan)

    def buckets(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours(q, k, v, packed_seq_params=packed)

    def with_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION], set_priority=True):
            return buckets(q, k, v)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later

        takes = inspect.signature(varlen_attn).parameters
        how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
        how |= {"enable_gqa": True} if "enable_gqa" in takes else {}
        out = varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths), **how)
        assert isinstance(out, Tensor), "only the output was asked for"
        return out.flatten(1)

    rows, ways = [], (("padded buckets", buckets), ("padded buckets, cuDNN", with_cudnn), ("varlen_attn", varlen))
    for size, heads, pairs in [(16, 4, 2)] if options.quick else [(64, 32, 8), (128, 32, 8)]:
        shapes = [(sum(lengths), count, size) for count in (heads, pairs, pairs)]
        q, k, v = (torch.randn(x, device=options.device, dtype=dtype, requires_grad=True) for x in shapes)
        flops = 2.0 * heads * size * sum(length**2 for length in lengths)
        of_row, wanted = {"head size": size, "heads": heads, "of keys": pairs}, buckets(q, k, v).detach()
        rows += [
            of_row | {"way": name} | _tried(_both_ways, way, (q, k, v), wanted, flops, options) for name, way in ways
        ]
    configuration = {"lengths": str(lengths), "slots": plan.num_slots, "buckets": str(plan.buckets)}
    return page.Result("gpu_attention", options.device, configuration, rows, title="Attention over a packed row")


def _both_ways(
    way: Callable[..., Tensor], qkv: tuple[Tensor, ...], wanted: Tensor, flops: float, options: argparse.Namespace
) -> dict[str, float]:
    """`wanted`: the outputs that the first way gives; `flops`: of a forward pass."""
    apart = (way(*qkv).detach() - wanted).abs().max().item()
    forward = _seconds(lambda: way(*qkv), options)
    both = _seconds(lambda: torch.autograd.grad(way(*qkv), qkv, wanted), options)
    of_both = {"forward and backward, ms": 1e3 * both, "TFLOP/s": 3.5e-12 * flops / both}
    return {"forward, ms": 1e3 * forward, **of_both, "apart from the first": apart}


def large_job(options: argparse.Namespace) -> page.Result:
    """A rank of the last pipeline stage; the collectives of the other ranks return at once, with this rank's values."""
    name = f"quick_{options.job}" if options.quick else options.job
    preset, of_preset, layers, num_ranks, sequences, length, dtype = JOBS[name]
    found = yaml.safe_load((config_dir() / "model" / f"{preset}.yaml").read_text())
    hf = completed(found["model"]["config"] | {"num_hidden_layers": layers})
    keys = found["layouts"][of_preset]["actor"]["megatron"]
    sizes = {field: keys[key] for field, key in KEYS.items() if key in keys}
    local = not (options.device == "cuda" and has_transformer_engine())
    recompute = keys.get("recompute_granularity") == "full"
    case = Case(name, hf, sizes, num_ranks, recompute, sequences, length, 2, dtype=dtype, local=local)
    layout = Layout(**sizes)
    engine = ExecutionOptions(
        transformer_impl="local" if local else "transformer_engine",
        overlap_grad_reduce=keys.get("overlap_grad_reduce", False),
    )
    engine = recomputed(engine) if recompute else engine
    rows, device = list[dict[str, Any]](), torch.device(options.device)
    with _rank_of(case, layout, device), watched(options.device) as memory:

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            memory.forget_peak()
            begun = time.perf_counter()
            row: dict[str, Any] = {"phase": name}
            yield
            if device.type == "cuda":
                torch.cuda.synchronize()
                row["most reserved, GB"] = torch.cuda.max_memory_reserved() / 1e9
            row |= {"GB": memory.now_bytes / 1e9, "peak, GB": memory.peak_bytes / 1e9}
            rows.append(row | {"seconds": time.perf_counter() - begun})

        with phase("build"):
            model = build_model(hf, layout, dtype=dtype, engine=engine)
        with phase("wrap"):
            model = wrap_for_training(model, layout, engine)
        with phase("optimizer"):
            optimizer = Optimizer(model, ADAMW)
            buffer = OffloadBuffer(model, optimizer, parameters=True, gradients=True, moments=True)
        outputs, loss, micros = Outputs(layout, hf["vocab_size"]), ActorLoss("ppo"), micros_of(case)
        for step in ("first step", "second step"):
            with phase(f"{step}: forward and backward"):
                optimizer.zero_grad()
                backward(model, micros, outputs, loss, num_tokens=2 * case.tokens, device=device)
            with phase(f"{step}: optimizer"):
                optimizer.step(optimizer.gradient_norm())  # a made-up one: not of what the others would have sent
        with phase("offload"):
            buffer.offload()
        with phase("onload"):
            buffer.onload()
    planned = predicted(case, layout, layout.pp - 1)
    has_experts = "num_experts" in hf
    planner = {part: getattr(planned, part) for part in PARTS} | {
        "communicators": communicator_bytes(layout, num_ranks, has_experts=has_experts),
        "all but the reserve": planned.total - planned.reserve,
        "while it is wrapped": 2 * planned.weights + planned.gradients,
    }
    rows += [{"phase": f"planner: {part}", "GB": num_bytes / 1e9} for part, num_bytes in planner.items()]
    configuration = {
        "preset": f"{preset}, {of_preset}, {layers} layers",
        "layout": str(layout),
        "ranks": num_ranks,
        "row": f"{sequences} x {length} tokens, two of them in a step",
        "layers": "local" if local else "Transformer-Engine",
        "recomputed": recompute,
    }
    return page.Result(
        f"gpu_large_job_{options.job}", options.device, configuration, rows, title="One rank of a large job"
    )


@contextmanager
def _rank_of(case: Case, layout: Layout, device: torch.device) -> Iterator[None]:
    """The first rank of the last stage.  What other stages would send is random numbers of the right shape."""
    cpu.activate()
    split = layout.tp if layout.sequence_parallel else 1
    shape = (case.tokens // layout.cp // split, 1, case.hf["hidden_size"])
    dtype = getattr(torch, case.dtype)

    def exchange(self: Any, *, recv_prev: bool, recv_next: bool, **_: Any) -> tuple[Tensor | None, Tensor | None, None]:
        prev, next_ = (
            torch.randn(shape, device=device, dtype=dtype).requires_grad_() if asked else None
            for asked in (recv_prev, recv_next)
        )
        return prev, next_, None

    rank = (layout.pp - 1) * case.num_ranks // layout.pp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.num_ranks)
    try:
        make_groups(layout)
        with mock.patch.object(P2PCommunicator, "_communicate", exchange):
            yield
    finally:
        destroy_groups()
        dist.destroy_process_group()


def pinning(options: argparse.Namespace) -> page.Result:
    """Host memory as a run has it, of pages of either size; copies from it to the device, alone and beside products."""
    num_bytes, size, count = (2**22, 64, 1) if options.quick else (20 * 10**9, 8192, 250)
    to = torch.empty(num_bytes, dtype=torch.uint8, device=options.device)
    factor = torch.randn(size, size, device=options.device, dtype=torch.bfloat16)
    system = mmap.mmap

    def huge(*how: Any, **flags: Any) -> mmap.mmap:
        block = system(*how, **flags)
        block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def products() -> None:
        for _ in range(count):
            factor @ factor

    def measured(make: Callable[..., mmap.mmap]) -> dict[str, float]:
        begun = time.perf_counter()
        with mock.patch.object(mmap, "mmap", make):
            memory = host_memory.HostMemory((num_bytes,))
        pinned = time.perf_counter() - begun
        pairs = [(to, memory.parts[0])]
        host_memory.copy_at_once(pairs)  # without a GPU the first one also maps the memory

        def both() -> None:
            arrive = host_memory.begin_copies(pairs)
            products()
            arrive()

        copy, alone, together = (
            timed(x, options.device) for x in (lambda: host_memory.copy_at_once(pairs), products, both)
        )
        copying = {"copy, s": copy, "copy, GB/s": num_bytes / 1e9 / copy}
        return {"GB": num_bytes / 1e9, "pin, s": pinned, **copying, "products, s": alone, "both at once, s": together}

    ways = {"as the system has them": system, "MADV_HUGEPAGE": huge}
    rows = [{"pages": name} | _tried(measured, way) for name, way in ways.items()]
    return page.Result("gpu_pinning", options.device, {}, rows, title="Host memory for what is offloaded")


def fragmentation(options: argparse.Namespace) -> page.Result:
    """One step of rows whose lengths change; the allocator's options are those of the environment."""
    draw, on_gpu = random.Random(0), options.device == "cuda"
    size = SIZES["quick"] if options.quick else SIZES["cuda"] | {"layers": 12}
    rows, shortest, most = (6, 32, 128) if options.quick else (200, 4096, 16384)
    lengths = list[int]()
    sizes = list[int]()
    for _ in range(rows):
        left = draw.randint(shortest, most)
        of_row = [size["longest"]] * (left // size["longest"]) + [max(2, left % size["longest"])]
        lengths, sizes = lengths + of_row, [*sizes, len(of_row)]
    dtype = "bfloat16" if on_gpu else "float32"
    cpu.activate()
    dist.init_process_group(backend_of(options.device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_groups(Layout())
        work = make_work(model_config(size), lengths, sum(lengths), dtype, torch.device(options.device))
        ours = Ours(replace(work, micro_sizes=sizes))
        row: dict[str, Any] = {ALLOCATOR: os.environ.get(ALLOCATOR, ""), "rows": rows, "tokens": sum(lengths)}
        row["seconds"] = timed(ours.step, options.device)
        if on_gpu:
            row |= _allocated()
    finally:
        destroy_groups()
        dist.destroy_process_group()
    return page.Result("gpu_fragmentation", options.device, size, [row], title="Memory that the allocator keeps")


def _allocated() -> dict[str, Any]:
    found = torch.cuda.memory_stats()
    reserved, allocated = (found[f"{name}_bytes.all.peak"] for name in ("reserved", "allocated"))
    return {
        "most reserved, GB": reserved / 1e9,
        "most allocated, GB": allocated / 1e9,
        "between, GB": (reserved - allocated) / 1e9,
        "in split blocks, at most, GB": found["inactive_split_bytes.all.peak"] / 1e9,
        "retries": found["num_alloc_retries"],
    }


def _seconds(work: Callable[[], object], options: argparse.Namespace) -> float:
    """The median, after one that warms up."""
    times = [timed(work, options.device) for _ in range(3 if options.quick else 11)]
    return statistics.median(times[1:])


def _tried(measure: Callable[..., dict[str, float]], *how: Any) -> dict[str, Any]:
    """What it measures of a way that may not exist here, or why it does not."""
    try:
        return measure(*how)
    except (ImportError, OSError, RuntimeError, TypeError) as error:
        return {"not here": " ".join(str(error).split())[:100]}


PARTS_OF_A_STEP = {work.__name__: work for work in (add, attention, large_job, pinning, fragmentation)}


def parser() -> argparse.ArgumentParser:
    made = page.arguments(__doc__)
    made.add_argument("part", choices=PARTS_OF_A_STEP, help="what is measured")
    made.add_argument("--job", choices=("dense", "experts"), default="dense", help="of large_job")
    return made


if __name__ == "__main__":
    raise SystemExit(page.run(lambda options: PARTS_OF_A_STEP[options.part](options), parser()))
