"""Crop-ready and shrunk shards: equal pixels and batches, honest manifests, resume, repair, verification."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import cv2
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
from support.image_files import encoded, png
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


def test_plain_shards_know_nothing_of_it(plain: Path) -> None:
    manifest = json.loads((plain / "manifest.json").read_bytes())

    assert manifest["crit"] == ["offsets"]
    assert "crop_ready" not in manifest
    assert "crop_ready" not in manifest["plan"]
    assert "quality" not in manifest["plan"]


@pytest.mark.parametrize("level", torture_except(["quick", "records", "decode", "full"], "decode", "quick"))
def test_crop_ready_shards_verify(ready: Path, level: str) -> None:
    assert not verify(ready, level=level).findings


def test_containers_and_workers_give_the_same_content(archives: Path, ready: Path, tmp_path: Path) -> None:
    hdf5 = converted(archives, tmp_path / "hdf5", container="hdf5", crop_ready=True, workers=2)
    with open_dataset(ready) as dataset:
        assert hdf5.content_root == dataset.manifest.content_root


def test_a_table_that_does_not_fit_is_a_finding(ready: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hdf5"
    converted(ready, folder, container="hdf5", shard_size=1 << 30)
    with open_dataset(folder) as dataset:
        number = int(np.flatnonzero(dataset.index["flags"] & ImageFlag.CROP_READY)[0])
        record = dataset[number]
    shard = writable(folder / "shard-00000.h5")
    data = shard.read_bytes()
    at = data.index(record.image) + record.image.index(b"shardprep\0") + 70
    shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    findings = verify(folder, level="records").findings

    assert any(record.key in str(finding) for finding in findings)


def test_repair_rebuilds_the_same_bytes(archives: Path, ready: Path, tmp_path: Path) -> None:
    shutil.copytree(ready, tmp_path / "copy")
    shard = writable(tmp_path / "copy/shard-00000.lmdb")
    shard.write_bytes(shard.read_bytes()[:-100])

    assert not repair(tmp_path / "copy", archives, workers=0).findings
    assert tree(tmp_path / "copy") == tree(ready)


def test_repair_asks_for_the_version_that_coded_the_images(
    archives: Path, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ready, tmp_path / "copy")
    shard = writable(tmp_path / "copy/shard-00000.lmdb")
    shard.write_bytes(shard.read_bytes()[:-100])
    monkeypatch.setattr("shardprep.formats.images.crop_ready.jpegtran_version", lambda: "libjpeg-turbo 9.9")

    with pytest.raises(OperationError, match="but libjpeg-turbo 9"):
        repair(tmp_path / "copy", archives, workers=0)


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


def test_a_crop_ready_dataset_stays_so_in_another_container_and_order(ready: Path, tmp_path: Path) -> None:
    made = converted(ready, tmp_path / "made", container="hdf5", order="key", shard_size=100_000)

    with open_dataset(ready) as before, open_dataset(tmp_path / "made") as after:
        assert made.crop_ready == before.manifest.crop_ready
        assert {record.key: record for record in before} == {record.key: record for record in after}
    assert not verify(tmp_path / "made").findings


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


def test_kinds_without_segments_stay_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    smooth = cv2.resize(rng.integers(0, 256, (6, 6, 3)).astype(np.uint8), (200, 150))
    images = {"a.jpg": encoded(smooth), "b.png": png(200, 150, 2), "c.webp": encoded(smooth, ".webp")}
    (tmp_path / "photos/cat").mkdir(parents=True)
    for name, data in images.items():
        (tmp_path / "photos/cat" / name).write_bytes(data)

    made = converted(tmp_path / "photos", tmp_path / "out", crop_ready=True)

    assert made.crop_ready == 1
    found = inspect(tmp_path / "out").crop_ready
    assert found is not None
    assert (found.images, found.others) == (1, {"PNG": 1, "WebP": 1})
    with open_dataset(tmp_path / "out") as dataset:
        stored = {record.key.rpartition("/")[2]: record.image for record in dataset}
    assert [stored[name] == data for name, data in images.items()] == [False, True, True]


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
