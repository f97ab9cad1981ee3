"""Chromium without a window, led over a pipe by the DevTools protocol: opens a page and tells all that went wrong."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

LIMIT_S = 120.0  # of a call and of a wait
LOUD = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


class Chromium:
    """Example: with Chromium(tmp_path) as browser: browser.open(path, width=400); browser.value("document.title")"""

    def __init__(self, folder: Path) -> None:
        """`folder`: for the browser's profile."""
        self._ids = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            f"--user-data-dir={folder}",
        ]  # fmt: skip
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'  # the numbers that Chromium reads and writes
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{room}.enable")

    _session: str | None = None

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(LIMIT_S)
        os.close(self._out)
        os.close(self._in)

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page, and wait until it says that it is drawn; the events of the page before are forgotten."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def value(self, expression: str) -> Any:
        """What JavaScript comes to, a promise too."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression}: not in {LIMIT_S:.0f} s; {self.complaints()}"
            time.sleep(0.05)

    def complaints(self) -> list[Any]:
        """Errors and whatever else the page has put on its console, violations of its policy among them."""
        return [event["params"] for event in self.events if event["method"] in LOUD]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for, itself the first."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], LIMIT_S)
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, "chromium has ended, or says nothing"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)
