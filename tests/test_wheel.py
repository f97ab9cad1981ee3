"""The wheel: what a user installs has every module of the package, and each can be imported from it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of 0.19.2, which Python 3.11 has not.
NEWER = tuple(f"megarl/mcore/models/{name}.py" for name in ("gated_delta", "mamba", "sparse_latent"))
OF_A_NEWER_MEGATRON = () if sys.version_info >= (3, 12) else NEWER
NOT_OURS = ("sglang_cpu", "verifiers_worker", "fork_server")  # modules of other environments, or of a fork server
IMPORT_ALL = """
import importlib, sys
place, *names = sys.argv[1:]
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith(place), f"{name} comes from {module.__file__}"
"""


@pytest.mark.full
def test_every_module_is_imported_from_the_wheel(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):  # a copy: setuptools writes beside what it builds
        if name.startswith(("megarl/", "megarl_sandbox/", "configs/")) or name in ("setup.py", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w")
    command = [sys.executable, "-m", "pip", "wheel", *options, built, "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("megarl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    tops = (source / "megarl", source / "megarl_sandbox")
    package = {str(path.relative_to(source)) for top in tops for path in top.rglob("*") if path.is_file()}
    assert package <= files, f"not in the wheel: {sorted(package - files)}"
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sorted(package)
        if name.endswith(".py") and not any(theirs in name for theirs in NOT_OURS) and not name.endswith("__main__.py")
        if name not in OF_A_NEWER_MEGATRON
    ]
    place = str(tmp_path / "installed")
    env = {**os.environ, "PYTHONPATH": place, "PYTHONWARNINGS": "ignore"}
    for command in (["-c", IMPORT_ALL, place, *modules], ["-m", "megarl", "launch", "slurm", "quickstart"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "-m megarl train" in done.stdout, "its templates are there too"
