"""What runs on the ranks of the parity tests: columns, loss, gradient and a few optimizer steps under a layout."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from chunks import fill_value_head, gradients, named_parameters, parameters, weights
from flex_cases import on_cpus
from megatron.core.transformer.moe import moe_utils, router
from spawn import run_ranks

from megarl.algo.loss import MTP, ActorLoss, CriticLoss
from megarl.algo.step_columns import step_columns
from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.arch.mtp import with_mtp
from megarl.data.packing import plan
from megarl.data.prefix_tree import CommonPrefixes, prefix_groups
from megarl.mcore.logprobs import fused
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.lora import LoraSettings, adapted, apply_lora
from megarl.mcore.models.model import Model, build_model
from megarl.mcore.setup import destroy_groups, device_for, make_groups
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import make_row, micro_batches
from megarl.mcore.training.step import Outputs, backward, forward_only
from megarl.mcore.training.wrappers import OneProcess
from megarl.samples.batch import Batch, LossOutput
from megarl.samples.ragged import Ragged, names_in_batch
from megarl.samples.sample import SUPPORT
from megarl.weights.hf.load import load_hf


class EveryColumn:
    """A loss that nobody trains with, of all the columns that an actor and its reference give."""

    columns = ("weight", "advantages", "old_log_probs")

    def __call__(self, batch: Batch, outputs: dict[str, torch.Tensor]) -> LossOutput:
        token_loss = batch.columns["advantages"] * outputs["log_probs"] + outputs["full_kl"]
        token_loss = token_loss + outputs["sum_pi_squared"] - 0.5 * outputs["entropy"]
        return LossOutput((batch.columns["weight"] * token_loss).sum())


NAMES = {"actor": ("log_probs", "entropy"), "critic": ("values",), "actor with reference": fused.NAMES}
LOSSES: dict[str, Any] = {
    "actor": ActorLoss("ppo", entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1),
    "critic": CriticLoss(0.5),
    "actor with reference": EveryColumn(),
}


def with_support(batch: Batch, vocab_size: int) -> Batch:
    """The batch with the tokens that could be drawn for each trained token, itself among them; for every fifth, all."""
    rng, mask = np.random.default_rng(7), batch.columns["response_mask"].tolist()
    lists: list[list[int]] = []
    for place, token in enumerate(batch.tokens.tolist()):
        others = rng.permutation(vocab_size)[: rng.integers(0, 12)].tolist()
        lists.append(list(dict.fromkeys([token, *others])) if mask[place] and place % 5 else [])
    columns = Ragged.of(lists).spread(batch.lengths.numpy())
    return batch.with_columns(**dict(zip(names_in_batch(SUPPORT), columns, strict=True)))


def make_step(vocab_size: int, num_sequences: int = 13) -> Batch:
    """Ragged sequences with every column a loss may ask for; the first sequence trains no token.

    Without token 0, padding, whose embedding may be 0: each norm would multiply its gradient by up to 1,000, and no
    other could be seen beside it.
    """
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 14, (num_sequences,), generator=g)
    n = int(lengths.sum())
    mask = (torch.rand(n, generator=g) < 0.6).float()
    starts = lengths.cumsum(0) - lengths
    mask[starts] = 0.0
    mask[: int(lengths[0])] = 0.0
    columns = {name: torch.randn(n, generator=g) for name in ("advantages", "values", "returns")}
    columns |= {name: -2.5 + 0.3 * torch.randn(n, generator=g) for name in ("old_log_probs", "ref_log_probs")}
    columns |= {"response_mask": mask, "weight": mask / mask.sum()}
    return Batch(torch.randint(1, vocab_size, (n,), generator=g), lengths, columns)


def make_alike_step(vocab_size: int) -> Batch:
    """Like `make_step`, with groups whose rows begin alike and part again later, equal rows, and one inside another."""
    g = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(0, vocab_size, (length,), generator=g).tolist()

    rows = []
    for of_prompt, answers in ((7, 4), (5, 1), (12, 3), (3, 2)):
        prompt, history = draw(of_prompt), draw(6)
        rows += [[*prompt, *(history if i % 2 else []), *draw(1 + 2 * i)] for i in range(answers)]
    rows += [list(rows[0]), rows[1][:9], draw(2)]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g).tolist()]
    lengths = torch.tensor([len(row) for row in rows])
    n = int(lengths.sum())
    inside = torch.cat([torch.arange(len(row)) for row in rows])
    mask = ((torch.rand(n, generator=g) < 0.6) & (inside > 4)).float()
    columns = {name: torch.randn(n, generator=g) for name in ("advantages", "values", "returns")}
    columns |= {name: -2.5 + 0.3 * torch.randn(n, generator=g) for name in ("old_log_probs", "ref_log_probs")}
    columns |= {"response_mask": mask, "weight": mask / mask.sum()}
    return Batch(torch.tensor(sum(rows, [])), lengths, columns)


def in_episodes(batch: Batch) -> Batch:
    """The 13 rows of `make_alike_step`, those alike beside each other, as 7 samples of up to 3 rows in 3 groups."""
    ordered = batch.select(CommonPrefixes.of(batch).order.tolist())
    samples = replace(ordered, rows=torch.tensor([3, 1, 2, 3, 1, 2, 1]))
    return samples.with_per_sequence(group=torch.tensor([0, 0, 1, 1, 2, 2, 2]))


@dataclass(frozen=True)
class Case:
    """An optimizer step, and what it is computed by."""

    role: str  # a key of LOSSES
    layout: Layout = Layout()
    engine: ExecutionOptions = ExecutionOptions()
    max_tokens: int = 24  # of a micro-batch
    optim: str = "sgd"
    num_steps: int = 0  # optimizer steps to take, the first by the gradient that is looked at
    narrowed: bool = False  # of some tokens only those of a support could be drawn
    alike: bool = False  # rows begin alike
    shares_prefixes: bool = False  # and what they have in common is computed once
    by_flex: bool = False  # by the calls that are made on GPUs
    lora: bool = False  # adapters are trained: their gradient and weights are looked at
    dtype: str = "float32"  # float32 takes local layers
    folder: str | None = None  # of another model than its table's
    mtp: str = "off"  # detached or joint: its MTP layers are trained too
    exact: bool = False  # weights, activations and gradients are float64; on one rank, and without steps
    policy_loss: str | None = None  # of an actor: instead of that of LOSSES, over samples of several rows
    policy_args: Mapping[str, float] = field(default_factory=dict)
    agg_mode: str = "seq-mean-token-mean"  # with it


@dataclass(frozen=True)
class Table:
    """Cases that run together: starting ranks costs more than most of them."""

    num_ranks: int
    folder: str
    cases: Mapping[str, Case]


class Found(dict[str, list[dict[str, Any]]]):
    """Case -> what each rank returned.  A table runs once, when a case of it is first asked for.

    A case that raised raises again for who asks for it, and not for the others of its table.
    """

    def __init__(self, *tables: Table) -> None:
        super().__init__()
        self._tables = tables

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        ranks = super().__getitem__(name)
        if errors := [rank["error"] for rank in ranks if "error" in rank]:
            raise AssertionError(f"{name} raised on {len(errors)} of {len(ranks)} ranks:\n{errors[0]}")
        return ranks

    def __missing__(self, name: str) -> list[dict[str, Any]]:
        table = next(table for table in self._tables if name in table.cases)
        try:
            ranks = run_ranks(table.num_ranks, run_cases, table.folder, dict(table.cases), timeout_s=400)
        except Exception as error:  # of a rank that ended, or hung because only another one raised
            ranks = [dict.fromkeys(table.cases, {"error": str(error)})]
        self.update({case: [rank[case] for rank in ranks] for case in table.cases})
        return self[name]


def run_cases(folder: str, cases: dict[str, Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = run_case(case.folder or folder, case)
        except Exception:  # the others of the table are tried all the same
            found[name] = {"error": traceback.format_exc()}
    return found


def run_case(folder: str, case: Case) -> dict[str, Any]:
    """What this rank sees; whole tensors on rank 0.  A sharded optimizer leaves no whole gradient to be looked at."""
    with _routers_in_float64() if case.exact else nullcontext(), on_cpus() if case.by_flex else nullcontext():
        return _run_case(folder, case)


@contextmanager
def _routers_in_float64() -> Iterator[None]:
    """Megatron's routers compute scores in float32, whatever their input: they name it themselves."""

    class Wide(ModuleType):
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with ExitStack() as patches:
        for module in (moe_utils, router):
            patches.enter_context(mock.patch.object(module, "torch", Wide("torch")))
        patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def _run_case(folder: str, case: Case) -> dict[str, Any]:
    where, device = make_groups(case.layout), device_for("auto")
    try:
        hf, role = with_mtp(read_hf_config(folder), case.mtp), case.role.split()[0]
        engine = case.engine.for_dtype(case.dtype)
        model = build_model(hf, case.layout, role=role, dtype=case.dtype, engine=engine)
        load_hf(model, folder, hf, role=role)
        reference = _reference(folder, hf, case.layout) if "reference" in case.role else None
        for chunk in (*model, *(reference or ())) if case.exact else ():
            chunk.double()
        if role == "critic":
            fill_value_head(model)
        adapters = _adapters(model) if case.lora else {}
        model = _wrapped_in_float64(model) if case.exact else wrap_for_training(model, case.layout, engine)
        batch, loss = _step_of(case, hf["vocab_size"])
        columns_read = loss.columns
        if case.narrowed:
            batch = with_support(batch, hf["vocab_size"])
            columns_read = (*loss.columns, "response_mask", *names_in_batch(SUPPORT))
        how_packed: dict[str, Any] = {"max_tokens": case.max_tokens}
        if case.shares_prefixes:
            how_packed["groups"] = prefix_groups(
                batch, where.num_replicas, max_tokens=case.max_tokens, max_sequences=None, hidden_size=32
            )
        part = plan(batch.sample_lengths.tolist(), where.num_replicas, **how_packed)[where.replica]
        own = batch.select(part.indices).keep_columns(*columns_read)
        micros = micro_batches(own, part.micro_sizes, shares_prefixes=case.shares_prefixes)
        outputs = Outputs(case.layout, hf["vocab_size"], temperature=0.8, names=NAMES[case.role])
        how = {"num_tokens": batch.num_tokens, "device": device, "reference": reference}
        columns = forward_only(model, micros, outputs, device, reference)
        if case.mtp != "off":
            loss, outputs = replace(loss, mtp_coef=0.3), replace(outputs, names=(*outputs.names, MTP))
        stats = backward(model, micros, outputs, loss, **how).stats
        if case.lora or case.exact:  # what is sent to servers and files is never float64
            trained = adapters if case.lora else dict(named_parameters(model))
            gradient = {name: param.main_grad.clone() for name, param in trained.items()}
        else:
            is_sharded = case.layout.use_distributed_optimizer or case.engine.strategy == "fsdp"
            gradient = {} if is_sharded else gradients(model, hf, role)
        grad_norms: list[float] = []
        if case.num_steps:
            optimizer = Optimizer(model, OptimSettings(name=case.optim, lr=0.05, momentum=0.9, eps=1.0))
        for step in range(case.num_steps):
            if step:
                optimizer.zero_grad()
                backward(model, micros, outputs, loss, **how)
            grad_norms.append(optimizer.gradient_norm())
            optimizer.step(grad_norms[-1])
        after = {name: param.detach() for name, param in adapters.items()}
        if case.num_steps and not case.lora:
            after = weights(model, hf, role)
        return {
            "gradient": gradient if dist.get_rank() == 0 else {},
            "grad_norms": grad_norms,
            "after": after if dist.get_rank() == 0 else {},
            "indices": part.indices,
            "columns": {n: torch.cat([c[n] for c in columns]) for n in columns[0]} if where.is_reporter else {},
            "stats": stats if where.is_reporter else {},
            "num_micros": len(micros),
            "num_places": sum(make_row(micro, case.layout, device).tokens.numel() for micro in micros),
        }
    finally:
        destroy_groups()


