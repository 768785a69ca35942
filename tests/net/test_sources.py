"""The contract of sources: any content, in the files of any layout, is converted to these records or refused.

A member writes content as the files of its layout. The laws hold over all members.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardprep.formats import open_dataset, verify, write_dataset
from shardprep.formats.errors import DataError, OperationError, UsageError
from shardprep.formats.sources.recognise import recognise
from support.column_sources import as_csv, as_json_lines
from support.datasets import converted
from support.image_files import encoded, pixels
from support.record_sources import write_shard, write_tfrecord
from support.source_builders import TRAIN, Miniature, tar_of, write

WNIDS = ["n90000001", "n90000002", "n90000003"]  # none of the official ones, of which there are more
NAMED = (UsageError, DataError, OperationError, OSError)


class Sample(NamedTuple):
    """An image: its stem, its class, its bytes, and a text beside it."""

    stem: str
    wnid: str
    image: bytes
    text: str


Content = list[Sample]


@dataclass(frozen=True)
class Member:
    """A layout: ``write`` makes its files in a folder, in the order given, and returns the path to convert.

    ``text`` is the column of the texts, if they have one; ``has_names`` says that classes have their names,
    and ``is_checked`` that the layout has checksums by which a changed byte is found.
    """

    write: Callable[[Path, Content], Path]
    text: str = ""
    has_names: bool = True
    is_checked: bool = False


def class_folders(folder: Path, content: Content) -> Path:
    for sample in content:
        write(folder / "train" / sample.wnid / f"{sample.stem}.png", sample.image)
    return folder


def flat(folder: Path, content: Content) -> list[dict[str, Any]]:
    """Write all images into one folder; return a row for each."""
    for sample in content:
        write(folder / f"{sample.stem}.png", sample.image)
    return [{"file_name": f"{s.stem}.png", "label": s.wnid, "text": s.text} for s in content]


def labelled_list(folder: Path, content: Content) -> Path:
    rows = [
        {"path": f"images/{row['file_name']}", "label": row["label"]}
        for row in flat(folder / "images", content)
    ]
    write(folder / "train.csv", as_csv(rows).encode())
    return folder / "train.csv"


def metadata_csv(folder: Path, content: Content) -> Path:
    write(folder / "train" / "metadata.csv", as_csv(flat(folder / "train", content)).encode())
    return folder


def metadata_jsonl(folder: Path, content: Content) -> Path:
    write(folder / "train" / "metadata.jsonl", as_json_lines(flat(folder / "train", content)).encode())
    return folder


def coco(folder: Path, content: Content) -> Path:
    rows = flat(folder / "train2017", content)
    images = [{"id": n, "file_name": row["file_name"], "width": 9, "height": 6} for n, row in enumerate(rows)]
    wanted = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "thing"}]}
    write(folder / "annotations" / "instances_train2017.json", json.dumps(wanted).encode())
    return folder


def official_tar(folder: Path, content: Content) -> Path:
    classes = {
        f"{wnid}.tar": tar_of(
            {f"{wnid}_{crc32(s.stem.encode())}.JPEG": s.image for s in content if s.wnid == wnid}
        )
        for wnid in dict.fromkeys(s.wnid for s in content)
    }
    write(folder / TRAIN, tar_of(classes))
    counts = {wnid: tuple(n for n, s in enumerate(content) if s.wnid == wnid) for wnid in WNIDS}
    Miniature(tuple(WNIDS), counts).write_devkit(folder)
    return folder


def webdataset(folder: Path, content: Content) -> Path:
    parts = {
        s.stem: {"png": s.image, "cls": b"%d" % WNIDS.index(s.wnid), "txt": s.text.encode()} for s in content
    }
    write_shard(folder / "train-000000.tar", parts)
    return folder


def tfrecord(folder: Path, content: Content) -> Path:
    rows = [
        {
            "image": s.image,
            "label": WNIDS.index(s.wnid),
            "file_name": f"{s.stem}.png".encode(),
            "text": s.text.encode(),
        }
        for s in content
    ]
    write_tfrecord(folder / "train-00000-of-00001", rows)
    return folder


def parquet(folder: Path, content: Content) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "image": [{"bytes": s.image, "path": f"{s.stem}.png"} for s in content],
            "label": [WNIDS.index(s.wnid) for s in content],
            "text": [s.text for s in content],
        }
    )
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=2)
    return folder


def tensorpack(folder: Path, content: Content) -> Path:
    folder.mkdir(parents=True)
    database = lmdb.open(str(folder / "train.lmdb"), subdir=False, map_size=1 << 24)
    with database, database.begin(write=True) as transaction:
        keys = [b"%08d" % number for number in range(len(content))]
        for key, s in zip(keys, content, strict=True):
            transaction.put(key, pickle.dumps([s.image, WNIDS.index(s.wnid)]))
        transaction.put(b"__keys__", pickle.dumps(keys))
    (folder / "train.lmdb-lock").unlink()
    return folder / "train.lmdb"


def saved(folder: Path, content: Content) -> Path:
    records = [{"key": s.stem, "image": s.image, "label": s.wnid, "text": s.text} for s in content]
    write_dataset(records, folder, classes=WNIDS, workers=0)
    return folder


MEMBERS = {
    "class folders": Member(class_folders),
    "labelled list": Member(labelled_list),
    "metadata.csv": Member(metadata_csv, text="text"),
    "metadata.jsonl": Member(metadata_jsonl, text="text"),
    "COCO": Member(coco, has_names=False),
    "official tar": Member(official_tar),
    "WebDataset": Member(webdataset, text="txt", has_names=False),
    "TFRecord": Member(tfrecord, text="text", has_names=False, is_checked=True),
    "Parquet": Member(parquet, text="text", has_names=False),
    "tensorpack": Member(tensorpack, has_names=False),
    "converted": Member(saved, text="text", is_checked=True),
}

IMAGES = [encoded(pixels(6, 9, 3)[:, : 9 - n], ".png") for n in range(4)]
samples = st.builds(
    Sample,
    st.text("abcXYZ019_", min_size=1, max_size=12),
    st.sampled_from(WNIDS),
    st.sampled_from(IMAGES),
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20).map("t{}".format),
)
contents = st.lists(samples, min_size=1, max_size=6, unique_by=lambda sample: sample.stem.lower())

few = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
over_all = pytest.mark.parametrize("name", MEMBERS)


def records_of(path: Path, output: Path, member: Member) -> list[tuple[Any, ...]]:
    """Convert, and return the records as the member keeps them, sorted."""
    converted(path, output)
    with open_dataset(output) as dataset:
        names = [*(WNIDS if not member.has_names else dataset.classes)]
        return sorted(
            (
                names[record.label] if record.label >= 0 else "",
                record.image,
                text_of(record[member.text]) if member.text else "",
            )
            for record in dataset
        )


def sample_of(name: str, key: str, content: Content) -> Sample:
    """The sample that has the key: it is named by its stem, or numbered."""
    stem = Path(key).stem
    if name == "tensorpack":
        return content[int(stem)]
    named = {f"{s.wnid}_{crc32(s.stem.encode())}" if name == "official tar" else s.stem: s for s in content}
    return named[stem]


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def expected(content: Content, name: str) -> list[tuple[Any, ...]]:
    """The same of the content; COCO has no classes of images."""
    member = MEMBERS[name]
    return sorted(("" if name == "COCO" else s.wnid, s.image, s.text if member.text else "") for s in content)


@pytest.mark.slow
@over_all
@few
@given(content=contents)
def test_the_records_are_those_that_were_written(name: str, content: Content) -> None:
    with TemporaryDirectory() as folder:
        path = MEMBERS[name].write(Path(folder) / "source", content)

        assert records_of(path, Path(folder) / "out", MEMBERS[name]) == expected(content, name)
        with open_dataset(Path(folder) / "out") as dataset:
            for record in dataset:
                assert record.image == sample_of(name, record.key, content).image


@over_all
@few
@given(content=contents, seed=st.integers(0, 99))
def test_a_source_is_recognised_and_read_in_any_order_any_number_of_times(
    name: str, content: Content, seed: int
) -> None:
    with TemporaryDirectory() as folder:
        path = MEMBERS[name].write(Path(folder) / "source", content)
        listing = recognise(path, split="train").listing("train")
        numbers = random.Random(seed).choices(range(len(listing.entries)), k=12)
        with listing.reader as reader:
            first = {
                n: (reader.read(listing.entries[n]), reader.values(listing.entries[n])) for n in set(numbers)
            }
        with pickle.loads(pickle.dumps(listing.reader)) as copy:  # noqa: S301
            for n in numbers:
                assert (copy.read(listing.entries[n]), copy.values(listing.entries[n])) == first[n]
        assert {image for image, _ in first.values()} <= {sample.image for sample in content}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MEMBERS} - {"tensorpack", "converted"}))
@few
@given(content=contents, seed=st.integers(0, 99))
def test_the_order_in_which_files_were_made_does_not_matter(name: str, content: Content, seed: int) -> None:
    """Where records have names: tensorpack's have numbers, and items that were saved keep their order."""
    other = random.Random(seed).sample(content, len(content))
    with TemporaryDirectory() as folder:
        here = Path(folder)
        paths = [MEMBERS[name].write(here / part, some) for part, some in (("a", content), ("b", other))]
        roots = [converted(path, here / f"out{n}", order="key").records_root for n, path in enumerate(paths)]

        assert roots[0] == roots[1]


