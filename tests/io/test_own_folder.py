"""No test sees what another one, or a run in the checkout, has left in the working folder."""

from pathlib import Path

import pytest
from readme_blocks import ROOT


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_test_starts_in_an_empty_folder_outside_the_checkout(turn: str) -> None:
    here = Path.cwd()
    assert not here.is_relative_to(ROOT)
    assert not list(here.iterdir()), f"before the {turn} one wrote"
    (here / "runs").mkdir()


@pytest.fixture(scope="module")
def folder_of_a_fixture() -> Path:
    return Path.cwd()


def test_so_does_a_fixture_that_tests_share(folder_of_a_fixture: Path) -> None:
    assert not folder_of_a_fixture.is_relative_to(ROOT)
    assert folder_of_a_fixture != Path.cwd()
    assert not list(folder_of_a_fixture.iterdir())
