"""Bad images that are skipped are summed up by cause, and skipping goes on with the work that is done."""

import json
from pathlib import Path

import pytest
from test_convert import StopAfter

from shardprep.formats import (
    BadImage,
    Converted,
    PlanOptions,
    SkippedCause,
    SkippedImages,
    convert,
)
from shardprep.formats.runtime.progress import Progress
from support.datasets import converted, prep_here
from support.image_files import JPEG, encoded, pixels
from support.source_builders import write

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(90)
BAD = {
    "cat/notes.txt": b"not an image",
    "cat/more.txt": b"nor this",
    "cat/cut.jpg": JPEG[:-9],
    "dog/phone.heic": HEIC,
    "fox/broken.jpg": JPEG[:-30],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Good and bad images of two classes, and one class of bad images only."""
    for at in range(40):
        write(tmp_path / "source" / ("cat", "dog")[at % 2] / f"{at:02}.jpg", encoded(pixels(20 + at, 30, 3)))
    for name, data in BAD.items():
        write(tmp_path / "source" / name, data)
    return tmp_path / "source"


def skipping(source: Path, output: Path, progress: Progress | None = None) -> Converted:
    options = PlanOptions(shard_size=10_000, on_bad_image="skip")
    (done,) = convert(source, output, split="train", plan_options=options, workers=0, progress=progress)
    return done


SUMMARY = SkippedImages(
    count=5,
    causes=(
        SkippedCause("not an image", 2, "cat/more.txt"),
        SkippedCause("truncated", 2, "cat/cut.jpg"),
        SkippedCause("HEIC, which OpenCV does not decode", 1, "dog/phone.heic"),
    ),
    emptied=("fox",),
)


@pytest.mark.slow
def test_what_was_skipped_is_summed_up_by_cause_with_a_warning_of_an_emptied_class(
    source: Path, tmp_path: Path
) -> None:
    assert skipping(source, tmp_path / "alone").skipped == SUMMARY
    words = ["convert", source, tmp_path / "out", "--split", "train", "--on-bad-image", "skip"]
    done, again = prep_here(*words), prep_here(*words, "--json")

    assert "skipped       5 images: 2 not an image (first: cat/more.txt), 2 truncated" in done.stdout
    assert "1 HEIC, which OpenCV does not decode (first: dog/phone.heic); listed in quar" in done.stdout
    assert "no image of this class is left, all were skipped: fox" in done.stderr
    (split,) = json.loads(again.stdout)["splits"]
    assert split["skipped"] == 5
    assert split["skipped_causes"][0] == {"cause": "not an image", "count": 2, "first": "cat/more.txt"}
    assert split["emptied_classes"] == ["fox"]


def test_no_longer_skipping_trusts_no_shard_that_lacks_images(source: Path, tmp_path: Path) -> None:
    shards = len(skipping(source, tmp_path / "fresh").manifest.shards)
    with pytest.raises(KeyboardInterrupt):
        skipping(source, tmp_path / "out", progress=StopAfter(shards))

    with pytest.raises(BadImage):
        converted(source, tmp_path / "out", shard_size=10_000)
    assert not (tmp_path / "out" / "manifest.json").exists()
