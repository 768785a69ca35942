"""Columns on their way to training: subsets, damage, other processes and machines, and frameworks."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import CorruptRecord, UsageError
from shardprep.loaders import Flow, Loader, LocalShuffle
from shardprep.loaders.batches.stack import JsonValues
from support.column_datasets import EVERY_KIND, every_kind, write_columns
from support.remote_ends import wired
from support.sampling import torture_except

NUMERIC = ("vector", "age", "score", "colour")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, 20)
    return folder


def as_plain(value: Any) -> Any:
    """A value that compares by type, dtype, shape and content."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: as_plain(part) for name, part in value.items()}
    if isinstance(value, bytes | memoryview):
        return bytes(value)
    if isinstance(value, tuple | list):
        return type(value).__name__, [as_plain(part) for part in value]
    return value


def batches(dataset: Path, **options: Any) -> list[Any]:
    given: dict[str, Any] = {"batch_size": 6, "workers": 0, "drop_last": False, "shuffle": LocalShuffle(9)}
    with Loader(dataset, **given | options) as loader:
        return [as_plain(batch) for batch in loader]


def test_numbers_are_arrays_of_known_dtypes_and_json_is_a_list(dataset: Path) -> None:
    with Loader(dataset, batch_size=20, workers=0) as loader:
        values, _ = next(iter(loader))

    dtypes = {name: values[name].dtype.name for name in NUMERIC}
    assert dtypes == {"vector": "float16", "age": "int64", "score": "float64", "colour": "int64"}
    assert type(values["about"]) is JsonValues


@pytest.mark.parametrize(
    "columns",
    [
        ("about", "caption"),
        *(pytest.param(c, marks=pytest.mark.torture) for c in (None, NUMERIC, ("image", "age"))),
    ],
)
def test_batches_do_not_depend_on_the_workers(dataset: Path, columns: Any) -> None:
    assert batches(dataset, columns=columns, workers=2) == batches(dataset, columns=columns)


def test_a_subset_and_steps_have_the_values_of_their_records(dataset: Path) -> None:
    options: dict[str, Any] = {"batch_size": 3, "workers": 0, "columns": ("age", "caption"), "classes": ["b"]}
    with Loader(dataset, **options) as loader:
        whole = [as_plain(batch) for batch in loader]
        steps = [as_plain(step.batch) for step in loader.steps(0, [2, 0])]
        labels = [label for _, some in loader for label in some.tolist()]

    assert steps == [whole[2], whole[0]]
    assert set(labels) == {1}


@pytest.mark.parametrize("name", ["caption", "age", "mask"])
@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
def test_a_damaged_value_is_skipped_with_a_reason_that_names_its_column(
    dataset: Path, tmp_path: Path, name: str, workers: int
) -> None:
    folder = Path(shutil.copytree(dataset, tmp_path / "d"))
    value = EVERY_KIND[name].codec.encode(every_kind(7)[name])
    files = sorted(folder.glob(f"column-{name}*"))
    path, data = next((file, file.read_bytes()) for file in files if value in file.read_bytes())
    path.write_bytes(data.replace(value, bytes([value[0] ^ 1]) + value[1:], 1))

    with Loader(folder, batch_size=20, workers=workers, on_bad_record="skip", drop_last=False) as loader:
        ((values, labels),) = list(loader)
        ((key, reason),) = loader.skipped.items()

    assert name in reason
    assert len(labels) == len(values["vector"]) == len(values["about"]) == 19
    assert int(key[1:]) + -3 not in values["age"].tolist()
    with Loader(folder, batch_size=20, workers=workers) as loader, pytest.raises(CorruptRecord, match=name):
        list(loader)


def test_a_loader_whose_records_are_all_damaged_delivers_empty_columns(dataset: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dataset, tmp_path / "d"))
    path = folder / "column-age.npy"
    data = bytearray(path.read_bytes())
    data[-20 * 12 :] = bytes(20 * 12)
    path.write_bytes(data)

    with Loader(folder, batch_size=20, workers=0, on_bad_record="skip", columns=["age", "about"]) as loader:
        ((values, _),) = list(loader)

    assert (values["age"].shape, values["age"].dtype, values["about"]) == ((0,), np.int64, [])


def test_another_choice_of_columns_is_another_identity(dataset: Path) -> None:
    def identity(columns: Any) -> dict[str, str]:
        with Loader(dataset, batch_size=2, workers=0, columns=columns) as loader:
            return loader.identity

    assert identity(["age"]) == identity(["age"])
    assert identity(["age"]) != identity(["score"])


def keyed(item: tuple[str, dict[str, Any], int]) -> tuple[str, dict[str, Any], int]:
    return item


@pytest.mark.parametrize("processes", torture_except([0, 2], 0))
def test_a_flow_has_the_values_of_each_record(dataset: Path, processes: int) -> None:
    flow = Flow.from_dataset(dataset, shuffle=LocalShuffle(9), with_keys=True)
    if processes:
        flow = flow.map(keyed, processes=processes)

    items = list(flow)

    assert sorted(key for key, _, _ in items) == [f"k{number:04}" for number in range(20)]
    for key, values, label in items:
        expected = every_kind(int(key[1:]))
        assert list(values) == ["image", *EVERY_KIND.names]
        assert values["about"] == expected["about"]
        np.testing.assert_array_equal(values["boxes"], expected["boxes"])
        assert label == int(key[1:]) % 2


def test_a_flow_reads_only_the_chosen_columns(dataset: Path) -> None:
    items = list(Flow.from_dataset(dataset, columns=["caption"]))

    assert sorted(values["caption"] for values, _ in items) == sorted(f"grün {n}" for n in range(20))
    with pytest.raises(UsageError, match="depth"):
        Flow.from_dataset(dataset, columns=["depth"])


def test_batches_arrive_from_another_machine_as_they_are(dataset: Path) -> None:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": 6, "workers": 0, "drop_last": False}

    with wired(partial(Loader, dataset, shuffle=LocalShuffle(9), **options)) as source:
        arrived = [as_plain(batch) for batch in source]

    assert arrived == batches(dataset)


def test_tensors_of_pytorch_have_the_columns_and_lists_stay(dataset: Path) -> None:
    torch = pytest.importorskip("torch")
    from shardprep.loaders.torch_data import to_torch

    with Loader(dataset, batch_size=20, workers=0) as loader:
        ((values, labels),) = list(to_torch(loader))

    numbers = (values["age"] + 3).tolist()
    assert values["vector"].shape == (20, 3)
    assert {values[name].dtype for name in ("age", "colour")} == {labels.dtype} == {torch.int64}
    assert values["caption"] == [f"grün {number}" for number in numbers]
    assert values["about"] == [every_kind(number)["about"] for number in numbers]
    assert [boxes.shape[0] for boxes in values["boxes"]] == [number % 4 for number in numbers]


@pytest.mark.slow
def test_arrays_of_jax_have_the_columns_and_lists_stay(dataset: Path) -> None:
    pytest.importorskip("jax")
    from shardprep.loaders.jax_data import to_jax

    with Loader(dataset, batch_size=20, workers=0) as loader:
        ((values, _),) = list(to_jax(loader))

    assert values["vector"].shape == (20, 3)
    assert values["caption"] == [f"grün {age + 3}" for age in values["age"].tolist()]
