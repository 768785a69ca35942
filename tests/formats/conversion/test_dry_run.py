"""A dry run says all that the conversion would find wrong, and writes nothing; nor does what is refused."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import (
    ConvertOptions,
    DryRun,
    PlanOptions,
    ShardprepError,
    SourceOptions,
    UsageError,
    convert,
    plan_conversion,
)
from shardprep.formats.runtime.progress import NoProgress
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


def test_it_says_what_the_conversion_makes_and_writes_nothing(archives: Path, tmp_path: Path) -> None:
    planned = dry_run(archives, tmp_path / "out", plan_options=PlanOptions(shard_size=60_000))
    assert [*tmp_path.iterdir()] == []
    done = convert(archives, tmp_path / "out", plan_options=PlanOptions(shard_size=60_000), workers=0)

    assert (said(planned), planned.exit_code) == ([], 0)
    assert [(s.path, s.images, s.image_bytes, s.shards, s.layout) for s in planned.splits] == [
        (d.path, d.manifest.records, d.manifest.image_bytes, len(d.manifest.shards), "official-tars")
        for d in done
    ]
    for split, one in zip(planned.splits, done, strict=True):
        assert sum(file.size for file in one.manifest.files) <= split.disk_bytes
    assert json.loads(json.dumps(planned.to_json()))["splits"][1]["split"] == "val"
    assert pickle.loads(pickle.dumps(done))[0].path == done[0].path  # noqa: S301 - made here
    assert planned.seconds
    assert planned.read_rate


def test_all_problems_of_all_splits_are_said_with_their_numbers(photos: Path, tmp_path: Path) -> None:
    for name in ("train/cat/0.png", "train/cat/2.png", "val/dog/1.png"):
        write(photos / name, b"no image")
    write(photos / "train/dog/1.png", (photos / "train/dog/3.png").read_bytes()[:-30])
    (photos / "val/bird").mkdir()
    (photos / "val/fish").mkdir()
    (photos / "train/dog/link.png").symlink_to("1.png")
    write(photos / "val/lost.png", b"x")

    planned = dry_run(photos, tmp_path / "out")

    link, lost, empty, *bad = said(planned)
    assert "link.png: is a symbolic link" in link
    assert "lost.png: is not in a class folder" in lost
    assert "bird: this class has no image; add some, or remove the folder (the first of 2)" in empty
    assert sorted(problem.count for problem in planned.problems) == [1, 1, 1, 2, 3]
    assert any("(the first of 3)" in one for one in bad)
    assert planned.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_bad_images_that_are_skipped_are_no_problem(photos: Path, tmp_path: Path) -> None:
    write(photos / "train/cat/0.png", b"no image")

    planned = dry_run(photos, tmp_path / "out", plan_options=PlanOptions(on_bad_image="skip"))

    assert (said(planned), planned.exit_code) == ([], 0)
    assert [problem.count for problem in planned.skipped] == [1]
    assert [split.skipped for split in planned.splits] == [1, 0]


def test_a_bad_image_in_a_folder_is_named_once(photos: Path, tmp_path: Path) -> None:
    write(photos / "train/cat/0.png", b"")

    assert said(dry_run(photos, tmp_path / "out")) == [
        f"{photos}/train/cat/0.png: not an image (starts with nothing)"
    ]


def test_a_split_without_an_intact_image_is_a_problem(photos: Path, tmp_path: Path) -> None:
    for path in (photos / "val").rglob("*.png"):
        write(path, b"no image")

    planned = dry_run(photos, tmp_path / "out", plan_options=PlanOptions(on_bad_image="skip"))

    assert said(planned) == [f"{tmp_path}/out/val: the source has no intact image"]
    with pytest.raises(ShardprepError, match="the source has no intact image"):
        converted(photos, tmp_path / "val", split="val", on_bad_image="skip")
    assert not (tmp_path / "val/manifest.json").exists()


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


def test_a_finished_output_is_said_to_be_complete(photos: Path, tmp_path: Path) -> None:
    options = PlanOptions(shard_size=60_000)
    converted(photos, tmp_path / "out", split="train")

    planned = dry_run(photos, tmp_path / "out", split="train", plan_options=options)

    assert [split.already_complete for split in planned.splits] == [True]
    assert (planned.exit_code, planned.seconds) == (0, None)


def test_an_unfinished_output_of_other_options_is_a_problem(photos: Path, tmp_path: Path) -> None:
    write(tmp_path / "out/.prep/plan.json", b'{"seed":7}\n')

    planned = dry_run(photos, tmp_path / "out", split="train")
    restarted = dry_run(photos, tmp_path / "out", split="train", options=ConvertOptions(restart=True))

    assert any("--seed was 7, is now 0" in problem for problem in said(planned))
    assert said(restarted) == []


def test_a_source_that_is_nothing_known_is_a_problem(tmp_path: Path) -> None:
    planned = dry_run(tmp_path, tmp_path / "out")

    assert planned.exit_code == 2
    assert "is not a known source" in said(planned)[0]


@pytest.mark.torture
def test_workers_find_the_same(photos: Path, tmp_path: Path) -> None:
    for name in ("train/cat/0.png", "train/cat/2.png", "val/dog/1.png"):
        write(photos / name, b"no image")

    here, there = (dry_run(photos, tmp_path / "out", workers=workers) for workers in (0, 2))

    assert said(here) == said(there)
    assert here.splits == there.splits


def test_files_that_are_gone_are_counted(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Removing(NoProgress):
        """Progress that removes a class when its images are about to be read."""

        def task(self, title: str, *, records: int, size: int) -> Any:
            shutil.rmtree(photos / "val/cat", ignore_errors=True)
            return super().task(title, records=records, size=size)

    planned = dry_run(photos, tmp_path / "out", progress=Removing())

    assert [problem.count for problem in planned.problems] == [3]
    assert "changed while it was read" in said(planned)[0]


class Notes(NoProgress):
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_class_of_val_without_an_image_in_train_is_named(photos: Path, tmp_path: Path) -> None:
    write(photos / "val" / "dogs/1.png", encoded(pixels(8, 8), ".png"))
    for run in (plan_conversion, convert):
        progress = Notes()

        run(photos, tmp_path / "out", workers=0, progress=progress)

        assert "classes of val without an image in train: dogs" in progress.notes


@pytest.mark.parametrize(
    ("there", "match"),
    [
        ("out/train/manifest.json", r"is a folder of splits \(train\); give '.*out/val' with --split val"),
        ("out/train/.prep", r"is a folder of splits \(train\); give '.*out/val' with --split val"),
        ("out", "out: is not a folder; choose another output"),
    ],
)
def test_a_folder_of_splits_and_a_file_are_no_outputs(
    there: str, match: str, photos: Path, tmp_path: Path
) -> None:
    write(tmp_path / there, b"{}")
    before = tree(tmp_path)

    with pytest.raises(UsageError, match=match):
        convert(photos, tmp_path / "out", split="val", workers=0)

    assert tree(tmp_path) == before
