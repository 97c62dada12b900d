"""A real headless Chromium for tests of pages, driven over chromedriver's HTTP interface."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 120.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of element references in the WebDriver standard
_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
]
KEYS = {"up": "\ue013", "down": "\ue015", "left": "\ue012", "right": "\ue014", "tab": "\ue004", "enter": "\ue007"}


class Browser:
    """One window; `url` is the address of its WebDriver session."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, path: Path) -> None:
        """Open a page from disk and wait until it is built."""
        self.go(path.resolve().as_uri())
        self.wait("document.documentElement.dataset.ready === 'true'")

    def go(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what the JavaScript returns."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + _TIMEOUT_S
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < until, f"{condition} is not true after {_TIMEOUT_S} s"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The visible text of the first element."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def count(self, selector: str) -> int:
        """The number of elements that are shown."""
        script = "return [...document.querySelectorAll(arguments[0])].filter((node) => node.offsetParent).length"
        return self.run(script, selector)

    def click(self, selector: str) -> None:
        self._post(f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into the element; `KEYS` has the keys that are no characters."""
        self._post(f"/element/{self._find(selector)}/value", {"text": text})

    def set(self, selector: str, value: str | float) -> None:
        """Give a field or a select a value, as if the user had chosen it."""
        self.run(
            "const node = document.querySelector(arguments[0]); node.value = arguments[1];"
            "for (const kind of ['input', 'change']) node.dispatchEvent(new Event(kind, {bubbles: true}))",
            selector,
            value,
        )

    def hover(self, selector: str, share: float) -> None:
        """Move the pointer over an element, to this share of its width."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = self.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        x, y = int(box["x"] + share * box["width"]), int(box["y"] + box["height"] / 2)
        moves = [{"type": "pointerMove", "duration": 0, "x": at, "y": y} for at in (x - 3, x)]
        self._post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page's viewport, also below the smallest size of a window."""
        self._cdp(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, theme: str) -> None:
        """Set the color scheme that the system prefers, `light` or `dark`."""
        self._cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})

    def errors(self) -> list[str]:
        """What was written to the console since the last call, errors and warnings."""
        entries = self._post("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Addresses that were requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._post("/se/log", {"type": "performance"})]
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        shot = self._cdp("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _find(self, selector: str) -> str:
        return self._post("/element", {"using": "css selector", "value": selector})[_ELEMENT]

    def _cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _send("POST", f"{self._url}{path}", body)

    def close(self) -> None:
        _send("DELETE", self._url)


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile below `folder`.

    Without Chromium the test fails in continuous integration, and is skipped elsewhere.
    """
    programs = [shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")]
    if None in programs:
        missing = "chromium and chromedriver are not installed; on Debian: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    with (folder / "chromedriver.log").open("wb") as output:
        driver = subprocess.Popen([str(programs[1]), "--port=0"], stdout=subprocess.PIPE, stderr=output)
    try:
        url = f"http://127.0.0.1:{_port(driver)}"
        browser = Browser(f"{url}/session/{_session(url, str(programs[0]), folder / 'profile')}")
        try:
            browser.go("about:blank")  # the page of a new tab makes requests
            browser.requests()
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()


def _port(driver: subprocess.Popen[bytes]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if b"started successfully on port" in line:
            return int(line.split()[-1].rstrip(b"."))
    raise RuntimeError("chromedriver ended before it opened its port")


def _session(url: str, program: str, profile: Path) -> str:
    options = {"binary": program, "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
    logs = {"browser": "ALL", "performance": "ALL"}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
    return _send("POST", f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]


def _send(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode("utf-8", "replace")) from error
