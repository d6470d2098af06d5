"""Chromium, driven over WebDriver with plain HTTP: no client library is needed.

`find_chromium` is None where it or its driver is not installed; tests are skipped there and say so.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

START_LIMIT_S = 60.0
PATIENCE_S = 60.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name of an element's id


def find_chromium() -> tuple[str, str] | None:
    """The browser and its driver."""
    browsers = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((found for name in browsers if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver") or shutil.which("chromium.chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One session."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver, self._session = driver, session

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = self._driver.request(method, f"/session/{self._session}{path}", json=body)
        value = reply.json()["value"]
        assert reply.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """A script's answer; the browser runs it despite the page's policy."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: object) -> Any:
        """The script's first answer that is true."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := self.run(f"return ({script})", *arguments):
                return found
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}\n{self.run('return document.body.innerText')}")

    def _find(self, selector: str) -> str:
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return str(self._ask("GET", f"/element/{self._find(selector)}/text"))

    def resize(self, width: int, height: int) -> None:
        """The page's own size; a headless window has a least width, an emulated one has none."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, theme: str) -> None:
        """What the reader's system is set to: dark or light."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def readers_tree(self) -> list[tuple[str, str]]:
        """What a screen reader is given: role and name of every node that is not passed over."""
        nodes = self._devtools("Accessibility.getFullAXTree", {})["nodes"]
        return [
            (str(node["role"]["value"]), str(node.get("name", {}).get("value", "")))
            for node in nodes
            if not node["ignored"]
        ]

    def run_async(self, script: str, *arguments: object) -> Any:
        """What the script gives to its last argument."""
        return self._ask("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def _devtools(self, command: str, given: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": given})

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the console has had since the last call, from warnings up."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]


@contextlib.contextmanager
def chromium(found: tuple[str, str], profile: Path) -> Iterator[Browser]:
    program, driver = found
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--window-size=1280,900", f"--user-data-dir={profile}", "--lang=en"]  # fmt: skip
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": program, "args": flags},
        "goog:loggingPrefs": {"browser": "WARNING"},
    }
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            _wait_ready(client)
            made = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()
            session = made["value"]["sessionId"]
            try:
                yield Browser(client, session)
            finally:
                client.delete(f"/session/{session}")
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(client: httpx.Client) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/status").json()["value"]["ready"]:
                return
        time.sleep(0.05)
    raise AssertionError("chromedriver did not start")
