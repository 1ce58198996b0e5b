"""A headless Chromium, spoken to by the DevTools protocol through a pair of pipes: no driver and no package needed."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# Chromium reads commands from file descriptor 3 and writes answers to 4, whatever they are here.
LAUNCHER = """
import os, sys
reading, writing = (os.dup(int(number)) for number in sys.argv[1:3])
while min(reading, writing) <= 4:
    reading, writing = os.dup(reading), os.dup(writing)
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One browser with one empty tab."""

    def __init__(self, profile: Path) -> None:
        commands_out, self._commands = os.pipe()
        self._answers, answers_in = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCHER, str(commands_out), str(answers_in)),
                *("chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the tab told by itself: errors, console lines, requests."""
        tab = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda found: found.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: Path) -> None:
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._wait(lambda found: found.get("method") == "Page.loadEventFired")

    def run(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def screenshot(self, width: int, height: int, *, phone: bool = False) -> bytes:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """Exceptions, errors and warnings of the page, and of the browser about it."""
        found = []
        for event in self.events:
            details = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(details["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                found.append(str(details["args"]))
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(str(details["entry"]))
        return found

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._session = None
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group: start_new_session
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _wait(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while True:
            message = self._next(deadline)
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._answers, 1 << 16) if ready else b""
            if not piece:
                raise RuntimeError("chromium ended" if ready else f"chromium did not answer in {SECONDS} seconds")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
