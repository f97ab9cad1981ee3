"""What a run says whose machines cannot reach each other at free ports."""

import re
import threading
from pathlib import Path

import pytest

from megarl.arch.layout import Layout
from megarl.group import Group, GroupSettings
from megarl.group.failures import PortsBlocked
from megarl.machines.agent import Agent
from megarl.machines.nodes import Nodes

TOKEN = "the secret of these tests"
HELPERS = Path(__file__).parents[1] / "helpers"
WORKER = "firewalled_worker"


@pytest.mark.full
def test_blocked_ports_are_one_sentence_with_both_ends_and_how_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops what comes to machine 1; the driver's port and its connections to it are open."""
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=":")
    with Nodes(2, 1, "127.0.0.1", 0, TOKEN) as nodes:
        agent = Agent(1, f"127.0.0.1:{nodes.port}", TOKEN, source="127.0.0.2", workers=(WORKER,))
        threading.Thread(target=agent.serve, daemon=True).start()
        nodes.wait(60.0)
        group = Group("far", 2, Layout(), GroupSettings(device="cpu", worker=WORKER), log_dir=tmp_path, nodes=nodes)
        with pytest.raises(PortsBlocked) as caught, group:
            group.start()
    assert re.fullmatch(
        r"group far: rank 0 \(machine 0, host .*\) failed in setup: Unreachable: (127\.0\.0\.2:\d+) cannot be reached "
        r"from here \(timed out\); expected that all ports between the machines are open, .* `megarl doctor --listen "
        r"\1` there and `--peer \1` here show it",
        str(caught.value),
    )
