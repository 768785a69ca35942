"""Columns joined to a finished dataset."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from shardprep.formats import PlanOptions, SourceOptions, convert, gate, join, open_dataset, repair, verify
from shardprep.formats.errors import (
    DataError,
    NoSpace,
    OutputBusy,
    PlanMismatch,
    SourceDamaged,
    SourceIncomplete,
    UsageError,
)
from shardprep.formats.shards.read import CONTAINERS
from shardprep.formats.sources.tables import TableForm
from shardprep.formats.verification.verify import DatasetFiles
from support.column_sources import as_csv, as_json_lines, picture, rows_of, write_pictures
from support.datasets import StopAfter, flip, prep_here, tree
from support.resealed import reseal
from support.sampling import torture_except
from support.source_builders import write

NAMES = [f"{number}.png" for number in range(9)]
ROWS = rows_of(NAMES)
SHARD_SIZE = 900


def made(output: Path, *, grey: bool = False, container: str = "lmdb", suffix: str = "png") -> Path:
    """A dataset of the pictures, of several shards."""
    source = output.parent / f"{output.name}-source"
    names = [f"{n}.{suffix}" for n in range(len(NAMES))]
    write_pictures(source / "images", names, grey=grey)
    write_pictures(source / "same", names)
    plan_options = PlanOptions(container=container, shard_size=SHARD_SIZE, seed=int(grey))
    options = SourceOptions(pairs=("same=same",))
    convert(source, output, split="train", plan_options=plan_options, source_options=options, workers=0)
    return output


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, its source, and masks for it."""
    folder = tmp_path_factory.mktemp("origins")
    made(folder / "masks", grey=True)
    return made(folder / "dataset").parent


@pytest.fixture
def masks(origins: Path) -> Path:
    return origins / "masks"


@pytest.fixture
def dataset(origins: Path, tmp_path: Path) -> Path:
    for name in ("dataset", "dataset-source"):
        shutil.copytree(origins / name, tmp_path / name)
    return tmp_path / "dataset"


def stored(dataset: Path, values: Callable[[int], Any]) -> np.ndarray:
    """An array with the value of each picture in the stored order of the dataset."""
    with open_dataset(dataset) as opened:
        return np.array([values(int(record.key.partition(".")[0])) for record in opened])


@pytest.mark.parametrize(("container", "workers"), torture_except([("lmdb", 0), ("hdf5", 2)], ("lmdb", 0)))
def test_columns_of_all_origins_are_there_and_no_file_was_written_again(
    tmp_path: Path, container: str, workers: int
) -> None:
    dataset = made(tmp_path / "dataset", container=container)
    made(tmp_path / "masks", grey=True, suffix="bmp")
    np.save(tmp_path / "vectors.npy", stored(dataset, lambda n: np.full((2, 3), n, ">f4")))
    np.save(tmp_path / "ages.npy", stored(dataset, lambda n: n).astype(np.uint8))
    rows = [{"key": f"{n}", "caption": f"a\n{n}"} for n in range(12)]
    write(tmp_path / "blob", as_csv(rows[::-1]).encode())
    (tmp_path / "t.csv").symlink_to("blob")
    boxes = [{"path": f"{n}.png", "x": [[n] * 4] * n} for n in range(9)]
    write(tmp_path / "t.jsonl", as_json_lines(boxes).encode())
    before = {path: path.stat() for path in dataset.iterdir() if path.name != "manifest.json"}
    opened = open_dataset(dataset)

    columns = {
        "mask": tmp_path / "masks",
        "other": f"{tmp_path / 'masks'}#same",
        "vector": tmp_path / "vectors.npy",
        "age": tmp_path / "ages.npy",
        "caption": tmp_path / "t.csv",
        "boxes:float32[*,4]": f"{tmp_path / 't.jsonl'}#x",
    }
    done = join(dataset, columns, workers=workers)

    assert done.added == ("mask", "other", "vector", "age", "caption", "boxes")
    assert [note.replace(str(tmp_path), "") for note in done.notes] == [
        "left out 3 values of /t.csv: no record here has such a key"
    ]
    assert {path: path.stat() for path in before} == before
    assert [record.image for record in opened] == [record.image for record in open_dataset(dataset)]
    assert verify(dataset).findings == []
    assert not (dataset / ".prep").exists()
    with open_dataset(dataset) as again:
        for record in again:
            n = NAMES.index(record.key)
            assert record["mask"] == picture(n, grey=True)
            assert record["other"] == record["same"] == record.image == picture(n)
            assert (record["age"], record["caption"]) == (n, f"a\n{n}")
            np.testing.assert_array_equal(record["vector"], np.full((2, 3), n, np.float32))
            np.testing.assert_array_equal(record["boxes"], np.full((n, 4), n, np.float32))
    assert [one["name"] for one in done.manifest.source["joined"]] == [*done.added]
    assert "sha256" in done.manifest.source["joined"][2]


