"""A loader of a dataset with columns: as they are, chosen, and in a transform."""

from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import UsageError
from shardprep.loaders import Loader, TrainTransform
from support.column_datasets import write_columns


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
        pytest.raises(UsageError, match="must also name 'image'"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("columns", "says"),
    [("age", r"\('age',\)"), (["depth"], "image, mask"), (["age", "age"], "once"), ([], "empty")],
)
def test_other_columns_are_refused(dataset: Path, columns: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Loader(dataset, batch_size=2, columns=columns)
