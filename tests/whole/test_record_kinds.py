"""Records of six tasks: made, verified, damaged and found, loaded, and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import CorruptRecord, Field, Schema, open_dataset, verify, write_dataset
from shardprep.loaders import EvalTransform, Loader, LocalShuffle, TrainTransform
from support.datasets import flip
from support.image_files import encoded
from support.sampling import torture_except

RECORDS = 24
GENRES = ("comedy", "crime", "drama", "horror")


def segmentation(n: int) -> dict[str, Any]:
    mask = np.zeros((40, 60), np.uint8)
    mask[n : n + 10, 5:40] = 1 + n % 3
    image = np.where(mask > 0, 220, 30).astype(np.uint8)
    return {"image": encoded(cv2.merge([image] * 3), ".png"), "mask": encoded(mask, ".png"), "label": n % 2}


def detection(n: int) -> dict[str, Any]:
    boxes = np.array([[0, 0, 0.5, (1 + n) / 25]] * (n % 3), np.float32).reshape(-1, 4)
    return {
        "image": encoded(np.full((40, 40, 3), n, np.uint8), ".png"),
        "boxes": boxes,
        "kinds": np.full(n % 3, 77_000_000 + n, np.int32),
    }


def caption(n: int) -> dict[str, Any]:
    return {"caption": f"grün {n} " * (1 + n), "about": {"number": n, "parts": [None, True]}}


def several_labels(n: int) -> dict[str, Any]:
    return {"genres": np.unique([n % 4, n // 4 % 4]).astype(np.int32), "plot": f"film {n}"}


def regression(n: int) -> dict[str, Any]:
    return {"price": 1000.0 * n, "place": np.array([n, -n], np.float32)}


def sound(n: int) -> dict[str, Any]:
    return {"wave": np.arange(n, n + 100 + 7 * n).astype(np.int16), "rate": 8000 + n}


def padded_text(record: Any, rng: np.random.Generator) -> Any:
    text = record["caption"].encode()[:32]
    return np.frombuffer(text.ljust(32, b"\0"), np.uint8), np.int64(record["about"]["number"])


def multi_hot(record: Any, rng: np.random.Generator) -> Any:
    target = np.zeros(len(GENRES), np.float32)
    target[record["genres"]] = 1
    return target


def placed(record: Any, rng: np.random.Generator) -> Any:
    return record["place"] * np.float32(1), np.float32(record["price"])


def excerpt(record: Any, rng: np.random.Generator) -> Any:
    first = rng.integers(len(record["wave"]) - 99)
    return record["wave"][first : first + 100] / np.float32(2**15), np.int64(record["rate"])


@dataclass(frozen=True)
class Task:
    sample: Callable[[int], dict[str, Any]]
    schema: Schema
    transform: Any
    shapes: list[tuple[int, ...]]


TASKS = {
    "segmentation": Task(
        segmentation, Schema({"mask": "image"}), TrainTransform(16, masks=("mask",)), [(16, 16, 3), (16, 16)]
    ),
    "detection": Task(
        detection,
        Schema({"boxes": "float32[*,4]", "kinds": "int32[*]"}),
        EvalTransform(16, resize=16, boxes="boxes", box_labels="kinds", max_boxes=3),
        [(16, 16, 3), (3, 4), (3,), ()],
    ),
    "captions": Task(caption, Schema({"caption": "text", "about": "json"}), padded_text, [(32,), ()]),
    "several labels": Task(
        several_labels, Schema([Field("genres", "labels", GENRES), Field("plot", "text")]), multi_hot, [(4,)]
    ),
    "regression": Task(regression, Schema({"price": "float", "place": "float32[2]"}), placed, [(2,), ()]),
    "sounds": Task(sound, Schema({"wave": "int16[*]", "rate": "int"}), excerpt, [(100,), ()]),
}


@pytest.fixture(scope="module", params=torture_except(TASKS, "detection"))
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


@pytest.fixture(scope="module")
def dataset(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds") / "train"
    write_dataset(map(task.sample, range(RECORDS)), folder, schema=task.schema, shard_size=8 << 10)
    return folder


def test_what_was_given_comes_back(dataset: Path, task: Task) -> None:
    verify(dataset, level="records").raise_for_findings()
    with open_dataset(dataset) as ds:
        assert (len(ds), ds.schema) == (RECORDS, task.schema)
        for number, record in enumerate(ds):
            expected = task.sample(number)
            assert record.image == expected.get("image", b"")
            for name in task.schema.names:
                np.testing.assert_equal(record[name], expected[name])
                assert type(record[name]) is type(expected[name])


@pytest.mark.slow
def test_a_flipped_bit_in_any_column_is_found_and_is_never_a_value(
    dataset: Path, task: Task, tmp_path: Path
) -> None:
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    # of shards only values are damaged: most of a small LMDB file is never read
    damaged = [tmp_path / table_or_shard(name, task) for name in task.schema.names]
    for file in damaged:
        flip(file, last_value_in(file, task))

    findings = verify(tmp_path, level="records").findings

    assert {file.name for file in damaged} <= {finding.file for finding in findings}
    with open_dataset(tmp_path) as ds:
        for name in task.schema.names:
            with pytest.raises(CorruptRecord):
                _ = [record[name] for record in ds]  # type: ignore[call-overload]


def table_or_shard(name: str, task: Task) -> str:
    return f"column-{name}.npy" if task.schema[name].is_fixed else f"column-{name}-00000.lmdb"


def last_value_in(file: Path, task: Task) -> int:
    """The place of a byte of the last record's value, or of its row of a table."""
    if file.suffix == ".npy":
        return file.stat().st_size - 2
    name = next(name for name in task.schema.names if file.name.startswith(f"column-{name}-0"))
    values = [task.schema[name].codec.encode(task.sample(number)[name]) for number in range(RECORDS)]
    data = file.read_bytes()
    return max(data.find(value) + len(value) - 1 for value in values if len(value) > 4 and value in data)


@pytest.mark.slow
def test_batches_are_the_same_for_any_workers_and_after_a_restart(dataset: Path, task: Task) -> None:
    options = {"batch_size": 5, "transform": task.transform, "shuffle": LocalShuffle(12), "drop_last": False}
    with Loader(dataset, workers=0, **options) as loader:
        expected = list(loader)
    with Loader(dataset, workers=2, **options) as loader:
        batches = iter(loader)
        np.testing.assert_equal([next(batches), next(batches)], expected[:2])
        state = json.dumps(loader.state_dict())
    with Loader(dataset, workers=1, **options) as loader:
        loader.load_state_dict(json.loads(state))
        np.testing.assert_equal(list(loader), expected[2:])
        loader.receipt().check(RECORDS)
    assert [part.shape[1:] for part in expected[0][:-1]] == task.shapes
