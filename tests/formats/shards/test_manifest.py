"""The manifest: what is written is read, and nothing else is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.formats import Manifest, read_manifest
from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.errors import ManifestDamaged, UnknownVersion
from shardprep.formats.records.record import ImageClass, LabelSpace
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from shardprep.formats.shards.manifest import CRITICAL_KEYS, KNOWN_KEYS, MAX_MANIFEST_BYTES
from shardprep.formats.shards.read import FileEntry

DIGEST = "sha256:" + "0123456789abcdef" * 4
SMALL = Manifest(
    split="val", records=3, image_bytes=300, partial=False, class_sorted=False, skipped=0,
    labels=LabelSpace((ImageClass("n01440764", "tench", 449), ImageClass("n01443537"))),
    source={"layout": "official", "archives": []},
    plan=PlanOptions(order="key").__dict__ | {"sha256": DIGEST}, container="lmdb",
    writer={"page_size": 4096}, tables=(FileEntry("index.npy", 200, DIGEST, 3),),
    shards=(FileEntry("shard-00000.lmdb", 8192, DIGEST, 3),), content_root="blake3:00",
)  # fmt: skip


@given(data=st.data())
def test_every_change_of_a_byte_is_refused(data: st.DataObject) -> None:
    changed = bytearray(SMALL.to_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises((ManifestDamaged, UnknownVersion)):
        Manifest.parse(bytes(changed))


def sealed(change: dict[str, Any]) -> bytes:
    """A manifest with other parts and the right root; a part of ``...`` is left out."""
    body = json.loads(SMALL.to_bytes()) | change
    del body["root"]
    body = {name: part for name, part in body.items() if part is not ...}
    return canonical_json(body | {"root": sha256_of(body)})


def nested(part: str, **change: Any) -> dict[str, Any]:
    """A change within a part."""
    value: dict[str, Any] = json.loads(SMALL.to_bytes())[part]
    return {part: {name: v for name, v in (value | change).items() if v is not ...}}


def shard(**change: Any) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(SMALL.to_bytes())["shards"][0]
    return {"shards": [entry | change]}


def classes(*given: dict[str, Any]) -> dict[str, Any]:
    """A label space of these classes, with its right hash."""
    return nested("labels", classes=list(given), sha256=sha256_of([c["name"] for c in given]))


TENCH = {"name": "n01440764", "words": "tench", "ilsvrc2012_id": 449}
LIES: dict[str, dict[str, Any]] = {
    **{f"no {name}": {name: ...} for name in sorted(KNOWN_KEYS - {"root", "format", *CRITICAL_KEYS})},
    **{f"{name} is null": {name: None} for name in sorted(KNOWN_KEYS - {"root"})},
    **{f"{name} is a list": {name: [1]} for name in sorted(KNOWN_KEYS - {"root", "crit"})},
    **{f"dataset without {name}": nested("dataset", **{name: ...}) for name in ("split", "records", "partial")},
    **{f"the parts {parts}": parts for parts in (
        {"format": "other"}, {"container": "zip"}, {"version": [1, 0, 0]}, {"version": ["1", 0]},
        {"version": [True, False]}, {"crit": False}, {"kinds": ["WebP"]}, {"crit": ["kinds"], "kinds": 7},
    )},
    **{f"a dataset with {change}": nested("dataset", **change) for change in (
        {"skipped": -1}, {"skipped": False}, {"image_bytes": 1 << 63}, {"records": 3.0}, {"records": 4}, {"more": 1},
    )},
    **{f"labels with {change}": nested("labels", **change) for change in (
        {"space": "other"}, {"sha256": ...}, {"sha256": DIGEST}, {"more": 1},
    )},
    "a class without words": nested("labels", classes=[{"name": "n1", "ilsvrc2012_id": None}]),
    "a class that is text": nested("labels", classes=["n1"]),
    "a class name that is no text": classes({"name": "\ud800", "words": None, "ilsvrc2012_id": None}),
    **{f"the words {words!a}": classes(TENCH | {"words": words}) for words in ("\ud800", ["tench"])},
    **{f"the devkit id {n}": classes(TENCH | {"ilsvrc2012_id": n}) for n in (1.5, True, 1 << 31, -1)},
    **{f"the classes {names}": classes(*(TENCH | {"name": name} for name in names)) for names in ("aa", "ba")},
    "a plan without its digest": nested("plan", sha256=...),
    "a source without a layout": nested("source", layout=...),
    "a dataset of nothing": nested("dataset", records=0, image_bytes=0) | {"shards": []},
    "a file listed twice": {"tables": shard()["shards"]},
    **{f"a shard with {change}": shard(**change) for change in (
        {"size": 1 << 63}, {"sha256": DIGEST[:-1]}, {"sha256": DIGEST.upper()}, {"more": 1},
    )},
    **{f"a shard called {name!r}": shard(name=name) for name in (
        "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0", "a\n", "é", "x" * 65, 7,
    )},
}  # fmt: skip


TEXTS = {"nothing": b"", "a number without an end of line": b"1", "a number": b"1\n"}
TEXTS |= {name: sealed(change) for name, change in LIES.items()}


@pytest.mark.parametrize("data", TEXTS.values(), ids=TEXTS)
def test_what_cannot_be_is_refused_even_under_a_right_root(data: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        Manifest.parse(data)


@pytest.mark.parametrize("later", [{"encryption": "rot13"}, {"kinds": ["JPEG XL"]}], ids=str)
def test_an_unknown_critical_key_or_kind_is_of_a_later_version(later: dict[str, Any]) -> None:
    with pytest.raises(UnknownVersion, match=r"encryption|JPEG XL"):
        Manifest.parse(sealed({"version": [1, 1], "crit": [*later], **later}))


def test_a_later_minor_version_is_read_and_keeps_its_root() -> None:
    data = sealed({"version": [1, 7], "thumbnails": {"size": 64}})

    manifest = Manifest.parse(data)

    assert manifest.extra == {"thumbnails": {"size": 64}}
    assert manifest.root == json.loads(data)["root"]
    assert manifest.to_bytes() == data


def test_a_fifo_for_a_manifest_is_not_waited_for_and_an_endless_one_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ManifestDamaged, match="not a regular file"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(ManifestDamaged, match="too many for a file"):
        read_manifest(tmp_path)
