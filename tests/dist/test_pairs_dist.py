"""DPO, IPO and Bradley-Terry under every layout and cut: loss and gradient of the formulas written out."""

from functools import partial

import pytest
from pair_cases import LOSSES, make_pairs, run_pairs, with_reference, written_out
from parity_compare import relative
from rank_answers import Answers
from spawn import Ranks
from tiny_models import write_model

from megarl.arch.layout import Layout
from megarl.samples.batch import Batch, merge_stats

pytestmark = pytest.mark.dist

# name -> ranks, layout, micro-batches of each rank
CUTS = {
    "one": (1, Layout(), 1),
    "micro4": (1, Layout(), 4),
    "cp2": (2, Layout(cp=2), 1),
    "dp2": (2, Layout(), 2),
    "pp2": (2, Layout(pp=2), 4),
    "tp2": (2, Layout(tp=2), 1),
    "tp2+sp": (2, Layout(tp=2, sequence_parallel=True), 2),
    "tp2 cp2": (4, Layout(tp=2, cp=2, sequence_parallel=True), 2),
    "tp2 pp2": (4, Layout(tp=2, pp=2), 2),
    "dp2 cp2": (4, Layout(cp=2), 1),
}
FAST = [(cut, "tied") for cut in ("cp2", "dp2", "micro4", "pp2", "tp2")] + [("tp2", "untied")]
TOLERANCE = 1e-5  # of a tensor's gradient, relative to its largest entry or a hundredth of the largest of all


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    root = tmp_path_factory.mktemp("models")
    return {
        which: {
            name: str(write_model(root / which / name, "qwen3", tied=which == "tied", seed=seed, num_hidden_layers=2))
            for seed, name in enumerate(("actor", "reference"), start=1)
        }
        for which in ("tied", "untied")
    }


@pytest.fixture(scope="module")
def pairs(folders: dict[str, dict[str, str]]) -> dict[str, Batch]:
    return {which: with_reference(make_pairs(45), own["reference"]) for which, own in folders.items()}


@pytest.fixture(scope="module")
def found(
    folders: dict[str, dict[str, str]],
    pairs: dict[str, Batch],
    one_rank: Ranks,
    two_ranks: Ranks,
    four_ranks: Ranks,
) -> Answers:
    worlds, groups = {1: one_rank, 2: two_ranks, 4: four_ranks}, []
    for cut, (size, layout, micros) in CUTS.items():
        for which, own in folders.items():
            run = partial(worlds[size].run, _keyed, cut, which, own, layout, pairs[which], micros, timeout_s=240)
            groups.append(([(cut, which, name) for name in LOSSES], run))
    return Answers(*groups)


def _keyed(cut: str, which: str, own: dict[str, str], layout: Layout, batch: Batch, micros: int) -> dict:
    return {(cut, which, name): of for name, of in run_pairs(own, layout, batch, list(LOSSES), micros).items()}


@pytest.mark.parametrize(
    ("cut", "which"),
    [
        pytest.param(cut, which, marks=() if (cut, which) in FAST else pytest.mark.full)
        for cut in sorted(CUTS)
        for which in ("tied", "untied")
    ],
)
def test_loss_and_gradient_of_pairs_are_those_of_the_formulas_however_a_step_is_cut(
    found: Answers, folders: dict[str, dict[str, str]], pairs: dict[str, Batch], cut: str, which: str
) -> None:
    for name in LOSSES:
        loss, gradient = written_out(name, pairs[which], folders[which]["actor"])
        ranks = found[cut, which, name]
        assert sum(rank["value"] for rank in ranks) == pytest.approx(loss, rel=1e-5), name
        stats = merge_stats([rank["stats"] for rank in ranks])
        assert stats["pairs/loss"].result() == pytest.approx(loss, rel=1e-5), name
        got = ranks[0]["gradient"]
        scale = max(t.abs().max().item() for t in gradient.values())
        assert scale > 1e-3, "there is something to compare"
        assert gradient.keys() <= got.keys()
        errors = {n: relative(got[n].view_as(t), t, 1e-2 * scale) for n, t in gradient.items()}
        assert not {n: f"{e:.1e}" for n, e in errors.items() if not e < TOLERANCE}, name
