"""Transformer-Engine's layers beside local ones: the same gradient, norms and weights after clipped steps.

All of Python's part of Transformer-Engine runs, under Megatron-Core and the product's own step; for its compiled part
stand `te_kernels.py` and `te_attention.py`.  What its kernels compute on a GPU is shown by tests/gpu alone.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from parity_cases import Case
from parity_compare import assert_same_after, assert_same_gradient, assert_same_stats
from te_cases import fixed, run_te_cases
from te_start import run as start
from tiny_models import write_model

from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions
from megarl.megatron_fields import FUSIONS

pytestmark = [pytest.mark.dist, pytest.mark.full]

TE = ExecutionOptions(transformer_impl="transformer_engine")
RECOMPUTED = replace(TE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
LOCAL = ExecutionOptions(transformer_impl="local")


def selective(*modules: str) -> ExecutionOptions:
    return replace(TE, recompute_granularity="selective", override_transformer_config={"recompute_modules": [*modules]})


ENGINES: dict[str, ExecutionOptions] = {
    "local": LOCAL,
    "": TE,
    "recomputed": RECOMPUTED,
    "experts recomputed": selective("layernorm", "moe_act"),
    "latents recomputed": selective("layernorm", "mla_up_proj", "mlp", "shared_experts"),
    "without fusions": replace(TE, override_transformer_config=dict.fromkeys(FUSIONS, False)),
}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one": (1, Layout()),
    "tp2": (2, Layout(tp=2)),
    "tp2+sp": (2, Layout(**SP)),
    "pp2": (2, Layout(pp=2)),
    "pp2 vpp2": (2, Layout(pp=2, vpp=2)),
    "dp2": (2, Layout()),
    "cp2": (2, Layout(cp=2)),
    "ep2": (2, Layout(ep=2)),
    "tp2+sp ep2 etp1": (2, Layout(**SP, ep=2, etp=1)),
    "dp2 sharded": (2, Layout(use_distributed_optimizer=True)),
    "tp2+sp sharded": (2, Layout(**SP, use_distributed_optimizer=True)),
    "tp2+sp cp2": (4, Layout(**SP, cp=2)),
    "cp2 pp2": (4, Layout(cp=2, pp=2)),
    "cp4": (4, Layout(cp=4)),
    "ep2 etp2": (4, Layout(ep=2, etp=2)),
}
DENSE = ("one", "tp2", "tp2+sp", "pp2 vpp2", "dp2", "cp2")
SPARSE = ("one", "tp2+sp", "ep2", "tp2+sp ep2 etp1", "pp2 vpp2")
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": (*DENSE, "tp2+sp cp2", "cp2 pp2", "cp4"),
    "qwen3_moe": (*SPARSE, "cp2", "ep2 etp2"),
    "deepseek_v3": (*SPARSE, "cp2", "tp2+sp cp2"),
    "glm4_moe": SPARSE,
    "minimax_m2": SPARSE,
    "gpt_oss": ("one", "ep2", "tp2+sp ep2 etp1", "pp2", "cp2"),
    "mistral": ("one", "tp2+sp", "cp2"),
}


@dataclass(frozen=True)
class Run:
    """Two steps of a family's tiny model, whose gradients are clipped."""

    family: str
    layout: str
    optim: str = "sgd"
    role: str = "actor"
    tied: bool = False
    engine: ExecutionOptions = TE

    @property
    def case(self) -> Case:
        how: dict[str, Any] = {"max_tokens": 40, "num_steps": 2, "optim": self.optim}
        return Case(self.role, LAYOUTS[self.layout][1], self.engine, **how)

    @property
    def num_ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def local(self) -> "Run":
        """The same by local layers on one rank."""
        return replace(self, layout="one", engine=LOCAL)

    def __str__(self) -> str:
        parts = [self.family, "tied" * self.tied, self.layout, self.role, self.optim]
        parts += [name for name, engine in ENGINES.items() if engine == self.engine]
        return " ".join(filter(None, parts))


RUNS = [Run(family, layout) for family, layouts in FAMILIES.items() for layout in layouts]
RUNS += [Run("qwen3", layout, tied=True) for layout in ("one", "tp2+sp", "pp2 vpp2", "dp2")]
RUNS += [Run("qwen3_moe", layout, tied=True) for layout in ("tp2+sp ep2 etp1", "pp2 vpp2")]
RUNS += [Run("qwen3_moe", layout, optim="muon") for layout in ("one", "tp2+sp", "tp2+sp ep2 etp1", "ep2 etp2")]
RUNS += [Run("qwen3_moe", layout, optim="adamw") for layout in ("one", "dp2 sharded", "tp2+sp sharded")]
RUNS += [Run("qwen3_moe", layout, role="critic") for layout in ("one", "tp2+sp ep2 etp1")]
for _engine in ("recomputed", "experts recomputed", "without fusions"):
    RUNS += [Run("qwen3_moe", layout, engine=ENGINES[_engine]) for layout in ("one", "tp2+sp ep2 etp1")]
RUNS += [Run("deepseek_v3", layout, engine=ENGINES["latents recomputed"]) for layout in ("one", "tp2+sp")]
# Products of the two kinds of layers add in different orders.  Muon mixes all entries of a matrix.
TOLERANCE = {"sgd": 2e-7, "adamw": 1e-6, "muon": 2e-5}


class Found(dict[int, Future[list[dict[str, Any]]]]):
    """Number of ranks -> what each of them returned, by run.  They start when the first of their runs is asked for."""

    def __init__(self, pool: ProcessPoolExecutor, root: Path) -> None:
        super().__init__()
        self.pool, self._root = pool, root

    def __missing__(self, num_ranks: int) -> Future[list[dict[str, Any]]]:
        runs = [run for run in (*RUNS, *(run.local for run in RUNS)) if run.num_ranks == num_ranks]
        cases = {str(run): (self._folder(run), run.case) for run in runs}
        self[num_ranks] = self.pool.submit(start, num_ranks, run_te_cases, cases)
        return self[num_ranks]

    def _folder(self, run: Run) -> str:
        folder = self._root / f"{run.family}{'-tied' * run.tied}"
        return str(folder if folder.exists() else write_model(folder, run.family, tied=run.tied))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Found(pool, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layers_of_transformer_engine_train_as_local_ones(found: Found, run: Run) -> None:
    got = [rank[str(run)] for rank in found[run.num_ranks].result()]
    expected = found[1].result()[0][str(run.local)]
    if not run.case.layout.use_distributed_optimizer:  # it leaves no whole gradient to look at
        assert_same_gradient(got[0]["gradient"], expected["gradient"], 1e-5)
    assert_same_stats(got, [expected])
    assert got[0]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=3e-6)
    assert min(expected["grad_norms"]) > 1.0, "both steps are clipped"
    assert_same_after(got[0], expected, TOLERANCE[run.optim])


def test_names_that_megatron_loses_of_transformer_engine_are_put_back(found: Found) -> None:
    (rank,) = found.pool.submit(start, 1, fixed).result()
    assert rank == {"te_split_is_lost": (True, False), "te_gemm_is_lost": (True, False)}
