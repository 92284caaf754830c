"""Headless Chromium over its debugging port: a page as a phone or a desk shows it, with what it complains of."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_WAIT_S = 60


def chromium() -> str | None:
    """The browser on the PATH; None where there is none."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


@dataclass
class Shown:
    """A page as it was rendered."""

    complaints: list[str] = field(default_factory=list)  # of the console, of scripts, of what did not load
    requests: list[str] = field(default_factory=list)  # other than the page itself
    width: float = 0.0  # of the content, in CSS pixels
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # expression -> value
    png: bytes = b""
    pdf: bytes = b""


def show(page: Path, width: int, dark: bool = False, pdf: bool = False, ask: tuple[str, ...] = ()) -> Shown:
    """Open a local page in a window `width` pixels wide, and evaluate expressions on it."""
    browser = chromium()
    assert browser is not None
    with tempfile.TemporaryDirectory(prefix="draftmill-browser-", ignore_cleanup_errors=True) as home:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-port=0", f"--user-data-dir={home}", "--no-first-run", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return asyncio.run(_show(Path(home), page.resolve().as_uri(), width, dark, pdf, ask))
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


async def _show(home: Path, url: str, width: int, dark: bool, pdf: bool, ask: tuple[str, ...]) -> Shown:
    async with asyncio.timeout(_WAIT_S), aiohttp.ClientSession() as session:
        port = home / "DevToolsActivePort"
        while not (port.exists() and port.read_text().strip()):
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
            return await _Tab(socket).show(url, width, dark, pdf, ask)


class _Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number, self._loaded, self._shown = socket, 0, False, Shown()

    async def show(self, url: str, width: int, dark: bool, pdf: bool, ask: tuple[str, ...]) -> Shown:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")
        await self._size(width, 800)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self._call("Emulation.setEmulatedMedia", features=scheme)
        await self._call("Page.navigate", url=url)
        while not self._loaded:
            self._note(await self._socket.receive_json())
        shown = self._shown
        shown.requests = [r for r in shown.requests if r != url and not r.startswith("data:")]
        shown.width = await self._value("document.documentElement.scrollWidth")
        shown.text = await self._value("document.body.innerText")
        shown.values = {expression: await self._value(expression) for expression in ask}
        height = int(await self._value("document.documentElement.scrollHeight"))
        await self._size(width, height)
        shown.png = base64.b64decode((await self._call("Page.captureScreenshot"))["data"])
        if pdf:
            shown.pdf = base64.b64decode((await self._call("Page.printToPDF", printBackground=False))["data"])
        return shown

    async def _size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self._call("Emulation.setDeviceMetricsOverride", **metrics)

    async def _value(self, expression: str) -> Any:
        found = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_str(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self._shown.requests.append(params["request"]["url"])
        elif method in (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
            "Network.loadingFailed",
        ):
            self._shown.complaints.append(f"{method}: {json.dumps(params)[:1000]}")
