"""A page in a headless Chromium, driven over a pipe (Chrome's DevTools protocol): no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 20.0
"""Seconds for one answer of the browser."""
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-default-apps", "--remote-debugging-pipe", "about:blank"),
)


class Chromium:
    """One browser with one page."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self.to, self.back = process, to, back
        self.unread, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile is kept in `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Load a file in a window of this size, a phone's if it is narrow."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element, as a user would."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, whole: bool = False) -> bytes:
        """What is seen, or all of the page, as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        return base64.b64decode(shot["data"])

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    @property
    def requests(self) -> list[str]:
        """What the page asked for, its own file and what it holds itself aside."""
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        urls = [one["request"]["url"] for one in sent if one["request"]["url"] != one["documentURL"]]
        return [url for url in urls if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts, and whatever was written to the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.back], [], [], max(0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            read = os.read(self.back, 1 << 20)
            assert read, "Chromium ended"
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser that ends with the block; skips the test where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    to_read, to = os.pipe()
    back, back_write = os.pipe()

    def hand_over() -> None:  # the protocol's pipes are file descriptors 3 and 4
        first, second = os.dup(to_read), os.dup(back_write)
        os.dup2(first, 3)
        os.dup2(second, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, f"--user-data-dir={profile}", *FLAGS],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(back_write)
        try:
            browser = Chromium(process, to, back)
            yield browser
            with suppress(AssertionError):
                browser.session = ""
                browser.ask("Browser.close")
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            os.close(to)
            os.close(back)
