"""Megatron makes the groups of every layout of a preset, with as many ranks as it has: up to thousands."""

import pytest
from group_cases import sizes_of_groups
from preset_files import NAMES, cases_of
from spawn import run_ranks

from megarl.arch.layout import Layout

CASES = list(dict.fromkeys((case.layout, case.num_ranks) for name in NAMES for case in cases_of(name)))


def expected(layout: Layout, num_ranks: int) -> dict[str, int]:
    own = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "etp": layout.expert_tp}
    replicas = num_ranks // (layout.tp * layout.pp * layout.cp)
    return own | {"dp": replicas, "expert dp": num_ranks // (layout.ep * layout.expert_tp * layout.pp)}


@pytest.mark.dist
@pytest.mark.full
def test_every_preset_has_the_groups_of_its_layouts() -> None:
    assert max(num_ranks for _, num_ranks in CASES) >= 512
    asked = [(layout, num_ranks, rank) for layout, num_ranks in CASES for rank in (0, num_ranks - 1)]
    (found,) = run_ranks(1, sizes_of_groups, asked, timeout_s=300)
    assert found == [expected(layout, num_ranks) for layout, num_ranks, _ in asked]
