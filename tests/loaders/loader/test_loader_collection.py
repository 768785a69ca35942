"""Loaders of collections, of columns, of images that stay in the official tars, and of a billion records."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import BadTarget, ManifestDamaged, UsageError, collect, make_sample, open_dataset
from shardprep.formats.conversion import shard as conversion
from shardprep.formats.records.schema import Schema
from shardprep.formats.storage import open as collections
from shardprep.loaders import EvalTransform, Flow, Loader, LocalShuffle, SortedByClass, TrainTransform
from support import billion_records
from support.column_datasets import every_kind, write_columns, write_samples
from support.cut_datasets import collected
from support.datasets import converted, flip
from support.image_files import encoded, numbers_png
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_columns_are_those_of_their_parts_except_damaged_values(tmp_path: Path, workers: int) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, records in zip(folders, (12, 19), strict=True):
        write_columns(folder, records)
    wanted = [record for folder in folders for record in open_dataset(folder)]
    names = ("age", "caption", "boxes", "colour", "vector", "score", "image")

    with collect(tmp_path / "all", folders) as made:
        for record, of_part in zip(made, wanted, strict=True):
            for name in made.schema.names:
                np.testing.assert_equal(record[name], of_part[name])
    for item, record in zip(Flow.from_dataset(tmp_path / "all", columns=names), wanted, strict=True):
        assert item[0]["caption"] == record["caption"]
    write_columns(tmp_path / "bad", instead={"colour": b"\7\0\0\0"})  # no class, with the right checksum
    (tmp_path / "bad/column-colour.npy").replace(folders[0] / "column-colour.npy")
    flip(folders[1] / "column-vector.npy", 128 + 18 * 10)
    options = {"columns": names, "workers": workers, "shuffle": LocalShuffle(8), "on_bad_record": "skip"}
    with loader_on(tmp_path / "all", transform=None, **options) as loader:
        for values, _, numbers in epoch_of(loader):
            for row, number in enumerate(numbers.tolist()):
                for name in names[:-1]:
                    np.testing.assert_equal(values[name][row], wanted[number][name])
        assert sorted(loader.skipped) == ["k0003", loader.key(30)]


def test_a_cut_index_is_an_error_of_the_step(
    lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "MAX_INDEX_BYTES", 0)
    with loader_on(collected(lmdb_shards, tmp_path, 5), shuffle=None) as loader:
        batches = iter(loader)
        next(batches)
        flip(tmp_path / "part-0/index.npy", 300)
        with pytest.raises(ManifestDamaged, match="changed since it was verified"):
            list(batches)


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
        patch.setattr(conversion, "BLOCK_BYTES", 30_000)
        converted(archives_of_20, output, container="tar", order="archive", shard_size=900_000)
    return output


not_decoded = partial(loader_on, transform=None, batch_size=16)


def test_a_local_shuffle_reads_blocks_in_random_order_and_resumes_anywhere(in_place: Path) -> None:
    shuffle = LocalShuffle(79)
    with not_decoded(in_place, shuffle=shuffle) as loader:
        blocks, batches = loader.dataset.blocks, iter(loader)
        first = epoch_of(batches, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = epoch_of(batches)
        assert_exactly_once(loader, first + rest)
    with not_decoded(in_place, shuffle=shuffle, workers=1) as resumed:
        resumed.load_state_dict(state)
        assert_same(epoch_of(resumed), rest)

    assert len(blocks) > 3 * len(open_dataset(in_place).manifest.shards)
    assert np.mean([len(set(labels.tolist())) for _, labels, _ in first[1:]]) > 7


def test_the_warning_names_a_window_that_mixes_the_classes(in_place: Path) -> None:
    with pytest.warns(SortedByClass, match=r"LocalShuffle of at least \d+ records, or convert to shards"):
        not_decoded(in_place, shuffle=LocalShuffle(3), batch_size=8).close()


def measured(large_folder: Path, parts: int) -> dict[str, Any]:
    """What the program measured of so many parts, in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(large_folder / "cache")}
    program = [sys.executable, billion_records.__file__, str(large_folder / f"{parts}"), str(parts)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, env=environment)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def large_folder(tmp_path: Path) -> Iterator[Path]:
    """A large_folder that is removed at once: copied, its files have 60 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.torture
def test_memory_does_not_grow_with_the_records(large_folder: Path) -> None:
    few, many = measured(large_folder, 8), measured(large_folder, 64)

    print(json.dumps([few, many], indent=1))
    assert many["records"] == 1 << 30
    assert many["peak_kb"] < 1_000_000
    grown = 1024 * (many["peak_kb"] - few["peak_kb"]) / (many["records"] - few["records"])
    assert grown < 0.2, "bytes per record"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, 20)
    return folder


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_of_images_that_are_not_read_is_an_error(dataset: Path, workers: int) -> None:
    options: Any = {"transform": TrainTransform(8), "columns": ["age"], "on_bad_record": "skip"}
    with (
        Loader(dataset, batch_size=20, workers=workers, **options) as loader,
        pytest.raises(UsageError, match="name 'image' in columns="),
    ):
        next(iter(loader))


def test_another_choice_of_columns_is_another_identity(dataset: Path) -> None:
    one, again, other = (
        Loader(dataset, batch_size=2, workers=0, columns=[name]).identity for name in ("age", "age", "score")
    )

    assert one == again != other


@pytest.mark.parametrize("name", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_arrays_of_a_framework_have_the_columns_and_lists_stay(dataset: Path, name: str) -> None:
    pytest.importorskip(name)
    module = import_module(f"shardprep.loaders.{name}_data")

    with Loader(dataset, batch_size=20, workers=0) as loader:
        ((values, labels),) = list(getattr(module, f"to_{name}")(loader))

    numbers = (values["age"] + 3).tolist()
    assert values["vector"].shape == (20, 3)
    assert {values[name].dtype for name in ("age", "colour")} == {labels.dtype}
    assert values["caption"] == [f"grün {number}" for number in numbers]
    assert values["about"] == [every_kind(number)["about"] for number in numbers]
    assert [boxes.shape[0] for boxes in values["boxes"]] == [number % 4 for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["about", "boxes"])
def test_a_list_that_is_no_tensor_of_tensorflow_is_an_error_that_names_its_column(
    dataset: Path, name: str
) -> None:
    pytest.importorskip("tensorflow")
    from shardprep.loaders.tf_inputs import to_dataset

    with (
        Loader(dataset, batch_size=5, workers=0, columns=["age", name]) as loader,
        pytest.raises(UsageError, match=f"'{name}'.*columns="),
    ):
        to_dataset(loader)


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
    return {
        "image": encoded(image, ".png"),
        "mask": numbers_png(mask),
        "field": mask,
        "boxes": box,
        "kinds": kinds,
    }


@pytest.fixture(scope="module")
def segmented_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmented") / "train"
    write_samples(folder, [segmented(number) for number in range(12)], SEGMENTED)
    return folder


TARGETS: Any = {"masks": ("mask", "field"), "boxes": "boxes", "box_labels": "kinds", "max_boxes": 4}


@pytest.mark.torture
def test_a_flow_of_a_dataset_is_transformed_as_a_loader_does_it(segmented_dataset: Path) -> None:
    transform = EvalTransform(32, **TARGETS, resize=40)
    expected = list(Loader(segmented_dataset, batch_size=5, transform=transform, workers=0, drop_last=False))
    flow = Flow.from_dataset(segmented_dataset)

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
