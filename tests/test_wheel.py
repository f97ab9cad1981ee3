"""A release: the sdist, the wheel that is built from it, and a quickstart with nothing but what the wheel requires."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl import __version__
from megarl.config.names import PACKAGES_OF_LOGGER

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]
# Of 0.19.2, which Python 3.11 has not.
NEWER = tuple(f"megarl/mcore/models/{name}.py" for name in ("hybrid/gated_delta", "hybrid/mamba", "sparse_latent"))
OF_A_NEWER_MEGATRON = () if sys.version_info >= (3, 12) else NEWER
# Modules of other environments, of a fork server, or of the project that `megarl new --agent` writes.
NOT_OURS = ("sglang_cpu", "verifiers_worker", "fork_server", "tasks/agent/task")
# Of Triton, which a build of torch for CUDA requires; where it is not, they are not imported.
KERNELS = ("megarl/mcore/logprobs/fused_triton.py", "megarl/weights/verify/weight_hash_triton.py")
PACKAGES = ("megarl/", "megarl_sandbox/", "configs/")
IMPORT_ALL = """
import importlib, sys
place, *names = sys.argv[1:]
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith(place), f"{name} comes from {module.__file__}"
"""
HIDES = """
import sys
from importlib.machinery import PathFinder


class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


class Release(NamedTuple):
    """Example: Release({"megarl/cli.py", ...}, Path("megarl-0.2.0.tar.gz"), Path("megarl-0.2.0-py3-none-any.whl"))."""

    sources: set[str]  # of its packages, as files of the repository
    sdist: Path
    wheel: Path

    @property
    def metadata(self) -> Metadata:
        """Of the wheel.  Raises for what a package index would refuse."""
        with zipfile.ZipFile(self.wheel) as archive:
            return Metadata.from_email(archive.read(f"megarl-{__version__}.dist-info/METADATA"), validate=True)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Built as CONTRIBUTING.md says, without an index."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files = [name for name in listed.split("\0") if name]
    for name in files:  # a copy: setuptools writes beside what it builds
        if name.startswith((*PACKAGES, "tests/")) or name in ("setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ("--offline", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(built))
    done = subprocess.run(["uv", "build", *options], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = built.glob("megarl-*.tar.gz"), built.glob("megarl-*.whl")
    return Release({name for name in files if name.startswith(PACKAGES)}, sdist, wheel)


@pytest.fixture(scope="module")
def only_required(release: Release, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python has the wheel's files, and of other packages those that it requires."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(release.wheel) as archive:
        archive.extractall(folder)
    needed = {"megarl", *required(release.metadata.requires_dist or ())}
    # In a process of its own: setuptools, once imported, adds the packages that it contains.
    ask = "import json; from importlib.metadata import packages_distributions as of; print(json.dumps(of()))"
    of_module = json.loads(subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True).stdout)
    hidden = {module for module, of in of_module.items() if not needed & set(map(canonicalize_name, of))}
    assert {"tensorboard", "pytest", "wandb"} <= hidden and not hidden & {"torch", "transformers", "megarl"}
    (folder / "sitecustomize.py").write_text(HIDES.format(hidden=hidden - {"sitecustomize"}))
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**others, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}


def required(requirements: Iterable[Requirement]) -> set[str]:
    """The packages that pip would install here for some."""
    found: set[str] = set()
    seen: set[str] = set()
    todo = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    while todo:
        one = todo.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        found.add(canonicalize_name(one.name))
        try:
            needs = map(Requirement, distribution(one.name).requires or ())
        except PackageNotFoundError:  # CUDA's, of a build of torch for CPUs
            continue
        extras = ("", *one.extras)
        todo += [r for r in needs if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    return found


def megarl(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_sdist_has_the_packages_alone_and_the_wheel_from_it_every_file_of_them(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in packed} - {""}
    own = {"setup.py", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE", "PKG-INFO", "megarl.egg-info"}
    assert tops == {*own, "megarl", "megarl_sandbox", "configs"}
    assert release.sources <= packed, f"not in the sdist: {sorted(release.sources - packed)}"
    with zipfile.ZipFile(release.wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {re.sub("^configs/", "megarl/configs/", name) for name in release.sources}
    assert files == wanted, f"differs in {sorted(files ^ wanted)}"
    assert {"megarl/commands/launch/files/pod.yaml", "megarl/metrics/trackers/grafana.json"} <= files


def test_an_index_would_take_its_metadata(release: Release) -> None:
    found = release.metadata
    assert (found.name, str(found.version), found.license_expression) == ("megarl", __version__, "Apache-2.0")
    assert found.description_content_type == "text/markdown" and (found.description or "").startswith("# megarl")
    assert {name for name, packages in PACKAGES_OF_LOGGER.items() if packages} <= set(found.provides_extra or ())


def test_every_module_is_imported_with_what_the_wheel_requires(
    release: Release, only_required: dict[str, str], tmp_path: Path
) -> None:
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sorted(release.sources)
        if name.endswith(".py") and not any(theirs in name for theirs in NOT_OURS) and not name.endswith("__main__.py")
        if name not in (*OF_A_NEWER_MEGATRON, *KERNELS)
    ]
    place = only_required["PYTHONPATH"]
    command = [sys.executable, "-c", IMPORT_ALL, place, *modules]
    done = subprocess.run(command, cwd=tmp_path, env=only_required, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = megarl(tmp_path, only_required, "launch", "slurm", "quickstart")
    assert "-m megarl train" in printed.stdout, printed.stderr


def test_a_tracker_without_its_package_is_refused_before_anything_starts(
    only_required: dict[str, str], tmp_path: Path
) -> None:
    for more in ([], ["trainer.check_only=true"]):
        done = megarl(tmp_path, only_required, "quickstart", "trainer.logger=[console,tensorboard]", *more)
        assert done.returncode == 2
        sentence = (
            "error: trainer.logger=[console, tensorboard]: tensorboard needs tensorboard, not installed here; "
            "expected `pip install 'megarl[tensorboard]'`, or no tensorboard in trainer.logger"
        )
        assert done.stderr.splitlines()[-1] == sentence
    assert not list(tmp_path.rglob("*.jsonl")), "nothing is made before"


@pytest.mark.timeout(600)
def test_a_quickstart_of_four_steps_runs_in_an_empty_folder(only_required: dict[str, str], tmp_path: Path) -> None:
    done = megarl(tmp_path, only_required, "quickstart", "trainer.total_training_steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4" in done.stdout and "Warning" not in done.stderr
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 5
    assert (tmp_path / "runs/quickstart/report.html").exists()
