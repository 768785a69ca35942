"""Conversion: the same images give the same bytes, whatever they came in and however often it stopped."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardprep.formats import (
    Converted,
    ConvertOptions,
    PlanOptions,
    SkippedCause,
    SkippedImages,
    convert,
    join,
    open_dataset,
    verify,
)
from shardprep.formats.conversion import prepare as preflight
from shardprep.formats.errors import BadImage, NoSpace, PlanMismatch, UsageError
from shardprep.formats.runtime import files as filesystem
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.progress import Progress
from support.datasets import StopAfter, converted, prep_here, tree
from support.image_files import JPEG, encoded, pixels
from support.record_sources import tfds, write_tfrecord
from support.sampling import torture_except
from support.source_builders import write


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    container=st.sampled_from(["lmdb", "hdf5"]),
    shard_size=st.integers(1, 400_000),
    order=st.sampled_from(["key", "shuffled"]),
)
def test_neither_container_nor_shard_size_changes_the_content(
    archives: Path, tmp_path_factory: pytest.TempPathFactory, container: str, shard_size: int, order: str
) -> None:
    folder, options = tmp_path_factory.mktemp("out"), {"split": "val", "order": order}

    manifest = converted(archives, folder / "d", container=container, shard_size=shard_size, **options)

    assert manifest.content_root == converted(archives, folder / "reference", **options).content_root
    assert verify(folder / "d", level="quick").findings == []


@pytest.mark.slow
@pytest.mark.parametrize("container", torture_except(["lmdb", "hdf5"], "lmdb"))
def test_any_number_of_workers_gives_the_same_bytes(archives: Path, tmp_path: Path, container: str) -> None:
    for workers in (0, 1, 3):
        converted(archives, tmp_path / f"{workers}", workers=workers, container=container)

    assert tree(tmp_path / "0") == tree(tmp_path / "1") == tree(tmp_path / "3")


def test_labels_of_val_follow_the_ground_truth_in_every_space(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "val", split="val")

    with (
        open_dataset(tmp_path / "val") as plain,
        open_dataset(tmp_path / "val", labels="ilsvrc2012_id") as devkit,
        open_dataset(tmp_path / "val", labels="sorted_wnid1_bg") as background,
    ):
        for number, record in enumerate(plain):
            assert devkit[number].label == plain.manifest.labels.classes[record.label].ilsvrc2012_id
            assert background[number].label == record.label + 1


def interrupted(source: Path, output: Path, *, split: str = "train", **options: object) -> None:
    """A conversion that has built some shards and was then interrupted."""
    plan_options = PlanOptions(shard_size=60_000, **options)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt) as stop:
        convert(source, output, split=split, plan_options=plan_options, workers=0, progress=StopAfter(3))
    (note,) = stop.value.__notes__
    assert re.fullmatch(r"[1-3] of \d+ shards (is|are) done; run it again to continue", note)


def test_a_folder_may_have_the_name_of_a_scheme_and_a_url_is_none(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert converted(archives, Path("s3"), split="test").records
    for url in ("s3://bucket/test", Path("s3://bucket/test")):
        with pytest.raises(UsageError, match="is a URL"):
            convert(archives, url, split="test", workers=0)


def test_a_restart_that_is_interrupted_goes_on_without_restart(archives: Path, tmp_path: Path) -> None:
    interrupted(archives, tmp_path / "out/val", split="val")
    plan_options, restart = PlanOptions(shard_size=60_000, seed=5), ConvertOptions(restart=True)
    again = partial(convert, archives, tmp_path / "out", plan_options=plan_options, workers=0)
    with pytest.raises(KeyboardInterrupt) as stop:
        again(options=restart, progress=StopAfter(1))
    done = again()

    (note,) = stop.value.__notes__
    assert re.fullmatch(r"1 of \d+ shards is done; run it again, without restart, .*", note)
    assert [one.already_complete for one in done] == [False] * 3


@pytest.mark.parametrize("change", [{}, {"image_bytes": "7"}, {"size": 7.5}])
def test_a_conversion_that_an_earlier_release_began_is_finished_and_damaged_records_of_it_count_as_none(
    change: dict[str, object], archives: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "whole/val", split="val", shard_size=60_000)
    interrupted(archives, tmp_path / "out/val", split="val")
    for path in (tmp_path / "out/val/.prep").glob("*.commit"):
        commit = json.loads(path.read_bytes())
        del commit["rows"]
        path.write_bytes(canonical_json(commit | change))  # another form would be built again
    done = convert(archives, tmp_path / "out/val", split="val", plan_options=PlanOptions(shard_size=60_000))

    assert not done[0].already_complete
    assert tree(tmp_path / "out/val") == tree(tmp_path / "whole/val")


CHANGES = [
    ({"seed": 5}, "--seed was 0, is now 5"),
    ({"shard_size": 3 << 20}, "--shard-size was 60000, is now 3MiB"),
    ({"decode_check": True}, "--decode-check was off, is now on"),
    ({"container": "hdf5", "seed": 1}, "--format was lmdb, is now hdf5, --seed was 0, is now 1"),
]


@pytest.mark.parametrize(("changed", "said"), CHANGES)
def test_resuming_with_other_options_is_refused_and_names_old_and_new(
    archives: Path, tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    interrupted(archives, tmp_path / "out")
    with pytest.raises(PlanMismatch, match=f"unfinished conversion: {said}; give the options"):
        converted(archives, tmp_path / "out", **changed)
    begun, now = {"names": ["0"], "seed": 0, "columns": ["a:int"]}, {"names": [], "seed": 5}
    said = "--seed was 0, is now 5, --column was ['a:int'], is now off"
    assert preflight.describe_differences(begun, now) == said


def test_newer_files_in_the_source_of_a_finished_conversion_are_noted(tmp_path: Path) -> None:
    write(file := tmp_path / "source/cat/1.jpg", JPEG)
    for time, is_noted in ((1, False), (2, False), (1 << 32, True)):
        os.utime(file, (time, time))
        (done,) = convert(tmp_path / "source", tmp_path / "out", split="train", workers=0)
        assert any("are newer than this dataset" in note for note in done.notes) == is_noted


def test_space_is_checked_before_anything_is_written(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(NoSpace, match="free"):
        converted(archives, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))  # of ramfs
    assert converted(archives, tmp_path / "out", split="test").records


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "beegfs", "fuse.sshfs"])
def test_lmdb_on_a_network_file_system_is_refused(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts, disk = tmp_path / "mountinfo", tmp_path / "a\tdisk\x85"
    disk.mkdir()
    hidden = f"1 0 8:1 / / rw - ext4 /dev/vda rw\n1 0 8:1 / {tmp_path}/a\\011disk\x85 rw - xfs /dev/vdb rw\n"
    mounts.write_text(f"{hidden}2 1 0:1 / {tmp_path}/a\\011disk\x85 rw shared:1 - {kind} x rw\n")
    monkeypatch.setattr(filesystem, "MOUNTS", mounts)
    with pytest.raises(UsageError, match="network"):
        converted(archives, disk / "out")
    converted(archives, disk / "hdf5", container="hdf5")
    mounts.write_text(mounts.read_text().replace(kind, "fuse.fuse-overlayfs"))
    converted(archives, disk / "out")


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
    assert "all images of fox were skipped" in done.stderr
    (split,) = json.loads(again.stdout)["splits"]
    assert split["skipped"] == 5
    assert split["skipped_causes"][0] == {"cause": "not an image", "count": 2, "first": "cat/more.txt"}
    assert split["emptied_classes"] == ["fox"]


def test_a_shard_of_bad_images_only_has_columns_of_one_size(tmp_path: Path) -> None:
    examples = [tfds(n, height=n) | ({"image": b"bad"} if n == 1 else {}) for n in range(3)]
    write_tfrecord(source := tmp_path / "train.tfrecord", examples)
    np.save(tmp_path / "widths.npy", np.arange(2))
    manifest = converted(source, tmp_path / "out", shard_size=1, on_bad_image="skip", order="key")
    join(tmp_path / "out", {"width": tmp_path / "widths.npy"}, workers=0)

    assert [shard.records for shard in manifest.shards] == [1, 0, 1]
    with open_dataset(tmp_path / "out") as dataset:
        assert [(record["height"], record["width"]) for record in dataset] == [(0, 0), (2, 1)]
    assert verify(tmp_path / "out").exit_code == 0


def test_no_longer_skipping_trusts_no_shard_that_lacks_images(source: Path, tmp_path: Path) -> None:
    shards = len(skipping(source, tmp_path / "fresh").manifest.shards)
    with pytest.raises(KeyboardInterrupt):
        skipping(source, tmp_path / "out", progress=StopAfter(shards))

    with pytest.raises(BadImage):
        converted(source, tmp_path / "out", shard_size=10_000)
    assert not (tmp_path / "out" / "manifest.json").exists()
