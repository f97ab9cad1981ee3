"""What the fork server of a command imports, and where there is none."""

from unittest import mock

import pytest

from megarl.commands import preload
from megarl.commands.preload import preload_for
from megarl.config import load_config

RANK, SERVER, CHILD = "megarl.roles.worker", "megarl.hf_server.main", "megarl.processes.child"


def imported(command: str, *words: str, has_gpus: bool = False) -> list[str] | None:
    config, _ = load_config(["recipe=quickstart_grpo", *words])
    with (
        mock.patch.object(preload, "preload") as started,
        mock.patch.object(preload, "_has_gpus", return_value=has_gpus),
    ):
        preload_for(command, config)
    return list(started.call_args.args[1]) if started.called else None


def test_it_imports_what_the_processes_of_the_command_need() -> None:
    whole = imported("train", "trainer.device=cpu", "rollout.engine=hf")
    assert whole is not None and {RANK, SERVER, CHILD} < set(whole)
    assert imported("sft") == [RANK]
    evaluation = imported("evaluate", "rollout.engine=hf")
    assert evaluation is not None and RANK not in evaluation
    other = imported("train", "rollout.engine=sglang")
    assert other is not None and SERVER not in other, "SGLang has an environment of its own"


@pytest.mark.parametrize("command", ["serve", "plan", "node", "config"])
def test_other_commands_have_none(command: str) -> None:
    assert imported(command) is None


def test_there_is_none_where_gpus_are_used() -> None:
    """A GPU's driver does not survive a fork."""
    assert imported("train", "trainer.device=auto", has_gpus=True) is None
    assert imported("train", "trainer.device=cpu", has_gpus=True) is not None
    assert imported("train", "trainer.device=cuda") is None
