"""Datasets of every released format version stay readable: their bytes are kept, and never rebuilt."""

from pathlib import Path

import pytest

from shardprep.formats import open_dataset, verify
from support.repository import GOLDEN

DATASETS = sorted(path.parent for path in GOLDEN.glob("*/*/manifest.json"))
CONTENT_ROOT = "blake3:7ac8994a968220d7e9c248c53024ede553743464f1c393a925064a821dd5421d"


def test_there_are_some() -> None:
    assert {path.name for path in DATASETS} == {"hdf5", "lmdb"}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS, ids=lambda p: "-".join(p.parts[-2:]))
def test_it_verifies_and_reads(dataset: Path) -> None:
    report = verify(dataset, level="decode")

    assert (report.findings, report.unchecked) == ([], [])
    assert report.manifest is not None
    assert report.manifest.content_root == CONTENT_ROOT
    with open_dataset(dataset) as ds:
        assert sorted((r.key, r.label) for r in ds) == [
            (f"{name}/{number}{'.png' if number == 2 else '.jpg'}", label)
            for label, name in enumerate(["ape", "bee", "cat"])
            for number in range(3)
        ]
