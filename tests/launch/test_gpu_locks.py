"""The lock files of the environments for GPUs: trainer and servers fit together, and each file has its hash."""

from __future__ import annotations

import re
from pathlib import Path

import check_pins
import gpu_locks
import pytest

LOCKS = sorted(check_pins.GPU.glob("*.txt"))
TRAINER, SERVER = (
    dict(pin.split("==") for pin in check_pins.pins_of(file))
    for file in (check_pins.TRAINER_LOCK, check_pins.SERVER_LOCK)
)


@pytest.mark.parametrize("package", ["torch", "triton", "nvidia-nccl-cu13", "nvidia-cuda-runtime", "cuda-toolkit"])
def test_the_versions_of_both_environments_are_the_same(package: str) -> None:
    """NCCL joins no two processes with different versions of it, and torch brings its own."""
    assert TRAINER[package] == SERVER[package]


def test_the_versions_of_both_environments_hold_one_nccl_each() -> None:
    for packages in (TRAINER, SERVER):
        assert [name for name in packages if name.startswith("nvidia-nccl")] == ["nvidia-nccl-cu13"]


def test_the_trainer_has_the_tested_versions_but_of_torch() -> None:
    tested = dict(pin.split("==") for pin in check_pins.pins_of(check_pins.CONSTRAINTS))
    others = {"torch", "setuptools"}  # the locked torch takes any setuptools
    assert {name for name, version in tested.items() if TRAINER[name] != version} <= others


def test_the_server_is_the_one_that_the_tests_run_against() -> None:
    tested = dict(pin.split("==") for pin in check_pins.pins_of(check_pins.ROOT / "launch/sglang-0.5.23.txt"))
    assert (SERVER["sglang"], SERVER["smg"]) == (tested["sglang"], tested["smg"])


def test_every_part_of_transformer_engine_has_the_version_of_the_extra() -> None:
    (extra,) = check_pins.declared()["extras_require"]["gpu"]
    (engine,) = check_pins.pins_of(check_pins.ENGINE_LOCK)
    parts = {TRAINER["transformer-engine"], TRAINER["transformer-engine-cu13"], engine.split("==")[1]}
    assert parts == {extra.split("==")[1]}
    assert "torch" not in engine.split("==")[1], "a version, not a build"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda file: file.name)
def test_a_lock_has_a_hash_for_each_package_and_names_no_host(lock: Path) -> None:
    pins = check_pins.pins_of(lock)
    for pin in pins:
        (hashes,) = re.findall(
            rf"^{re.escape(pin)}((?: \\\n    --hash=sha256:[0-9a-f]{{64}})+)$", lock.read_text(), re.M
        )
        assert hashes
    assert "://" not in lock.read_text() and "index" not in lock.read_text()


def test_a_lock_serves_both_versions_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 has to take what 3.11 took; the hashes are those of the files for either."""
    asked = check_pins.Installation("file", "what", ("one", "two"))
    files = {"3.11": {"one==1": ["b"], "two==1": ["c"]}, "3.12": {"one==1": ["a"], "two==1": ["c"]}}
    under = []

    def resolved(_: object, python: str, pins: list[str]) -> dict[str, list[str]]:
        under.append(pins)
        return files[python]

    monkeypatch.setattr(gpu_locks, "resolved", resolved)
    lines = gpu_locks.lock(asked, ["one<2"]).removeprefix(gpu_locks.HEADER).splitlines()
    assert lines == ["one==1 \\", "    --hash=sha256:a \\", "    --hash=sha256:b", "two==1 \\", "    --hash=sha256:c"]
    assert under == [["one<2"], ["one==1", "two==1"]]


def test_a_package_without_a_wheel_has_the_hash_of_its_source() -> None:
    source = {"hashes": {"sha256": "s"}}
    assert gpu_locks.hashes_of({"sdist": source}) == ["s"]
    assert gpu_locks.hashes_of({"sdist": source, "wheels": [{"hashes": {"sha256": "w"}}]}) == ["w"]


def test_a_lock_that_lacks_a_package_is_told_apart(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("one==1 \\\n    --hash=sha256:a\ntwo==1 \\\n    --hash=sha256:c\n")
    asked = check_pins.Installation("file", "what", ("one",), (lock,), locked=True)
    assert check_pins.unlocked(asked, "one==1\ntwo==1\n") is None
    fault = "it lacks ['three==1'] and has ['two==1'] too much: run python launch/gpu_locks.py"
    assert check_pins.unlocked(asked, "one==1\nthree==1\n") == fault
