"""Malicious programs in every sandbox that this machine has; and without one, where they can succeed."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandbox_modes import NOBODY, modes

from megarl.sandbox.python import Python, python_for_others

ATTACKS = Path(__file__).with_name("attacks.py")
SOURCE = ATTACKS.read_text()
NAMES = [
    line[4 : line.index("(")] for line in SOURCE.splitlines() if line.startswith("def ") and line.endswith("(at):")
]
AS_ATTACKER = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
# None: nobody attacks without a sandbox, since attacks of root are not harmless.
PYTHON = Python(sys.executable, ()) if os.geteuid() else python_for_others()
TRUTH = "the answer is 46f1c"
# Nothing but a sandbox stops these, whoever tries them, on any machine.
_ANYBODY_CAN = """
reads_a_file reads_the_password_file writes_a_file makes_a_file_outside lists_a_folder follows_a_symlink
climbs_out_by_dots climbs_out_by_a_folder_descriptor truncates_a_file truncates_by_opening removes_a_file changes_a_mode
changes_the_mode_of_an_open_file changes_a_time finds_the_truth sees_the_environment reads_an_inherited_descriptor
reads_its_own_proc lists_processes connects_by_tcp sends_by_udp listens connects_to_a_unix_socket
connects_to_an_abstract_socket sends_from_half_a_pair_of_datagram_sockets signals_a_process signals_everybody
asks_for_a_pair_of_internet_sockets lists_files_of_the_system
signals_a_thread signals_through_a_file slows_another_process moves_another_process limits_another_process
leaves_its_group moves_to_another_group makes_files_in_memory outlives_its_parent takes_much_memory writes_a_big_file
forks_many starts_many_threads opens_many_files
"""
ANYBODY_CAN = _ANYBODY_CAN.split()


@pytest.fixture(scope="module")
def world():
    """What the attacks are aimed at; it belongs to the user who attacks where there is no sandbox."""
    user = os.geteuid() or NOBODY
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to other users
    folder.chmod(0o777)
    for name in ("secret", "own_file", "open_file", "removable", "truth"):
        file = folder / name
        file.write_text(TRUTH)
        os.chown(file, user, -1)
        file.chmod(0o644 if name in ("secret", "own_file") else 0o666)
    tcp, unix, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(1)
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    unix.bind(f"{folder}/stream")
    datagrams.bind(f"{folder}/datagrams")
    abstract.bind(name := f"\0megarl-{os.getpid()}")
    for listening in (unix, abstract):
        listening.listen(64)
    for path in ("stream", "datagrams"):
        (folder / path).chmod(0o777)
    victim = subprocess.Popen(["/bin/sleep", "900"], **AS_ATTACKER)
    inherited = os.open(folder / "secret", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    targets = {
        "secret": f"{folder}/secret",
        "own_file": f"{folder}/own_file",
        "open_file": f"{folder}/open_file",
        "removable": f"{folder}/removable",
        "folder": str(folder),
        "truth": TRUTH[::-1],
        "port": tcp.getsockname()[1],
        "unix": f"{folder}/stream",
        "datagrams": f"{folder}/datagrams",
        "abstract": name[1:],
        "victim": victim.pid,
        "runner": os.getpid(),
        "descriptor": inherited,
    }
    yield SimpleNamespace(targets=targets, folder=folder, user=user, victim=victim, inherited=inherited)
    victim.kill()
    victim.wait()
    os.close(inherited)
    shutil.rmtree(folder)
    for one in (tcp, unix, abstract, datagrams):
        one.close()


def test_this_machine_has_a_sandbox():
    assert modes(), "no sandbox works here: `megarl doctor` says what is missing"


@pytest.mark.parametrize("mode", modes())
def test_no_attack_succeeds(mode, world, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", TRUTH)
    before = {file.name: (file.stat().st_mode, file.stat().st_uid) for file in world.folder.iterdir()}
    order = json.dumps({"attacks": NAMES, **world.targets})
    result = modes()[mode].run(SOURCE, stdin=order)  # one program tries all
    assert result.is_good, (result.stdout, result.stderr, result.why)
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert [line for line in lines if " stopped: " not in line] == []
    after = {file.name: (file.stat().st_mode, file.stat().st_uid) for file in world.folder.iterdir()}
    assert (after, (world.folder / "secret").read_text(), world.victim.poll()) == (before, TRUTH, None)


if PYTHON is not None:

    def test_the_same_attacks_succeed_without_a_sandbox(world):
        """So that a test of this file can fail.  The user is one whom nothing belongs to, and harmless attacks only."""
        work = world.folder / "work"
        work.mkdir()
        os.chown(work, world.user, -1)
        ran = subprocess.run(
            [PYTHON.path, "-I", "-S", "-B", "-c", SOURCE],  # the same program
            input=json.dumps({"attacks": ANYBODY_CAN, **world.targets}),
            env={"WANDB_API_KEY": TRUTH},
            cwd=work,
            **AS_ATTACKER,
            pass_fds=[world.inherited],
            capture_output=True,
            text=True,
            timeout=300,
        )
        stopped = [line for line in ran.stdout.splitlines() if not line.endswith(" reached")]
        assert not stopped and len(ran.stdout.splitlines()) == len(ANYBODY_CAN), (stopped, ran.stderr)