@pytest.mark.parametrize("container", CONTAINERS)
def test_joining_in_jobs_of_any_size_is_converting_with_the_same_columns_and_reads_a_table_once(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardprep.formats.conversion.join.MAX_JOB_BYTES", 40)  # two records at a time
    options = PlanOptions(container=container, shard_size=SHARD_SIZE)
    for name in ("with", "plain"):
        write_pictures(tmp_path / name, NAMES)
    (table := tmp_path / "with/metadata.csv").write_bytes(as_csv(ROWS).encode())
    write(tmp_path / "plain/metadata.csv", b"file_name\n" + b"".join(f"{n}\n".encode() for n in NAMES))
    (whole,) = convert(tmp_path / "with", tmp_path / "a", plan_options=options, workers=0)
    (plain,) = convert(tmp_path / "plain", tmp_path / "b", plan_options=options, workers=0)

    assert plain.manifest.columns is None
    with patch.object(TableForm, "rows", autospec=True, side_effect=TableForm.rows) as read:
        join(plain.path, {"age": table, "score": table}, workers=0)
    done = join(plain.path, {"caption": table}, workers=0)

    assert read.call_count == 1
    for name in ("content_root", "records_root", "schema"):
        assert getattr(done.manifest, name) == getattr(whole.manifest, name)
    captions = {record.key: record["caption"] for record in open_dataset(plain.path)}
    assert captions == {row["file_name"]: row["caption"] for row in ROWS}


UNMATCHED: dict[str, tuple[list[int], str]] = {
    "8": ([*range(8)], r"8\.png: this record of the dataset has no partner here \(one of 1"),
    "other": ([*range(8), 9], r"8\.png: .*no partner here .*; 9 here belongs to no record \(one of 1"),
    "twice": ([*range(9), 8], "8: .*occurs twice"),
    "none": ([], "no partner here"),
}


@pytest.mark.parametrize(
    ("columns", "error", "match"),
    [
        ({}, UsageError, "name at least one column"),
        ({"same": "a.npy"}, UsageError, "a column same with different values; choose another name"),
        ({"label": "a.npy"}, UsageError, "reserved"),
        ({"a": "nowhere"}, UsageError, "does not exist"),
        ({"a": "text.txt"}, UsageError, "not a known kind of table"),
        ({"a:text": "a.npy"}, UsageError, r"holds int64\[\], which is not text"),
        ({"a:int": "dataset"}, UsageError, "holds values of kind image, not int"),
        ({"a": "dataset#b"}, UsageError, "no column 'b'; the columns are: same"),
        ({"a": "a.npy#b"}, UsageError, "an array, which has no columns"),
        ({"a": "short.npy"}, SourceIncomplete, "has 8 rows; the dataset has 9"),
        ({"a": "objects.npy"}, SourceDamaged, "holds object"),
        ({"a": "long.npy"}, SourceDamaged, "holds float128.*up to 64 bits"),
        ({"a": "cut.npy"}, SourceDamaged, "does not have the size its header gives"),
        ({"a": "text.npy"}, SourceDamaged, "write it with numpy.save"),
        ({"b": "a.csv"}, SourceDamaged, "line 1: has no column 'b'"),
        ({"age": "no_key.csv"}, SourceDamaged, "line 1: has no column of keys or paths"),
        ({"age": "ragged.csv"}, SourceDamaged, "line 3: has 1 column"),
        ({"age": "val.csv"}, SourceIncomplete, r"val/9: keys match only by .* \(one of 1\); leave out other"),
        ({"age:int": "words.csv"}, SourceDamaged, "the column age: expected a whole number, not 'x'"),
        ({"age:labels": "a.npy"}, UsageError, "needs classes|which is no labels"),
        *(({"age": f"{name}.csv"}, SourceIncomplete, match) for name, (_, match) in UNMATCHED.items()),
    ],
)
def test_what_cannot_be_joined_is_refused_and_changes_nothing(
    columns: dict[str, str], error: type[Exception], match: str, dataset: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.arange(9))
    np.save(tmp_path / "short.npy", np.arange(8))
    np.save(tmp_path / "objects.npy", np.array([object()] * 9))
    np.save(tmp_path / "long.npy", np.arange(9, dtype=np.longdouble) / 3)
    write(tmp_path / "cut.npy", (tmp_path / "a.npy").read_bytes()[:-1])
    for name in ("text.npy", "text.txt"):
        write(tmp_path / name, b"text")
    keys = [name.removesuffix(".png") for name in NAMES]
    write(tmp_path / "a.csv", as_csv([{"key": key, "a": key} for key in keys]).encode())
    write(tmp_path / "words.csv", as_csv([{"Path": key, "age": "x"} for key in keys]).encode())
    for name, (numbers, _) in UNMATCHED.items():
        write(tmp_path / f"{name}.csv", b"key,age\n" + b"".join(b"%d,1\n" % number for number in numbers))
    write(tmp_path / "val.csv", b"key,age\n" + b"".join(b"val/%d,1\n" % number for number in range(10)))
    write(tmp_path / "no_key.csv", b"name,age\n1,2\n")
    write(tmp_path / "ragged.csv", b"key,age\n1,2\n3\n")
    before = tree(dataset)

    with pytest.raises(error, match=match):
        join(dataset, {name: str(tmp_path / origin) for name, origin in columns.items()}, workers=0)

    assert {name: digest for name, digest in tree(dataset).items() if not name.startswith(".prep")} == before
    assert verify(dataset).exit_code == 0


def test_what_is_damaged_of_joined_columns_is_found_and_mended_by_the_same_join(
    dataset: Path, masks: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "ages.npy", np.arange(9))
    columns = {"mask": masks, "age": tmp_path / "ages.npy"}
    first = join(dataset, columns, workers=0)
    before = tree(dataset)

    again = join(dataset, columns, workers=0)
    flip(dataset / "column-mask-00001.lmdb", 4000)
    flip(dataset / "column-age.npy", 200)
    (dataset / "column-mask-00000.lmdb").unlink()
    found = prep_here("verify", dataset, "--quiet")
    left = repair(dataset, tmp_path / "dataset-source", workers=0)
    (dataset / "shard-00000.lmdb").unlink()
    both = prep_here("verify", dataset, "--quiet")
    repaired = repair(dataset, tmp_path / "dataset-source", workers=0)
    mended = join(dataset, columns, workers=0)

    assert (again.added, again.rebuilt, again.manifest) == ((), (), first.manifest)
    assert (found.returncode, both.returncode) == (1, 1)
    assert "next: run the prep join command that added these" in found.stdout
    assert "next: prep repair" in both.stdout
    assert repaired.rebuilt == ("shard-00000.lmdb",)
    damaged = {"column-mask-00000.lmdb", "column-mask-00001.lmdb", "column-age.npy"}
    assert {one.file for one in left.findings} == {one.file for one in repaired.findings} == damaged
    assert ({*mended.rebuilt}, left.rebuilt) == (damaged, ())
    assert mended.added == ()
    assert tree(dataset) == before


def test_a_repair_or_conversion_discards_no_join_that_is_unfinished_or_finishes_meanwhile(
    dataset: Path, masks: Path, tmp_path: Path
) -> None:
    source, victim = tmp_path / "dataset-source", dataset / "shard-00000.lmdb"
    whole = tree(dataset)
    with pytest.raises(KeyboardInterrupt):
        join(dataset, {"mask": masks}, workers=0, progress=StopAfter(2))
    begun = tree(made(dataset))  # complete already
    victim.unlink()
    given_up, replaced = (shutil.copytree(dataset, tmp_path / name) for name in ("given-up", "replaced"))

    with pytest.raises(PlanMismatch, match=r"has an unfinished join.*run the same prep join again"):
        repair(dataset, source, workers=0)
    left = tree(dataset)
    shutil.rmtree(given_up / ".prep")
    (replaced / ".prep/plan.json").write_bytes(b'{"joined to":"another dataset"}\n')
    for folder in (given_up, replaced):
        repair(folder, source, workers=0)
    check, names = DatasetFiles.check_others, iter(("mask", "more"))

    def check_later(*found: Any) -> None:
        join(dataset, {next(names): masks}, workers=0)
        check(*found)

    with patch.object(DatasetFiles, "check_others", check_later):
        assert [each.file for each in verify(dataset).findings] == [victim.name]
        with pytest.raises(OutputBusy, match="changed by another process in the meantime; try again"):
            repair(dataset, source, workers=0)
    repair(dataset, source, workers=0)

    assert left == {name: digest for name, digest in begun.items() if name != victim.name}
    assert any(name.endswith(".commit") for name in left)
    assert tree(given_up) == whole
    assert verify(dataset, level="records").findings == []


@pytest.mark.parametrize("origin", ["array", "table", "images", "column"])
def test_space_is_checked_before_anything_is_written(
    dataset: Path, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    np.save(tmp_path / "values.npy", stored(dataset, lambda n: np.full(100, n)))
    write(tmp_path / "t.csv", as_csv([{"key": f"{n}", "new": "a" * 800} for n in range(9)]).encode())
    files = {
        "array": tmp_path / "values.npy",
        "table": tmp_path / "t.csv",
        "images": masks,
        "column": f"{masks}#same",
    }
    usage, before = shutil.disk_usage(tmp_path), tree(dataset)
    free = {"images": 9 * 60, "column": 9 * 60, "array": 2 * 9 * 800}.get(origin, 9 * 800)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))

        with pytest.raises(NoSpace, match=r"needs [\d.]+ K?B and the disk has [\d.]+ K?B free"):
            join(dataset, {"new": files[origin]}, workers=0)

    assert tree(dataset) == before
    assert join(dataset, {"new": files[origin]}, workers=0).added == ("new",)


