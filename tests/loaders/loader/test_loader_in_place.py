"""Loaders and flows over datasets of images that stay in the official tars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import make_sample, open_dataset
from shardprep.formats.conversion import finish as finalize
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle, SortedByClass
from support.datasets import converted
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on

TRAIN = "ILSVRC2012_img_train.tar"


@pytest.fixture(scope="module")
def archives_of_20(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 images of 20 classes."""
    folder = tmp_path_factory.mktemp("archives-of-20")
    make_sample(folder, classes=20, train_per_class=8, val=1, test=1)
    return folder


@pytest.fixture(scope="module")
def in_place(archives_of_20: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their index, in tables of 30 images and blocks of one or two."""
    output = tmp_path_factory.mktemp("in-place") / "train"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finalize, "BLOCK_BYTES", 30_000)
        converted(archives_of_20, output, container="tar", order="archive", shard_size=900_000)
    return output


@pytest.fixture(scope="module")
def records(archives_of_20: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, bytes]]:
    """Key, label and image of each record, read from shards and put into the archive's order."""
    output = tmp_path_factory.mktemp("copied") / "train"
    converted(archives_of_20, output, shard_size=900_000)
    with open_dataset(output) as dataset:
        found = [tuple(record) for record in dataset]
    archive = (archives_of_20 / TRAIN).read_bytes()
    return sorted(found, key=lambda record: archive.index(record[2]))


def encoded(path: Path, **options: Any) -> Loader:
    return loader_on(path, **({"transform": None, "shuffle": GlobalShuffle(), "batch_size": 16} | options))


def test_a_local_shuffle_reads_blocks_in_random_order_and_resumes_anywhere(in_place: Path) -> None:
    shuffle = LocalShuffle(79)
    with encoded(in_place, shuffle=shuffle) as loader:
        blocks, batches = loader.dataset.blocks, iter(loader)
        first = epoch_of(batches, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = epoch_of(batches)
        assert_exactly_once(loader, first + rest)
    with encoded(in_place, shuffle=shuffle, workers=1) as resumed:
        resumed.load_state_dict(state)
        assert_same(epoch_of(resumed), rest)

    assert len(blocks) > 3 * len(open_dataset(in_place).manifest.shards)
    assert np.mean([len(set(labels.tolist())) for _, labels, _ in first[1:]]) > 7


def test_a_flow_reads_it_too(in_place: Path, records: list[tuple[str, int, bytes]]) -> None:
    flow = Flow.from_dataset(in_place, with_keys=True)

    assert [(key, label, bytes(image)) for key, image, label in flow] == records


def test_the_warning_names_a_window_that_mixes_the_classes(in_place: Path) -> None:
    with pytest.warns(SortedByClass, match=r"LocalShuffle of at least \d+ records, or convert it to shards"):
        encoded(in_place, shuffle=LocalShuffle(3), batch_size=8).close()
