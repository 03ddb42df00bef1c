"""Headless Chromium over its DevTools protocol: what a page loads, says on the console, and shows."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--remote-debugging-port=0")


def chromium() -> str:
    """The browser's path; without one the test is skipped, or fails where CI says that there must be one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI") == "true":
        pytest.fail("no Chromium on the PATH: install the package chromium")
    pytest.skip("no Chromium on the PATH")


@dataclass(slots=True)
class Seen:
    """What happened while a page was open: requests that are not file: or data:, and errors of any kind."""

    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.outside.append(params["request"]["url"])
        elif method == "Network.loadingFailed":
            self.errors.append(f"{params['type']} failed: {params['errorText']}")
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])


@dataclass(slots=True)
class Page:
    """One tab."""

    socket: aiohttp.ClientWebSocketResponse
    session: str
    numbers: Any = field(default_factory=lambda: itertools.count(1000))
    seen: Seen = field(default_factory=Seen)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; what else arrives meanwhile is noted."""
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params, "sessionId": self.session})
        while True:
            message = await asyncio.wait_for(self.socket.receive_json(), 30)
            self.seen.note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def open(self, path: Path) -> None:
        """Loads a file and waits until it, and what it asks for, is there."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=path.resolve().as_uri())
        while not await self.run("document.readyState === 'complete'"):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)    # a late request would come now

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; an error there fails the test."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def width(self, pixels: int) -> None:
        """The window's width, as of a phone or a desk."""
        await self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1,
                        mobile=pixels < 600)


@contextlib.asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A tab in a browser of its own, with an empty profile."""
    binary = chromium()
    with tempfile.TemporaryDirectory(prefix="batchlab-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            address = await asyncio.wait_for(asyncio.to_thread(devtools, process), 60)
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket, await attach(socket))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stderr.close()


def devtools(process: subprocess.Popen[str]) -> str:
    """The address that the browser prints when it is ready."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"DevTools listening on (ws://\S+)", line):
            return match[1]
    raise AssertionError("Chromium did not start: " + "".join(lines[-5:]))


async def attach(socket: aiohttp.ClientWebSocketResponse) -> str:
    """A new tab's session."""
    async def answer(number: int, method: str, **params: Any) -> dict[str, Any]:
        await socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        while (message := await asyncio.wait_for(socket.receive_json(), 30)).get("id") != number:
            pass
        return message["result"]

    target = await answer(1, "Target.createTarget", url="about:blank")
    return (await answer(2, "Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
