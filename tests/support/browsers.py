"""A real browser that opens pages: what they ask for, what they say, and how wide they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
AXE = "AXE_CORE"  # the file axe.min.js of the npm package axe-core


class Browser:
    """Chromium with one page at a time."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def show(self, page: Path, *, width: int, scheme: str) -> None:
        """Open a page that wide, light or dark, with everything in it unfolded."""
        prefers = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": prefers})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.get_log("performance")
        self._driver.get(page.as_uri())
        self.run("document.querySelectorAll('details').forEach(one => one.open = true)")

    def run(self, program: str, *values: object) -> Any:
        """Return the value of a program in the page."""
        return self._driver.execute_script(program, *values)

    def complaints(self) -> list[str]:
        """Return the lines of the console since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, but for data in the page and the page itself."""
        events = (json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance"))
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")][1:]

    def cut_off(self) -> list[str]:
        """Return the elements that reach over the page's right edge, and text that reaches over its chart."""
        return self.run("""
            const wide = document.documentElement.scrollWidth > innerWidth ? ['the page'] : [];
            const over = [...document.body.querySelectorAll('*')].filter(
                one => one.getBoundingClientRect().right > innerWidth + 1);
            const outside = [...document.querySelectorAll('svg text')].filter(one => {
                const [text, chart] = [one, one.ownerSVGElement].map(each => each.getBoundingClientRect());
                return text.left < chart.left - 1 || text.right > chart.right + 1; });
            over.push(...outside);
            return [...wide, ...over.map(one => one.outerHTML.slice(0, 200))];
        """)

    def faults(self) -> list[str]:
        """Return the serious faults that axe-core finds. Skips the test where it is missing."""
        if not os.environ.get(AXE):
            pytest.skip(f"the variable {AXE} does not name axe.min.js of the npm package axe-core")
        self.run(Path(os.environ[AXE]).read_text(encoding="utf-8"))
        found = self._driver.execute_async_script("""
            const done = arguments[0];
            axe.run(document, {preload: false}).then(found => done(found.violations.map(
                one => [one.impact, one.id, ...one.nodes.slice(0, 3).map(node => node.html.slice(0, 200))])));
        """)
        return [" ".join(rest) for impact, *rest in found if impact in ("serious", "critical")]

    def picture(self, path: Path) -> None:
        """Save what is seen."""
        self._driver.save_screenshot(str(path))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a new profile. Skips the test where Chromium or selenium is missing."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("there is no chromium with chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()
