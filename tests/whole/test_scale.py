"""The size of the real thing: 1,281,167 entries, without their images."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats.runtime.files import hash_file
from shardprep.formats.shards.manifest import index_dtype
from shardprep.formats.shards.read import FileEntry, write_table
from support.billion_records import made_up

IMAGES = 1_281_167

OPEN = """
import re, sys
from shardprep.formats import open_dataset
def peak():  # ru_maxrss counts the parent, too
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
ds = open_dataset(sys.argv[1])
assert len(ds) == int(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.torture
def test_opening_takes_little_time_and_memory(tmp_path: Path) -> None:
    rows = np.zeros(IMAGES, index_dtype(25))
    rows["key"] = np.char.add("n01440764/n01440764_", np.arange(IMAGES).astype(str)).astype("S25")
    rows["label"] = np.arange(IMAGES) % 1000
    rows["shard"] = np.arange(IMAGES) // 2334
    rows["ordinal"] = np.arange(IMAGES) % 2334
    rows["length"] = 100_000
    path = tmp_path / "index.npy"
    with path.open("wb") as file:
        write_table(file, rows)
    index = FileEntry(path.name, path.stat().st_size, hash_file(path), IMAGES)
    manifest = made_up(0, np.bincount(rows["shard"]).tolist(), index)
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())

    command = [sys.executable, "-c", OPEN, tmp_path, str(IMAGES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert int(done.stdout) < 20_000 + index.size / 1000  # KB
