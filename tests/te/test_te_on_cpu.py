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
from saved_tensors import with_again
from te_cases import fixed, kept_by_te_layers, run_te_cases
from te_start import loaded
from te_start import run as start
from tiny_models import tiny_model, write_model

from megarl.arch.layout import Layout
from megarl.arch.megatron_fields import FUSIONS
from megarl.mcore.models.execution import ExecutionOptions
from megarl.plan.memory import kept_numbers
from megarl.weights.count import kinds_of

pytestmark = pytest.mark.dist

TE = ExecutionOptions(transformer_impl="transformer_engine")
RECOMPUTED = replace(TE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
LOCAL = ExecutionOptions(transformer_impl="local")


ENGINES: dict[str, ExecutionOptions] = {
    "local": LOCAL,
    "": TE,
    "recomputed": RECOMPUTED,
    "experts recomputed": with_again(TE, ("layernorm", "moe_act")),
    "latents recomputed": with_again(TE, ("layernorm", "mla_up_proj", "mlp", "shared_experts")),
    "without fusions": replace(TE, override_transformer_config=dict.fromkeys(FUSIONS, False)),
}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
ETP1: dict[str, Any] = {**SP, "etp": 1}
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one": (1, Layout()),
    "tp2": (2, Layout(tp=2)),
    "tp2+sp": (2, Layout(**SP)),
    "pp2": (2, Layout(pp=2)),
    "pp2 vpp2": (2, Layout(pp=2, vpp=2)),
    "pp2 uneven": (2, Layout(pp=2, first_stage_layers=3)),
    "dp2": (2, Layout()),
    "cp2": (2, Layout(cp=2)),
    "ep2": (2, Layout(ep=2)),
    "cp2 ep2": (2, Layout(cp=2, ep=2)),
    "tp2+sp ep2 etp1": (2, Layout(**ETP1, ep=2)),
    "dp2 sharded": (2, Layout(**SHARDED)),
    "cp2 sharded": (2, Layout(cp=2, **SHARDED)),
    "ep2 sharded": (2, Layout(ep=2, **SHARDED)),
    "tp2+sp sharded": (2, Layout(**SP, **SHARDED)),
    "tp2+sp cp2": (4, Layout(**SP, cp=2)),
    "tp2+sp pp2 vpp2": (4, Layout(**SP, pp=2, vpp=2)),
    "tp4+sp": (4, Layout(tp=4, sequence_parallel=True)),
    "pp4 uneven": (4, Layout(pp=4, first_stage_layers=1, last_stage_layers=1)),
    "pp2 vpp2 dp2": (4, Layout(pp=2, vpp=2)),
    "cp2 dp2": (4, Layout(cp=2)),
    "cp2 pp2": (4, Layout(cp=2, pp=2)),
    "cp4": (4, Layout(cp=4)),
    "ep4": (4, Layout(ep=4)),
    "ep2 etp2": (4, Layout(ep=2, etp=2)),
    "tp2+sp ep4 etp1": (4, Layout(**ETP1, ep=4)),
    "tp2+sp cp2 ep2": (4, Layout(**SP, cp=2, ep=2)),
    "pp2 ep2": (4, Layout(pp=2, ep=2)),
    "pp2 vpp2 ep2": (4, Layout(pp=2, vpp=2, ep=2)),
    "cp2 ep4": (4, Layout(cp=2, ep=4)),
    "tp2+sp dp2 sharded": (4, Layout(**SP, **SHARDED)),
    "pp2 vpp2 ep2 sharded": (4, Layout(pp=2, vpp=2, ep=2, **SHARDED)),
    "tp2+sp pp2 cp2": (8, Layout(**SP, pp=2, cp=2)),
    "tp2+sp pp2 vpp2 ep2 etp1": (8, Layout(**ETP1, pp=2, vpp=2, ep=2)),
}
DENSE = ("one", "tp2", "tp2+sp", "pp2 vpp2", "dp2", "cp2")
SPARSE = ("one", "tp2+sp", "ep2", "tp2+sp ep2 etp1", "pp2 vpp2")
# Between them each family has what is its own: windows and sinks exchange heads under context parallelism, latents
# take part in a ring, biases of experts stand on some of the ranks.
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": (*DENSE, "tp2+sp cp2", "tp2+sp pp2 vpp2", "cp2 dp2", "cp2 pp2", "cp4", "tp2+sp pp2 cp2"),
    "qwen3_moe": (*SPARSE, "cp2", "ep2 etp2", "pp2 vpp2 ep2", "cp2 ep4", "tp2+sp pp2 vpp2 ep2 etp1"),
    "deepseek_v3": (*SPARSE, "cp2", "pp2 uneven", "tp2+sp cp2", "tp4+sp", "tp2+sp ep4 etp1", "tp2+sp cp2 ep2"),
    "glm4_moe": (*SPARSE, "cp2", "pp2 ep2"),
    "minimax_m2": (*SPARSE, "cp2 ep2", "ep4"),
    "gpt_oss": ("one", "ep2", "tp2+sp ep2 etp1", "pp2", "cp2", "cp2 ep2", "cp2 pp2"),
    "mistral": ("one", "tp2+sp", "cp2", "pp4 uneven", "cp2 dp2"),
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
RUNS += [Run("qwen3", layout, tied=True) for layout in FAMILIES["qwen3"]]
RUNS += [Run("qwen3_moe", layout, tied=True) for layout in ("one", "tp2+sp ep2 etp1", "pp2 vpp2", "pp2 vpp2 ep2")]
RUNS += [Run("mistral", layout, tied=True) for layout in ("one", "cp2", "pp2 vpp2 dp2")]
RUNS += [Run("qwen3_moe", layout, optim="muon") for layout in ("one", "tp2+sp", "tp2+sp ep2 etp1", "ep2 etp2")]
RUNS += [
    Run("qwen3_moe", layout, optim="adamw") for layout in ("one", *(name for name in LAYOUTS if "sharded" in name))
]
RUNS += [Run("qwen3", layout, optim="adamw", tied=True) for layout in ("dp2 sharded", "tp2+sp dp2 sharded")]
RUNS += [Run("qwen3_moe", layout, role="critic") for layout in ("one", "tp2+sp ep2 etp1")]
for _engine in ("recomputed", "experts recomputed", "without fusions"):
    RUNS += [Run("qwen3_moe", layout, engine=ENGINES[_engine]) for layout in ("one", "tp2+sp ep2 etp1")]
