"""A loader of a dataset with columns: as they are, chosen, in a transform, and as tensors of frameworks."""

from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import UsageError
from shardprep.loaders import Loader, TrainTransform
from support.column_datasets import every_kind, write_columns


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


def test_another_choice_of_columns_is_another_identity(dataset: Path) -> None:
    one, again, other = (
        Loader(dataset, batch_size=2, workers=0, columns=[name]).identity for name in ("age", "age", "score")
    )

    assert one == again != other


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
