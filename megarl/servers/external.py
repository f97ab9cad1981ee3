"""A server that another program started, for example `megarl serve`: health-checked, never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.processes.lifetime import ProcessHandle
from megarl.rollout.client import ServerClient
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import ServerProcess


class NotOurs:
    """A ProcessHandle for a process of another owner: `end` marks it as ended and does nothing to it."""

    pid = 0

    def __init__(self) -> None:
        self._code: int | None = None

    def exit_code(self) -> int | None:
        return self._code

    def log_tail(self) -> str:
        return ""

    def end(self, grace_s: float) -> None:
        self._code = 0


class RunningServer(ServerProcess):
    """A ServerProcess of another owner.

    A changed startup_time in /server_info shows that the owner restarted it, so that its pushed weights are lost.
    """

    def __init__(self, url: str, token: str, index: int) -> None:
        launch = EngineLaunch("running", "", index=index, **place(url))
        super().__init__(launch, token, Path("that of who started it"), name=f"server {index}")
        self._started: Any = None  # its startup_time

    def _start(self) -> ProcessHandle:
        """Starts nothing: the server runs, or its owner restarts it."""
        return NotOurs()

    def wait_until_serving(self, limit_s: float) -> None:
        super().wait_until_serving(limit_s)
        self._started = self._wait_for(ServerClient.server_info, "did not answer", limit_s).get("startup_time")

    def wait_for_answer(self, limit_s: float) -> None:
        if self._wait_for(ServerClient.server_info, "did not answer", limit_s).get("startup_time") != self._started:
            raise self.died("was started again")


def place(url: str) -> dict[str, Any]:
    """http://10.0.0.3:30000 -> host, port and tls, as fields of EngineLaunch.  Raises ValueError for another form."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    tls = {"http": "never", "https": "always"}.get(parts.scheme)
    if tls is None or not parts.hostname or port is None or parts.path.strip("/") or parts.query:
        raise ValueError(f"rollout.urls: {url} is none; expected http://HOST:PORT or https://HOST:PORT")
    return {"host": parts.hostname, "port": port, "group_port": port, "tls": tls}
