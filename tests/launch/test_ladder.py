"""The ladders of checks for machines with GPUs: how a ladder runs, and that what its rungs name exists."""

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import gsm8k_shaped
import ladder
import pytest
import torch
import versions

from megarl.commands.doctor import machine
from megarl.config import load_config
from megarl.config.placement import gpu_seats
from megarl.servers.sglang_environment import PYTHON_VARIABLE
from megarl.trainer.servers.colocation import check_shared_gpus

ROOT = ladder.ROOT
LADDERS = {name: ladder.read_ladder(ROOT / "launch" / f"{name}.toml") for name in ("one_gpu", "eight_gpus")}
COMMANDS = {
    f"{name}/{rung.name}/{i}": [word.format(python="python", out="/out", page="/out/1") for word in shlex.split(text)]
    for name, rungs in LADDERS.items()
    for rung in rungs
    for i, text in enumerate(rung.commands)
}
TRAIN = {name: words[words.index("train") + 1 :] for name, words in COMMANDS.items() if "megarl" in words}
PYTEST = {name: words for name, words in COMMANDS.items() if "pytest" in words}


def files_in(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("tests/") and word.endswith(".py")]


# A rung has a name, a limit in seconds, what it needs, and commands.
LONG = """sh -c 'sh -c "trap : TERM; echo child \\$\\$; while :; do sleep 1; done" & wait'"""  # it does not want to end
FAKE: list[tuple[str, int, str, list[str]]] = [
    ("good", 60, "", ["{python} -c 'print(1)'", "cp JUNIT {page}.xml"]),
    ("bad", 60, "", ["sh -c 'sleep 1000 & echo child $!; echo no such kernel >&2; exit 3'", "touch {out}/never"]),
    ("slow", 1, "", [LONG]),
    ("without", 60, "sh -c 'echo nothing like it; exit 1'", ["true"]),
    ("last", 60, "", ["true"]),
]
JUNIT = """<testsuites><testsuite><testcase name="a"/>
<testcase name="b"><skipped message="Transformer-Engine is not installed"/></testcase></testsuite></testsuites>"""


