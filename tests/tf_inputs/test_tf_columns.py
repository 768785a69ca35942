"""Batches of columns as tensors: numbers, labels and text; what TensorFlow cannot take is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.column_datasets import write_columns

tf = pytest.importorskip("tensorflow")

from shardprep.formats import UsageError  # noqa: E402 - after the check that TensorFlow is there
from shardprep.formats.records.schema import Schema  # noqa: E402
from shardprep.loaders import Loader  # noqa: E402
from shardprep.loaders.tf_inputs import QueueInput, StagingInput, to_dataset  # noqa: E402

pytestmark = pytest.mark.slow

TAKEN = ("image", "mask", "sound", "caption", "age", "score", "colour", "vector")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, 20)
    return folder


def loader_of(dataset: Path, *columns: str) -> Loader:
    return Loader(dataset, batch_size=5, workers=0, columns=columns or None)


@pytest.mark.parametrize("make", [to_dataset, QueueInput, StagingInput])
def test_a_dict_of_columns_arrives_as_tensors(dataset: Path, make: Any) -> None:
    with loader_of(dataset, *TAKEN) as loader:
        batches = [(values, labels) for values, labels in make(loader)]

    assert len(batches) == 4
    for values, labels in batches:
        assert set(values) == set(TAKEN)
        assert values["caption"].dtype == values["mask"].dtype == tf.string
        assert (values["colour"].dtype, labels.dtype) == (tf.int64, tf.int64)
        captions = [text.decode() for text in values["caption"].numpy()]
        assert captions == [f"grün {age + 3}" for age in values["age"].numpy()]
        np.testing.assert_array_equal(values["vector"].numpy()[:, 0], values["age"].numpy() + 3)


@pytest.mark.parametrize("name", ["about", "boxes"])
def test_a_list_that_is_no_tensor_is_an_error_that_names_its_column(dataset: Path, name: str) -> None:
    with loader_of(dataset, "age", name) as loader, pytest.raises(UsageError, match=f"'{name}'.*columns="):
        to_dataset(loader)


def test_rows_that_differ_in_a_later_batch_are_an_error_that_names_their_column(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", 4, Schema({"boxes": "float32[*,4]"}))

    specs = ({"boxes": tf.TensorSpec([None, 2, 4], tf.float32)}, tf.TensorSpec([None], tf.int64))
    with Loader(tmp_path / "d", batch_size=1, workers=0, columns=["boxes"]) as loader:
        data = to_dataset(loader, signature=specs)
        with pytest.raises((UsageError, tf.errors.OpError), match="boxes: a batch has"):
            list(data)
