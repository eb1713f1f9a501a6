"""A headless Chromium over the DevTools protocol: open a file, click, look, and hear every complaint.

The protocol goes over two pipes (`--remote-debugging-pipe`: JSON, each message ended by a zero byte),
so it takes no port and no package. requirements/browser.sh says where the browser comes from.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import pytest

OWN = Path(sys.prefix) / "browser"
"""The folder into which requirements/browser.sh puts the browser: `.venv/browser`."""
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-zygote"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars"),
)
TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """$MRL_CHROMIUM, the one of `make test`, or one of this machine."""
    own = OWN / "chromium"
    found = [os.environ.get("MRL_CHROMIUM"), str(own) if own.exists() else None]
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in (*found, *map(shutil.which, names)) if path), None)


def open_browser() -> Page:
    """Skips the test, by name, where there is no browser; in CI that is a failure."""
    executable = find_browser()
    if executable is None and not os.environ.get("CI"):
        pytest.skip("no browser: make test brings one where npm is, or set MRL_CHROMIUM")
    assert executable is not None, "no browser in CI: requirements/browser.sh brings one with npm"
    return Page(executable)


class Page:
    """One tab. `errors` and `requests` hold everything since the last `open`."""

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="mrl-chromium-")
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        command = [executable, *FLAGS, f"--user-data-dir={self._profile.name}"]
        redirect = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        libraries = os.pathsep.join([str(OWN / "lib"), os.environ.get("LD_LIBRARY_PATH", "")])
        own = Path(executable).parent == OWN
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | ({"LD_LIBRARY_PATH": libraries} if own else {}),
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self._loads = 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call, wait for the answer. Raises RuntimeError where the browser refuses."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, file: Path) -> None:
        """Load and wait for it; then two frames, in which charts are drawn."""
        self.go(file.resolve().as_uri())

    def go(self, url: str) -> None:
        """Load an address, like `open`."""
        self.errors, self.requests, self._loads = [], [], 0
        self.send("Page.navigate", url=url)
        while not self._loads:
            self._read()
        self.settle()

    def assert_quiet(self, file: Path) -> None:
        """No error, no warning, and nothing was asked for but the file itself."""
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith("data:")] == [
            file.resolve().as_uri()
        ]

    def settle(self) -> None:
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression of the page; a promise is awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector: str) -> int:
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str, nth: int = 0) -> None:
        """A real mouse press in the middle of the element, which is scrolled into view."""
        box = self._middle(selector, nth)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)
        self.settle()

    def hover(self, selector: str, nth: int = 0) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector, nth))
        self.settle()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.settle()

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)
        self.settle()

    def choose(self, selector: str, value: str, nth: int = 0) -> None:
        """An option of a <select>."""
        box = f"document.querySelectorAll({json.dumps(selector)})[{nth}]"
        self.evaluate(
            f"{box}.value = {json.dumps(value)}; {box}.dispatchEvent(new Event('change'))"
        )
        self.settle()

    def view(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window, and the colours that the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def screenshot(self, file: Path) -> None:
        shot = self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def _middle(self, selector: str, nth: int) -> dict[str, float]:
        """{x, y} in the window."""
        return self.evaluate(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{nth}];"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getClientRects()[0];"
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"Chromium said nothing for {TIMEOUT_S} s, or ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
