"""The front door: runs Python source in the sandbox that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.sandbox.execute import Jailer, execute
from megarl.sandbox.layers import chosen
from megarl.sandbox.limits import Limits
from megarl.sandbox.result import Result
from megarl.sandbox.service import Service


def run(
    source: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    sandbox: Jailer | Service | None = None,
) -> Result:
    """Run Python source in a sandbox; returns when none of its processes is left.

    Args:
        stdin: what it reads.
        files: plain names and contents of further files in its folder, which is also its working folder.
        sandbox: by default that of `use`.
    Raises SandboxError if there is no sandbox: code never runs without one.  What the code does is no error.

    Example: run("print(1 + int(input()))", stdin="2").stdout == "3\\n".
    """
    where = sandbox or chosen()
    limits, files = limits or Limits(), files or {}
    assert all("/" not in name for name in files), f"plain names are expected, not {list(files)}"
    if isinstance(where, Service):
        return where.run(source, stdin=stdin, files=files, limits=limits)
    return execute(where, source, stdin=stdin, files=files, limits=limits)
