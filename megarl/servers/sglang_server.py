"""The server process in SGLang's environment: SGLang's own server, with the token from a variable.

    MEGARL_SERVER_TOKEN=... python -m megarl.servers.sglang_server PARENT_PID --model-path DIR --port 30000 ...

SGLang takes its key only from the command line, which every user of the machine can read. This module reads it from the
environment and adds it to the arguments that SGLang parses, within the process. The server ends with its parent;
SGLang's worker processes are its children and end with it.
"""

from __future__ import annotations

import logging
import os
import sys

from megarl.io.job_signals import hold_back_for_good
from megarl.processes.lifetime import die_with_parent
from megarl.rollout.protocol import Abilities
from megarl.servers.launch import TOKEN_VARIABLE
from megarl.servers.weight_group import KEY_VARIABLE, groups_key


def main() -> None:
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    hold_back_for_good()  # SGLang's own handler of SIGTERM would end it
    # Not at the top: only SGLang's environment has it, and SGLang's workers, which import this file, do not need it.
    from sglang import __version__ as version
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if not Abilities.of(version).flush_beside_queue:
        arguments.append("--disable-radix-cache")
    token = os.environ.pop(TOKEN_VARIABLE, "")
    os.environ[KEY_VARIABLE] = groups_key(token)
    if token:
        hide_in_logs(token)
        arguments += ["--api-key", token]
    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def hide_in_logs(secret: str) -> None:
    """Replace `secret` by stars in all log records of this process: SGLang logs all its settings."""
    make = logging.getLogRecordFactory()

    def make_without(*args: object, **options: object) -> logging.LogRecord:
        record = make(*args, **options)
        text = record.getMessage()
        if secret in text:
            record.msg, record.args = text.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(make_without)


if __name__ == "__main__":
    main()
