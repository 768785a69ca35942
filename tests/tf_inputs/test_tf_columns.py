"""Batches of columns as tensors: numbers, labels and text; what TensorFlow cannot take is named."""

from pathlib import Path

import pytest

from shardprep.formats import UsageError
from shardprep.loaders import Loader
from shardprep.loaders.tf_inputs import to_dataset
from support.column_datasets import write_columns

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, 20)
    return folder


def loader_of(dataset: Path, *columns: str) -> Loader:
    return Loader(dataset, batch_size=5, workers=0, columns=columns or None)


@pytest.mark.parametrize("name", ["about", "boxes"])
def test_a_list_that_is_no_tensor_is_an_error_that_names_its_column(dataset: Path, name: str) -> None:
    with loader_of(dataset, "age", name) as loader, pytest.raises(UsageError, match=f"'{name}'.*columns="):
        to_dataset(loader)
