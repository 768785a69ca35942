"""Shards that no converter writes, or that change or fail while they are read: refused, and no crash."""

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import ShardDamaged
from shardprep.formats.shards.read import ALL_CONTAINERS, ARCHIVE_NAME, CONTAINERS, Shard
from support.loaded import epoch_of, loader_on
from support.sampling import needs_strace, torture_except
from support.shard_files import HEADER, THREE, read, stored, values, write, write_around, write_lmdb

RECORDS, PAYLOAD = 3, sum(len(r.image) for r in THREE)
Hostility = Callable[[h5py.File], object]


def replaced(name: str, **how: Any) -> Hostility:
    """Replace a column by one made in another way."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **how)

    return change


def linked(name: str, link: object) -> Hostility:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return change


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((RECORDS,), "<i4")
    layout[:] = h5py.VirtualSource(f"{file.filename}.other", "labels", (RECORDS,))
    del file["labels"]
    file.create_virtual_dataset("labels", layout)


def with_offsets(*offsets: int) -> Hostility:
    return replaced("offsets", data=np.array(offsets, "<i8"))


ZEROS = np.zeros(RECORDS, "<i4")
HOSTILITIES: dict[str, Hostility] = {
    "external link": linked("labels", h5py.ExternalLink("other.h5", "/labels")),
    "soft link": linked("labels", h5py.SoftLink("/crc32c")),
    "link to itself": linked("data", h5py.SoftLink("/data")),
    "external storage": replaced(
        "data", shape=(PAYLOAD,), dtype="u1", external=[("/etc/passwd", 0, PAYLOAD)]
    ),
    "virtual dataset": virtual,
    "compression": replaced("data", data=np.zeros(PAYLOAD, "u1"), chunks=(8,), compression="gzip"),
    "chunks": replaced("labels", data=ZEROS, chunks=(2,)),
    "resizable": replaced("labels", data=ZEROS, maxshape=(None,)),
    "extra dataset": lambda f: f.create_dataset("more", data=ZEROS),
    "group for a column": lambda f: (f.pop("labels"), f.create_group("labels")),
    "attribute of the root": lambda f: f.attrs.__setitem__("note", "read me"),
    "missing column": lambda f: f.pop("crc32c"),
    "two dimensions": replaced("labels", data=np.zeros((RECORDS, 1), "<i4")),
    "null space": replaced("labels", data=h5py.Empty("<i4")),
    "big-endian": replaced("labels", data=ZEROS.astype(">i4")),
    "variable-length bytes": replaced("keys", data=["a", "b", "c"], dtype=h5py.string_dtype()),
    "references": replaced("labels", shape=(RECORDS,), dtype=h5py.ref_dtype),
    "huge data": replaced("data", shape=(1 << 40,), dtype="u1"),
    "a size that wraps around": replaced("keys", shape=((1 << 61) - 1,), dtype="S8"),
    "shorter column": replaced("labels", data=ZEROS[:-1]),
    "no offsets": with_offsets(),
    "negative offset": with_offsets(-1, 3, 63, PAYLOAD),
    "offsets from one": with_offsets(1, 3, 63, PAYLOAD),
    "offsets behind the data": with_offsets(0, 3, 63, PAYLOAD + 1),
    "offsets that overflow": with_offsets(0, (1 << 63) - 1, -(1 << 63), PAYLOAD),
}


@pytest.mark.parametrize("hostility", HOSTILITIES.values(), ids=HOSTILITIES)
def test_what_no_converter_writes_is_refused(tmp_path: Path, hostility: Hostility) -> None:
    shard = write_around(tmp_path / "shard.h5", "hdf5", THREE)
    with h5py.File(shard, "r+") as file:
        hostility(file)

    with pytest.raises(ShardDamaged) as raised:
        Shard(shard, "hdf5")
    assert raised.value.path == str(shard)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_file_cut_short_anywhere_is_damage(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "shard", kind, THREE)
    data = path.read_bytes()

    for size in range(0, len(data), 61):
        path.write_bytes(data[:size])
        with pytest.raises(ShardDamaged):
            read(path, kind, 3)


PAGE = os.sysconf("SC_PAGE_SIZE")
HONEST = values(THREE)
FIRST = bytes(8)

# Fields of a meta page, after mdb.c's MDB_page and MDB_meta of 64-bit platforms.
VERSION, PAGE_SIZE, FLAGS, DEPTH, ENTRIES, ROOT, TRANSACTION = 20, 40, 92, 94, 120, 128, 144


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard.lmdb"


INVALID = {
    "nothing": b"",
    "half a header": HONEST[FIRST][: HEADER.size - 1],
    "a key longer than the value": HEADER.pack(1, 0, 0xFFFF, 0, 0) + b"key",
    "version 2": b"\x02" + HONEST[FIRST][1:],
}
CRAFTED = {
    **{name: (HONEST | {FIRST: value}, "record 0 has an invalid header") for name, value in INVALID.items()},
    "another ordinal": ({k.replace(FIRST, b"9" * 8): v for k, v in HONEST.items()}, "no record"),
    "longer ordinals": ({k + b"\0": v for k, v in HONEST.items()}, "has no record"),
    "little-endian ordinals": ({k[::-1]: v for k, v in HONEST.items()}, "has no record"),
    "a key too many": (HONEST | {FIRST + b"\0": b"more"}, "has no record 1"),
}


@pytest.mark.parametrize(("pairs", "message"), CRAFTED.values(), ids=CRAFTED)
def test_keys_and_values_that_are_no_records_are_refused(
    path: Path, pairs: dict[bytes, bytes], message: str
) -> None:
    write_lmdb(path, pairs)

    with pytest.raises(ShardDamaged, match=message):
        read(path, "lmdb", 3)


METAS = {
    "a root behind the end": (ROOT, struct.pack("<Q", 1 << 40)),
    "a root among the metas": (ROOT, struct.pack("<Q", 0)),
    "no root": (ROOT, b"\xff" * 8),
    "2**64 - 1 entries": (ENTRIES, b"\xff" * 8),
    "no entries": (ENTRIES, bytes(8)),
    "another version": (VERSION, struct.pack("<I", 2)),
    "a page size of 0": (PAGE_SIZE, struct.pack("<I", 0)),
    "a page size of 4095": (PAGE_SIZE, struct.pack("<I", 4095)),
    "65535 levels": (DEPTH, b"\xff\xff"),
    "keys in reverse": (FLAGS, b"\x02\0"),
}


@pytest.mark.parametrize(("offset", "value"), METAS.values(), ids=METAS)
def test_a_crafted_meta_page_is_refused(path: Path, offset: int, value: bytes) -> None:
    with write(path, "lmdb", THREE).open("r+b") as file:
        for page in (0, PAGE):
            file.seek(page + offset)
            file.write(value)

    with pytest.raises(ShardDamaged):
        read(path, "lmdb", 3)


def test_pages_that_lead_in_circles_end(path: Path) -> None:
    """Trees with a root all of whose branches lead to itself, of two levels, and of more than there are."""
    write(path, "lmdb", [stored(f"n{n}", n, bytes(9)) for n in range(1000)])
    data = bytearray(path.read_bytes())
    meta = max((0, PAGE), key=lambda page: struct.unpack_from("<Q", data, page + TRANSACTION))
    (root,) = struct.unpack_from("<Q", data, meta + ROOT)
    assert struct.unpack_from("<H", data, meta + DEPTH) == (2,)
    (behind,) = struct.unpack_from("<H", data, root * PAGE + 12)
    for (node,) in struct.iter_unpack("<H", data[root * PAGE + 16 : root * PAGE + behind]):
        struct.pack_into("<HHH", data, root * PAGE + node, root & 0xFFFF, root >> 16, root >> 32)
    for deep in (2, 3, 32):
        for page in (0, PAGE):
            struct.pack_into("<H", data, page + DEPTH, deep)
        path.write_bytes(data)
        with pytest.raises(ShardDamaged, match=r"page .* the wrong number"), Shard(path, "lmdb") as reader:
            reader.read_record(0)


OPENING_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from shardprep.formats.shards.read import Shard, container

container("hdf5")
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken, limits[1]))
try: Shard(Path(sys.argv[1]), "hdf5")
finally: resource.setrlimit(resource.RLIMIT_AS, limits)  # printing an error takes memory
"""