CONTENT = [Sample(f"s{n}", WNIDS[n % 3], IMAGES[n % 4], f"text {n}") for n in range(5)]


@over_all
def test_what_is_converted_is_verified_and_other_workers_make_the_same(name: str, tmp_path: Path) -> None:
    path = MEMBERS[name].write(tmp_path / "source", CONTENT)

    manifest = converted(path, tmp_path / "out")

    assert verify(tmp_path / "out", level="decode").exit_code == 0
    assert converted(path, tmp_path / "again", workers=2).root == manifest.root


def files_below(path: Path) -> list[Path]:
    return sorted(file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def changed(file: Path, rng: random.Random) -> None:
    """Cut the file, empty it, remove it, or change some of its bytes."""
    data, kind = bytearray(file.read_bytes()), rng.randrange(4)
    file.chmod(0o644)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        file.write_bytes(data[: rng.randrange(len(data))])
    else:
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


def damaged_sources(name: str, seeds: Sequence[int]) -> None:
    member = MEMBERS[name]
    with TemporaryDirectory() as folder:
        here = Path(folder)
        path = member.write(here / "whole", CONTENT)
        whole = expected(CONTENT, name)
        for seed in seeds:
            for made in ("source", "out"):
                shutil.rmtree(here / made, ignore_errors=True)
            shutil.copytree(here / "whole", here / "source")
            rng = random.Random(seed)
            changed(rng.choice(files_below(here / "source")), rng)
            with suppress(*NAMED):  # anything else is a finding
                found = records_of(here / "source" / path.relative_to(here / "whole"), here / "out", member)
                assert not member.is_checked or found == whole, seed


@over_all
def test_a_damaged_source_is_read_or_refused_by_a_named_error(name: str) -> None:
    damaged_sources(name, range(6))


@pytest.mark.torture
@over_all
def test_so_it_is_however_it_is_damaged(name: str) -> None:
    damaged_sources(name, range(1000, 1060))
