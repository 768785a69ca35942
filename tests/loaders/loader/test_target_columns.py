"""Masks and boxes of datasets, from their files to the batches of a Loader and the items of a Flow."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import BadTarget, ManifestDamaged, open_dataset
from shardprep.formats.records.schema import Schema
from shardprep.formats.shards.dataset import Dataset
from shardprep.loaders import EvalTransform, Flow, Loader, LocalShuffle, TrainTransform
from shardprep.loaders.batches.stack import BatchSpec
from support.column_datasets import write_samples
from support.datasets import converted
from support.pictures import numbers_png, png
from support.sampling import torture_except

SEGMENTED = Schema({"mask": "image", "field": "uint8[*,*]", "boxes": "float32[*,4]", "kinds": "int32[*]"})


def segmented(number: int) -> dict[str, Any]:
    """A square of another colour, its mask in both forms, and its box."""
    x, y, size = 5 + number, 10 + 2 * number, 30
    mask = np.zeros((80, 100), np.uint8)
    mask[y : y + size, x : x + size] = 1 + number
    image = np.full((80, 100, 3), 20, np.uint8)
    image[mask > 0] = 200
    box = np.array([[x / 100, y / 80, (x + size) / 100, (y + size) / 80]], np.float32)
    kinds = np.array([number], np.int32)
    return {"image": png(image), "mask": numbers_png(mask), "field": mask, "boxes": box, "kinds": kinds}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmented") / "train"
    write_samples(folder, [segmented(number) for number in range(12)], SEGMENTED)
    return folder


TARGETS: Any = {"masks": ("mask", "field"), "boxes": "boxes", "box_labels": "kinds", "max_boxes": 4}


@pytest.mark.parametrize(
    "transform", [TrainTransform(40, **TARGETS), EvalTransform(40, resize=50, **TARGETS)]
)
@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
def test_a_loader_delivers_masks_and_boxes_of_the_same_crop(
    dataset: Path, transform: Any, workers: int
) -> None:
    with Loader(
        dataset, batch_size=4, transform=transform, workers=workers, shuffle=LocalShuffle(6)
    ) as loader:
        assert loader.batch_specs is not None
        assert loader.batch_specs[1:6] == (
            BatchSpec("mask", (4, 40, 40), np.dtype(np.uint8)),
            BatchSpec("field", (4, 40, 40), np.dtype(np.uint8)),
            BatchSpec("boxes", (4, 4, 4), np.dtype(np.float32)),
            BatchSpec("kinds", (4, 4), np.dtype(np.int32)),
            BatchSpec("box_count", (4,), np.dtype(np.int32)),
        )
        for images, masks, fields, boxes, kinds, counts, _ in loader:
            np.testing.assert_array_equal(masks, fields)
            for image, mask, box, kind, count in zip(images, masks, boxes[:, 0], kinds, counts, strict=True):
                inside = cv2.erode(mask, np.ones((3, 3)))
                assert (image[inside > 0] > 150).all()
                assert (image[cv2.dilate(mask, np.ones((3, 3))) == 0] < 60).all()
                assert set(np.unique(mask)) <= ({0, 1 + kind[0]} if count else {0, *range(1, 13)})
                assert np.isin(kind[count:], -1).all()
                assert_around(mask, box * 40, count)


def assert_around(mask: np.ndarray, box: np.ndarray, count: int) -> None:
    ys, xs = np.nonzero(mask)
    if count:
        left, top, right, bottom = box
        np.testing.assert_allclose(
            [left, top, right, bottom], [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], atol=0.51
        )


@pytest.mark.torture
def test_a_flow_of_a_dataset_is_transformed_as_a_loader_does_it(dataset: Path) -> None:
    transform = EvalTransform(32, **TARGETS, resize=40)
    expected = list(Loader(dataset, batch_size=5, transform=transform, workers=0, drop_last=False))
    flow = Flow.from_dataset(dataset)

    values, label = next(iter(flow))
    assert (list(values), label) == (["image", *SEGMENTED.names], 0)
    dicts = flow.map(lambda item: item[0] | {"label": item[1], "key": "k"})
    np.testing.assert_equal(list(dicts.transform(transform).batch(5)), expected)
    np.testing.assert_equal(list(flow.transform(transform).batch(5)), expected)
    with flow.transform(transform, processes=2).batch(5) as in_processes:
        np.testing.assert_equal(list(in_processes), expected)


@pytest.mark.torture
def test_a_record_with_a_mask_of_another_size_is_an_error_or_skipped(tmp_path: Path) -> None:
    samples = [segmented(number) for number in range(6)]
    samples[2]["mask"] = numbers_png(np.zeros((80, 99), np.uint8))
    write_samples(tmp_path / "d", samples, SEGMENTED)
    options: Any = {"batch_size": 6, "transform": TrainTransform(8, masks=("mask",)), "drop_last": False}

    with (
        Loader(tmp_path / "d", workers=1, **options) as loader,
        pytest.raises(BadTarget, match=r"k0002.*99x80"),
    ):
        list(loader)
    with Loader(tmp_path / "d", workers=0, on_bad_record="skip", **options) as loader:
        ((images, masks, _),) = list(loader)
        assert (len(images), len(masks), list(loader.skipped)) == (5, 5, ["k0002"])


@pytest.fixture(scope="module")
def boxed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("boxed") / "train"
    converted(archives, folder)
    return folder


def expected_boxes(ds: Dataset, number: int) -> tuple[np.ndarray, np.ndarray]:
    table = ds.boxes
    assert table is not None
    rows = table[table["record"] == number]
    return np.stack([rows[s] for s in ("x_min", "y_min", "x_max", "y_max")], 1), rows["label"]


def test_records_have_the_boxes_of_their_annotations(boxed: Path) -> None:
    with open_dataset(boxed) as ds, open_dataset(boxed, labels="sorted_wnid1_bg") as other:
        for number in range(len(ds)):
            boxes, labels = expected_boxes(ds, number)
            np.testing.assert_array_equal(ds[number]["boxes"], boxes)
            np.testing.assert_array_equal(ds[number]["box_labels"], labels)
            np.testing.assert_array_equal(other[number]["box_labels"], labels + 1)
        record = ds[ds.boxes["record"][0]]  # type: ignore[index]
        copy = pickle.loads(pickle.dumps(record))  # noqa: S301
    assert (record["boxes"].dtype, record["box_labels"].dtype) == (np.float32, np.int32)
    assert (len(ds.schema), copy, list(copy.columns)) == (0, record, ["boxes", "box_labels"])


@pytest.mark.parametrize("workers", torture_except([0, 1], 0))
def test_a_loader_reads_the_boxes_of_annotations(boxed: Path, workers: int) -> None:
    transform = EvalTransform(
        64, resize=64, boxes="boxes", box_labels="box_labels", max_boxes=20, min_box=0, box_units="pixels"
    )
    options: Any = {"batch_size": 16, "workers": workers, "drop_last": False, "with_numbers": True}
    with open_dataset(boxed) as ds, Loader(boxed, transform=transform, **options) as loader:
        seen = 0
        for _, boxes, labels, counts, _, numbers in loader:
            for row, number in enumerate(numbers):
                _, expected = expected_boxes(ds, number)
                assert counts[row] <= len(expected)
                assert set(labels[row][: counts[row]]) <= set(expected)
                seen += counts[row]
                assert (boxes[row] <= 64).all()
    assert seen > 10


def test_a_loader_without_a_transform_gives_boxes_only_if_they_are_named(boxed: Path) -> None:
    with Loader(boxed, batch_size=8, workers=0) as plain:
        images, _ = next(iter(plain))
        assert isinstance(images, list)
    named: Any = {"columns": ("boxes", "box_labels"), "labels": "ilsvrc2012_id"}
    with Loader(boxed, batch_size=8, workers=1, **named) as loader:
        values, _ = next(iter(loader))
    with open_dataset(boxed, labels="ilsvrc2012_id") as ds:
        for name in values:
            assert [each.tolist() for each in values[name]] == [ds[n][name].tolist() for n in range(8)]
    key, item, _ = next(iter(Flow.from_dataset(boxed, columns=("image", "boxes"), with_keys=True)))
    assert (key, list(item)) == (ds.index["key"][0].decode(), ["image", "boxes"])
    np.testing.assert_array_equal(item["boxes"], values["boxes"][0])


def test_a_damaged_table_of_boxes_is_found_when_boxes_are_asked_for(boxed: Path, tmp_path: Path) -> None:
    for file in boxed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = bytearray((tmp_path / "boxes.npy").read_bytes())
    data[-3] ^= 1
    (tmp_path / "boxes.npy").write_bytes(data)

    with open_dataset(tmp_path) as ds:
        assert ds[0].image
        with pytest.raises(ManifestDamaged, match=r"boxes\.npy"):
            ds[0]["boxes"]
