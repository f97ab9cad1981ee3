"""Transformer-Engine's layers beside local ones: the same gradient, norms and weights after clipped steps.

All of Python's part of Transformer-Engine runs, under Megatron-Core and the product's own step; for its compiled part
stands `te_kernels.py` and `te_attention.py`.  What its kernels compute on a GPU is shown by tests/gpu alone.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import spawn
from parity_cases import Case
from parity_compare import assert_same_after, assert_same_gradient, assert_same_stats
from te_cases import run_te_cases
from tiny_models import write_model

from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.dist

TE = ExecutionOptions(transformer_impl="transformer_engine")
LOCAL = ExecutionOptions(transformer_impl="local")
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
ONE, TP, TP_SP, PP, VPP, CP = Layout(), Layout(tp=2), Layout(**SP), Layout(pp=2), Layout(pp=2, vpp=2), Layout(cp=2)
EP, SP_EP = Layout(ep=2), Layout(**SP, ep=2, etp=1)
DENSE = {"one": (1, ONE), "tp2": (2, TP), "tp2+sp": (2, TP_SP), "pp2 vpp2": (2, VPP), "dp2": (2, ONE), "cp2": (2, CP)}
SPARSE = {"one": (1, ONE), "tp2+sp": (2, TP_SP), "ep2": (2, EP), "tp2+sp ep2 etp1": (2, SP_EP), "pp2 vpp2": (2, VPP)}
CASES: dict[str, dict[str, tuple[int, Layout]]] = {
    "qwen3": DENSE | {"tp2+sp cp2": (4, Layout(**SP, cp=2)), "cp2 pp2": (4, Layout(cp=2, pp=2)), "cp4": (4, Layout(cp=4))},
    "qwen3_moe": SPARSE | {"cp2": (2, CP), "ep2 etp2": (4, Layout(ep=2, etp=2))},
    "deepseek_v3": SPARSE | {"cp2": (2, CP), "tp2+sp cp2": (4, Layout(**SP, cp=2))},
    "glm4_moe": SPARSE,
    "minimax_m2": SPARSE,
    "gpt_oss": {"one": (1, ONE), "ep2": (2, EP), "tp2+sp ep2 etp1": (2, SP_EP), "pp2": (2, PP)},
    "mistral": {"one": (1, ONE), "tp2+sp": (2, TP_SP)},
}
# TE's products of a shard and ours add in another order, step after step.
TOLERANCE = 2e-7


def _run(num_ranks: int, folder: str, cases: dict[str, Case]) -> list[dict[str, Any]]:
    spawn.PRELOADED = ["te_on_cpu", *spawn.PRELOADED]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the process that loads them knows no other (Python 3.11)
    return spawn.run_ranks(num_ranks, run_te_cases, folder, cases, timeout_s=300)


class Tables:
    """What each rank returned, of all the layouts of a family that have so many ranks; a table runs when it is asked."""

    def __init__(self, pool: ProcessPoolExecutor, folder_of: Callable[[str], str]) -> None:
        self._pool, self._folder_of = pool, folder_of
        self._found: dict[tuple[str, int], Any] = {}

    def of(self, family: str, num_ranks: int) -> list[dict[str, Any]]:
        if (family, num_ranks) not in self._found:
            layouts = {name: layout for name, (size, layout) in CASES[family].items() if size == num_ranks}
            how: dict[str, Any] = {"max_tokens": 40, "num_steps": 2}
            cases = {name: Case("actor", layout, TE, **how) for name, layout in layouts.items()}
            if num_ranks == 1:
                cases["local"] = Case("actor", ONE, LOCAL, **how)
            made = self._pool.submit(_run, num_ranks, self._folder_of(family), cases)
            self._found[family, num_ranks] = made.result(timeout=400)
        return self._found[family, num_ranks]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    """Started by a process of its own: the ranks of other tests have Megatron without Transformer-Engine."""
    folders: dict[str, str] = {}

    def folder_of(family: str) -> str:
        if family not in folders:
            folders[family] = str(write_model(tmp_path_factory.mktemp(family), family, tied=False))
        return folders[family]

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Tables(pool, folder_of)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, own in CASES.items() for name in own])
def test_layers_of_transformer_engine_on_a_cpu_train_as_local_ones(tables: Tables, family: str, name: str) -> None:
    num_ranks, _ = CASES[family][name]
    (local,) = tables.of(family, 1)
    got, expected = [rank[name] for rank in tables.of(family, num_ranks)], local["local"]
    assert_same_gradient(got[0]["gradient"], expected["gradient"], 1e-5)
    assert_same_stats(got, [expected])
    assert got[0]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-6)
    assert min(expected["grad_norms"]) > 1.0, "both steps are clipped"
    assert_same_after(got[0], expected, TOLERANCE)
