"""A page in a headless Chromium: measured, and as a picture."""

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Browser:
    """Speaks Chromium's DevTools protocol over a pair of pipes: JSON, each ended by a zero byte.

    Its windows are never narrower than 500 pixels; a page's own width has no such limit.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write = os.fdopen(to_browser, "wb", buffering=0)
        self._read = os.fdopen(from_browser, "rb", buffering=0)
        self._count = 0
        self._pending = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        answer = self._wait_for("id", self._count)
        assert "error" not in answer, answer
        return answer["result"]

    def _wait_for(self, key: str, value: object) -> dict[str, Any]:
        while True:
            while b"\0" not in self._pending:
                part = self._read.read(1 << 20)
                assert part, "the browser has ended"
                self._pending += part
            line, self._pending = self._pending.split(b"\0", 1)
            message = json.loads(line)
            if message.get(key) == value:
                return message

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Open a page as a screen of this width shows it, a telephone's below 600 pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        # Sent by hand: the page may have loaded by the time of the answer.
        self._count += 1
        message = {
            "id": self._count,
            "method": "Page.navigate",
            "params": {"url": page.as_uri()},
            "sessionId": self._session,
        }
        self._write.write(json.dumps(message).encode() + b"\0")
        self._wait_for("method", "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a Chromium with a profile of its own, and end it."""
    assert CHROMIUM
    browsers_in, to_browser = os.pipe()
    from_browser, browsers_out = os.pipe()

    def place_pipes() -> None:
        """Give the browser its pipes as the descriptors 3 and 4."""
        first, second = os.dup(browsers_in), os.dup(browsers_out)
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=place_pipes,
        close_fds=False,
        start_new_session=True,
    )
    os.close(browsers_in)
    os.close(browsers_out)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
