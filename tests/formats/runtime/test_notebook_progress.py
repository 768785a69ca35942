"""Bars in a notebook are widgets."""

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
module("ipywidgets", HTML=Widget, FloatProgress=Widget, HBox=Widget)
"""

WORK = """
from pathlib import Path
from shardprep.formats import convert, plan_conversion, verify
from shardprep.loaders import Loader
from shardprep.loaders.measuring import watched

path = Path(sys.argv[1])
verify(path / "lmdb", workers=1)
for call in (plan_conversion, convert):
    call(path / "archives", sys.argv[2], split="val", workers=1)
with Loader(path / "lmdb", batch_size=50, workers=0) as loader:
    for _ in watched(loader, title="train"):
        pass
"""


@pytest.mark.slow
def test_in_a_notebook_there_are_widgets(lmdb_shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", KERNEL + WORK, lmdb_shards.parent, tmp_path / "val"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("widget\n") == done.stdout.count("closed ") >= 4
    assert "closed 204 204" in done.stdout  # verification, in images
    assert "closed 4 4" in done.stdout  # an epoch, in batches
    assert "%" not in done.stderr
