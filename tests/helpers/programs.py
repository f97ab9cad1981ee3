"""Which program a process runs, whether it was forked or started."""

import psutil


def runs(process: psutil.Process, program: str) -> bool:
    """`program`: a module, a script, or a function that `start_child` runs in a process."""
    is_named = process.name() == program.removeprefix("megarl.")[:15]
    return is_named or any(word.endswith(program) for word in process.cmdline())
