"""The contract of a shard, over every container."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardprep.formats.errors import CorruptRecord, ShardDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES, content_digest, record_crc
from shardprep.formats.runtime.files import hash_file
from shardprep.formats.runtime.processes import call_isolated
from shardprep.formats.shards.lmdb import RECORDS_PER_COMMIT
from shardprep.formats.shards.read import (
    ALL_CONTAINERS,
    ARCHIVE_NAME,
    FileEntry,
    Memory,
    Shard,
    StoredRecord,
    container,
)
from shardprep.formats.verification.checks import FileCheck
from support.image_files import png
from support.sampling import torture_except
from support.shard_files import (
    THREE,
    address,
    index_rows,
    opened,
    read,
    read_around,
    stored,
    try_flips,
    unit_of,
    write,
)

SEVERAL_COMMITS = range(3 * RECORDS_PER_COMMIT + 5)
MANY = [stored(f"n{i % 7}/{i}", i % 7, bytes([i % 251]) * (i % 40)) for i in SEVERAL_COMMITS]
LONG = [stored("k" * MAX_KEY_BYTES, -(1 << 31), b""), stored("é" * (MAX_KEY_BYTES // 2), (1 << 31) - 1, b"i")]

# Three per leaf, so that the tree of pages has three levels; others have overflow pages

keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200)
labels = st.integers(-1, 999) | st.integers(-(1 << 31), (1 << 31) - 1)
images = st.binary(max_size=40) | st.integers(0, 20_000).map(bytes)
identity = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=ALL_CONTAINERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shard(kind: str, tmp_path: Path) -> Path:
    return write(tmp_path / "shard", kind, THREE)


@pytest.fixture
def records(shard: Path, kind: str) -> list[StoredRecord]:
    """THREE, with their offsets in the shard."""
    with Shard(shard, kind) as reader:
        return [record._replace(offset=reader.address(n)[3]) for n, record in enumerate(THREE)]


@pytest.mark.slow
@identity
@given(records=st.lists(st.builds(stored, keys, labels, images), max_size=12))
@example(records=[])
@example(records=LONG)
@example(records=MANY)
@example(records=[stored(f"n{i}", i, bytes([i % 251]) * (1300 if i % 9 else 5000)) for i in range(1200)])
def test_what_is_written_is_read_here_and_by_the_library(kind: str, records: list[StoredRecord]) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "shard", kind, records)

        assert read(path, kind, len(records)) == records
        assert read_around(path, kind) == records
        assert path.stat().st_size <= container(kind).bytes_needed(unit_of(records))


def test_the_checksums_of_a_record_never_change() -> None:
    assert record_crc(b"n01440764/n01440764_10026", 0, b"image") == 0x5A465751
    digest = content_digest(b"n01440764/n01440764_10026", 0, b"image").hex()
    assert digest == "98c7f1b68278f0e2ce9fdb69c1983ed1ed7ab771a55a461e33350a6500ad3ff6"


@pytest.mark.parametrize("kind", torture_except(ALL_CONTAINERS, "lmdb"), indirect=True)
@pytest.mark.parametrize("step", [23, pytest.param(7, marks=pytest.mark.torture)])
def test_no_flipped_bit_changes_a_record_unseen(shard: Path, kind: str, tmp_path: Path, step: int) -> None:
    todo = [(position, bit) for position in range(shard.stat().st_size) for bit in range(8)][::step]
    tried, unseen = tmp_path / "tried", tmp_path / "unseen"
    unseen.touch()
    while todo:
        damaged = Path(shutil.copy(shard, tmp_path / "damaged"))
        call_isolated(200, try_flips, damaged, kind, todo, tried, unseen)
        todo = todo[tried.stat().st_size :]

    assert unseen.read_text() == ""


PICTURES = [stored(f"n{n}", n, png(n + 3, 2, 2)) for n in range(3)]


def test_records_that_changed_places_are_found(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "shard", kind, [PICTURES[1], PICTURES[0], PICTURES[2]])

    rows = index_rows(PICTURES)
    entry = FileEntry(path.name, path.stat().st_size, hash_file(path), len(PICTURES))
    check = FileCheck(path, entry, "records", kind, rows["key"], rows)
    assert [finding.key for finding in check.run().findings] == ["n0", "n1"]

    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="symbolic links"):
        check.run()


def fresh(size: int) -> Memory:
    return np.empty(size, np.uint8)


@pytest.mark.parametrize("has_offset", [True, False])
@pytest.mark.parametrize("part", ["key", "label", "image", "crc32c"])
def test_a_record_that_differs_from_its_address_is_corrupt(
    shard: Path, kind: str, records: list[StoredRecord], part: str, has_offset: bool
) -> None:
    wrong = records[0]._replace(**{part: getattr(THREE[1], part)})
    there = address(wrong if has_offset else wrong._replace(offset=0))
    with opened(shard, kind, 3) as found:
        for read in (found.read_image, lambda *where: found.read_image_into(*where, fresh)):
            with pytest.raises((CorruptRecord, ShardDamaged), match="record 0"):
                read(0, there)


def test_a_file_cut_short_since_is_damage(shard: Path, kind: str, records: list[StoredRecord]) -> None:
    file = shard.with_name(ARCHIVE_NAME) if kind == "tar" else shard
    with opened(shard, kind, 3) as found:
        os.truncate(file, records[1].offset + 3)
        first = [number for number in (0, 2) if records[number].offset < records[1].offset]
        assert all(found.read_image(n, address(records[n])) == THREE[n].image for n in first)
        for read in (found.read_image, lambda *where: found.read_image_into(*where, fresh)):
            with pytest.raises(ShardDamaged, match="ends before record 1"):
                read(1, address(records[1]))


def test_eight_threads_read_through_one_shard(tmp_path: Path, kind: str) -> None:
    ordinals = list(range(len(MANY))) * 8
    with Shard(write(tmp_path / "shard", kind, MANY), kind) as shard, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(shard.read_record, ordinals))
        images = [pool.submit(shard.read_image, n, address(found[n])) for n in ordinals]
        earlier = [pool.submit(shard.read_image, n, address(MANY[n])) for n in ordinals]

    assert [record._replace(offset=0) for record in found] == MANY * 8
    assert [image.result() for image in images] == [record.image for record in MANY] * 8
    assert [image.result() for image in earlier] == [record.image for record in MANY] * 8


def test_no_descriptor_stays_open_and_a_closed_reader_is_not_read(shard: Path, kind: str) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - a Path would name its own descriptor, too
    damaged = shard.with_name("damaged")
    damaged.write_bytes(b"\0" * 9000)
    for _ in range(3):
        with Shard(shard, kind) as reader:
            reader.close()
            with pytest.raises(OSError, match="descriptor"):
                reader.read_record(0)
        with pytest.raises(ShardDamaged):
            Shard(damaged, kind)
        with opened(shard, kind, 2) as short, pytest.raises(ShardDamaged):
            short.read_image(0, address(THREE[0]))
        write(shard.with_name("other"), kind, THREE)
        shard.with_name("other").unlink()

    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_a_writer_that_is_left_by_an_error_leaves_no_shard(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "shard"
    with suppress(KeyboardInterrupt), container(kind).write(path, unit_of(THREE)) as writer:
        writer.append(THREE[0])
        raise KeyboardInterrupt

    with pytest.raises(ShardDamaged):
        read(path, kind, 1)
