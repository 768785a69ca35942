"""A loader of a dataset with columns: as they are, chosen, and in a transform."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import UsageError
from shardprep.loaders import Loader, LocalShuffle, TrainTransform
from support.column_datasets import EVERY_KIND, every_kind, write_columns
from support.image_files import JPEG
from support.sampling import torture_except


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, 20)
    return folder


def numbers_of(batch: dict[str, Any]) -> list[int]:
    return [int(age) + 3 for age in batch["age"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_transform_every_column_comes_as_it_is(dataset: Path, workers: int) -> None:
    with Loader(dataset, batch_size=5, workers=workers, shuffle=LocalShuffle(10)) as loader:
        seen = []
        for values, labels in loader:
            numbers = numbers_of(values)
            expected = [every_kind(number) for number in numbers]
            assert list(values) == ["image", *EVERY_KIND.names]
            assert values["caption"] == [one["caption"] for one in expected]
            assert values["about"] == [one["about"] for one in expected]
            assert list(map(bytes, values["image"])) == [JPEG] * 5
            np.testing.assert_array_equal(values["vector"], [one["vector"] for one in expected])
            assert values["vector"].dtype == np.float16
            assert [boxes.tobytes() for boxes in values["boxes"]] == [
                one["boxes"].tobytes() for one in expected
            ]
            np.testing.assert_array_equal(labels, [number % 2 for number in numbers])
            seen += numbers
    assert sorted(seen) == list(range(20))


def test_only_the_chosen_columns_are_read(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in dataset.iterdir():
        if not file.name.startswith(("shard-", "column-mask", "column-caption")):
            (folder / file.name).write_bytes(file.read_bytes())

    with Loader(folder, batch_size=10, workers=0, columns=("vector", "age")) as loader:
        batches = list(loader)

    assert [list(values) for values, _ in batches] == [["vector", "age"]] * 2
    assert batches[0][0]["vector"].shape == (10, 3)


def columns_of(record: Any, rng: np.random.Generator) -> Any:
    return np.float32(record["score"] + record.columns["age"]), len(record.image)


@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
def test_a_transform_reads_the_columns_that_it_asks_for(dataset: Path, workers: int) -> None:
    with Loader(dataset, batch_size=20, workers=workers, transform=columns_of) as loader:
        sums, sizes, _ = next(iter(loader))

    assert sorted(sums.tolist()) == sorted(np.float32(n / 7 + n - 3).item() for n in range(20))
    assert set(sizes.tolist()) == {len(JPEG)}


def test_the_image_is_left_out_if_it_is_not_chosen(dataset: Path) -> None:
    with Loader(dataset, batch_size=20, workers=0, transform=columns_of, columns=["age", "score"]) as loader:
        assert set(next(iter(loader))[1].tolist()) == {0}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_of_images_that_are_not_read_is_an_error(dataset: Path, workers: int) -> None:
    options: Any = {"transform": TrainTransform(8), "columns": ["age"], "on_bad_record": "skip"}
    with (
        Loader(dataset, batch_size=20, workers=workers, **options) as loader,
        pytest.raises(UsageError, match="must also name 'image'"),
    ):
        next(iter(loader))


def test_records_without_images_are_delivered(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", image=None)

    with Loader(tmp_path / "d", batch_size=12, workers=0) as loader:
        values, _ = next(iter(loader))

    assert list(values) == list(EVERY_KIND.names)


@pytest.mark.parametrize(
    ("columns", "says"),
    [("age", r"\('age',\)"), (["depth"], "image, mask"), (["age", "age"], "once"), ([], "empty")],
)
def test_other_columns_are_refused(dataset: Path, columns: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Loader(dataset, batch_size=2, columns=columns)


def test_a_resumed_loader_goes_on_with_the_same_values(dataset: Path) -> None:
    with Loader(dataset, batch_size=4, workers=0, shuffle=LocalShuffle(8)) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [numbers_of(values) for values, _ in batches]

    with Loader(dataset, batch_size=4, workers=2, shuffle=LocalShuffle(8)) as loader:
        loader.load_state_dict(state)
        found = [numbers_of(values) for values, _ in loader]

    assert found == expected
