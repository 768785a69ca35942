"""The checks of a manifest's statements about the records against the tables, as far as these show them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardprep.formats.containers.published_file import read_small
from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.index import kinds_in
from shardprep.formats.dataset.manifest import QUARANTINE_NAME, Manifest
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.formats.records.canonical_json import parse_canonical_json
from shardprep.formats.records.labels import OFFICIAL_IMAGES
from shardprep.formats.records.stored_order import MAX_SEED, ORDERS, is_class_sorted, permutation

MAX_QUARANTINE_BYTES = 64 << 20


def false_claims(manifest: Manifest, index: Rows) -> Iterator[str]:
    """Yield what the manifest says and the index does not.

    That is of unique keys, the plan's order, ``kinds``, ``crop_ready``, ``class_sorted`` and ``partial``. If
    images were skipped, the plan's order and ``class_sorted`` cannot be checked. ``partial`` is checked for
    the official classes only.
    """
    if not _order_ok(manifest, index):
        yield f"its order is not the plan's ({manifest.plan['order']}, seed {manifest.plan['seed']})"
    if not _keys_unique(index):
        yield "two records have the same key"
    if (kinds := kinds_in(index["flags"])) != manifest.kinds:
        yield f"its kinds are {', '.join(manifest.kinds) or 'none'}, and the records' {', '.join(kinds) or 'none'}"
    if (ready := int(np.count_nonzero(index["flags"] & ImageFlag.CROP_READY))) != manifest.crop_ready:
        yield f"{manifest.crop_ready} of its images are crop-ready, and {ready} of the records"
    is_sorted = is_class_sorted(index["label"])
    if is_sorted != manifest.class_sorted and not manifest.skipped:
        yield f"its class_sorted is {manifest.class_sorted}, and the records' order is {is_sorted}"
    wanted = OFFICIAL_IMAGES.get(manifest.split) if manifest.labels.is_official else None
    is_partial = manifest.records + manifest.skipped != wanted
    if wanted is not None and is_partial != manifest.partial:
        yield f"its partial is {manifest.partial}, with {manifest.records + manifest.skipped} images of {wanted}"


def check_quarantine(dataset: Path, manifest: Manifest) -> None:
    """Check the number of skipped images against the quarantine list. Raises ManifestDamaged, OSError."""
    entry, path = manifest.table(QUARANTINE_NAME), dataset / QUARANTINE_NAME
    listed = len(quarantined(dataset)) if entry else 0
    if not manifest.skipped == listed == (entry.records if entry else 0):
        raise ManifestDamaged(f"lists {listed} images, and {manifest.skipped} were skipped", path=path)


def quarantined(dataset: Path) -> list[dict[str, str]]:
    """Return the quarantine list: key, where and reason of each image. Raises ManifestDamaged, OSError."""
    path = dataset / QUARANTINE_NAME
    try:
        listed = parse_canonical_json(read_small(path, MAX_QUARANTINE_BYTES))
    except ValueError as error:
        raise ManifestDamaged(str(error), path=path) from error
    if not isinstance(listed, list) or not all(map(_is_skipped, listed)):
        raise ManifestDamaged("is not a list of images with key, where and reason", path=path)
    return listed


def _is_skipped(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"key", "where", "reason"}:
        return False
    return all(isinstance(part, str) for part in value.values())


def _order_ok(manifest: Manifest, index: Rows) -> bool:
    order, seed, keys = manifest.plan["order"], manifest.plan["seed"], index["key"]
    if manifest.skipped or order not in ORDERS:  # a later release may have more orders
        return True
    if order == "shuffled":
        if not 0 <= seed <= MAX_SEED:
            return False
        by_key = np.empty_like(keys)
        by_key[permutation(len(keys), seed)] = keys
        keys = by_key
    return bool((keys[:-1] <= keys[1:]).all())


def _keys_unique(index: Rows) -> bool:
    keys = np.sort(index["key"])
    return not (keys[:-1] == keys[1:]).any()
