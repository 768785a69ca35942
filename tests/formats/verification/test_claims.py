"""What a manifest and its tables claim of the records is checked, as far as the records show it."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import Manifest, ManifestDamaged, open_dataset, read_manifest, verify
from shardprep.formats.errors import CorruptRecord
from shardprep.formats.records.record import LabelSpace, official_words
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.shards.manifest import index_dtype, read_index
from shardprep.formats.shards.read import FileEntry, Rows
from shardprep.formats.verification.checks import check_quarantine, false_claims
from shardprep.loaders import Loader
from support.datasets import converted, prep_here, writable
from support.image_files import png
from support.loaded import epoch_of, loader_on
from support.resealed import reseal, with_rows
from support.source_builders import write


@pytest.fixture(scope="module")
def intact(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("promises") / "val"
    converted(archives, output, split="val", shard_size=150_000)
    return output


@pytest.fixture(scope="module")
def opened(intact: Path) -> tuple[Manifest, Rows]:
    with open_dataset(intact) as dataset:
        return dataset.manifest, dataset.index


def broken(manifest: Manifest, index: Rows) -> str:
    return "; ".join(false_claims(manifest, index))


def test_claims_that_are_not_those_of_the_rows_are_found(opened: tuple[Manifest, Rows]) -> None:
    manifest, index = opened
    for plan in ({"seed": 1}, {"seed": -1}, {"seed": 1 << 64}, {"order": "key"}):
        other = replace(manifest, plan=manifest.plan | plan)
        assert "its order differs from the plan's" in broken(other, index)
    twice = index.copy()
    twice["key"][[2, 7]] = twice["key"][4]
    assert "two records have the same key" in broken(manifest, twice)
    assert "1 of its images are crop-ready, but 0 of" in broken(replace(manifest, crop_ready=1), index)
    for own in ({"class_sorted": True, "skipped": 1}, {"plan": manifest.plan | {"order": "source"}}):
        assert broken(replace(manifest, **own), index) == ""
    assert "its class_sorted is True" in broken(replace(manifest, class_sorted=True), index)
    assert "its class_sorted is False" in broken(manifest, index[np.argsort(index["label"], kind="stable")])


def test_partial_is_known_for_the_official_classes(opened: tuple[Manifest, Rows]) -> None:
    manifest, index = opened
    official = replace(manifest, labels=LabelSpace.of(official_words()))

    assert "its partial is False, with 10 images of 50,000" in broken(official, index)
    assert broken(replace(official, partial=True), index) == ""
    assert broken(replace(manifest, partial=True), index) == ""


LISTS = {
    "one image too few": [],
    "an image more": [{"key": "k", "where": "w", "reason": "r"}] * 3,
    "no list": {},
    "no images": ["k"] * 2,
    "numbers": [{"key": 1, "where": "w", "reason": "r"}] * 2,
}


@pytest.fixture(scope="module")
def quarantined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset from a source with two bad images."""
    folder = tmp_path_factory.mktemp("quarantined")
    for number, name in enumerate("aabbab"):
        image = b"no image" if number in (0, 3) else png(number + 1, 2, 2)
        write(folder / "source" / name / f"{number}.png", image)
    converted(folder / "source", folder / "out", on_bad_image="skip")
    return folder / "out"


def test_a_quarantine_list_that_is_right_is_no_finding(quarantined: Path) -> None:
    assert read_manifest(quarantined).skipped == 2
    assert verify(quarantined, level="records").findings == []


@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_a_quarantine_list_that_is_not_what_was_skipped_is_refused(
    quarantined: Path, tmp_path: Path, listed: object
) -> None:
    (tmp_path / "quarantine.json").write_bytes(canonical_json(listed))

    with pytest.raises(ManifestDamaged) as raised:
        check_quarantine(tmp_path, read_manifest(quarantined))
    assert raised.value.path == str(tmp_path / "quarantine.json")


Change = Callable[[np.ndarray], np.ndarray | None]


def set_in(column: str, value: object, row: int = 3) -> Change:
    def change(rows: np.ndarray) -> None:
        rows[column][row] = value

    return change


