"""`megarl node`, the command of a further machine, with nothing behind it."""

from unittest.mock import MagicMock

import pytest

from megarl.commands import node
from megarl.config import load_config


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1", True), ("10.1.2.3", False)])
def test_a_machine_that_looks_for_machine_0_at_itself_says_so(
    address: str, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGARL_TOKEN", "a" * 32)
    monkeypatch.setattr(node, "Agent", MagicMock())
    words = ["trainer.nnodes=2", "trainer.node_rank=1", "trainer.master_port=29400", f"trainer.master_addr={address}"]
    config, _ = load_config(["recipe=quickstart", *words], command="node")
    assert node.main(config) == 0
    assert (f"trainer.master_addr={address}: that is this machine" in capsys.readouterr().err) == warns
