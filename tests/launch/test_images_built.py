"""The images of launch/docker/, built step by step in a chroot: what is left out stands in helpers/dockerfiles.py."""

import json
import shlex
from pathlib import Path

import pytest
from dockerfiles import ROOT, Image, built

from megarl import __version__

DOCKER = ROOT / "launch/docker"
INSTALLED = "lib/python3.*/site-packages/megarl"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Image:
    arguments = {"VERSION": __version__, "REVISION": "8250ede7"}
    return built(DOCKER / "trainer.Dockerfile", tmp_path_factory.mktemp("trainer"), arguments, {})


@pytest.mark.full
def test_the_image_of_trainers_has_megarl_alone_compiled_and_for_its_user(trainer: Image) -> None:
    assert "left out: apt-get" in trainer.said
    assert trainer.user == "megarl" and trainer.folder == "/workspace"
    assert trainer.labels["org.opencontainers.image.version"] == __version__
    assert trainer.labels["org.opencontainers.image.revision"] == "8250ede7"
    assert [path.name for path in trainer.place("/opt/megarl").iterdir()] == [".venv"], "no sources, tests or scripts"
    (package,) = trainer.place("/opt/megarl/.venv").glob(INSTALLED)
    modules = [path for path in package.rglob("*.py") if "project" not in path.parts]
    stale = [path for path in modules if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))]
    assert len(modules) > 300 and not stale, "each start would compile them"
    said = trainer.run("id -u; touch here; megarl --version; touch /opt/megarl/.venv/here || echo cannot")
    assert said.stdout.splitlines() == ["10001", f"megarl {__version__}", "cannot"], said.stderr
    checked = trainer.run("megarl quickstart trainer.check_only=true")
    assert checked.returncode == 0 and "nothing was found that would stop this run" in checked.stdout, checked.stderr
    doctor = trainer.run(shlex.join(json.loads(trainer.command)))
    assert "megatron" in doctor.stdout and "Traceback" not in doctor.stderr, doctor.stdout + doctor.stderr


@pytest.mark.full
def test_the_image_of_servers_is_that_of_trainers_with_an_environment_for_sglang(
    trainer: Image, tmp_path: Path
) -> None:
    server = built(DOCKER / "server.Dockerfile", tmp_path, {"TRAINER": "this"}, {"this": trainer})
    assert "left out: the packages of server" in server.said
    assert server.user == "megarl" and server.folder == "/workspace"
    assert server.labels["org.opencontainers.image.version"] == __version__
    said = server.run("$MEGARL_SGLANG_PYTHON -c 'import sys; print(sys.prefix)'; megarl --version")
    assert said.stdout.splitlines() == ["/opt/megarl/.venv-sglang", f"megarl {__version__}"], said.stderr
