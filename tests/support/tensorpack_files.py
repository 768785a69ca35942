"""LMDBs as tensorpack's LMDBSerializer writes them, with each of its serializers."""

import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

KEYS = b"__keys__"


def packed(item: Any) -> bytes:
    """MessagePack as ``msgpack.dumps(…, use_bin_type=True)`` has it after ``msgpack_numpy.patch()``."""
    match item:
        case np.ndarray():
            kind = b"" if item.dtype.kind != "O" else b"O"
            parts = {b"kind": kind, b"shape": item.shape, b"data": item.tobytes()}
            return packed({b"nd": True, b"type": item.dtype.str, **parts})
        case np.generic():
            return packed({b"nd": False, b"type": item.dtype.str, b"data": item.tobytes()})
        case bool() | None:
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[item]
        case int():
            return struct.pack(">b", item) if -32 <= item < 128 else struct.pack(">Bq", 0xD3, item)
        case float():
            return struct.pack(">Bd", 0xCB, item)
        case bytes():
            return struct.pack(">BI", 0xC6, len(item)) + item
        case str():
            return struct.pack(">BH", 0xDA, len(item.encode())) + item.encode()
        case dict():
            pairs = (packed(part) for pair in item.items() for part in pair)
            return bytes([0x80 + len(item)]) + b"".join(pairs)
    head = bytes([0x90 + len(item)]) if len(item) < 16 else struct.pack(">BH", 0xDC, len(item))
    return head + b"".join(map(packed, item))


def pickled(protocol: int) -> Callable[[Any], bytes]:
    return lambda item: pickle.dumps(item, protocol=protocol)


SERIALIZERS: dict[str, Callable[[Any], bytes]] = {
    **{f"pickle {protocol}": pickled(protocol) for protocol in (2, 3, 4, 5)},
    "msgpack": packed,
}
NEWEST = pickled(5)


def put_or_grow(database: Any, transaction: Any, key: bytes, value: bytes) -> Any:
    """Put a record like LMDBSerializer.save: if the map is full, uncommitted records are lost."""
    try:
        transaction.put(key, value)
    except lmdb.MapFullError:
        transaction.abort()
        database.set_mapsize(2 * database.info()["map_size"])
        return put_or_grow(database, database.begin(write=True), key, value)
    return transaction


def save(path: Path, records: Mapping[bytes, bytes], keys: bytes | None, *, map_size: int = 1 << 34) -> Path:
    """Write a file, or into an existing folder, like LMDBSerializer.save."""
    database = lmdb.open(os.fspath(path), subdir=path.is_dir(), map_size=map_size, meminit=False)
    with database:
        transaction = database.begin(write=True)
        for number, (key, value) in enumerate(records.items(), start=1):
            transaction = put_or_grow(database, transaction, key, value)
            if number % 5000 == 0:
                transaction.commit()
                transaction = database.begin(write=True)
        transaction.commit()
        if keys is not None:
            put_or_grow(database, database.begin(write=True), KEYS, keys).commit()
    return path


def key_of(number: int) -> bytes:
    return f"{number:08}".encode("ascii")


def save_datapoints(
    path: Path, datapoints: Iterable[Any], dumps: Callable[[Any], bytes] = NEWEST, *, first: int = 0
) -> Path:
    """Write the datapoints under their numbers, and the list of these."""
    records = {key_of(n): dumps(point) for n, point in enumerate(datapoints, start=first)}
    return save(path, records, dumps(list(records)))
