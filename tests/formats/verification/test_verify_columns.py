"""Verification of columns: damage in any of their files is found at the level that promises it."""

import random
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from shardprep.formats import Finding, PlanOptions, open_dataset, read_manifest, verify
from shardprep.formats.errors import DataError
from shardprep.formats.records.schema import Schema
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.shards.read import CONTAINERS
from support.column_datasets import EVERY_KIND, write_columns
from support.crashing_decoder import crashing, install
from support.image_files import JPEG, chunk, png_head
from support.mutations import mutated
from support.resealed import listed, reseal, with_rows
from support.sampling import torture_except

NAMES = EVERY_KIND.names


@pytest.fixture(scope="module", params=torture_except(CONTAINERS, "hdf5"))
def intact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact") / request.param
    write_columns(folder, options=PlanOptions(container=request.param, shard_size=9000))
    return folder


def found(dataset: Path, level: str = "full") -> list[Finding]:
    report = verify(dataset, level=level, workers=2)
    assert report.unchecked == []
    return report.findings


@pytest.mark.parametrize("level", ["full", "records"])
def test_progress_counts_each_record_once_when_its_columns_are_checked(intact: Path, level: str) -> None:
    progress = Mock(wraps=NoProgress())
    assert verify(intact, level=level, progress=progress).findings == []
    *before, last = (call.args for call in progress.at.call_args_list)
    most = max(records for records, size in before if size < last[1])
    assert last[0] == read_manifest(intact).records > most


def files(dataset: Path) -> list[Path]:
    """The files of the columns."""
    return sorted(dataset.glob("column-*"))


def of_column(dataset: Path, name: str) -> Path:
    """The file with the column's values of the first shard."""
    return next((path for path in sorted(dataset.glob(f"column-{name}-*"))), dataset / f"column-{name}.npy")


def test_any_changed_file_of_a_column_is_found_and_none_of_it_is_a_value(dataset: Path) -> None:
    rng = random.Random(0)
    with open_dataset(dataset) as opened:
        intact = [repr(dict(record.columns)) for record in opened]
    assert len(files(dataset)) >= len(NAMES) + 2 * sum(not field.is_fixed for field in EVERY_KIND)
    for path in files(dataset) * 4:
        honest = path.read_bytes()
        changed = mutated(honest, rng)
        path.write_bytes(changed)

        assert {f.file for f in found(dataset)} == ({path.name} if changed != honest else set())
        with suppress(DataError), open_dataset(dataset) as opened:
            for record, values in zip(opened, intact, strict=True):
                for name in NAMES:
                    with suppress(DataError):
                        assert f"{name!r}: {record[name]!r}" in values
        path.write_bytes(honest)


@pytest.mark.slow
def test_swapped_files_and_rows_are_found_under_a_right_root(dataset: Path) -> None:
    for name in ("age", "vector"):
        with_rows(dataset, f"column-{name}.npy", lambda rows: rows[[1, 0, *range(2, len(rows))]])
    keys = [key.decode() for key in np.load(dataset / "index.npy")["key"][:2]]
    caption, about = (of_column(dataset, name) for name in ("caption", "about"))
    caption.rename(dataset / "kept")
    about.rename(caption)
    (dataset / "kept").rename(about)
    reseal(dataset)

    findings = found(dataset, "records")
    named = {(f.file, f.key) for f in findings}

    assert found(dataset, "decode") == findings
    assert {(f"column-{name}.npy", key) for name in ("age", "vector") for key in keys} <= named
    assert {caption.name, about.name} <= {file for file, _ in named}


@pytest.mark.slow
@pytest.mark.parametrize("name", torture_except(["caption", "colour"], "caption"))
def test_another_value_under_right_checksums_is_not_of_the_content_root(tmp_path: Path, name: str) -> None:
    field = EVERY_KIND[name]
    value = field.codec.encode("grüN 3" if name == "caption" else 1)
    write_columns(tmp_path / "d", 4, Schema([field]))
    write_columns(tmp_path / "other", 4, Schema([field]), instead={name: value})
    for path in files(tmp_path / "other"):
        shutil.copy(path, tmp_path / "d" / path.name)
    reseal(tmp_path / "d")

    assert [f.file for f in found(tmp_path / "d")] == []
    (finding,) = found(tmp_path / "d", "records")
    assert finding.problem == f"its content_root of the column {name} differs from that of the values"


def test_other_lengths_under_a_right_root_are_found(dataset: Path) -> None:
    with_rows(dataset, "column-sound.npy", lambda rows: rows["length"].__setitem__(1, rows["length"][1] + 1))
    (value,) = found(dataset, "records")
    with_rows(dataset, "column-sound.npy", lambda rows: rows["length"].__setitem__(1, 1 << 27))
    (table,) = found(dataset)

    assert (value.file, table.file) == (of_column(dataset, "sound").name, "column-sound.npy")
    assert "differs from the table" in value.problem
    assert "rows that do not fit the manifest" in table.problem


@pytest.mark.torture
def test_a_damaged_index_leaves_the_columns_checked_by_what_they_hold(dataset: Path) -> None:
    (dataset / "index.npy").write_bytes(b"")
    caption = of_column(dataset, "caption")
    caption.write_bytes(caption.read_bytes().replace("grün".encode(), "grüm".encode(), 1))

    named = {(f.file, f.problem.partition(";")[0]) for f in found(dataset, "records")}

    assert ("index.npy", f"has 0 bytes, not {listed(dataset, 'index.npy')['size']}") in named
    assert (caption.name, "its SHA-256 differs from the manifest") in named
    assert any(name == caption.name and "CRC-32C" in problem for name, problem in named)


BAD_VALUES = {
    "mask": png_head(4, 4, 0) + chunk(b"IDAT", b"no pixels") + chunk(b"IEND"),
    "caption": b"\xff",
    "about": b"{",
    "tags": b"abc",
    "boxes": b"\3\0\0\0",
    "colour": (7).to_bytes(4, "little"),
}


@pytest.mark.torture
def test_a_value_that_is_none_of_its_kind_is_found_at_the_last_level(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", instead=BAD_VALUES)

    assert found(tmp_path / "d", "records") == []
    findings = found(tmp_path / "d", "decode")
    assert {f.file.split("-")[1].removesuffix(".npy") for f in findings} == {*BAD_VALUES}
    assert {f.key for f in findings} == {"k0003"}


@pytest.mark.slow
def test_a_mask_that_crashes_the_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)
    write_columns(tmp_path / "d", instead={"mask": crashing(JPEG)})

    (finding,) = found(tmp_path / "d", "decode")

    assert (finding.key, finding.problem) == ("k0003", "crashes the decoder (SIGSEGV)")
