"""A dry run says all that the conversion would find wrong, and writes nothing."""

from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import (
    DryRun,
    PlanOptions,
    ShardprepError,
    SourceOptions,
    convert,
    plan_conversion,
)
from support.datasets import converted, tree
from support.image_files import encoded, pixels
from support.source_builders import write


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for number in range(6):
            name = ("cat", "dog")[number % 2]
            write(
                tmp_path / "photos" / split / name / f"{number}.png", encoded(pixels(8, 9 + number), ".png")
            )
    return tmp_path / "photos"


def dry_run(source: Path, output: Path, **arguments: Any) -> DryRun:
    arguments.setdefault("plan_options", PlanOptions(shard_size=300))
    return plan_conversion(source, output, **{"workers": 0, **arguments})


def said(planned: DryRun) -> list[str]:
    return [str(problem) for problem in planned.problems]


def test_a_split_without_an_intact_image_is_a_problem(photos: Path, tmp_path: Path) -> None:
    for path in (photos / "val").rglob("*.png"):
        write(path, b"no image")

    planned = dry_run(photos, tmp_path / "out", plan_options=PlanOptions(on_bad_image="skip"))

    assert said(planned) == [f"{tmp_path}/out/val: the source has no intact image"]


REFUSED: dict[str, dict[str, Any]] = {
    "a split that is not there": {"split": "test"},
    "another plan": {"split": "train", "plan_options": PlanOptions(seed=1)},
    "a folder of splits into a dataset": {},
    "a fraction of a source with val": {"source_options": SourceOptions(val_fraction=0.1)},
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_the_exit_code_is_that_of_the_conversion(
    arguments: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    converted(photos, tmp_path / "out", split="train")
    before = tree(tmp_path / "out")

    planned = dry_run(photos, tmp_path / "out", **arguments)

    with pytest.raises(ShardprepError) as caught:
        convert(photos, tmp_path / "out", **arguments, workers=0)
    assert planned.exit_code == caught.value.exit_code
    assert said(planned)[0] == str(caught.value)
    assert tree(tmp_path / "out") == before


@pytest.mark.torture
def test_workers_find_the_same(photos: Path, tmp_path: Path) -> None:
    for name in ("train/cat/0.png", "train/cat/2.png", "val/dog/1.png"):
        write(photos / name, b"no image")

    here, there = (dry_run(photos, tmp_path / "out", workers=workers) for workers in (0, 2))

    assert said(here) == said(there)
    assert here.splits == there.splits
