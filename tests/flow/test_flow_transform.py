"""A loader's transforms over a flow: the loader's results, in any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import EvalTransform, Flow, Loader, TrainTransform
from support.sampling import torture_except


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    torture_except([{}, {"threads": 2}, {"processes": 2}], {}, {"threads": 2}),
    ids=["here", "threads", "processes"],
)
def test_a_transformed_dataset_is_what_the_loader_delivers(lmdb_shards: Path, options: Any) -> None:
    transform = EvalTransform(32)
    with (
        Flow.from_dataset(lmdb_shards).transform(transform, **options).batch(20) as flow,
        Loader(lmdb_shards, batch_size=20, transform=transform, workers=0, drop_last=False) as loader,
    ):
        np.testing.assert_equal(list(flow), list(loader))


@pytest.mark.torture
def test_random_crops_are_the_same_wherever_they_are_made(lmdb_shards: Path) -> None:
    source = Flow.from_dataset(lmdb_shards).take(40)
    with source.transform(TrainTransform(32), processes=2, seed=5) as flow:
        for number in range(2):
            here = source.transform(TrainTransform(32), seed=5).at_pass(number)
            np.testing.assert_equal(list(flow.at_pass(number)), list(here))


def test_a_transform_s_outputs_of_any_size_go_with_their_labels() -> None:
    def halves(record: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        return record.image[: len(record.image) // 2], rng.random()

    items = list(Flow.from_iterable([(b"abcd", 7), (b"ef", 8)]).transform(halves))

    assert [(image, label) for image, _, label in items] == [(b"ab", 7), (b"e", 8)]


def test_what_is_no_image_with_a_label_is_refused_with_its_number() -> None:
    with pytest.raises(UsageError, match=r"items of \(image, label\)") as raised:
        list(Flow.from_iterable([5]).transform(EvalTransform(8)))
    assert "item 0 of pass 0" in raised.value.__notes__[0]
    with pytest.raises(BadImage):
        list(Flow.from_iterable([(b"no image", 1)]).transform(EvalTransform(8)))