def test_hdf5_is_not_opened_in_too_little_memory_for_its_library_which_would_crash(path: Path) -> None:
    write(path, "hdf5", THREE)
    command = [sys.executable, "-c", OPENING_IN_LITTLE_MEMORY, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "OSError: [Errno 12] Cannot allocate memory" in done.stderr, (done.returncode, done.stderr)


READING = """
import errno, os, sys
from pathlib import Path
from shardprep.formats.shards.read import Shard
from support import shard_files

kind, path = sys.argv[1], Path(sys.argv[2])
found = {"opening": [], "reading": [], "right": 0}

def attempt(where, call):
    try:
        return call()
    except OSError as error:
        assert error.filename in (str(path), str(path.with_name("archive.tar"))), error
        assert where == "opening" or "at record" in str(error), error
        found[where].append(errno.errorcode[error.errno])

for _ in range(10):
    if (shard := attempt("opening", lambda: Shard(path, kind))) is None:
        continue
    for ordinal, record in enumerate(shard_files.THREE * 4):
        ordinal %= 3
        stored = attempt("reading", lambda: shard.read_record(ordinal))
        there = attempt("reading", lambda: shard.address(ordinal))
        image = there and attempt("reading", lambda: shard.read_image(ordinal, there))
        assert stored is None or stored[:4] == record[:4]
        assert image in (None, record.image)
        found["right"] += (stored is not None) + (image is not None)
    shard.close()
print(sorted(set(found["opening"])), sorted(set(found["reading"])), found["right"])
"""


def under_strace(kind: str, path: Path, *injections: str) -> tuple[list[str], list[str], int]:
    """The errors in opening and in reading, and the number of records read."""
    rules = [word for injection in injections for word in ("-e", f"inject={injection}")]
    paths = ["-P", path, "-P", path.with_name(ARCHIVE_NAME)]
    program = [sys.executable, "-c", READING, kind, path]
    command = ["strace", "-f", "-qq", "-o", "/dev/null", *paths, *rules, *program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opening, reading, right = done.stdout.replace("] [", "]|[").replace("] ", "]|").split("|")
    return eval(opening), eval(reading), int(right)  # noqa: S307


@needs_strace
@pytest.mark.parametrize("kind", torture_except(ALL_CONTAINERS, "lmdb"))
@pytest.mark.parametrize(
    ("of_open", "of_read"),
    [
        ("EMFILE", "EIO"),
        pytest.param("EACCES", "ESTALE", marks=pytest.mark.torture),
        pytest.param("ENOMEM", "ENOMEM", marks=pytest.mark.torture),
        pytest.param("ENFILE", "ETIMEDOUT", marks=pytest.mark.torture),
    ],
)
def test_an_error_of_the_system_is_no_damage_wherever_it_comes(
    kind: str, tmp_path: Path, of_open: str, of_read: str
) -> None:
    path = write(tmp_path / "shard", kind, THREE)
    opening, reading, right = under_strace(
        kind, path, f"openat:error={of_open}:when=1+4", f"pread64,preadv:error={of_read}:when=2+5"
    )

    assert of_open in opening
    assert set(opening) <= {of_open, of_read}
    assert reading == [of_read]
    assert right > 0


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("transform", [{}, {"transform": None}], ids=["decoded", "encoded"])
def test_a_bad_sector_is_not_skipped_and_names_the_record(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, transform: dict[str, Any]
) -> None:
    path = request.getfixturevalue(f"{kind}_shards")
    with open_dataset(path) as dataset:
        entry, key = dataset.manifest.shards[0], dataset[7].key
        place = (path / entry.name).read_bytes().index(dataset[7].image)
    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, _failing(getattr(os, name), path / entry.name, place))

    with (
        loader_on(path, shuffle=None, on_bad_record="skip", **transform) as loader,
        pytest.raises(OSError, match=f"Input/output error, at record 7: .*{entry.name}") as raised,
    ):
        epoch_of(loader)

    assert raised.value.errno == errno.EIO
    assert key in raised.value.__notes__[0]


def _failing(call: Callable[..., Any], file: Path, place: int) -> Callable[..., Any]:
    status = file.stat()

    def failing(descriptor: int, what: Any, at: int) -> Any:
        if at == place and os.fstat(descriptor).st_ino == status.st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor, what, at)

    return failing
