"""Columns on their way to training: subsets, damage, other processes and machines, and frameworks."""

from pathlib import Path
from typing import Any

import pytest

from shardprep.loaders import Loader
from support.column_datasets import every_kind, write_columns


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, 20)
    return folder


def test_another_choice_of_columns_is_another_identity(dataset: Path) -> None:
    def identity(columns: Any) -> dict[str, str]:
        with Loader(dataset, batch_size=2, workers=0, columns=columns) as loader:
            return loader.identity

    assert identity(["age"]) == identity(["age"])
    assert identity(["age"]) != identity(["score"])


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
