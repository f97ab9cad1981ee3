"""What all tests share: one thread each, no hidden skips, steady hypothesis examples."""

import os
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from config_helpers import tables_kept  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)

# The same examples every time, and no limit on how long one takes: the machine may be busy.
settings.register_profile("steady", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks and servers take longest: first, so that no worker ends with one while others idle."""
    items.sort(key=lambda item: item.get_closest_marker("dist") is None)


@pytest.fixture(autouse=True, scope="module")
def tables_as_they_were() -> Iterator[None]:
    """What plug-ins of one file's tests registered is gone for the next file's."""
    with tables_kept():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip says nothing about the code, so only a test marked gpu may skip."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {report.longrepr}; only a test marked gpu may skip"
    return report
