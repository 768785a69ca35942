"""Crop-ready and shrunk shards: equal pixels and batches, honest manifests, resume, repair, verification."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    OperationError,
    PlanMismatch,
    PlanOptions,
    UsageError,
    convert,
    inspect,
    open_dataset,
    repair,
    verify,
)
from shardprep.formats.images import crop_ready as jpegtran
from shardprep.formats.images.crop_ready import grid_of
from shardprep.formats.images.info import ImageFlag
from shardprep.formats.sources.sample import make_sample
from shardprep.loaders import EvalTransform, Loader, LocalShuffle, TrainTransform, decode_rgb
from support.datasets import converted, tree, writable
from support.sampling import torture_except

pytestmark = pytest.mark.skipif(not shutil.which(jpegtran.PROGRAM), reason="no jpegtran")


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crop") / "archives"
    make_sample(folder, classes=2, train_per_class=15, val=4, test=2)
    return folder


@pytest.fixture(scope="session")
def plain(archives: Path) -> Path:
    converted(archives, archives.parent / "plain", shard_size=400_000)
    return archives.parent / "plain"


@pytest.fixture(scope="session")
def ready(archives: Path) -> Path:
    converted(archives, archives.parent / "ready", shard_size=400_000, crop_ready=True)
    return archives.parent / "ready"


def batches(path: Path, **options: object) -> Iterator[list[np.ndarray]]:
    with Loader(path, batch_size=6, rank=0, world_size=1, **options) as loader:  # type: ignore[arg-type]
        for _ in range(2):
            yield from ([np.array(part) for part in batch] for batch in loader)


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
@pytest.mark.parametrize(
    "transform",
    [
        TrainTransform(64),
        TrainTransform((48, 96), interpolation="cubic", dtype="float32"),
        TrainTransform(100, orientation="apply"),
        EvalTransform(64, resize=72),
        EvalTransform(200, resize=256, interpolation="linear"),
    ],
    ids=["train", "cubic", "oriented", "eval", "eval-linear"],
)
def test_batches_are_those_of_plain_shards(plain: Path, ready: Path, transform: object, workers: int) -> None:
    options = {"transform": transform, "shuffle": LocalShuffle(10), "workers": workers}

    pairs = zip(batches(plain, **options), batches(ready, **options), strict=True)

    for one, other in pairs:
        for part, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(part, same)


def test_records_are_the_same_pictures_and_name_their_originals(plain: Path, ready: Path) -> None:
    with open_dataset(plain) as one, open_dataset(ready) as other:
        assert [record.key for record in one] == [record.key for record in other]
        flags = other.index["flags"] & ImageFlag.CROP_READY != 0
        assert flags.sum() == other.manifest.crop_ready > 20
        for number, (before, after) in enumerate(zip(one, other, strict=True)):
            np.testing.assert_array_equal(decode_rgb(before), decode_rgb(after))
            assert after.crop_ready == flags[number] == (after.image != before.image)
            assert (grid_of(after.image) is not None) == after.crop_ready


def test_the_manifest_is_refused_by_readers_that_do_not_know_segments(ready: Path) -> None:
    manifest = json.loads((ready / "manifest.json").read_bytes())

    assert manifest["crit"] == ["crop_ready", "offsets"]
    assert manifest["plan"]["crop_ready"] is True
    assert manifest["plan"]["transcoder"] == jpegtran.jpegtran_version()


def test_repair_rebuilds_the_same_bytes_with_the_version_that_coded_the_images(
    archives: Path, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ready, tmp_path / "copy")
    shard = writable(tmp_path / "copy/shard-00000.lmdb")
    shard.write_bytes(shard.read_bytes()[:-100])

    with monkeypatch.context() as other:
        other.setattr("shardprep.formats.images.crop_ready.jpegtran_version", lambda: "libjpeg-turbo 9.9")
        with pytest.raises(OperationError, match="but libjpeg-turbo 9"):
            repair(tmp_path / "copy", archives, workers=0)

    assert not repair(tmp_path / "copy", archives, workers=0).findings
    assert tree(tmp_path / "copy") == tree(ready)


def test_going_on_without_the_option_is_refused(archives: Path, ready: Path, tmp_path: Path) -> None:
    shutil.copytree(ready, tmp_path / "copy")

    with pytest.raises(PlanMismatch, match="--crop-ready was on, is now off"):
        converted(archives, tmp_path / "copy", shard_size=400_000)


def test_a_dataset_becomes_crop_ready_without_its_source(plain: Path, ready: Path, tmp_path: Path) -> None:
    made = converted(plain, tmp_path / "made", shard_size=400_000, crop_ready=True)

    with open_dataset(ready) as straight, open_dataset(plain) as first:
        assert made.content_root == straight.manifest.content_root
        assert made.source["dataset"]["root"] == first.manifest.root
        assert made.source["dataset"]["source"] == first.manifest.source


@pytest.mark.slow
def test_shrunk_images_are_crop_ready_and_said_to_be_lossy(
    archives: Path, plain: Path, tmp_path: Path
) -> None:
    made = converted(archives, tmp_path / "small", shorter_side=64, quality=85)

    with open_dataset(tmp_path / "small") as small, open_dataset(plain) as dataset:
        larger = np.minimum(dataset.index["width"], dataset.index["height"]) > 64
        assert (np.minimum(small.index["width"], small.index["height"])[larger] == 64).all()
        assert made.image_bytes < dataset.manifest.image_bytes
    assert made.plan["shorter_side"] == 64
    assert made.plan["transcoder"].startswith("OpenCV ")
    found = inspect(tmp_path / "small").crop_ready
    assert found is not None
    assert (found.shorter_side, found.quality) == (64, 85)
    assert not verify(tmp_path / "small", level="decode").findings


@pytest.mark.parametrize("options", [{"quality": 0}, {"quality": 101}, {"shorter_side": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        PlanOptions(**options)


def test_without_the_program_nothing_is_begun(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    jpegtran.jpegtran.cache_clear()
    jpegtran.jpegtran_version.cache_clear()
    try:
        with pytest.raises(OperationError, match="libjpeg-turbo-progs"):
            convert(archives, tmp_path / "out", plan_options=PlanOptions(crop_ready=True), workers=0)
    finally:
        jpegtran.jpegtran.cache_clear()
        jpegtran.jpegtran_version.cache_clear()
    assert not (tmp_path / "out").exists()