def _step_of(case: Case, vocab_size: int) -> tuple[Batch, Any]:
    """What is packed of a step, with the columns that the driver makes of all of it, and its loss."""
    batch = (make_alike_step if case.alike else make_step)(vocab_size)
    if case.policy_loss is None:
        return batch, LOSSES[case.role]
    loss = ActorLoss(case.policy_loss, args=case.policy_args, entropy_coeff=0.01)
    how: dict[str, Any] = {"loss": loss, "agg_mode": case.agg_mode, "loss_scale_factor": 16.0, "seed": 11}
    batch = step_columns(in_episodes(batch), **how)
    return batch if loss.per_sequence else batch.by_row(), loss


def _wrapped_in_float64(model: Model) -> Model:
    """Ready for training in one process; `OneProcess` alone would add up gradients in float32."""
    wrapped = [OneProcess(chunk) for chunk in model]
    for param in (param for chunk in wrapped for param in chunk.trained):
        param.main_grad = param.main_grad.double()
    return wrapped


def _adapters(model: Model) -> dict[str, Any]:
    """Parameters of new adapters, none of them 0; the same on every rank whose model is whole."""
    apply_lora(model, LoraSettings(2, 4.0), seed=3)
    found = {f"{name} {i}": p for name, linear in adapted(model) for i, p in enumerate(linear.lora.parameters())}
    g = torch.Generator().manual_seed(11)
    for param in found.values():
        param.data += 0.1 * torch.randn(param.shape, generator=g)
    return found


def _reference(folder: str, hf: dict[str, Any], layout: Layout) -> Model:
    """The same model with smaller weights."""
    model = build_model(hf, layout, engine=ExecutionOptions(transformer_impl="local"))
    load_hf(model, folder, hf)
    with torch.no_grad():
        for param in parameters(model):
            param.mul_(0.8)
    return model
