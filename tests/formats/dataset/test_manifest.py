"""The manifest: what is written is read, and nothing else is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.errors import ManifestDamaged, UnknownVersion
from shardprep.formats.records.labels import ImageClass, LabelSpace
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.shards.manifest import (
    CRITICAL_KEYS,
    KNOWN_KEYS,
    MAX_MANIFEST_BYTES,
    Manifest,
    read_manifest,
)
from shardprep.formats.shards.read import CONTAINERS
from support.sampling import torture_except

DIGEST = "sha256:" + "0123456789abcdef" * 4
SMALL = Manifest(
    split="val",
    records=3,
    image_bytes=300,
    partial=False,
    class_sorted=False,
    skipped=0,
    labels=LabelSpace((ImageClass("n01440764", "tench", 449), ImageClass("n01443537"))),
    source={"layout": "official", "archives": []},
    plan=PlanOptions(order="key").__dict__ | {"sha256": DIGEST},
    container="lmdb",
    writer={"page_size": 4096},
    tables=(FileEntry("index.npy", 200, DIGEST, 3),),
    shards=(FileEntry("shard-00000.lmdb", 8192, DIGEST, 3),),
    content_root="blake3:00",
)

natural = st.integers(0, (1 << 63) - 1)
digests = st.binary(min_size=32, max_size=32).map(lambda d: "sha256:" + d.hex())
texts = st.text(max_size=8)
parts = st.dictionaries(texts, st.none() | st.booleans() | natural | texts | st.lists(texts), max_size=3)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(
        st.lists(
            st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,20}", fullmatch=True), unique=True, min_size=1, max_size=6
        )
    )
    files = [FileEntry(name, draw(natural), draw(digests), draw(st.integers(1, 1 << 40))) for name in names]
    split_at = draw(st.integers(0, len(files) - 1))
    class_ids = st.none() | st.integers(1, 1000)
    class_names = sorted(draw(st.sets(texts, max_size=4)))
    classes = [ImageClass(name, draw(st.none() | texts), draw(class_ids)) for name in class_names]
    return Manifest(
        split=draw(texts),
        records=sum(f.records for f in files[split_at:]),
        image_bytes=draw(natural),
        partial=draw(st.booleans()),
        class_sorted=draw(st.booleans()),
        skipped=draw(natural),
        labels=LabelSpace(tuple(classes)),
        source={**draw(parts), "layout": draw(texts)},
        plan=draw(parts) | PlanOptions(seed=draw(natural)).__dict__ | {"sha256": draw(digests)},
        container=draw(st.sampled_from(CONTAINERS)),
        writer=draw(parts),
        tables=tuple(files[:split_at]),
        shards=tuple(files[split_at:]),
        content_root=draw(texts),
        version=(1, draw(natural)),
        extra={name: part for name, part in draw(parts).items() if name not in KNOWN_KEYS},
    )


@pytest.mark.slow
@settings(deadline=None)
@given(manifests())
def test_what_is_written_is_read(manifest: Manifest) -> None:
    assert Manifest.parse(manifest.to_bytes()) == manifest


def is_refused(data: bytes) -> bool:
    try:
        Manifest.parse(data)
    except (ManifestDamaged, UnknownVersion):
        return True
    return False


@pytest.mark.torture
def test_every_change_of_a_byte_is_refused() -> None:
    data = SMALL.to_bytes()
    differences = [1 << bit for bit in range(8)] + [3, 5, 6, 7, 9, 10, 12, 13, 15, 31, 127, 255]
    accepted = [
        (position, difference)
        for position, byte in enumerate(data)
        for difference in differences
        if not is_refused(data[:position] + bytes([byte ^ difference]) + data[position + 1 :])
    ]

    assert accepted == []


@pytest.mark.slow
def test_every_loss_and_addition_of_a_byte_is_refused() -> None:
    data = SMALL.to_bytes()

    assert all(is_refused(data[:size]) for size in range(len(data)))
    assert all(is_refused(data[:at] + data[at + 1 :]) for at in range(len(data)))
    assert all(is_refused(data[:at] + new + data[at:]) for at in range(len(data) + 1) for new in (b" ", b"0"))


def sealed(change: dict[str, Any], base: Manifest = SMALL) -> bytes:
    """A manifest with other parts and the right root; a part of ``...`` is left out."""
    body = json.loads(base.to_bytes()) | change
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


def test_a_sealed_manifest_is_accepted_when_nothing_is_wrong() -> None:
    assert Manifest.parse(sealed({})) == SMALL


def classes(*given: dict[str, Any]) -> dict[str, Any]:
    """A label space of these classes, with its right hash."""
    digest = sha256_of([c["name"] for c in given])
    return nested("labels", classes=list(given), sha256=digest)


TENCH = {"name": "n01440764", "words": "tench", "ilsvrc2012_id": 449}
SURROGATE = {"name": "\ud800", "words": None, "ilsvrc2012_id": None}
LIES: dict[str, dict[str, Any]] = {
    **{f"no {name}": {name: ...} for name in sorted(KNOWN_KEYS - {"root", "format", *CRITICAL_KEYS})},
    **{f"{name} is null": {name: None} for name in sorted(KNOWN_KEYS - {"root"})},
    **{f"{name} is a list": {name: [1]} for name in sorted(KNOWN_KEYS - {"root", "crit"})},
    **{f"dataset without {name}": nested("dataset", **{name: ...}) for name in ("split", "records", "partial")},
    "another format": {"format": "other"},
    "a version of three numbers": {"version": [1, 0, 0]},
    "a version of text": {"version": ["1", 0]},
    "a version of booleans": {"version": [True, False]},
    "crit that is no list": {"crit": False},
    "a negative count": nested("dataset", skipped=-1),
    "a size of 2**63": nested("dataset", image_bytes=1 << 63),
    "a fraction": nested("dataset", records=3.0),
    "a boolean count": nested("dataset", skipped=False),
    "a count that does not add up": nested("dataset", records=4),
    "more in the dataset than is known": nested("dataset", more=1),
    "another label space": nested("labels", space="other"),
    "labels without their hash": nested("labels", sha256=...),
    "labels with another hash": nested("labels", sha256=DIGEST),
    "labels with more than is known": nested("labels", more=1),
    "a class without words": nested("labels", classes=[{"name": "n1", "ilsvrc2012_id": None}]),
    "a class that is text": nested("labels", classes=["n1"]),
    "a class name that is no text": classes(SURROGATE),
    "words that are no text": classes(TENCH | {"words": "\ud800"}),
    "words that are a list": classes(TENCH | {"words": ["tench"]}),
    "a devkit id that is a fraction": classes(TENCH | {"ilsvrc2012_id": 1.5}),
    "a devkit id that is a boolean": classes(TENCH | {"ilsvrc2012_id": True}),
    "a devkit id of 2**31": classes(TENCH | {"ilsvrc2012_id": 1 << 31}),
    "a negative devkit id": classes(TENCH | {"ilsvrc2012_id": -1}),
    "a class that is there twice": classes(TENCH, TENCH),
    "classes out of order": classes(TENCH | {"name": "n2"}, TENCH | {"name": "n1"}),
    "a container of the future": {"container": "zip"},
    "a plan without its digest": nested("plan", sha256=...),
    "a source without a layout": nested("source", layout=...),
    "a file listed twice": {"tables": shard()["shards"]},
    "a shard of 2**63 bytes": shard(size=1 << 63),
    "a shard of negative size": shard(size=-1),
    "a shard with a short digest": shard(sha256=DIGEST[:-1]),
    "a shard with a digest in capitals": shard(sha256=DIGEST.upper()),
    "a shard with more than is known": shard(more=1),
    **{f"a shard called {name!r}": shard(name=name) for name in (
        "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0", "a\n", "é", "x" * 65, 7,
    )},
}  # fmt: skip


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_what_cannot_be_is_refused_even_under_a_right_root(change: dict[str, Any]) -> None:
    with pytest.raises(ManifestDamaged):
        Manifest.parse(sealed(change))


HOSTILE = {
    "duplicate keys": SMALL.to_bytes().replace(b"{", b'{"crit":[],', 1),
    "NaN": b'{"a":NaN}\n',
    "infinity": b'{"a":1e400}\n',
    "200,000 lists": b"[" * 200_000,
    "200,000 objects": b'{"a":' * 200_000,
    "5,000 digits": b'{"a":' + b"9" * 5000 + b"}\n",
    "UTF-16": SMALL.to_bytes().decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + SMALL.to_bytes(),
    "no UTF-8": b'{"a":"\xff"}\n',
    "no JSON": b"\x80\x04N.",
    "nothing": b"",
    "a number": b"1\n",
    "a list": b"[]\n",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        Manifest.parse(data)


@pytest.mark.parametrize("version", [[2, 0], [0, 9], [1 << 70, 0], [-1, 0]])
def test_another_major_version_is_not_guessed_at(version: list[int]) -> None:
    with pytest.raises(UnknownVersion, match=r"this release knows 1\.1") as raised:
        Manifest.parse(sealed({"version": version, "dataset": "something else"}))
    assert raised.value.exit_code == 4


def test_an_unknown_critical_key_is_refused() -> None:
    with pytest.raises(UnknownVersion, match="encryption"):
        Manifest.parse(sealed({"version": [1, 1], "crit": ["encryption"], "encryption": "rot13"}))


def test_a_later_minor_version_is_read_and_keeps_its_root() -> None:
    data = sealed({"version": [1, 7], "thumbnails": {"size": 64}})

    manifest = Manifest.parse(data)

    assert manifest.extra == {"thumbnails": {"size": 64}}
    assert manifest.root == json.loads(data)["root"]
    assert manifest.to_bytes() == data


def test_every_finding_is_reported() -> None:
    with pytest.raises(ManifestDamaged, match=r"source.*shards"):
        Manifest.parse(sealed({"source": None, "shards": None}))


def test_a_manifest_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(SMALL.to_bytes())

    assert read_manifest(tmp_path) == SMALL


def test_no_manifest_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ManifestDamaged, match="not a dataset, or its conversion has not finished"):
        read_manifest(tmp_path)


def test_a_fifo_for_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")

    with pytest.raises(ManifestDamaged, match="not a regular file"):
        read_manifest(tmp_path)


def test_an_endless_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)

    with pytest.raises(ManifestDamaged, match="more than the"):
        read_manifest(tmp_path)


MANY_SHARDS = {
    "shards": [{"name": f"shard-{n}", "size": n, "sha256": DIGEST, "records": 1} for n in range(60_000)]
}
CROWDED = {
    "shards": sealed(MANY_SHARDS | nested("dataset", records=60_000)),
    "classes": sealed(classes(*({**TENCH, "name": f"class-{n:020}"} for n in range(90_000)))),
    "empty lists": b'{"a":[' + b"[]," * (3 << 20) + b"[]]}\n",
    "objects": b'{"a":[' + b'{"a":1},' * (2 << 20) + b"{}]}\n",
    "wide text": sealed({"more": "a" * (8 << 20) + "\U0001f600"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", torture_except(CROWDED, "shards"))
def test_reading_takes_a_bounded_multiple_of_the_files_size(tmp_path: Path, kind: str) -> None:
    (tmp_path / "manifest.json").write_bytes(CROWDED[kind])
    script = f"""
import resource
from pathlib import Path
from shardprep.formats import ManifestDamaged, read_manifest

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_manifest(Path({str(tmp_path)!r}))
except ManifestDamaged:
    pass
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 8 * len(CROWDED[kind])
