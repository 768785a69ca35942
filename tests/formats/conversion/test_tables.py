"""An index or table of boxes that is published with other contents is refused at every reading."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import ManifestDamaged, open_dataset, read_manifest, verify
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.runtime.json_record import sha256_of
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.tables import checked_index, index_dtype
from shardprep.loaders import Loader
from support.datasets import converted, flip, prep_here, writable
from support.resealed import Json, in_part, reseal, with_header, with_rows

DTYPE = "[('key', '|S25'), ('label', '<i4')]"
HEADERS = {
    "a huge shape": f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': ({10**30},), }}",
    "a negative shape": f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': (-1,), }}",
    "a boolean shape": f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': (True,), }}",
    "no shape": f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': (), }}",
    "two dimensions": f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': (5, 2), }}",
    "nested minus signs": "-" * 5000 + "1",
    "nested brackets": "(" * 5000,
    "no fields": "{'descr': [], 'fortran_order': False, 'shape': (10,), }",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (10,), }",
    "rows of nothing": "{'descr': '|V0', 'fortran_order': False, 'shape': (10,), }",
    "nothing": "",
    "no text": "\xff" * 60,
}


@pytest.fixture(scope="module")
def intact(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tables") / "val"
    converted(archives, output, split="val", shard_size=150_000)
    return output


def is_refused(dataset: Path, file: str) -> bool:
    """Whether everything that reads the dataset refuses it as damaged."""
    if {finding.file for finding in verify(dataset).findings} != {file}:
        return False
    with suppress(ManifestDamaged), open_dataset(dataset) as opened:
        return opened.boxes is None  # if it is there, it should have been refused
    if file == "index.npy":
        with pytest.raises(ManifestDamaged):
            Loader(dataset, batch_size=4, workers=0)
        done = prep_here("inspect", dataset)
        return (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    return True


def accepted(
    intact: Path, folder: Path, file: str, lies: Mapping[str, Callable[[Path], object]]
) -> list[str]:
    """The changes of the file that some reader accepts."""
    believed = []
    for number, (name, change) in enumerate(lies.items()):
        dataset = Path(shutil.copytree(intact, folder / str(number)))
        change(dataset)
        if not is_refused(dataset, file):
            believed.append(name)
        shutil.rmtree(dataset)
    return believed


TABLES = ["index.npy", "boxes.npy"]


@pytest.mark.parametrize("file", TABLES)
def test_another_header_is_refused(intact: Path, tmp_path: Path, file: str) -> None:
    lies = {name: partial(with_header, name=file, header=header) for name, header in HEADERS.items()}

    assert accepted(intact, tmp_path, file, lies) == []


def with_bytes(dataset: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = writable(dataset / name)
    path.write_bytes(change(path.read_bytes()))
    reseal(dataset)


BYTES: dict[str, Callable[[bytes], bytes]] = {
    **{f"only {size} bytes": lambda data, size=size: data[:size] for size in (0, 1, 9, 10, 127, 128)},  # type: ignore[misc]
    "a byte less": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "another version": lambda data: data[:6] + b"\x02" + data[7:],
    "other padding": lambda data: data.replace(b" \n", b"\n ", 1),
}


@pytest.mark.parametrize("file", TABLES)
def test_other_bytes_around_the_rows_are_refused(intact: Path, tmp_path: Path, file: str) -> None:
    lies = {name: partial(with_bytes, name=file, change=change) for name, change in BYTES.items()}

    assert accepted(intact, tmp_path, file, lies) == []


Change = Callable[[np.ndarray], np.ndarray | None]


def set_in(column: str, value: object, row: int = 3) -> Change:
    def change(rows: np.ndarray) -> None:
        rows[column][row] = value

    return change


INDEX_LIES: dict[str, Change] = {
    "a label of no class": set_in("label", 4),
    "a huge label": set_in("label", (1 << 31) - 1),
    "a negative label": set_in("label", -2),
    "a shard that is not there": set_in("shard", 7),
    "another shard": set_in("shard", 1, 0),
    "a huge shard": set_in("shard", (1 << 32) - 1),
    "another ordinal": set_in("ordinal", 0, 1),
    "a huge ordinal": set_in("ordinal", (1 << 32) - 1),
    "a length that no image has": set_in("length", (1 << 32) - 1),
    "another length": set_in("length", 1),
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
    "infinity": set_in("y_max", np.inf),
    "a side below 0": set_in("y_min", -0.1),
    "a least above its most": set_in("x_min", 1.0),
    "a row less": lambda rows: rows[:-1],
}


@pytest.mark.parametrize(("file", "columns"), [("index.npy", INDEX_LIES), ("boxes.npy", BOX_LIES)])
def test_columns_that_do_not_fit_the_manifest_are_refused(
    intact: Path, tmp_path: Path, file: str, columns: Mapping[str, Change]
) -> None:
    lies = {name: partial(with_rows, name=file, change=change) for name, change in columns.items()}

    assert accepted(intact, tmp_path, file, lies) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", ["records", "decode"])
def test_without_an_index_the_shards_are_still_checked(dataset: Path, level: str) -> None:
    with_rows(dataset, "index.npy", set_in("label", 4))
    shard = sorted(dataset.glob("shard-*"))[0]
    flip(shard, shard.stat().st_size // 2)

    report = verify(dataset, level=level)

    assert {finding.file for finding in report.findings} == {"index.npy", shard.name}


def fewer_classes(manifest: Json) -> None:
    classes = manifest["labels"]["classes"][:2]
    manifest["labels"] |= {"classes": classes, "sha256": sha256_of([c["name"] for c in classes])}


@pytest.mark.parametrize("change", [fewer_classes, in_part("dataset", image_bytes=1 << 60)])
def test_a_manifest_that_does_not_fit_its_index_is_refused(
    dataset: Path, change: Callable[[Json], object]
) -> None:
    remove(dataset, "boxes.npy")
    reseal(dataset, change)

    assert is_refused(dataset, "index.npy")


def remove(dataset: Path, name: str) -> None:
    """Publish a dataset without one of its tables."""

    def drop(manifest: Json) -> None:
        manifest["tables"] = [entry for entry in manifest["tables"] if entry["name"] != name]

    reseal(dataset, drop)
    (dataset / name).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["quick", "full", "records"])
def test_a_manifest_without_an_index_is_a_finding(dataset: Path, level: str) -> None:
    remove(dataset, "index.npy")

    (finding,) = verify(dataset, level=level).findings

    assert (finding.file, "does not list index.npy" in finding.problem) == ("manifest.json", True)
    with pytest.raises(ManifestDamaged):
        open_dataset(dataset)


def test_cutting_the_index_short_while_a_dataset_is_open_changes_nothing(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        before = opened.index.copy()
        os.truncate(writable(dataset / "index.npy"), 0)

        assert (opened.index == before).all()
    with pytest.raises(ManifestDamaged, match="not the file that was published"):
        open_dataset(dataset)


def test_an_index_cannot_be_written_to(dataset: Path) -> None:
    with open_dataset(dataset) as opened, pytest.raises(ValueError, match="read-only"):
        opened.index["label"][0] = 1


def test_a_fifo_for_an_index_is_not_waited_for(dataset: Path) -> None:
    (dataset / "index.npy").unlink()
    os.mkfifo(dataset / "index.npy")

    with pytest.raises(ManifestDamaged, match="not a regular file"):
        open_dataset(dataset)


def test_a_table_of_more_than_any_size_is_not_read(dataset: Path) -> None:
    with writable(dataset / "index.npy").open("r+b") as file:
        file.truncate(1 << 40)
    entry = FileEntry("index.npy", 1 << 40, "sha256:" + "0" * 64, 10)
    manifest = replace(read_manifest(dataset), tables=(entry,))

    with pytest.raises(ManifestDamaged, match="more than any table"):
        checked_index(dataset, manifest)


def test_keys_beyond_ascii_are_read(tmp_path: Path) -> None:
    """Each is checked by itself, however they lie in memory."""
    rows = np.zeros(2, index_dtype(2))
    rows["key"], rows["ordinal"], rows["length"] = ["é".encode(), b"ab"], [0, 1], 1
    np.save(tmp_path / "index.npy", rows)
    data = (tmp_path / "index.npy").read_bytes()
    digest = "sha256:" + sha256(data).hexdigest()
    entry, shard = FileEntry("index.npy", len(data), digest, 2), FileEntry("shard-00000.lmdb", 2, digest, 2)
    manifest = Manifest(
        split="train",
        records=2,
        image_bytes=2,
        partial=False,
        class_sorted=False,
        skipped=0,
        labels=LabelSpace.of(["a"]),
        source={},
        plan={},
        container="lmdb",
        writer={},
        tables=(entry,),
        shards=(shard,),
        content_root="",
    )

    assert checked_index(tmp_path, manifest)["key"].tolist() == ["é".encode(), b"ab"]
