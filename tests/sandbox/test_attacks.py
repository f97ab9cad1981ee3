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

import attacks
import pytest
from sandbox_modes import NOBODY, modes

from megarl_sandbox.python import Python, python_for_others

SOURCE = Path(attacks.__file__).read_text()
AS_ATTACKER = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
# None: nobody attacks without a sandbox, since attacks of root are not harmless.
PYTHON = Python(sys.executable, ()) if os.geteuid() else python_for_others()
TRUTH = "the answer is 46f1c"


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
    targets = {name: f"{folder}/{name}" for name in ("secret", "own_file", "open_file", "removable", "datagrams")}
    targets |= {"folder": str(folder), "truth": TRUTH[::-1], "unix": f"{folder}/stream", "abstract": name[1:]}
    targets |= {"port": tcp.getsockname()[1], "victim": victim.pid, "runner": os.getpid(), "descriptor": inherited}
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
    order = json.dumps({"attacks": [*attacks.ATTACKS], **world.targets})
    result = modes()[mode].run(SOURCE, stdin=order)  # one program tries all
    assert result.is_good, (result.stdout, result.stderr, result.why)
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*attacks.ATTACKS]
    assert [line for line in lines if " stopped: " not in line] == []
    after = {file.name: (file.stat().st_mode, file.stat().st_uid) for file in world.folder.iterdir()}
    assert (after, (world.folder / "secret").read_text(), world.victim.poll()) == (before, TRUTH, None)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if "without" in mode else pytest.mark.full) for mode in modes()]
)
@pytest.mark.parametrize("attack", attacks.FILLS_THE_DISK)
def test_no_program_keeps_more_on_the_disk_than_its_folder_may_have(mode, attack):
    """Where the folder is in memory the kernel refuses it; elsewhere the program ends, sooner than it wants to."""
    result = modes()[mode].run(SOURCE, stdin=json.dumps({"attacks": [attack], "keeps_s": 60}), seconds=70)
    assert result.why == "folder" or "No space left on device" in result.stdout, result
    assert " reached" not in result.stdout


if PYTHON is not None:

    def test_the_same_attacks_succeed_without_a_sandbox(world):
        """So that a test of this file can fail.  The user is one whom nothing belongs to, and harmless attacks only."""
        work = world.folder / "work"
        work.mkdir()
        os.chown(work, world.user, -1)
        can = [*attacks.ANYBODY_CAN, *attacks.FILLS_THE_DISK]
        ran = subprocess.run(
            [PYTHON.path, "-I", "-S", "-B", "-c", SOURCE],  # the same program
            input=json.dumps({"attacks": can, "keeps_s": 0, **world.targets}),
            env={"WANDB_API_KEY": TRUTH},
            cwd=work,
            **AS_ATTACKER,
            pass_fds=[world.inherited],
            capture_output=True,
            text=True,
            timeout=300,
        )
        stopped = [line for line in ran.stdout.splitlines() if not line.endswith(" reached")]
        assert not stopped and len(ran.stdout.splitlines()) == len(can), (stopped, ran.stderr)
