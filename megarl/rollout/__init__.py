"""Everything that speaks to a server which generates rollouts.

Knows: SGLang's routes and JSON (`protocol`), how to call one server or many (`client`, `pool`), how to start and watch
them (`launch`, `supervisor`), among them stock SGLang in an environment of its own, with a router before it or without
(`sglang`, `foreign`, `router`; `sglang_server`, `smg_server` and `sglang_cpu/` are what runs there), and how prompts
become scored samples in a process of their own (`collect`, `stream`, `collector`).  `hf_server/` answers the same routes
on a CPU.
Does not know: Megatron, losses, what a reward is (a scoring object is passed in), or where weights come from.
Called by the driver and its supervisor; `protocol`, `client` and `weight_group` also by `weights/`.

The engine of a run is a name in this table; each entry makes a `ServerCommand` out of an `EngineLaunch` and a folder.
"""

from megarl.rollout.launch import MakeCommand, cpu_command
from megarl.rollout.sglang import sglang_command

ENGINES: dict[str, MakeCommand] = {"cpu": cpu_command, "sglang": sglang_command}
