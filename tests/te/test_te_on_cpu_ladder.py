"""The ladder for eight GPUs with Transformer-Engine's layers: layouts can be built, and a comparison sees experts."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from ladder_layouts import config_of, layouts, module
from te_cases import run_te_cases
from te_ladder import TE, built, configured, run_without_marks
from te_start import loaded, run

from megarl.arch.hf_config import read_hf_config

pytestmark = [pytest.mark.dist, pytest.mark.full]

RUNG = module("gpu/test_layouts_gpu.py")
CUT = ("tp2+sp", "tp2+sp ep2 etp1")  # in both, experts of another rank of the tensor-parallel group are not copies


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: RUNG.write_family(root / family, family) for family in RUNG.LAYOUTS}


def test_every_layout_of_the_ladder_can_be_configured(pool: ProcessPoolExecutor) -> None:
    asked = layouts()
    configs = {family: config_of(family) for family, _, _ in asked.values()}
    own = {name: (configs[family], layout, engine) for name, (family, layout, engine) in asked.items()}
    (found,) = loaded(pool.submit(run, 1, configured, own).result())
    assert found == dict.fromkeys(asked, "transformer_engine")


def test_each_rank_of_the_rung_builds_what_it_would_of_local_layers(
    pool: ProcessPoolExecutor, folders: dict[str, str]
) -> None:
    own = {
        f"{family}/{name}": (read_hf_config(folders[family]), RUNG.LAYOUTS[family][size][name], size)
        for family, size, name in RUNG.NAMES
    }
    (found,) = loaded(pool.submit(run, 1, built, own).result())
    assert sorted(found) == sorted(own)
    for name, ranks in found.items():
        assert len(ranks) == own[name][2] and all(te == local and te for te, local in ranks), name


@pytest.fixture(scope="module")
def compared(pool: ProcessPoolExecutor, folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What the first rank sees of the cases that the rung compares, and of those whose experts are not marked."""
    folder, cases = folders["qwen3_moe"], RUNG.cases_of("qwen3_moe")
    by_te = {name: replace(case, engine=TE) if case.dtype == "bfloat16" else case for name, case in cases.items()}
    alone, cut = ({name: (folder, by_te[name]) for name in names} for names in (("exact", "one"), CUT))
    asked = (1, run_te_cases, alone), (2, run_te_cases, cut), (2, run_without_marks, cut)
    one, marked, unmarked = (loaded(pool.submit(run, *what).result())[0] for what in asked)
    return one | marked | {f"unmarked {name}": rank for name, rank in unmarked.items()}


@pytest.mark.parametrize("name", CUT)
def test_the_rung_sees_experts_that_a_norm_has_missed(compared: dict[str, Any], name: str) -> None:
    exact, one = compared["exact"], compared["one"]
    RUNG.assert_as_near_to_float32(compared[name], one, exact)
    missed = compared[name] | {"grad_norms": compared[f"unmarked {name}"]["grad_norms"]}
    with pytest.raises(AssertionError):
        RUNG.assert_as_near_to_float32(missed, one, exact)
