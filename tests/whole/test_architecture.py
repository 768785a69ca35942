"""The parts of the source import in one direction."""

import re
from pathlib import Path

from support.imports import FILES, imported
from support.repository import ROOT

FORMATS = "runtime images records shards storage sources verification conversion transfer exports reports"
LOADERS = "order transforms batches engine loader flow machines frameworks measuring"
PARTS = [
    "formats/errors.py",
    *(f"formats/{name}" for name in FORMATS.split()),
    *(f"loaders/{name}" for name in LOADERS.split()),
    "loaders",
    "cli",
]
"""Each imports only from those before it. The ``__init__.py`` of formats and loaders are tables of names."""


def place_of(path: Path) -> int:
    name = path.relative_to(ROOT).as_posix()
    return next(number for number, part in enumerate(PARTS) if f"{name}/".startswith(f"{part}/"))


def test_each_part_imports_only_from_those_above_it() -> None:
    tables = {ROOT / "formats/__init__.py", ROOT / "loaders/__init__.py"}
    files = [path for path in FILES if path not in tables]
    upward = {
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for path in files
        for other in imported(path) - tables
        if place_of(other) > place_of(path)
    }

    assert len(files) > 150
    assert upward == set()


def test_the_architecture_page_names_each_module() -> None:
    rows = re.findall(
        r"^\| `([a-z/]+)` \| (.+) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
    )
    named = {f"{part}/{name}.py" for part, row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {path.relative_to(ROOT).as_posix() for path in FILES if not path.name.startswith("__")}
