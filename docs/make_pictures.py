"""Make the pictures of the documents from real output: ``python docs/make_pictures.py``, in a checkout.

Beside the pictures, ``inputs.json`` has a hash of what each one shows; a test compares it with the sources,
so that no picture is older than these. Only the older ones are made again; those of pages need Chromium.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
HASHES = PICTURES / "inputs.json"
PAGES = ("formats/reports/pages.py", "formats/reports/templates/[!d]*")  # without dataset.html
INPUTS = {
    "convert.svg": ("cli/console/output.py", "cli/commands/convert.py"),
    "report.png": (*PAGES, "formats/reports/templates/dataset.html"),
    "run.png": (*PAGES, "loaders/loader/run_page.py"),
}
MAX_BYTES = 200_000  # of a picture
COLUMNS = 92  # characters of a line
LINE, CHARACTER = 19, 8.4  # pixels: the height of a line, the width of a character
SAMPLE = ("sample", "archives", "--classes", "20", "--train-per-class", "60", "--val", "40", "--quiet")
CONVERT = ("convert", "archives", "shards", "--split", "train", "--shard-size", "5MB", "--workers", "1")
BENCH = ("bench-loader", "shards", "--size", "128", "--batch-size", "32", "--seconds", "6", "--quiet")
SHOTS = {"report.png": (1200, 1000), "run.png": (1200, 1130)}  # pixels of the window


class Printed(NamedTuple):
    """A line that was printed ``at`` this second."""

    at: float
    text: str


def main() -> None:
    """Make the pictures that are older than what they show, and note the hashes of that."""
    made = json.loads(HASHES.read_text())
    old = [picture for picture in INPUTS if made.get(picture) != hash_of(picture)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prep(folder, *SAMPLE)
        lines = conversion(folder)
        if "convert.svg" in old:
            (PICTURES / "convert.svg").write_text(recording(lines), encoding="utf-8")
        if "report.png" in old:
            prep(folder, "report", "shards", "-o", "report.html", "--quiet")
        if "run.png" in old:
            prep(folder, *BENCH, "--html", "run.html")
        for picture in SHOTS.keys() & set(old):
            screenshot(folder / picture.replace("png", "html"), PICTURES / picture, SHOTS[picture])
    for picture in INPUTS:
        if (PICTURES / picture).stat().st_size > MAX_BYTES:
            sys.exit(f"{picture} has more than {MAX_BYTES:,} bytes")
    HASHES.write_text(json.dumps({picture: hash_of(picture) for picture in INPUTS}, indent=2) + "\n")


def hash_of(picture: str) -> str:
    """Return the SHA-256 over the commands, and the names and bytes of files, that decide how it looks."""
    found = hashlib.sha256(repr((SAMPLE, CONVERT, BENCH, SHOTS)).encode())
    for path in sorted({path for pattern in INPUTS[picture] for path in ROOT.glob(pattern)}):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def prep(folder: Path, *words: str) -> None:
    """Run the command in a folder."""
    subprocess.run(
        [sys.executable, "-m", "shardprep", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )


def conversion(folder: Path) -> list[Printed]:
    """Return what a conversion prints that is interrupted, and goes on where it was."""
    first = printed(folder, CONVERT, interrupted=is_halfway)
    if not any(line.text == "^C" for line in first):
        sys.exit("the conversion ended before it could be interrupted; make the sample larger")
    second = printed(folder, CONVERT)
    last = printed(folder, ("verify", "shards"))
    lines: list[Printed] = []
    for words, part in ((CONVERT, first), (CONVERT, second), (("verify", "shards"), last)):
        began = lines[-1].at + 1 if lines else 0.5
        lines.append(Printed(began, f"$ prep {' '.join(words)}"))
        lines += [Printed(began + 0.5 + line.at, line.text) for line in part]
    return lines


def is_halfway(line: str) -> bool:
    """Whether the line says that some of the shards are done, and not all."""
    shards = re.search(r" (\d+) of (\d+) shards", line)
    return shards is not None and int(shards[1]) < int(shards[2])


def printed(
    folder: Path, words: Sequence[str], *, interrupted: Callable[[str], bool] = lambda line: False
) -> list[Printed]:
    """Return the lines of a command, each with its second; Ctrl-C follows an ``interrupted`` one."""
    command = [sys.executable, "-m", "shardprep", *words, "--progress", "plain"]
    began, lines = time.monotonic(), []
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        for line in process.stdout or ():
            lines.append(Printed(time.monotonic() - began, line.rstrip("\n")))
            if interrupted(line) and all(before.text != "^C" for before in lines):
                lines.append(Printed(time.monotonic() - began, "^C"))
                process.send_signal(signal.SIGINT)
    return lines


def recording(lines: Sequence[Printed]) -> str:
    """Return the lines as an animated terminal; all of them at once where motion is not wanted."""
    width, height = round(COLUMNS * CHARACTER) + 32, LINE * len(lines) + 40
    rows = [
        f'<text class="{"typed" if line.text.startswith("$") else "line"}" x="16" y="{36 + LINE * row}" '
        f'style="animation-delay:{line.at:.1f}s">{html.escape(cut(line.text))}</text>'
        for row, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>A conversion is interrupted, goes on where it was, and is verified</title>",
            "<style>text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#d5d9df;white-space:pre}.typed{fill:#7ee787}",
            "text{animation:shown .1s both}@keyframes shown{from{opacity:0}}",
            "@media (prefers-reduced-motion:reduce){text{animation:none}}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#14171b"/>',
            *rows,
            "</svg>\n",
        ]
    )


def cut(text: str) -> str:
    """Return a line that fits the picture."""
    return text if len(text) <= COLUMNS else f"{text[: COLUMNS - 1]}…"


def screenshot(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Open a page in Chromium, and save its beginning."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no chromium, which makes the pictures of pages: apt-get install chromium")
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={size[0]},{size[1]}",
    )
    command = [chromium, *flags, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
