"""A service that runs code, in place of this machine: the route `POST /run_code` of SandboxFusion."""

from __future__ import annotations

import base64
import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from megarl_sandbox.limits import Limits
from megarl_sandbox.program import Result, SandboxError

_SLACK_S = 10.0  # for the way, and for waiting in the service
# A service limits the clock and the memory, not the processor's time: the program's own process does.
_PROGRAM = "program.py"
_LIMITED = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
runpy.run_path("{_PROGRAM}", run_name="__main__")
"""


@dataclass(frozen=True)
class Service:
    """Example: Service("http://10.0.0.2:8080").run("print(1)", stdin="", files={}, limits=Limits()).

    Of the limits it is told `seconds` and `memory_bytes`; `output_bytes` counts when the answer is here.  A limit of
    processor time is set in the process of the program, which could lift it if the service runs it as root.  All others
    are the service's own.
    """

    url: str

    def run(self, source: str, *, stdin: str, files: Mapping[str, str], limits: Limits) -> Result:
        """Raises SandboxError if the service does not answer, or did not run the code."""
        if limits.processor_seconds is not None:
            files = {**files, _PROGRAM: source}
            source = _LIMITED.replace("SECONDS", str(math.ceil(limits.processor_seconds)))
        order = {
            "code": source,
            "language": "python",
            "stdin": stdin,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_bytes >> 20,
            "files": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
        }
        start = time.monotonic()
        answer = self._ask(order, limits)
        ran = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(ran, dict):
            raise SandboxError(f"{self.url}/run_code did not run the code: {answer.get('message') or answer}")
        outputs = [str(ran.get(name) or "") for name in ("stdout", "stderr")]
        kept = [text[: limits.output_bytes] for text in outputs]
        why = "time" if ran.get("status") == "TimeLimitExceeded" else "output" if kept != outputs else ""
        code = ran.get("return_code")
        status = code if isinstance(code, int) else -1
        return Result(kept[0], kept[1], status, time.monotonic() - start, why)

    def _ask(self, order: dict[str, object], limits: Limits) -> dict[str, object]:
        import http.client  # pulls in ssl, which nothing else here needs

        url, place = f"{self.url.rstrip('/')}/run_code", urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        within_s = limits.seconds + _SLACK_S
        connection, ends = kind(place.netloc, timeout=within_s), time.monotonic() + within_s
        try:
            connection.connect()
            with _ending(connection.sock, within_s):
                connection.request("POST", urlsplit(url).path, json.dumps(order), {"Content-Type": "application/json"})
                reply = connection.getresponse()
                if reply.status != HTTPStatus.OK:
                    raise SandboxError(f"{url} gave no answer: {reply.status} {reply.reason}")
                answer = json.loads(reply.read(4 * limits.output_bytes + (1 << 20)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = f" within {within_s:.3g} s" if time.monotonic() >= ends else ""
            raise SandboxError(f"{url} gave no answer{late}: {error}") from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise SandboxError(f"{url} answered {answer!r}; expected a mapping")
        return answer


@contextmanager
def _ending(connection: socket.socket, after_s: float) -> Iterator[None]:
    """Shut the connection down after a time: a later read from it finds its end.

    Its timeout is of each read: a service that sends a byte now and then would never let its caller go on.
    """
    timer = threading.Timer(after_s, _end, [connection])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # closed meanwhile
        connection.shutdown(socket.SHUT_RDWR)
