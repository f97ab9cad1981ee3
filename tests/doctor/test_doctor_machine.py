"""`megarl doctor` on the machine of the tests: its rows, its JSON, and the commands for what is missing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import load_config
from megarl.doctor import command, machine, versions
from megarl.doctor.finding import NOTE, OK

ROOT = Path(__file__).parent.parent.parent
LOCKS = {"sglang": re.compile(r"^sglang==([\d.]+)", re.M), "torch": re.compile(r"^torch==([\d.]+)", re.M)}


def test_the_object_has_every_section_with_measured_speeds_and_who_computes_what(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["can_run"] is True
    rows = {row["subject"]: row for section in told["findings"].values() for row in section}
    assert list(told["findings"]) == ["trainer", "servers", "compute", "machine", "sandbox"]
    assert rows["attention"]["found"] == "torch's scaled_dot_product_attention over packed rows"
    assert rows["optimizer"]["found"] == "torch's AdamW"
    for name, kernels in versions.KERNELS.items():  # which no machine without a GPU has
        assert rows[name]["found"] == f"not installed: {kernels.otherwise}"
        assert (rows[name]["verdict"], rows[name]["mend"]) == (OK, "")
    for subject in ("disk speed", "loopback socket", "free memory", "free disk", "open files"):
        assert rows[subject]["value"] > 0, subject
    assert all(row["mend"] for row in rows.values() if row["verdict"] == "fail")


def test_a_table_tells_the_command_that_brings_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(versions.TESTED, "a-package-that-nobody-has", "1.0")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "A run cannot start here: a-package-that-nobody-has." in said
    install = f'{sys.executable} -m pip install "a-package-that-nobody-has==1.0"'
    assert f"a-package-that-nobody-has: {install}\n" in said


def test_a_machine_with_gpus_is_told_the_commands_that_bring_the_kernels():
    rows = {row.subject: row for row in versions.trainer_findings(has_gpu=True) if row.subject in versions.KERNELS}
    assert rows["transformer-engine"].mend == "bash launch/gpu/install.sh transformer_engine"
    assert rows["apex"].mend.endswith(" git+https://github.com/NVIDIA/apex"), "PyPI's apex is another package"
    assert rows["flash-attn"].mend.endswith(" --no-build-isolation flash-attn")
    assert {row.verdict for row in rows.values()} == {NOTE}


@pytest.mark.parametrize("has_part", [False, True])
def test_another_package_of_the_name_apex_brings_no_kernels(monkeypatch: pytest.MonkeyPatch, has_part: bool):  # noqa: FBT001
    monkeypatch.setattr(versions, "version", lambda name: "0.9.10")
    monkeypatch.setattr(versions, "find_spec", lambda module: object() if has_part else None)
    row = versions._kernels("apex", has_gpu=True)
    assert (row.verdict, bool(row.mend)) == ((OK, False) if has_part else (NOTE, True))
    assert row.found.startswith("0.9.10" if has_part else "0.9.10 without fused_weight_gradient_mlp_cuda: ")


@pytest.mark.parametrize(
    ("found", "has_gpu", "text", "verdict"),
    [
        ({}, False, "not installed: torch's operations, on a CPU", OK),
        ({"sgl-kernel": "0.3"}, True, "sgl-kernel 0.3", NOTE),
        ({"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2"}, True, None, OK),
    ],
)
def test_the_kernels_of_servers_are_told(found: dict[str, str], has_gpu: bool, text: str | None, verdict: str) -> None:  # noqa: FBT001
    row = versions._kernels_of_servers(found, has_gpu=has_gpu)
    assert row.found == (text or "sglang-kernel 0.4.10, flashinfer-python 0.7.2")
    assert (row.verdict, bool(row.mend)) == (verdict, verdict == NOTE)


def test_the_versions_are_those_of_the_constraints_file():
    lines = (ROOT / "launch/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: pinned[name] for name in versions.TESTED} == versions.TESTED


def test_versions_known_to_work_together_are_those_of_the_lock_files():
    def in_file(name: str, what: re.Pattern[str]) -> str:
        (found,) = what.findall((ROOT / "launch" / name).read_text())
        return str(found)

    for row in versions.TOGETHER:
        if row.nccl is None:
            trainer, server = "constraints.txt", f"sglang-{row.sglang}.txt"
        else:
            trainer, server = "gpu/trainer.txt", "gpu/server.txt"
            nccl = re.compile(r"^nvidia-nccl-cu13==([\d.]+)", re.M)
            assert in_file(trainer, nccl) == in_file(server, nccl) == row.nccl
        assert in_file(trainer, LOCKS["torch"]) == row.torch
        assert in_file(server, LOCKS["torch"]) == row.torch_of_servers
        assert in_file(server, LOCKS["sglang"]) == row.sglang


@pytest.mark.parametrize(("sglang", "verdict"), [("0.5.23", OK), ("0.5.20", NOTE)])
def test_a_pair_of_environments_that_nobody_tested_is_a_note(sglang: str, verdict: str):
    row = versions._together({"sglang": sglang, "torch": "2.13.0+cpu"}, has_gpu=False)
    assert (row.verdict, row.mend) == (verdict, "" if verdict == OK else "bash launch/sglang_cpu.sh")


def test_a_low_limit_of_open_files_is_told_with_the_command_that_raises_it():
    code = "from megarl.doctor import machine; print(*machine._limits()[0], sep='|')"
    shell = f'ulimit -n 1000 && "{sys.executable}" -c "{code}"'
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert said == "open files|1000|4096 or more|note|ulimit -Hn 65536  # as root, or in limits.conf|1000.0\n"


def test_a_folder_of_runs_that_is_not_there_yet_is_measured_where_it_will_be(tmp_path: Path):
    config, _ = load_config([f"trainer.default_local_dir={tmp_path}/a/b"], command="doctor")
    (row,) = [row for row in machine.findings(config) if row.subject == "disk speed"]
    assert row.found.endswith(f" MB/s written in {tmp_path}")
    assert list(tmp_path.iterdir()) == [], "the file of the measurement is deleted"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run"], "megarl doctor --run: expected the folder of a run, such as runs/quickstart"),
        (
            ["--run", "runs/a", "rollout.n=2"],
            "megarl doctor --run runs/a rollout.n=2: the run has its own settings; expected nothing else",
        ),
        (
            ["--jason"],
            "there is no option --jason; "
            "expected --json, --run RUN, --listen ADDRESS:PORT, --peer ADDRESS:PORT, --config FILE or key=value",
        ),
    ],
)
def test_words_that_are_no_request_are_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_failed_row_makes_the_object_say_that_no_run_can_start():
    assert command.as_json({"machine": [machine._free("free disk", 0, 1, "fail")]})["can_run"] is False
