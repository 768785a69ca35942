"""Loaders and flows over datasets of images that stay in the official tars."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import CorruptRecord, make_sample, open_dataset
from shardprep.formats.conversion import finish as finalize
from shardprep.formats.shards.in_place import ARCHIVE_NAME
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle, SortedByClass
from shardprep.loaders.loader.read_ahead import ReadAhead, ShardStream
from shardprep.loaders.order.epoch_order import Shuffle
from support.datasets import converted, flip
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on
from support.sampling import torture_except
from support.waiting import until

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


@pytest.mark.parametrize("shuffle", torture_except([GlobalShuffle(), LocalShuffle(79), None], None))
def test_two_workers_deliver_the_records_that_shards_have_each_once(
    in_place: Path, records: list[tuple[str, int, bytes]], shuffle: Shuffle | None
) -> None:
    with encoded(in_place, workers=2, shuffle=shuffle) as loader:
        found = epoch_of(loader)
        assert_exactly_once(loader, found)
        for images, labels, numbers in found:
            keys = map(loader.key, numbers)
            assert [*zip(keys, labels, map(bytes, images), strict=True)] == [records[n] for n in numbers]
    with encoded(in_place, shuffle=shuffle) as alone:
        assert_same(found, epoch_of(alone))


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


def test_reading_ahead_asks_for_the_bytes_of_the_archive_once(
    in_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_dataset(in_place) as dataset:
        blocks = dataset.blocks
    stream = ShardStream.of(in_place, blocks, np.random.default_rng(0).permutation(len(blocks)))
    pieces = list(stream.pieces(0, int(stream.ends[-1])))
    size = (in_place / ARCHIVE_NAME).stat().st_size

    assert {path for path, _, _ in pieces} == {in_place / ARCHIVE_NAME}
    covered = np.zeros(size, np.uint8)
    for _, offset, length in pieces:
        covered[offset : offset + length] += 1
    assert covered.max() == 1
    assert covered.mean() > 0.99

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, length, __: asked.append((offset, length)))
    ahead = ReadAhead(stream, budget=0)
    ahead.expect(np.arange(blocks[0].records))
    until(lambda: any(offset == blocks[0].start for offset, _ in asked))
    ahead.close()


def test_the_warning_names_a_window_that_mixes_the_classes(in_place: Path) -> None:
    with pytest.warns(SortedByClass, match=r"LocalShuffle of at least \d+ records, or convert it to shards"):
        encoded(in_place, shuffle=LocalShuffle(3), batch_size=8).close()


def test_damage_in_the_archive_stops_an_epoch_or_is_skipped(archives_of_20: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(archives_of_20, tmp_path / "own"))
    converted(own, tmp_path / "out", container="tar", order="archive", shard_size=900_000)
    with open_dataset(tmp_path / "out") as dataset:
        key = dataset[31].key
        at = (own / TRAIN).read_bytes().index(dataset[31].image)
    flip(own / TRAIN, at + 200)

    with encoded(tmp_path / "out", workers=1) as loader, pytest.raises(CorruptRecord) as raised:
        epoch_of(loader)
    with encoded(tmp_path / "out", on_bad_record="skip") as loader:
        epoch_of(loader)
        skipped = loader.skipped

    assert (raised.value.path, raised.value.key) == (str(own / TRAIN), key)
    assert list(skipped) == [key]
