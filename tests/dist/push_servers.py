"""Real servers that a test can kill and start again at the same place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from push_cases import TOKEN

from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.launch import TOKEN_VARIABLE
from megarl.servers.supervisor import free_ports


class HFServer:
    """Example: with HFServer(folder) as server: server.url, server.pid; server.restart()"""

    def __init__(self, folder: Path, *, group_timeout_s: float = 60.0) -> None:
        (self._port,) = free_ports(["127.0.0.1"])
        self._folder, self._group_timeout_s = folder, group_timeout_s
        self.url = f"http://127.0.0.1:{self._port}"
        self.engine = ServerClient(self.url, TOKEN)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "megarl.hf_server.main", "--model-path", str(self._folder)]
        command += ["--port", str(self._port), "--max-running-requests", "4", "--max-total-tokens", "512"]
        command += ["--group-timeout-s", str(self._group_timeout_s)]
        self._process = subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"})

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, limit_s: float = 240) -> Self:
        """Until it serves."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.engine.health()
                return self
            except ServerError:
                assert self._process.poll() is None and time.monotonic() < deadline, f"{self.url} did not start"
                time.sleep(0.1)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()
        self.wait()

    @property
    def is_paused(self) -> bool:
        return bool(self.engine.server_info()["is_paused"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.kill()
        self.engine.close()
