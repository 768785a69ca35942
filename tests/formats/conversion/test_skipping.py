"""Bad images that are skipped are summed up by cause, and skipping goes on with the work that is done."""

import json
from pathlib import Path

import pytest
from test_convert import StopAfter

from shardprep.formats import (
    BadImage,
    Converted,
    PlanMismatch,
    PlanOptions,
    SkippedCause,
    SkippedImages,
    convert,
    verify,
)
from shardprep.formats.images.info import cause_of
from support.datasets import converted, prep, tree
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


def skipping(source: Path, output: Path, **options: object) -> Converted:
    plan_options = PlanOptions(shard_size=10_000, on_bad_image="skip", **options)  # type: ignore[arg-type]
    (done,) = convert(source, output, split="train", plan_options=plan_options, workers=0)
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


def test_what_was_skipped_is_summed_up_by_cause(source: Path, tmp_path: Path) -> None:
    assert skipping(source, tmp_path / "out").skipped == SUMMARY
    assert str(SUMMARY) == (
        "5 images: 2 not an image (first: cat/more.txt), 2 truncated (first: cat/cut.jpg), "
        "1 HEIC, which OpenCV does not decode (first: dog/phone.heic)"
    )


def test_a_finished_conversion_knows_what_it_skipped(source: Path, tmp_path: Path) -> None:
    skipping(source, tmp_path / "out")

    again = skipping(source, tmp_path / "out")

    assert again.already_complete
    assert again.skipped == SUMMARY


def test_a_conversion_that_skipped_nothing_says_so(source: Path, tmp_path: Path) -> None:
    for name in BAD:
        (source / name).unlink()
    (source / "fox").rmdir()

    assert skipping(source, tmp_path / "out").skipped == SkippedImages()


@pytest.mark.slow
def test_the_command_prints_the_causes_and_warns_of_an_emptied_class(source: Path, tmp_path: Path) -> None:
    done = prep("convert", source, tmp_path / "out", "--split", "train", "--on-bad-image", "skip", check=True)
    again = prep(
        "convert",
        source,
        tmp_path / "out",
        "--split",
        "train",
        "--on-bad-image",
        "skip",
        "--json",
        check=True,
    )

    assert f"skipped       {SUMMARY}; listed in quarantine.json" in done.stdout
    assert "no image of this class is left, all were skipped: fox" in done.stderr
    (split,) = json.loads(again.stdout)["splits"]
    assert split["skipped"] == 5
    assert split["skipped_causes"][0] == {"cause": "not an image", "count": 2, "first": "cat/more.txt"}
    assert split["emptied_classes"] == ["fox"]


REASONS = {
    "truncated: the JPEG has no end": "truncated",
    "not an image (starts with 00 01)": "not an image",
    "too large: 30000x30000 is more than 67108864 pixels": "too large",
    "does not decode: OpenCV(5.0.0) error": "does not decode",
    "crashes the decoder (SIGSEGV)": "crashes the decoder",
    "PAM, which OpenCV decodes to wrong pixels: convert it to PNG or JPEG": "PAM, which OpenCV decodes to wrong pixels",
    "a PNG chunk at byte 33 does not match its CRC": "damaged",
}  # fmt: skip


@pytest.mark.parametrize(("reason", "cause"), REASONS.items())
def test_a_cause_leaves_out_what_is_particular_to_one_image(reason: str, cause: str) -> None:
    assert cause_of(reason) == cause


def shards_in(output: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in output.glob("shard-*")}


@pytest.mark.slow
def test_skipping_after_a_failure_goes_on_with_the_work_done(source: Path, tmp_path: Path) -> None:
    for name in BAD:  # one late image is bad, so that shards are built before it
        if name != "fox/broken.jpg":
            (source / name).unlink()
    with pytest.raises(
        BadImage, match="add --on-bad-image skip to leave such images out and continue from here"
    ):
        converted(source, tmp_path / "out", shard_size=10_000, order="key")
    done = shards_in(tmp_path / "out")

    skipping(source, tmp_path / "out", order="key")

    assert len(done) > 2
    assert shards_in(tmp_path / "out").items() >= done.items()
    skipping(source, tmp_path / "fresh", order="key")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")
    assert verify(tmp_path / "out", level="records").findings == []


@pytest.mark.torture
def test_the_command_goes_on_in_the_same_way(source: Path, tmp_path: Path) -> None:
    words = [
        "convert",
        source,
        tmp_path / "out",
        "--split",
        "train",
        "--shard-size",
        "10000",
        "--workers",
        "1",
    ]
    failed = prep(*words)
    done = shards_in(tmp_path / "out")

    prep(*words, "--on-bad-image", "skip", check=True)

    assert failed.returncode == 1
    assert shards_in(tmp_path / "out").items() >= done.items()
    assert tree(tmp_path / "out") == tree(skipping(source, tmp_path / "fresh").path)


def test_no_longer_skipping_trusts_no_shard_that_lacks_images(source: Path, tmp_path: Path) -> None:
    shards = len(skipping(source, tmp_path / "fresh").manifest.shards)
    plan_options = PlanOptions(shard_size=10_000, on_bad_image="skip")
    with pytest.raises(KeyboardInterrupt):
        convert(
            source,
            tmp_path / "out",
            split="train",
            plan_options=plan_options,
            workers=0,
            progress=StopAfter(shards),
        )

    with pytest.raises(BadImage):
        converted(source, tmp_path / "out", shard_size=10_000)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_split_that_was_finished_without_bad_images_stays_when_another_one_is_skipped(
    source: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        for at in range(4):
            write(tmp_path / "two" / split / "cat" / f"{at}.jpg", encoded(pixels(20 + at, 30, 3)))
    write(tmp_path / "two" / "val" / "cat" / "bad.jpg", JPEG[:-9])
    with pytest.raises(BadImage):
        convert(tmp_path / "two", tmp_path / "out", workers=0)
    before = tree(tmp_path / "out" / "train")

    train, val = convert(
        tmp_path / "two", tmp_path / "out", plan_options=PlanOptions(on_bad_image="skip"), workers=0
    )

    assert train.already_complete
    assert tree(tmp_path / "out" / "train") == before
    assert val.skipped.count == 1


def test_a_finished_dataset_that_lacks_images_is_refused_where_none_may_be_skipped(
    source: Path, tmp_path: Path
) -> None:
    skipping(source, tmp_path / "out")

    with pytest.raises(PlanMismatch, match="--on-bad-image was skip, is now fail"):
        converted(source, tmp_path / "out", shard_size=10_000)
