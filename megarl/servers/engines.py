"""The server programs: a name of `rollout.engine` -> the function that makes its command line."""

from __future__ import annotations

from megarl.servers.launch import MakeCommand, hf_command
from megarl.servers.sglang import sglang_command

ENGINES: dict[str, MakeCommand] = {"hf": hf_command, "sglang": sglang_command}
