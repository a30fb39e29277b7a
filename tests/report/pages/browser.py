"""Opens a page in a real browser, where one is there."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

_NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, _NAMES)), None) if find_spec("websocket") else None


class Browser:
    """A headless browser without network, driven by its own protocol."""

    def __init__(self):
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={self._home.name}"]
        flags += ["--remote-allow-origins=*", "--no-first-run", "--disable-background-networking"]
        self._process = subprocess.Popen(
            [FOUND, *flags, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )
        import websocket

        port_file, deadline = Path(self._home.name, "DevToolsActivePort"), time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline, "the browser does not start"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        with urlopen(f"http://127.0.0.1:{port}/json") as answer:
            pages = [each for each in json.load(answer) if each["type"] == "page"]
        self._socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=60)
        self._number, self.events = 0, []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width, dark=False):
        """Open a page; return the errors that it logged and the addresses that it asked for."""
        self.events = []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._socket.recv()))
        errors = [
            event["params"]
            for event in self.events
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
            or event["method"] == "Runtime.consoleAPICalled"
        ]
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return errors, [url for url in asked if not url.startswith("data:")]

    def ask(self, script):
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        """Write a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self):
        self._socket.close()
        self._process.terminate()
        self._process.wait(60)
        self._home.cleanup()
