"""A headless Chromium, by its own protocol (Chrome DevTools Protocol): pages, their messages, keys, and screenshots."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from tests.eventually import LIMIT_S, eventually
from tests.real.servers import Missing

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13, "Escape": 27, "Home": 36}


def find_chromium() -> Path:
    """Its program. Raises Missing."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise Missing("no chromium on PATH: apt-get install chromium")
    return Path(path)


class Page:
    """A tab. ``errors`` are those of its console and of loading."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket, self._session = socket, session
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._replies[number] = asyncio.get_running_loop().create_future()
        command = {"id": number, "method": method, "params": parameters, "sessionId": self._session}
        await self._socket.send_json(command)
        async with asyncio.timeout(LIMIT_S):
            return await answer

    def hear(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the browser about this tab."""
        if answer := self._replies.pop(message.get("id", 0), None):
            if "error" in message:
                answer.set_exception(RuntimeError(str(message["error"])))
            else:
                answer.set_result(message["result"])
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case _:
                pass

    async def open(
        self, url: str, width: int = 1400, height: int = 900, *, dark: bool = False, phone: bool = False
    ) -> None:
        """Go to a page, in a window of that size."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=features)
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is awaited."""
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"].get("exception", {}).get("description", result))
        return result["result"].get("value")

    async def text(self, selector: str) -> str:
        """The text of an element."""
        return str(await self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def wait_until(self, expression: str, is_right: Callable[[Any], bool] = bool) -> Any:
        """Waits until the value of an expression is right."""
        values: list[Any] = []

        async def look() -> bool:
            values.append(await self.value(expression))
            return is_right(values[-1])

        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while not await look():
            assert asyncio.get_running_loop().time() < deadline, f"{expression}: {values[-1]!r}; {self.errors}"
            await asyncio.sleep(0.05)
        return values[-1]

    async def shows(self, selector: str, text: str) -> None:
        """Waits until an element has a text in it."""
        await self.wait_until(
            f"document.querySelector({json.dumps(selector)})?.textContent ?? ''", lambda shown_text: text in shown_text
        )

    async def press(self, *keys: str) -> None:
        """Keys, one after another."""
        for key in keys:
            code = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {"text": key}
            await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **code)
            await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self, *, format: str = "webp", quality: int = 80) -> bytes:  # noqa: A002 - as the protocol has it
        """A screenshot."""
        quality_of = {} if format == "png" else {"quality": quality}
        return base64.b64decode((await self.send("Page.captureScreenshot", format=format, **quality_of))["data"])


class Chromium:
    """A browser; each page is a tab of its own that shares nothing with others."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._browser = Page(socket, "")
        self._pages: dict[str, Page] = {}

    async def listen(self) -> None:
        """Handle the messages of the browser, until it is closed."""
        async for message in self._socket:
            event = json.loads(message.data)
            (self._pages.get(event.get("sessionId", ""), self._browser)).hear(event)

    async def _ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._browser._numbers)
        answer = self._browser._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(LIMIT_S):
            return await answer

    @contextlib.asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """A new tab."""
        context = (await self._ask("Target.createBrowserContext"))["browserContextId"]
        target = await self._ask("Target.createTarget", url="about:blank", browserContextId=context)
        session = (await self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
        page = self._pages[session] = Page(self._socket, session)
        try:
            yield page
        finally:
            await self._ask("Target.disposeBrowserContext", browserContextId=context)


@contextlib.asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Chromium]:
    """A browser that keeps its files in a folder."""
    command = [
        str(find_chromium()),
        "--headless=new",
        "--no-sandbox",  # tests run as root in containers
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    port_file = folder / "DevToolsActivePort"
    try:
        await eventually(lambda: port_file.exists() and len(port_file.read_text().split()) == 2)
        port, path = port_file.read_text().split()
        url = f"ws://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            browser = Chromium(socket)
            listening = asyncio.ensure_future(browser.listen())
            try:
                yield browser
            finally:
                listening.cancel()
    finally:
        process.terminate()
        await process.wait()