def write(folder: Path, *rungs: tuple[str, int, str, list[str]]) -> Path:
    """A ladder, as a file."""
    (folder / "junit.xml").write_text(JUNIT)
    tables = []
    for name, seconds, needs, commands in rungs:
        keys = {"name": name, "seconds": seconds, "about": f"it is {name}", "commands": commands}
        keys |= {"needs": needs} if needs else {}
        tables.append("\n".join(["[[rung]]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]))
    (folder / "fake.toml").write_text("\n\n".join(tables).replace("JUNIT", str(folder / "junit.xml")))
    return folder / "fake.toml"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ladder, "GRACE_S", 0.3)
    return write(tmp_path, *FAKE)


def ladder_of(folder: Path, command: str) -> list[str]:
    """The words that run a ladder of one rung with one command."""
    return [str(write(folder, ("one", 100, "", [command]))), "--out", str(folder / "out")]


def children(logs: Iterable[Path]) -> list[int]:
    """The processes whose ids stand in the logs."""
    return [int(pid) for log in logs for pid in re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)]


def pages(out: Path) -> dict[str, SimpleNamespace]:
    found = [SimpleNamespace(**json.loads(file.read_text())) for file in sorted(out.glob("*.json"))]
    return {page.name: page for page in found}


def is_running(pid: int) -> bool:
    """A killed process that nobody has waited for is not running."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_every_rung_leaves_a_page_and_no_process_and_a_later_call_keeps_the_earlier_pages(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = file.parent / "out"
    assert ladder.main([str(file), "--out", str(out)]) == 1
    found = pages(out)
    assert list(found) == ["good", "bad", "slow", "without", "last"]
    assert {name: page.verdict for name, page in found.items()} == {
        "good": "passed",
        "bad": "failed with exit status 3",
        "slow": "ended after 1 s, its limit",
        "without": "not run: nothing like it",
        "last": "passed",
    }
    assert found["good"].tests == "1 run, 0 failed, 1 skipped: Transformer-Engine is not installed"
    assert found["bad"].last_lines[-1] == "no such kernel"
    assert not (out / "never").exists(), "the commands behind one that failed"
    summary = (out / "summary.md").read_text()
    assert "| bad | failed with exit status 3 |" in summary and "| last | passed |" in summary
    assert "1 skipped: Transformer-Engine" in capsys.readouterr().out
    assert len(left := children(out.glob("*.log"))) == 2
    assert not [pid for pid in left if is_running(pid)]

    (out / "runs").mkdir()
    (out / "runs" / "metrics.jsonl").write_text("{}\n")
    (out / "runs" / "model.safetensors").write_bytes(b"weights")
    (out / "huge.log").write_bytes(bytes(ladder.ARCHIVED_BYTES + 1))
    bad = (out / "02_bad.json").read_text()
    assert ladder.main([str(file), "--out", str(out), "--from", "without"]) == 0
    assert (out / "02_bad.json").read_text() == bad
    assert "| bad | failed with exit status 3 |" in (out / "summary.md").read_text()
    with tarfile.open(file.parent / "out.tar.gz") as tar:
        names = set(tar.getnames())
    assert {"out/summary.md", "out/05_last.json", "out/05_last.log", "out/runs/metrics.jsonl"} <= names
    assert not names & {"out/huge.log", "out/runs/model.safetensors"}, "neither logs without end nor models"


@pytest.mark.full
def test_when_the_time_is_up_a_rung_is_ended_and_the_others_are_not_run(file: Path) -> None:
    write(file.parent, ("slow", 1000, "", [LONG]), *FAKE[3:])
    begun = time.monotonic()
    assert ladder.main([str(file), "--minutes", str(1.5 / 60), "--out", str(file.parent / "out")]) == 1
    assert time.monotonic() - begun < 10
    found = pages(file.parent / "out")
    assert found["slow"].verdict == "ended after 1 s, when the time was up"
    assert found["last"].verdict == "not run: the time was up"
    assert (file.parent / "out.tar.gz").exists()


def test_one_that_is_interrupted_ends_its_rung_and_packs_what_there_is(tmp_path: Path) -> None:
    words = ladder_of(tmp_path, "sh -c 'echo child $$; sleep 1000'")
    process = subprocess.Popen([sys.executable, str(ROOT / "launch/ladder.py"), *words], stdout=subprocess.DEVNULL)
    log, deadline = tmp_path / "out" / "01_one.log", time.monotonic() + 60
    while not (log.exists() and children([log])):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == ladder.EXIT_INTERRUPTED
    assert pages(tmp_path / "out")["one"].verdict == "interrupted"
    assert (tmp_path / "out.tar.gz").exists()
    assert not is_running(*children([log]))


NVIDIA_SMI = """#!/bin/sh
echo asked >>"$(dirname "$0")/asked"
case $(wc -l <"$(dirname "$0")/asked") in
1) echo 7 ;;
2|3|STUCK) echo 7; echo 8 ;;
esac
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "stuck", "num_asked"),
    [("true", "3", 1), ("false", "3", 4), ("false", "*", None)],
    ids=["passed", "failed", "stuck"],
)
def test_after_a_rung_that_failed_the_next_waits_until_its_gpu_memory_is_free(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    stuck: str,
    num_asked: int | None,
) -> None:
    """A made-up nvidia-smi: process 7 was there before, 8 stays for two questions, or for good."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.replace("STUCK", stuck))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ladder, "GPU_FREE_S", 60.0 if num_asked else 0.1)
    ladder.main(ladder_of(tmp_path, command))
    if num_asked:
        assert len((tmp_path / "asked").read_text().splitlines()) == num_asked
    said = "one: processes that began with it still hold GPU memory"
    assert (said in capsys.readouterr().out) == (num_asked is None)


def test_a_rung_whose_tests_were_all_skipped_has_not_passed(tmp_path: Path) -> None:
    words = ladder_of(tmp_path, f"cp {tmp_path / 'junit.xml'} {{page}}.xml")
    (tmp_path / "junit.xml").write_text(JUNIT.replace('<testcase name="a"/>', ""))
    assert ladder.main(words) == 1
    assert pages(tmp_path / "out")["one"].verdict == "failed: every test was skipped"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--from", "best"], "--from best: expected one of good, bad, slow, without, last"),
        (["--minutes", "0"], "--minutes 0: expected more than 0"),
        (["--python", "/no/python"], "--python /no/python: expected a Python that can be started"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    file: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ladder.main([str(file), *words]) == ladder.EXIT_USAGE
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_the_versions_say_what_is_missing_and_end_with_1_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(versions.OPTIONAL, "transformer-engine-of-nobody", "its tests are skipped")
    assert versions.OPTIONAL["apex"] == f"no {machine.APEX}", "what the doctor says"
    assert versions.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"torch: {importlib.metadata.version('torch')}" in lines
    assert "transformer-engine-of-nobody: missing: its tests are skipped" in lines
    assert lines[-1] == f"GPU: torch {torch.__version__} sees none"


def test_the_versions_name_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda index: (70 * 2**30, 80 * 2**30),
        "get_device_capability": lambda index: (9, index),
        "get_device_name": lambda index: f"GPU of kind {index}",
    }
    for name, value in of_gpu.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    found = versions.gpus()
    assert found[1] == "NCCL: 2.27.3"
    assert found[-1] == "GPU 1: GPU of kind 1, capability 9.1, 70.0 of 80.0 GiB free"
    assert len(found) == 5


@pytest.mark.parametrize("name", LADDERS)
def test_the_script_lists_its_rungs_without_a_gpu(name: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "launch" / f"{name}.sh"), "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [rung.name for rung in LADDERS[name]]
    assert all(rung.about in done.stdout for rung in LADDERS[name])


def test_the_files_of_a_command_exist() -> None:
    for name, words in COMMANDS.items():
        named = [word for word in words if word.startswith(("launch/", "tests/", "benchmarks/"))]
        assert named or name in TRAIN or words[0] == "nvidia-smi"
        assert not [word for word in named if not (ROOT / word).exists()], name


@pytest.mark.parametrize("name", [name for name, words in COMMANDS.items() if "benchmarks/" in " ".join(words)])
def test_a_benchmark_takes_its_options(name: str) -> None:
    script, *words = COMMANDS[name][COMMANDS[name].index("python") + 1 :]
    options = (
        importlib.import_module(".".join(Path(script).with_suffix("").parts)).parser().parse_intermixed_args(words)
    )
    assert options.device == "cuda"
    assert str(options.out) == "/out"


@pytest.mark.parametrize("name", TRAIN)
def test_a_run_composes_and_puts_the_servers_on_the_trainers_gpus(name: str, tmp_path: Path) -> None:
    gsm8k_shaped.main([str(tmp_path / "gsm8k")])  # what the command before it makes, in small
    config, warnings = load_config([word.replace("/out", str(tmp_path)) for word in TRAIN[name]], command="train")
    assert not warnings
    assert set(config.trainer.logger) == {"console", "jsonl"}, "the others need packages that megarl does not require"
    assert (config.trainer.device, config.rollout.placement) == ("cuda", "shared")
    assert config.trainer.default_local_dir == f"{tmp_path}/runs"
    check_shared_gpus(config)
    seats = gpu_seats(config, ["http://0"])
    assert seats is not None
    assert set(seats["servers"]["http://0"]) <= set(seats["trainer"]), "else no push by memory that both map"


def test_the_model_of_gsm8ks_form_has_the_sizes_that_are_asked_for(tmp_path: Path) -> None:
    gsm8k_shaped.main([str(tmp_path), "--hidden=48", "--layers=1", "--heads=6", "--ffn=40"])
    numbers = json.loads((tmp_path / "model" / "config.json").read_text())
    asked = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 40}
    assert numbers.items() >= asked.items()


def test_rungs_with_sglang_need_an_environment_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs = {rung.needs for rungs in LADDERS.values() for rung in rungs if rung.name.startswith("sglang_")}
    (words,) = [shlex.split(text) for text in needs]
    python = tmp_path / "python"
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for said, status in (('{"sglang": "0.5.23"}', 1), ('{"sglang": "0.5.23", "sgl-kernel": "0.3.21"}', 0)):
        python.write_text(f"#!/bin/sh\necho '{said}'\n")
        python.chmod(0o755)
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert status == 0 or "without the package sglang-kernel" in done.stderr.splitlines()[-1]


def test_every_file_of_gpu_tests_is_in_a_rung_for_one_gpu_but_that_of_layouts() -> None:
    named = {ladder: set[str]() for ladder in LADDERS}
    for name, words in PYTEST.items():
        named[name.partition("/")[0]].update(words)
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests/gpu").glob("test_*.py")}
    layouts = {"tests/gpu/test_layouts_gpu.py"}
    assert len(files) > 5 and files - named["one_gpu"] == layouts <= named["eight_gpus"]


def test_what_the_hf_engine_does_on_one_gpu_is_checked_before_its_benchmarks_and_without_sglang() -> None:
    rungs = {rung.name: rung for rung in LADDERS["one_gpu"]}
    names = list(rungs)
    first = min(names.index(name) for name in ("bench_rollout", "bench_push"))
    assert all(names.index(name) < first and not rungs[name].needs for name in ("hf_server", "hf_ring"))


def test_each_part_for_twelve_minutes_on_one_gpu_can_take_its_limit_and_the_last_still_begins() -> None:
    """In this order; the rungs behind them are run in what is left of more minutes."""
    limits = {rung.name: rung.seconds for rung in LADDERS["one_gpu"]}
    parts = [name for name in limits if name.startswith(("part_", "bench_step"))]
    first = list(limits)[: list(limits).index("fragmentation") + 1]
    assert first == ["versions", "prefix_sharing", *parts, "float32", "fragmentation"]
    assert sum(limits[name] for name in first[:-1]) < 12 * 60


def test_a_rung_names_its_files_of_tests_of_which_one_that_cannot_be_imported_stops_no_other() -> None:
    """pytest imports a whole folder before -k chooses."""
    for name, words in PYTEST.items():
        assert (files := files_in(words)), name
        assert len(files) == 1 or "--continue-on-collection-errors" in words, name
        has_full = any("mark.full" in (ROOT / file).read_text() for file in files)
        assert not has_full or "full or not full" in words, f"{name}: else pytest leaves out those that are marked full"


@pytest.mark.full
def test_each_command_of_tests_finds_some(tmp_path: Path) -> None:
    """pytest ends with 5 if it finds none.  All in one process: most of the time goes into imports."""
    chosen = {}
    # Of newer models' tests an older Megatron-Core collects none.
    is_old = importlib.metadata.version("megatron-core") < "0.19"
    wanted = {name: words for name, words in PYTEST.items() if not (is_old and "drafts_and_indexers" in name)}
    for name, words in wanted.items():
        words = words[words.index("pytest") + 1 :]
        chosen[name] = [word for word in words if not word.startswith("--junit-xml")]
    collect = (
        "import json, pytest, sys; all = json.loads(sys.argv[1]).items(); "
        "print({name: int(pytest.main([*words, '--collect-only', '-q'])) for name, words in all})"
    )
    done = subprocess.run(
        [sys.executable, "-c", collect, json.dumps(chosen)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1:] == [str(dict.fromkeys(wanted, 0))], done.stdout[-2000:] + done.stderr[-2000:]
