"""A loader of a dataset with columns: chosen, transformed, as masks and boxes, as tensors of frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import BadTarget, UsageError
from shardprep.formats.records.schema import Schema
from shardprep.loaders import EvalTransform, Flow, Loader, TrainTransform
from support.column_datasets import every_kind, write_columns, write_samples
from support.image_files import encoded, numbers_png


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
