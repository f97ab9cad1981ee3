"""The router process in SGLang's environment: `smg`, with the token from a variable; it ends with its parent.

MEGARL_SERVER_TOKEN=... python -m megarl.servers.router_server PARENT_PID --host 127.0.0.1 --port 30000 ...
"""

from __future__ import annotations

import os
import sys

from megarl.io.job_signals import hold_back_for_good
from megarl.processes.lifetime import die_with_parent
from megarl.servers.launch import TOKEN_VARIABLE


def main() -> None:
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    hold_back_for_good()
    from smg.launch_router import launch_router, parse_router_args  # only SGLang's environment has it

    token = os.environ.pop(TOKEN_VARIABLE, "")
    if token:
        arguments += ["--api-key", token]  # added within this process: every user can read a command line
    launch_router(parse_router_args(arguments))


if __name__ == "__main__":
    main()
