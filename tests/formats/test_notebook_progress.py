"""Bars in a notebook: widgets where ipywidgets is installed, lines of text where it is not."""

import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
import sys
from types import ModuleType, SimpleNamespace

class Widget(SimpleNamespace):
    value, bar_style = "", ""

    def __init__(self, **fields):
        super().__init__(layout=SimpleNamespace(), style=SimpleNamespace(bar_color=None), **fields)

    def close(self):
        print("closed", self.children[1].max, self.children[1].value)

def module(name, **names):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)

module("ipykernel.zmqshell")
module("IPython", get_ipython=lambda: None)
module("IPython.display", display=lambda widget: print("widget"))
if sys.argv[2] == "widgets":
    module("ipywidgets", HTML=Widget, FloatProgress=Widget, HBox=Widget)
else:
    sys.modules["ipywidgets"] = None
"""

WORK = """
from pathlib import Path
from shardprep.formats import convert, verify
from shardprep.loaders import Loader
from shardprep.loaders.measuring import watched

path = Path(sys.argv[1])
verify(path / "lmdb", workers=1)
convert(path / "archives", sys.argv[3], split="val", workers=1)
with Loader(path / "lmdb", batch_size=50, workers=0) as loader:
    for _ in watched(loader, title="train"):
        pass
"""


def in_kernel(lmdb_shards: Path, widgets: str, output: Path) -> tuple[str, str]:
    """What a program prints as a notebook's kernel in which warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", KERNEL + WORK, lmdb_shards.parent, widgets, output]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_in_a_notebook_there_are_widgets(lmdb_shards: Path, tmp_path: Path) -> None:
    out, err = in_kernel(lmdb_shards, "widgets", tmp_path / "val")

    assert out.count("widget\n") == out.count("closed ") >= 3
    assert "closed 204 204" in out  # verification, in images
    assert "closed 4 4" in out  # an epoch, in batches
    assert "%" not in err
