"""HDF5 can point at other files, hide things and declare more than there is: none of it is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.shards.hdf5 import Hdf5ShardReader
from support.shard_files import THREE, write, write_around

RECORDS, PAYLOAD = 3, sum(len(r.image) for r in THREE)
Hostility = Callable[[h5py.File], object]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """An honest shard; the hostile ones differ from it in one thing."""
    return write_around(tmp_path / "shard.h5", "hdf5", THREE)


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


def compact(file: h5py.File) -> None:
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((RECORDS,))
    del file["labels"]
    h5py.h5d.create(file.id, b"labels", h5py.h5t.NATIVE_INT32, space, options)


def with_offsets(*offsets: int) -> Hostility:
    return replaced("offsets", data=np.array(offsets, "<i8"))


ZEROS = np.zeros(RECORDS, "<i4")
HOSTILITIES: dict[str, Hostility] = {
    "external link": linked("labels", h5py.ExternalLink("other.h5", "/labels")),
    "soft link": linked("labels", h5py.SoftLink("/crc32c")),
    "dangling link": linked("data", h5py.SoftLink("/nowhere")),
    "link to itself": linked("data", h5py.SoftLink("/data")),
    "external storage": replaced(
        "data", shape=(PAYLOAD,), dtype="u1", external=[("/etc/passwd", 0, PAYLOAD)]
    ),
    "virtual dataset": virtual,
    "compression": replaced("data", data=np.zeros(PAYLOAD, "u1"), chunks=(8,), compression="gzip"),
    "chunks": replaced("labels", data=ZEROS, chunks=(2,)),
    "resizable": replaced("labels", data=ZEROS, maxshape=(None,)),
    "compact layout": compact,
    "extra dataset": lambda f: f.create_dataset("more", data=ZEROS),
    "extra group": lambda f: f.create_group("more"),
    "group for a column": lambda f: (f.pop("labels"), f.create_group("labels")),
    "type for a column": lambda f: (f.pop("labels"), f.__setitem__("labels", np.dtype("<i4"))),
    "attribute of the root": lambda f: f.attrs.__setitem__("note", "read me"),
    "attribute of a column": lambda f: f["data"].attrs.__setitem__("note", "read me"),
    "missing column": lambda f: f.pop("crc32c"),
    "no columns": lambda f: f.clear(),
    "two dimensions": replaced("labels", data=np.zeros((RECORDS, 1), "<i4")),
    "scalar": replaced("labels", data=np.int32(1)),
    "null space": replaced("labels", data=h5py.Empty("<i4")),
    "big-endian": replaced("labels", data=ZEROS.astype(">i4")),
    "wider": replaced("labels", data=ZEROS.astype("<i8")),
    "floats": replaced("offsets", data=np.arange(RECORDS + 1, dtype="<f8")),
    "compound": replaced("labels", data=np.zeros(RECORDS, [("a", "<i4")])),
    "variable-length bytes": replaced("keys", data=["a", "b", "c"], dtype=h5py.string_dtype()),
    "variable-length lists": replaced("data", shape=(PAYLOAD,), dtype=h5py.vlen_dtype(np.uint8)),
    "references": replaced("labels", shape=(RECORDS,), dtype=h5py.ref_dtype),
    "opaque keys": replaced("keys", data=np.zeros(RECORDS, "V8")),
    "huge data": replaced("data", shape=(1 << 40,), dtype="u1"),
    "huge labels": replaced("labels", shape=(1 << 40,), dtype="<i4"),
    "a size that wraps around": replaced("keys", shape=((1 << 61) - 1,), dtype="S8"),
    "shorter column": replaced("labels", data=ZEROS[:-1]),
    "longer column": replaced("crc32c", data=np.zeros(RECORDS + 1, "<u4")),
    "no offsets": with_offsets(),
    "negative offset": with_offsets(-1, 3, 63, PAYLOAD),
    "offsets from one": with_offsets(1, 3, 63, PAYLOAD),
    "overlapping offsets": with_offsets(0, 63, 3, PAYLOAD),
    "offsets behind the data": with_offsets(0, 3, 63, PAYLOAD + 1),
    "offsets short of the data": with_offsets(0, 3, 63, PAYLOAD - 1),
    "offsets that overflow": with_offsets(0, (1 << 63) - 1, -(1 << 63), PAYLOAD),
}


@pytest.mark.parametrize("hostility", HOSTILITIES.values(), ids=HOSTILITIES)
def test_what_no_converter_writes_is_refused(shard: Path, hostility: Hostility) -> None:
    with h5py.File(shard, "r+") as file:
        hostility(file)

    with pytest.raises(ShardDamaged) as raised:
        Hdf5ShardReader(shard)
    assert raised.value.path == str(shard)


@pytest.mark.parametrize("kept", range(0, 2620, 97))
def test_a_shard_cut_short_is_refused_whatever_its_size_is_said_to_be(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "shard.h5", "hdf5", THREE)
    with path.open("r+b") as file:
        file.truncate(kept)

    with pytest.raises(ShardDamaged):
        Hdf5ShardReader(path)
