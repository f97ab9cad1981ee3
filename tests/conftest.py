"""What all tests share: a folder of its own for each, one thread, no hidden skips, steady hypothesis examples."""

import itertools
import os
import random
import re
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, chdir
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Found from the working folder by default, and that is never the checkout here.
os.environ.setdefault("MEGARL_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
# Tests alone read these.
os.environ.setdefault("MEGARL_AGENTS_PYTHON", str(ROOT / ".venv-agents" / "bin" / "python"))
os.environ.setdefault("MEGARL_NPM_AGENTS", str(ROOT / ".npm-agents"))
os.environ.setdefault("MEGARL_INSTRUCTOR_PYTHON", str(ROOT / ".venv-agents-instructor" / "bin" / "python"))
os.environ.setdefault("MEGARL_ENVIRONMENTS_PYTHON", str(ROOT / ".venv-environments" / "bin" / "python"))
os.environ.setdefault("MEGARL_VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers" / "bin" / "python"))

import bad_input  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import verl_words  # noqa: E402
from config_helpers import tables_kept  # noqa: E402
from hypothesis import settings  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

torch.set_num_threads(1)

for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # a user's own choice is kept, and tests look at ours
    os.environ.pop(name, None)

# What a shell starts in the background ignores Ctrl-C, and so would the runs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and no limit on how long one takes: the machine may be busy.
settings.register_profile("steady", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("steady")

LONGEST_OF_A_SAMPLE_S = 1800.0  # a test with a longer limit is not drawn
# A test with one of these marks runs where `-m` names the mark, or where the test itself is named (FILE::TEST).
ONLY_IF_NAMED = ("full", "long", "browser", "gpu", "agents", "sglang", "slurm", "ray")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", metavar="COUNT:SEED", help="run so many of the chosen tests, drawn by the seed")


def _limit_s(item: pytest.Item) -> float:
    """The time limit of a test of its own; 0: it has that of all."""
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


class _ByServer(LoadFileScheduling):
    """A worker gets the tests of a file, or those of all files with one version and size of SGLang: it starts once."""

    def _split_scope(self, nodeid: str) -> str:
        server = re.search(r"^tests/servers/.*\[(sglang_old|sglang_tp2|sglang)[_\w]*[-\]]", nodeid)
        return server[1] if server else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByServer:
    return _ByServer(config, log)


@pytest.hookimpl(trylast=True)  # of those that -m has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that start ranks and servers take longest: first, so that no worker ends with one while others idle."""
    if not any("::" in word for word in config.args):
        named = re.findall(r"\w+", config.option.markexpr)
        unnamed = set(ONLY_IF_NAMED).difference(named)
        _keep(config, items, [unnamed.isdisjoint(mark.name for mark in item.iter_markers()) for item in items])
    if version("megatron-core") < "0.19":
        _keep(config, items, [item.get_closest_marker("megatron_0_19") is None for item in items])
    if (sample := config.getoption("--sample")) is not None:
        count, _, seed = sample.partition(":")
        short = [at for at, item in enumerate(items) if _limit_s(item) <= LONGEST_OF_A_SAMPLE_S]
        drawn = set(random.Random(seed).sample(short, min(int(count), len(short))))
        _keep(config, items, [at in drawn for at in range(len(items))])
    items.sort(key=lambda item: item.get_closest_marker("dist") is None)


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[bool]) -> None:
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]


# Here and not beside the tests of bad input: with several workers this process loads no other conftest.
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = [report for reports in terminalreporter.stats.values() for report in reports]
    for line in filter(None, (bad_input.summary(found), verl_words.summary(found))):
        terminalreporter.write_line(line)


# A relative path means the same to a test wherever pytest was started and whatever runs left there.  A folder stays
# until pytest removes the session's: processes that outlive a test, such as shared ranks, work in it.
@pytest.fixture(autouse=True, scope="session")
def in_a_new_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Changes into a new, empty folder: that of fixtures of the session, of a file, or of a test."""
    folders, number = tmp_path_factory.mktemp("cwd"), itertools.count()

    def enter() -> AbstractContextManager[None]:
        folder = folders / str(next(number))
        folder.mkdir()
        return chdir(folder)

    with enter():
        yield enter


@pytest.fixture(autouse=True, scope="module")
def folder_of_the_file(in_a_new_folder: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with in_a_new_folder():
        yield


@pytest.fixture(autouse=True)
def folder_of_the_test(in_a_new_folder: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with in_a_new_folder():
        yield


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
