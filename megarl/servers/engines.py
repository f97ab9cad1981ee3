"""The programs that a run's servers can be: a name of `rollout.engine` -> what makes its command line."""

from __future__ import annotations

from megarl.servers.launch import MakeCommand, hf_command
from megarl.servers.sglang import sglang_command

ENGINES: dict[str, MakeCommand] = {"hf": hf_command, "sglang": sglang_command}
