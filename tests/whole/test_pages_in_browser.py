"""Every page that the commands write, opened in a real browser."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import Examination, report
from shardprep.loaders.loader.run_page import run_page, save_page
from support.disk_profiles import full_profile
from support.examined import made_datasets
from support.run_figures import bench, course, stats, trace_of
from support.sampling import torture_except

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
AXE = "AXE_CORE"  # the file axe.min.js of the npm package axe-core


class Browser:
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


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    """A browser with a new profile. Skips the test where Chromium or selenium is missing."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("there is no chromium with chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()


pytestmark = pytest.mark.slow

HOSTILE = [
    "<script>document.title='ran'</script>",
    "<img src=http://127.0.0.1:9/x onerror=\"document.title='ran'\">",
    "\u202egnp.exe \u0645\u0631\u062d\u0628\u0627",
    "name\nof\x1b[2J lines \ud800",
    "w" * 4000,
    "';alert(1)//{{ 7 * 7 }}",
]
NAMED = {
    *("key", "name", "words", "class_name", "class_words", "note"),
    *("path", "shard", "split", "layout", "source", "kind"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a dataset, of its index alone, of one with large numbers, and of one with hostile names."""
    folder = tmp_path_factory.mktemp("pages")
    train, val, _, _ = made_datasets(folder)
    found = report(train, against=val, workers=2)
    wide = json.loads(json.dumps(found.to_json()))
    wide["index"]["width"]["counts"] = [1_280_000, 9_999_999]
    wide["index"]["width"]["edges"] = [1, 16_384, 123_456]
    wide["index"]["weights"] = [[10, 10], [123_456_789, 999_999_999]]
    pages = {
        "dataset": found,
        "wide": Examination(wide, found.pictures),
        "index": report(train, pixels="none", workers=0),
        "hostile": Examination(hostile(found.to_json(), iter(range(1 << 30))), found.pictures),
    }
    for name, one in pages.items():
        one.save(folder / f"{name}.html")
    disk = full_profile().to_json()
    figures = bench(stats=stats(course=course(100)))
    save_page(run_page(figures, disk=disk, trace=trace_of("read", "decode")), folder / "run.html")
    named = bench(stats=stats("\n".join(HOSTILE), course=course(3)))
    text = run_page(named, name=HOSTILE[0], disk=disk, trace=trace_of(*HOSTILE))
    save_page(text, folder / "hostile-run.html")
    return {name: folder / f"{name}.html" for name in (*pages, "run", "hostile-run")}


def hostile(value: Any, numbers: Iterator[int], name: str = "") -> Any:
    """The JSON value with all names from files replaced."""
    if isinstance(value, dict):
        return {key: hostile(part, numbers, key) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [hostile(part, numbers, name) for part in value]
    is_name = isinstance(value, str) and (name in NAMED or name == "names")
    return HOSTILE[next(numbers) % len(HOSTILE)] if is_name else value


@pytest.mark.parametrize(
    "name", torture_except(["dataset", "index", "hostile", "wide", "run", "hostile-run"], "hostile")
)
def test_a_page_is_whole_and_asks_for_nothing(name: str, pages: dict[str, Path], chromium: Browser) -> None:
    for width in (360, 1440):
        for scheme in ("light", "dark"):
            chromium.show(pages[name], width=width, scheme=scheme)

            assert chromium.requests() == []
            assert chromium.complaints() == []
            assert chromium.cut_off() == []
            assert chromium.run("return [...document.images].every(one => one.complete && one.naturalWidth)")


@pytest.mark.torture
def test_a_page_is_accessible(pages: dict[str, Path], chromium: Browser) -> None:
    for name in ("dataset", "run"):
        for scheme in ("light", "dark"):
            chromium.show(pages[name], width=1440, scheme=scheme)

            assert chromium.faults() == []


@pytest.mark.torture
def test_hostile_names_stay_text(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.show(pages["hostile"], width=360, scheme="light")

    assert "ran" not in chromium.run("return document.title").split()
    assert chromium.run("return document.scripts.length") == 0
    assert chromium.run("return [...document.images].every(one => one.src.startsWith('data:image/'))")
    shown = chromium.run("return document.body.innerText")
    assert "<script>document.title='ran'</script>" in shown
    assert "\\u202egnp.exe" in shown
    assert "{{ 7 * 7 }}" in shown
    names = chromium.run("return [...document.querySelectorAll('bdi')].map(b => b.innerText)")
    assert max(map(len, names)) <= 200


def test_a_script_that_got_into_a_page_would_not_run(
    pages: dict[str, Path], chromium: Browser, tmp_path: Path
) -> None:
    made = pages["index"].read_text().replace("</h1>", "</h1><script>document.title='ran'</script>")
    (tmp_path / "scripted.html").write_text(made)

    chromium.show(tmp_path / "scripted.html", width=360, scheme="light")

    assert chromium.run("return document.title") != "ran"
    assert any("Content Security Policy" in line for line in chromium.complaints())
