"""Transforms that no module defines go to the loader's workers by value, or the error says how they can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.sampling import torture_except

CELL = """
import sys
import numpy as np
from shardprep import Loader

SCALE = 3

class Brightness:
    def __init__(self, by): self.by = by

def brightness(record, rng):
    return np.frombuffer(record.image, np.uint8)[:4] * np.float32(SCALE) + Brightness(rng.random()).by

print("begun")
found = []
for workers in (0, 2):
    with Loader(sys.argv[1], batch_size=50, transform=brightness, workers=workers) as loader:
        found.append([images for images, labels in loader])

print(len(found[0]), np.array_equal(*found))
"""


def run(how: str, path: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a notebook does (typed, in a main module without a file), or as a script."""
    (folder / "script.py").write_text(program)
    typed = f"exec({program!r})\n"
    arguments = {
        "a script": ["script.py", path],
        "standard input": ["-", path],
        "an interactive session": ["-i", "-q", "-c", "", path],
    }[how]
    if how == "an interactive session":
        program = "import sys; sys.argv[1:] = [" + repr(str(path)) + "]\n" + typed
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=program,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


@pytest.mark.torture
@pytest.mark.parametrize(
    "how", torture_except(["a script", "standard input", "an interactive session"], "an interactive session")
)
def test_a_function_of_a_notebooks_cell_goes_to_the_workers(
    lmdb_shards: Path, tmp_path: Path, how: str
) -> None:
    """And a script needs no main guard: no worker runs it again."""
    done = run(how, lmdb_shards, tmp_path, CELL)

    assert "begun\n4 True\n" in done.stdout
    assert done.stdout.count("begun") == 1
    assert "Error" not in done.stderr


@pytest.mark.slow
def test_without_cloudpickle_the_error_says_how_to_install_it(lmdb_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('not installed')\n")

    done = run("standard input", lmdb_shards, tmp_path, CELL)

    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "defined in a notebook or on standard input" in said
    assert "pip install 'shardprep[cloudpickle]'" in said
