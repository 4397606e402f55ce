"""Headless Chromium, controlled through pipes by its DevTools protocol: what a page says, shows and looks like."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
SECONDS = 120.0
_START = 'r=$1 w=$2; shift 2; exec "$@" 3<&"$r" 4>&"$w"'


class Chromium:
    """One page. `said` collects console messages, uncaught errors, and what the browser refused."""

    def __init__(self, folder: Path):
        assert PROGRAM
        here, there = os.pipe(), os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", _START, "start", str(here[0]), str(there[1]), PROGRAM, *options, "about:blank"],
            pass_fds=(here[0], there[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(here[0])
        os.close(there[1])
        self._out, self._in, self._number, self._rest = here[1], there[0], 0, b""
        self._session: str | None = None
        self.said: list[str] = []
        (page,) = (each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0], "Chromium does not answer"
            read = os.read(self._in, 1 << 20)
            assert read, "Chromium has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"), event.get("params", {}):
            case "Runtime.consoleAPICalled", {"args": args}:
                self.said.append(" ".join(str(each.get("value", each.get("description"))) for each in args))
            case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                self.said.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded", {"entry": entry}:
                self.said.append(entry["text"])
            case "Network.requestWillBeSent", {"request": request} if request["url"].startswith("http"):
                self.said.append(f"asks for {request['url']}")

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Open a page in a window of this size; returns the milliseconds until it was drawn (`load`)."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Page.navigate", url=address)
        until = time.monotonic() + SECONDS
        while not (ready := self.value("document.documentElement?.dataset.ready || ''")):
            assert time.monotonic() < until, f"{address} is not ready; it said {self.said}"
            time.sleep(0.1)
        return float(ready)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    browser = Chromium(folder)
    try:
        yield browser
    finally:
        browser.close()