INDEX_LIES: dict[str, Change] = {
    "a label of no class": set_in("label", 4),
    "a negative label": set_in("label", -2),
    "a shard that is not there": set_in("shard", 7),
    "another shard": set_in("shard", 1, 0),
    "another ordinal": set_in("ordinal", 0, 1),
    "a length that no image has": set_in("length", (1 << 32) - 1),
    **{f"the offset {offset}": set_in("offset", offset) for offset in (176_000, 1 << 40, (1 << 64) - 1)},
    "a key that is not UTF-8": set_in("key", b"\xff"),
    "a key with half of a pair": set_in("key", b"\xed\xa0\x80"),
    "keys that are text only together": lambda rows: rows["key"].put([0, 1], [b"a\xc3", b"\xa4"]),
    "a row less": lambda rows: rows[:-1],
    "no rows": lambda rows: rows[:0],
    "a row more": lambda rows: np.concatenate([rows, rows[-1:]]),
    "a column more": lambda rows: np.zeros(len(rows), [*rows.dtype.descr, ("more", "<i4")]),
    "big-endian rows": lambda rows: rows.astype(rows.dtype.newbyteorder(">")),
    "wide keys": lambda rows: rows.astype(index_dtype(1025)),
}
BOX_LIES: dict[str, Change] = {
    "a record that is not there": set_in("record", 10, -1),
    "records out of order": lambda rows: rows[::-1],
    "a label of no class": set_in("label", 4),
    "no number": set_in("x_min", np.nan),
    "a side below 0": set_in("y_min", -0.1),
    "a least above its most": set_in("x_min", 1.0),
    "a row less": lambda rows: rows[:-1],
}


@pytest.mark.parametrize(
    ("file", "name"),
    [*(("index.npy", name) for name in INDEX_LIES), *(("boxes.npy", name) for name in BOX_LIES)],
)
def test_rows_that_do_not_fit_the_manifest_are_refused_by_every_reader(
    dataset: Path, file: str, name: str
) -> None:
    with_rows(dataset, file, {"index.npy": INDEX_LIES, "boxes.npy": BOX_LIES}[file][name])

    assert {finding.file for finding in verify(dataset).findings} == {file}
    with suppress(ManifestDamaged), open_dataset(dataset) as opened:
        assert opened.boxes is None  # if it is there, it should have been refused
    if file == "index.npy":
        with pytest.raises(ManifestDamaged):
            Loader(dataset, batch_size=4, workers=0)
        done = prep_here("inspect", dataset)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["quick", "full", "records"])
def test_a_manifest_without_an_index_is_a_finding(dataset: Path, level: str) -> None:
    reseal(dataset, lambda manifest: manifest["tables"].pop(0))
    (dataset / "index.npy").unlink()

    (finding,) = verify(dataset, level=level).findings

    assert (finding.file, "does not list index.npy" in finding.problem) == ("manifest.json", True)
    with pytest.raises(ManifestDamaged):
        open_dataset(dataset)


def test_a_table_of_more_than_any_size_is_not_read(dataset: Path) -> None:
    with writable(dataset / "index.npy").open("r+b") as file:
        file.truncate(1 << 40)
    entry = FileEntry("index.npy", 1 << 40, "sha256:" + "0" * 64, 10)
    manifest = replace(read_manifest(dataset), tables=(entry,))

    with pytest.raises(ManifestDamaged, match="more than any table"):
        read_index(dataset, manifest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value"), [("label", 3), ("label", -1), ("key", b"n1/other"), ("crc32c", 7), ("offset", 100)]
)
def test_a_record_that_is_not_as_the_index_says_is_corrupt(
    lmdb_shards: Path, tmp_path: Path, column: str, value: object
) -> None:
    dataset = Path(shutil.copytree(lmdb_shards, tmp_path / "dataset"))
    with open_dataset(dataset) as opened:
        number = next(n for n in range(20, 204) if opened.index["label"][n] not in (3, -1))
    with_rows(dataset, "index.npy", set_in(column, value, number))
    key = np.load(dataset / "index.npy")["key"][number].decode()

    for transform in ({"transform": None}, {}):
        with (
            loader_on(dataset, workers=0, shuffle=None, **transform) as loader,
            pytest.raises(CorruptRecord, match="does not match its CRC-32C") as raised,
        ):
            epoch_of(loader)
        assert raised.value.key == key
        assert raised.value.shard is not None
