#!/usr/bin/env python3
"""Opens a page of `gruyere map --html` in a headless Chromium, uses it as a person would, and
prints what came of it as JSON.

    tests/html/measure.py PAGE [--dark] [--size 1280x800] [--hash TEXT] [--screenshot FILE]
    tests/html/measure.py PAGE --look           # any page of ours: is something cut?

Times are real ones, in milliseconds: `ready` from the start of the navigation until the first
picture was on the screen and input is answered (the page's own mark), the others from an input
until the browser has shown what came of it. Exits with 77 where there is no Chromium. Nothing but
Python's own library is needed: the browser is spoken to through a pipe
(its --remote-debugging-pipe).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SKIPPED = 77
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60


class Browser:
    """A Chromium with one page."""

    def __init__(self, program: str, folder: str, width: int, height: int) -> None:
        to_read, to_write = os.pipe(), os.pipe()
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        command += [
            f"--user-data-dir={folder}",
            f"--window-size={width},{height}",
            "--remote-debugging-pipe",
            "about:blank",
        ]

        def descriptors() -> None:
            # The browser reads from 3 and writes to 4. Copies first: ours may have these very
            # numbers.
            ours = os.dup(to_write[0]), os.dup(to_read[1])
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self.process = subprocess.Popen(
            command,
            preexec_fn=descriptors,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_write[0])
        os.close(to_read[1])
        self.out, self.inn = to_write[1], to_read[0]
        self.rest, self.number, self.session = b"", 0, ""
        self.exceptions: list[str] = []
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self.session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.inn, 1 << 20)
            if not more:
                raise SystemExit("the browser ended")
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        if found.get("method") == "Runtime.exceptionThrown":
            self.exceptions.append(json.dumps(found["params"]["exceptionDetails"]))
        return found

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.out, json.dumps(request).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def value(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise SystemExit(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def shown(self) -> None:
        """Returns when the browser has shown what there is now."""
        self.value(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def timed(self, *actions: tuple[str, dict[str, Any]]) -> float:
        began = time.monotonic()
        for method, parameters in actions:
            self.call(method, **parameters)
        self.shown()
        return round((time.monotonic() - began) * 1000, 1)


def key(name: str) -> list[tuple[str, dict[str, Any]]]:
    event = {"key": name, **({"text": name} if len(name) == 1 else {})}
    return [("Input.dispatchKeyEvent", {"type": kind, **event}) for kind in ("keyDown", "keyUp")]


def mouse(kind: str, x: float, y: float, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more}


def use(browser: Browser) -> dict[str, Any]:
    """Zooms, hovers, selects, goes through the page with keys; what each took, and what the page
    said."""
    box = browser.value(
        "(({x, y, width, height}) => ({x, y, width, "
        "height}))(document.getElementById('map').getBoundingClientRect())"
    )
    x, y = box["x"] + box["width"] * 0.5, box["y"] + 12
    found: dict[str, Any] = {"hover_ms": browser.timed(mouse("mouseMoved", x, y))}
    found["tip"] = browser.value(
        "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    )
    found["legend"] = browser.value("document.getElementById('legend').textContent")
    # A part of the legend, chosen, changes the picture; chosen again, it is as it was.
    choose = "document.querySelector('#legend button').click()"
    picture = "document.getElementById('map').toDataURL()"
    browser.shown()
    pictures = [browser.value(what) for what in (picture, f"{choose}, {picture}")]
    pictures.append(browser.value(f"{choose}, {picture}"))
    found["highlighted"] = pictures[0] != pictures[1] and pictures[0] == pictures[2]
    found["zoom_ms"] = max(
        browser.timed(mouse("mouseWheel", x, y, deltaX=0, deltaY=-120)) for _ in range(6)
    )
    press = [
        mouse(kind, x, y, button="left", clickCount=1) for kind in ("mousePressed", "mouseReleased")
    ]
    found["select_ms"] = browser.timed(*press)
    found["selected"] = browser.value("document.getElementById('selected').textContent")
    found["next_ms"] = browser.timed(*key("ArrowRight"))
    found["after_next"] = browser.value("document.getElementById('selected').textContent")
    found["view_ms"] = browser.timed(*key("v"))
    found["view"] = browser.value(
        "document.querySelector('#views [aria-pressed=true]').dataset.view"
    )
    found["colour_ms"] = browser.timed(*key("c"))
    found["by"] = browser.value("document.getElementById('by').value")
    found["theme_ms"] = browser.timed(*key("t"))
    found["all_ms"] = browser.timed(*key("0"))
    run = browser.value("document.querySelector('#blocks button span').textContent")
    browser.value(
        f"(document.getElementById('address').value = {json.dumps(run)}, "
        "document.getElementById('search').requestSubmit())"
    )
    browser.shown()
    found["searched"], found["found"] = (
        run,
        browser.value("document.getElementById('selected').textContent"),
    )
    # Something was painted in more than one colour.
    found["colours"] = browser.value(
        "(() => { const c = document.getElementById('map'), d = new "
        "Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
        " return new Set(d).size; })()"
    )
    return found


# What is wider than the window, or has text that its own box cuts; what may scroll by itself is
# asked too.
LOOK = """(() => {
  const wide = document.documentElement.clientWidth, found = [];
  const say = (what, e) => found.push(`${what}: ${e.tagName}#${e.id}.${e.className} `
    + e.textContent.slice(0, 40));
  if (document.documentElement.scrollWidth > wide) found.push("the page scrolls sideways");
  for (const e of document.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || e.closest("svg")) continue;
    if (box.right > wide + 1 || box.left < -1) say("beyond the window", e);
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth && e.tagName !== "SELECT")
      say("cut or scrolled", e);
  }
  return found;
})()"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", default="1280x800")
    parser.add_argument("--hash", default="")
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--look", action="store_true")
    asked = parser.parse_args()
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print(f"skipped: no chromium (looked for {', '.join(NAMES)})", file=sys.stderr)
        return SKIPPED
    width, height = map(int, asked.size.split("x"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder, width, height)
        try:
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if asked.dark else "light"}]
            browser.call("Emulation.setEmulatedMedia", features=scheme)
            address = asked.page.resolve().as_uri() + (f"#{asked.hash}" if asked.hash else "")
            began = time.monotonic()
            refused = browser.call("Page.navigate", url=address).get("errorText")
            if refused:
                raise SystemExit(f"{address}: {refused}")
            data: dict[str, Any] = {}
            while (
                time.monotonic() - began < PATIENCE
                and "complete" not in data
                and "failed" not in data
            ):
                time.sleep(0.02)
                data = browser.value(
                    "location.protocol === 'file:' ? {...document.documentElement?.dataset} : {}"
                )
            found: dict[str, Any] = {
                name: int(data[name]) for name in ("ready", "complete", "strokes") if name in data
            }
            found["wall_ms"] = round((time.monotonic() - began) * 1000)
            found |= {name: data[name] for name in ("failed", "theme") if name in data}
            if asked.screenshot:
                asked.screenshot.write_bytes(
                    base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
                )
            if asked.look:
                found["cut"] = browser.value(LOOK)
                found["drawn"] = browser.value("document.querySelectorAll('svg polygon').length")
            elif "ready" in found and not asked.screenshot:
                found |= use(browser)
            found["exceptions"] = browser.exceptions
            print(json.dumps(found, indent=1))
        finally:
            browser.process.kill()
            browser.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
