"""`megarl doctor` on the machine of the tests: its rows, its JSON, what is missing, and the network to another one."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from check_pins import pins_of

from megarl.cli import main
from megarl.commands.doctor import command, link, machine, versions
from megarl.commands.doctor.machine import FAIL, NOTE, OK
from megarl.config import load_config
from megarl.plugins.options import Place, place_of

ROOT = Path(__file__).parents[3]


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
    assert command.as_json({"machine": [machine._free("free disk", 0, 1, "fail")]})["can_run"] is False


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


def test_versions_known_to_work_together_are_those_of_the_constraints_and_of_the_lock_files():
    def in_file(name: str, package: str) -> str:
        (found,) = re.findall(rf"^{package}==([\d.]+)", (ROOT / "launch" / name).read_text(), re.M)
        return str(found)

    constraints = dict(pin.split("==") for pin in pins_of(ROOT / "launch/constraints.txt"))
    assert {name: constraints[name] for name in versions.TESTED} == versions.TESTED
    for row in versions.TOGETHER:
        if row.nccl is None:
            trainer, server = "constraints.txt", f"sglang-{row.sglang}.txt"
        else:
            trainer, server = "gpu/trainer.txt", "gpu/server.txt"
            assert in_file(trainer, "nvidia-nccl-cu13") == in_file(server, "nvidia-nccl-cu13") == row.nccl
        assert in_file(trainer, "torch") == row.torch
        assert in_file(server, "torch") == row.torch_of_servers
        assert in_file(server, "sglang") == row.sglang


@pytest.mark.parametrize(("sglang", "verdict"), [("0.5.23", OK), ("0.5.20", NOTE)])
def test_a_pair_of_environments_that_nobody_tested_is_a_note(sglang: str, verdict: str):
    row = versions._together({"sglang": sglang, "torch": "2.13.0+cpu"}, has_gpu=False)
    assert (row.verdict, row.mend) == (verdict, "" if verdict == OK else "bash launch/sglang_cpu.sh")


def test_a_low_limit_of_open_files_is_told_with_the_command_that_raises_it():
    code = "from megarl.commands.doctor import machine; print(*machine._limits()[0], sep='|')"
    shell = f'ulimit -n 1000 && "{sys.executable}" -c "{code}"'
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert said == "open files|1000|4096 or more|note|ulimit -Hn 65536  # as root, or in limits.conf|1000.0\n"


def test_a_folder_of_runs_that_is_not_there_yet_is_measured_where_it_will_be(tmp_path: Path):
    config, _ = load_config([f"trainer.default_local_dir={tmp_path}/a/b"], command="doctor")
    (row,) = [row for row in machine.findings(config) if row.subject == "disk speed"]
    assert row.found.endswith(f" MB/s written in {tmp_path}")
    assert list(tmp_path.iterdir()) == [], "the file of the measurement is deleted"


TOKEN, OTHER = "a" * 32, "b" * 32
Listener = tuple["subprocess.Popen[str]", Place]


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    """A program that listens, and where; each test reads all that it says meanwhile."""
    words = [sys.executable, "-m", "megarl", "doctor", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "MEGARL_TOKEN": TOKEN}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout is not None
            line = program.stdout.readline()
            yield program, place_of(line.split("--peer ")[1].split()[0])
        finally:
            program.terminate()


def line_of(program: "subprocess.Popen[str]") -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def test_two_processes_measure_round_trip_and_both_directions(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, place = listener
    monkeypatch.setenv("MEGARL_TOKEN", TOKEN)
    assert main(["doctor", "--json", f"--peer={place}"]) == 0
    rows = json.loads(capsys.readouterr().out)["findings"]["network"]
    what = ("round trip", "sent", "received")
    assert [row["subject"] for row in rows] == [f"network to {place}, {of}" for of in what]
    trip, sent, received = (row["value"] for row in rows)
    assert 0 < trip < 1, "seconds"
    assert min(sent, received) > 2**20, "bytes a second, over loopback"
    assert line_of(program) == "measured from 127.0.0.1\n"


@pytest.mark.full
def test_another_token_or_a_stranger_is_refused_and_the_listener_goes_on(listener: Listener) -> None:
    program, place = listener
    (row,) = link.findings(place, OTHER)
    assert (row.verdict, row.found) == (FAIL, "what listens there does not have the same token")
    with socket.create_connection(place):
        pass
    assert len(link.findings(place, TOKEN)) == 3
    assert line_of(program) == "measured from 127.0.0.1\n"


def test_nobody_there_is_a_failure_with_the_command_for_the_other_side() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = Place("127.0.0.1", server.getsockname()[1])
    (row,) = link.findings(place, TOKEN)
    assert (row.verdict, "refused" in row.found) == (FAIL, True)
    assert row.mend == f"megarl doctor --listen {place}  # there, with the same token"


@pytest.mark.parametrize("option", ["--listen", "--peer"])
def test_without_a_token_nothing_is_measured(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEGARL_TOKEN", raising=False)
    assert main(["doctor", option, "127.0.0.1:0"]) == 2
    assert f"megarl doctor {option} 127.0.0.1:0: expected the run's token in MEGARL_TOKEN" in capsys.readouterr().err
