"""A plug-in's file as verl's documentation prints it, and what is said of imports that fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from config_helpers import tables_kept

from megarl.algo import ADV_ESTIMATORS, POLICY_LOSSES
from megarl.plugins.load import load_plugins

PRINTED = Path(__file__).parents[1] / "fixtures" / "source_documents"


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """A file to be; what it registers is gone afterwards."""
    with tables_kept():
        yield tmp_path / "mine.py"


def test_the_printed_functions_run_from_one_file_as_they_are_pasted(mine: Path) -> None:
    blocks = [(PRINTED / f"{name}_function.txt").read_text() for name in ("policy_loss", "estimator")]
    assert all(block.startswith("from verl.trainer.ppo.core_algos import register_") for block in blocks)
    mine.write_text("\n\n".join(blocks))
    load_plugins([str(mine)])
    assert "my_ppo_variant" in POLICY_LOSSES
    assert "my_advantage" in ADV_ESTIMATORS


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "from verl.trainer.ppo.core_algos import compute_gae",
            "cannot import name 'compute_gae' from 'megarl.algo.verl_compat.core_algos'",
        ),
        ("import verl.protocol", "No module named 'verl.protocol'"),
        ("from no_such_package import helper", "No module named 'no_such_package'"),
    ],
)
def test_an_import_that_fails_is_one_sentence(mine: Path, line: str, sentence: str) -> None:
    mine.write_text(line)
    with pytest.raises(ValueError, match="whose imports fail") as refused:
        load_plugins([str(mine)])
    assert str(refused.value).startswith(f"algorithm.plugins has '{mine}', whose imports fail: {sentence}")
    assert "\n" not in str(refused.value)


def test_what_fails_inside_a_file_is_told_with_its_own_line(mine: Path) -> None:
    mine.write_text("from verl.trainer.ppo.core_algos import register_policy_loss\n\n1 / 0\n")
    with pytest.raises(ValueError, match="ZeroDivisionError") as refused:
        load_plugins([str(mine)])
    told = f"algorithm.plugins has '{mine}', which fails: ZeroDivisionError: division by zero ({mine}:3)"
    assert str(refused.value) == told


def test_a_module_is_imported_by_its_name() -> None:
    load_plugins(["math"])
