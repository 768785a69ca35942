"""An epoch of 2**30 records in 64 parts: its order and its items, in the memory of one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import billion_records


def measured(folder: Path, parts: int) -> dict[str, Any]:
    """What the program measured of so many parts, in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    program = [sys.executable, billion_records.__file__, str(folder / f"{parts}"), str(parts)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, env=environment)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed at once: copied, its files have 60 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.torture
def test_memory_does_not_grow_with_the_records(folder: Path) -> None:
    few, many = measured(folder, 8), measured(folder, 64)

    print(json.dumps([few, many], indent=1))
    assert many["records"] == 1 << 30
    assert many["peak_kb"] < 1_000_000
    grown = 1024 * (many["peak_kb"] - few["peak_kb"]) / (many["records"] - few["records"])
    assert grown < 0.2, "bytes per record"