RUNS += [Run("deepseek_v3", layout, engine=ENGINES["latents recomputed"]) for layout in ("one", "tp2+sp")]
TOGETHER = 40  # runs of a part: threads of gloo's stay for each group of each, and slow the later ones down
# Products of the two kinds of layers add in different orders.  Muon mixes all entries of a matrix.
TOLERANCE = {"sgd": 2e-7, "adamw": 1e-6, "muon": 2e-5}


class Found(dict[tuple[int, int], Future[bytes]]):
    """Number of ranks and a part of their runs -> what each rank returned, by run.

    Those of a part start together when one of them is asked for.
    """

    def __init__(self, pool: ProcessPoolExecutor, root: Path) -> None:
        super().__init__()
        self.pool, self._root = pool, root

    def of(self, run: Run, like: Run) -> list[dict[str, Any]]:
        """What each rank returned of a run: `like` itself, or the local one that it is compared with."""
        part = RUNS.index(like) // TOGETHER
        return [rank[str(run)] for rank in loaded(self[run.num_ranks, part].result())]

    def __missing__(self, which: tuple[int, int]) -> Future[bytes]:
        num_ranks, part = which
        chosen = RUNS[part * TOGETHER : (part + 1) * TOGETHER]
        runs = [run for run in (*chosen, *(run.local for run in chosen)) if run.num_ranks == num_ranks]
        cases = {str(run): (self._folder(run), run.case) for run in runs}
        self[which] = self.pool.submit(start, num_ranks, run_te_cases, cases)
        return self[which]

    def _folder(self, run: Run) -> str:
        folder = self._root / f"{run.family}{'-tied' * run.tied}"
        return str(folder if folder.exists() else write_model(folder, run.family, tied=run.tied))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Found(pool, tmp_path_factory.mktemp("models"))


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layers_of_transformer_engine_train_as_local_ones(found: Found, run: Run) -> None:
    got, (expected,) = found.of(run, run), found.of(run.local, run)
    if not run.case.layout.use_distributed_optimizer:  # it leaves no whole gradient to look at
        assert_same_gradient(got[0]["gradient"], expected["gradient"], 1e-5)
    assert_same_stats(got, [expected])
    assert got[0]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=3e-6)
    assert min(expected["grad_norms"]) > 1.0, "both steps are clipped"
    assert_same_after(got[0], expected, TOLERANCE[run.optim])


def test_names_that_megatron_loses_of_transformer_engine_are_put_back(found: Found) -> None:
    (rank,) = loaded(found.pool.submit(start, 1, fixed).result())
    assert rank == {"te_split_is_lost": (True, False), "te_gemm_is_lost": (True, False)}


# Family, and modules that its layers compute again.
KEPT = [
    ("qwen3", ("mlp",)),
    ("qwen3", ("layernorm",)),
    ("qwen3_moe", ("moe",)),
    ("qwen3_moe", ("layernorm", "moe_act")),
    ("glm4_moe", ("shared_experts",)),
    ("deepseek_v3", ("mla_up_proj",)),
]


@pytest.mark.full
def test_what_is_computed_again_is_not_kept_as_planned(found: Found) -> None:
    """Numbers of a token; the small ones that the plan leaves out weigh more than in a real model."""
    flat = {"mlp_only_layers": [], "first_k_dense_replace": 0}
    hfs = {family: tiny_model(family, tied=False).config.to_dict() | flat for family, *_ in KEPT}
    cases = {
        f"{family} {modules}": (hfs[family], with_again(TE, modules))
        for family, again in KEPT
        for modules in ((), again)
    }
    (kept,) = loaded(found.pool.submit(start, 1, kept_by_te_layers, cases).result())
    for family, again in KEPT:
        (kind,) = set(kinds_of(hfs[family]))
        whole, rest = (kept[f"{family} {modules}"] for modules in ((), again))
        planned, planned_rest = (
            kept_numbers(kind, hfs[family]["hidden_size"], Layout(), again=each) for each in ((), again)
        )
        assert rest == pytest.approx(planned_rest, rel=0.08), (family, again)
        assert whole - rest == pytest.approx(planned - planned_rest, rel=0.22), (family, again)