def test_the_command_says_what_was_joined(dataset: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ages.npy", np.arange(9))
    words = ["join", dataset, "--column", f"age={tmp_path / 'ages.npy'}", "--workers", 0]

    done, again = prep_here(*words, "--quiet"), prep_here(*words, "--json")
    wrong = [prep_here("join", dataset, "--column", text).returncode for text in ("age", "age=", "a=nowhere")]
    short = prep_here("join", dataset, "--column", f"b={dataset / 'column-same.npy'}")

    assert done.returncode == 0, done.stderr
    assert "9 records, 2 columns" in done.stdout
    assert "added         age" in done.stdout
    assert json.loads(again.stdout)["columns"] == {"same": "image", "age": "int"}
    assert json.loads(again.stdout)["added"] == []
    assert wrong == [2, 2, 2]
    assert (short.returncode, short.stderr.count("a column takes")) == (1, 1)
    assert not (dataset / ".prep").exists()


def test_a_folder_of_splits_is_refused_and_one_of_partners_gives_its_split(
    dataset: Path, masks: Path, tmp_path: Path
) -> None:
    shutil.copytree(masks, tmp_path / "masks/train")

    for call, other in ((join, {"mask": masks}), (gate, {"damaged": 0}), (repair, masks)):
        with pytest.raises(UsageError, match="folder of splits"):
            call(tmp_path / "masks", other)
    with pytest.raises(DataError, match="not a dataset"):
        join(dataset, {"mask": tmp_path / "dataset-source"}, workers=0)
    reseal(dataset, lambda manifest: manifest["source"].update(joined=None))  # as no release writes it
    assert join(dataset, {"mask": tmp_path / "masks"}, workers=0).added == ("mask",)
