"""The matching of a dataset's records with partners, by their keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceIncomplete
from shardprep.formats.sources.listing.entry_table import repeated_keys

Keys = npt.NDArray[np.bytes_]


def matched(keys: Keys, partners: Keys, path: Path) -> npt.NDArray[np.int64]:
    """Return for each record the place of its partner, int64; ``path`` is that of the partners.

    Partners have the records' keys, or these without extensions, or the names of their files without
    extensions: the first way by which each record has one partner, and each partner one record. Raises
    SourceIncomplete, which names a record without a partner, or a partner without a record.
    """
    closest, most = (keys, partners), -1
    for form in (_as_it_is, _without_extension, _file_name):
        mine, others = form(keys), form(partners)
        if not repeated_keys(mine) and not repeated_keys(others):
            if len(mine) == len(others):
                order, theirs = np.argsort(mine, kind="stable"), np.argsort(others, kind="stable")
                if (mine[order] == others[theirs]).all():
                    places = np.empty(len(mine), np.int64)
                    places[order] = theirs
                    return places
            found = int(np.isin(mine, others).sum())
            if found > most:
                closest, most = (mine, others), found
    raise _unmatched(keys, partners, *closest, path)


def _unmatched(keys: Keys, partners: Keys, mine: Keys, others: Keys, path: Path) -> SourceIncomplete:
    if repeated := repeated_keys(others):
        message = "is there twice, and a record has one partner; remove one"
        return SourceIncomplete(message, path=path, key=repeated[0].decode())
    missing, surplus = keys[~np.isin(mine, others)], partners[~np.isin(others, mine)]
    key = (missing if len(missing) else surplus)[0].decode()
    of_record = f"this record of the dataset has no partner here (of {len(missing)} such records)"
    of_partner = f"no record of the dataset has this key (of {len(surplus)} such partners)"
    parts = [of_record] * bool(len(missing)) + [of_partner] * (not len(missing))
    if len(missing) and len(surplus):
        parts.append(f"{surplus[0].decode()} and {len(surplus) - 1} others here are of no record")
    return SourceIncomplete("; ".join(parts), path=path, key=key)


def _as_it_is(keys: Keys) -> Keys:
    return keys


def _without_extension(keys: Keys) -> Keys:
    return _each(keys, lambda key: key[: len(key) - len(_extension(key))])


def _file_name(keys: Keys) -> Keys:
    return _each(_without_extension(keys), lambda key: key.rpartition(b"/")[2])


def _extension(key: bytes) -> bytes:
    name = key.rpartition(b"/")[2]
    stem, dot, extension = name.rpartition(b".")
    return dot + extension if stem else b""


def _each(keys: Keys, form: Callable[[bytes], bytes]) -> Keys:
    return np.array([form(key) for key in keys.tolist()], np.bytes_)
