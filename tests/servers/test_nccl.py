"""One NCCL in the trainer's environment and in SGLang's: made-up environments, with metadata alone."""

import sys
from pathlib import Path

import pytest

from megarl.commands.doctor import versions
from megarl.commands.doctor.machine import FAIL, NOTE, OK
from megarl.config import load_config
from megarl.config.placement import joins_servers, pushes_over_nccl
from megarl.servers import nccl
from megarl.trainer import preflight as preflight_module
from megarl.trainer.servers import colocation


def environment(folder: Path, **packages: str) -> Path:
    """A Python that sees these packages and no others."""
    site = folder / f"lib/python3.{sys.version_info[1]}/site-packages"
    for name, version in packages.items():
        about = site / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "bin").mkdir(parents=True)
    real = Path(sys._base_executable)  # type: ignore[attr-defined]
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    (folder / "bin/python").symlink_to(real)
    return folder / "bin/python"


def load(*words: str):
    config, _ = load_config(["model.path=m", "data.train_files=[x]", "rollout.engine=sglang", *words], command="train")
    return config


NEW, OLD = {"nvidia_nccl_cu13": "2.30.7", "torch": "2.14.1"}, {"nvidia_nccl_cu13": "2.29.7", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("one", "other", "versions"),
    [
        (NEW, OLD, ("2.30.7", "2.29.7")),
        (NEW, {"nvidia_nccl_cu12": "2.30.7"}, ("2.30.7", "2.30.7")),  # CUDA 12 and 13 are no difference
        (NEW, {"torch": "2.14.1"}, ("2.30.7", None)),  # an NCCL that is no package is not known
    ],
)
def test_versions_of_both_are_read_and_a_difference_is_refused(
    tmp_path: Path, one: dict[str, str], other: dict[str, str], versions: tuple[str, str | None]
) -> None:
    pythons = environment(tmp_path / "one", **one), environment(tmp_path / "other", **other)
    assert tuple(map(nccl.nccl_of, pythons)) == versions
    if versions == ("2.30.7", "2.29.7"):
        said = r"has NCCL 2.30.7 and the trainer's NCCL 2.29.7, .*`bash launch/gpu/install.sh`"
        with pytest.raises(ValueError, match=said):
            nccl.check_one_nccl(*pythons)
    else:
        nccl.check_one_nccl(*pythons)


def test_paths_of_this_process_do_not_lead_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path / "a", torch="2.14.1")
    other = environment(tmp_path / "b", nvidia_nccl_cu13="2.30.7")
    (site,) = (other.parents[1] / "lib").glob("*/site-packages")
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert nccl.nccl_of(python) is None


def test_a_python_that_does_not_run_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match="python: expected a Python that lists its packages, it failed"):
        nccl.nccl_of(python)


@pytest.mark.parametrize(
    ("words", "over_nccl", "joins"),
    [
        (["rollout.placement=separate"], True, True),
        (["rollout.placement=separate", "rollout.push=gathered"], True, True),
        (["rollout.placement=shared"], False, False),
        (["rollout.placement=shared", "rollout.num_servers=2", "actor.num_ranks=1"], True, True),  # 1 beside the actor
        (["rollout.placement=separate", "actor.lora.rank=4", "actor.lora.push=adapter"], False, False),
        # not started by this run
        (["rollout.placement=separate", "rollout.urls=[https://10.0.0.1:30000]"], False, True),
    ],
)
def test_a_push_goes_over_nccl_to_servers_on_other_gpus(words: list[str], over_nccl: bool, joins: bool) -> None:
    config = load("trainer.n_gpus_per_node=2", *words)
    assert (pushes_over_nccl(config), joins_servers(config)) == (over_nccl, joins)


def test_a_run_whose_push_needs_one_nccl_does_not_start_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = environment(tmp_path / "server", nvidia_nccl_cu13="2.30.7")
    ours = environment(tmp_path / "ours", nvidia_nccl_cu13="2.29.7")
    monkeypatch.setattr(preflight_module, "uses_gpus", lambda config: True)
    monkeypatch.setattr(preflight_module, "check_one_nccl", lambda python: nccl.check_one_nccl(python, ours))
    words = [f"model.path={tmp_path}", f"rollout.sglang.python={server}", "rollout.placement=separate"]
    with pytest.raises(ValueError, match="NCCL joins no two versions"):
        preflight_module.preflight(load(*words), 0.0)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_doctor_shows_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    server = environment(tmp_path / "server", nvidia_nccl_cu13="2.30.7", sglang="0.5.23")
    monkeypatch.setattr(sys, "executable", str(environment(tmp_path / "ours", nvidia_nccl_cu13="2.29.7")))
    monkeypatch.setattr(colocation, "uses_gpus", lambda config: on_gpu)
    rows = versions.server_findings(load(f"rollout.sglang.python={server}"), has_gpu=on_gpu)
    found = {row.subject: row for row in rows}
    assert found["SGLang"].found == "0.5.23"
    assert found["NCCL"].found == "trainer 2.29.7, SGLang 2.30.7"
    assert found["NCCL"].verdict == (FAIL if on_gpu else NOTE)
    assert found["NCCL"].mend == "bash launch/gpu/install.sh"
    if on_gpu:
        saver = found["SGLang's memory saver"]
        assert (saver.found, saver.verdict) == ("lacks torch_memory_saver for cu13: memory would not be released", NOTE)
    else:
        assert "SGLang's memory saver" not in found


def test_doctor_fails_without_sglang_only_where_a_run_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGARL_SGLANG_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    for words, verdict in ((["rollout.engine=sglang"], FAIL), (["rollout.engine=hf"], OK)):
        (row,) = versions.server_findings(load(*words), has_gpu=False)
        assert (row.verdict, row.mend) == (verdict, "bash launch/sglang_cpu.sh")
