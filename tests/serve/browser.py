"""A headless Chromium, driven by its DevTools protocol over a pair of pipes: no port, no package."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--mute-audio", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE_S = 60.0
_COMPLAINING = ("security", "javascript")  # sources of entries of the log


def find() -> str | None:
    """Where Chromium is, if it is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """What the browser, or a script in its page, has refused."""


class Page:
    """A tab, and what it has asked for, logged and thrown."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.urls: list[str] = []
        """Every request."""
        self.complaints: list[str] = []
        """Exceptions of scripts, refusals of the content security policy."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        return self._browser.send(method, parameters, self._session)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def renew(self) -> None:
        """Makes the tab like a new one."""
        self.run("try { sessionStorage.clear() } catch { /* of about:blank */ }")
        self.send("Emulation.clearDeviceMetricsOverride")
        self.send("Emulation.setEmulatedMedia", features=[])
        self.urls.clear()
        self.complaints.clear()

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise what it becomes."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", details).get("description", str(details)))
        return answer["result"].get("value")

    def each(self, selector: str, of: str = "textContent") -> list[Any]:
        """This property of each element."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        values: list[Any] = self.run(f"{every}.map((one) => one.{of})")
        return values

    def text(self, selector: str) -> str:
        """Of the first such element."""
        return str(self.each(selector)[0])

    def until(self, condition: str) -> None:
        """Waits for an expression to be true; the page looks at it again and again."""
        self.run(f"""new Promise((resolve, reject) => {{
            const late = setTimeout(reject, {1000 * _PATIENCE_S}, new Error({json.dumps(condition)}));
            const look = () => {{
                if (!({condition})) return setTimeout(look, 5);
                clearTimeout(late);
                resolve();
            }};
            look();
        }})""")

    def press(self, *keys: str) -> None:
        """Keys by name; "Shift+Tab" holds Shift down."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "End": 35,
                 "Home": 36, " ": 32}  # fmt: skip
        for key in keys:
            shift, _, name = key.rpartition("+")
            event = {
                "key": name,
                "code": "Space" if name == " " else name,
                "windowsVirtualKeyCode": codes[name],
                "modifiers": 8 if shift else 0,
            }
            text = {"Enter": "\r", " ": " "}.get(name, "")
            self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
            self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Into what has the focus, a character at a time."""
        for character in text.replace("\n", "\r"):
            self.send("Input.dispatchKeyEvent", type="char", text=character)

    def click(self, selector: str) -> None:
        """The middle of an element, after it was scrolled to."""
        x, y = self.run(f"""(() => {{
            const one = document.querySelector({json.dumps(selector)});
            one.scrollIntoView({{block: "center"}});
            const box = one.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screen(self, width: int, height: int) -> None:
        """Sets the size of the window's content."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """light or dark"""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def hear(self, method: str, parameters: dict[str, Any]) -> None:
        """Takes an event of the browser."""
        if method == "Network.requestWillBeSent":
            self.urls.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["source"] in _COMPLAINING:
            self.complaints.append(parameters["entry"]["text"])


class Browser:
    """A process of Chromium; see `chromium`."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new tab with storage of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attach = {"targetId": target["targetId"], "flatten": True}
        session = self.send("Target.attachToTarget", attach)["sessionId"]
        self._pages[session] = page = Page(self, session)
        return page

    def send(self, method: str, parameters: Any = None, session: str | None = None) -> Any:
        """The answer to a command; events that come before it go to their pages."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters or {}}
        if session:
            command["sessionId"] = session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                return message["result"]
            page = self._pages.get(message.get("sessionId", ""))
            if page and "method" in message:
                page.hear(message["method"], message["params"])

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + 2 * _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("the browser does not answer" if not ready else "it has ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def chromium(path: str, folder: Path) -> Iterator[Browser]:
    """Runs Chromium with a profile in `folder`. It reads commands at its descriptor 3 and answers at 4."""
    commands, write = os.pipe()
    read, answers = os.pipe()
    shell = f'exec "$@" 3<&{commands} 4>&{answers}'  # pass_fds cannot renumber
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", path, *_OPTIONS, f"--user-data-dir={folder}"],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for ours in (commands, answers):
        os.close(ours)
    browser = Browser(write, read)
    try:
        yield browser
        browser.send("Browser.close")
    finally:
        os.close(write)  # without its pipe it ends
        os.close(read)
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
