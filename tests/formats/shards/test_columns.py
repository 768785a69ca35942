"""What records consist of: values of columns, labels of classes, and one JSON text for one value."""

import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from shardprep.formats import Manifest, PlanOptions, UsageError, open_dataset, read_manifest, write_dataset
from shardprep.formats.errors import CorruptRecord, ManifestDamaged, SourceDamaged
from shardprep.formats.records.record import SPACES, LabelSpace, Record, official_words
from shardprep.formats.records.schema import BadValue, Field, Schema
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.shards import columns as shard_cache
from shardprep.formats.shards.read import CONTAINERS
from support.column_datasets import EVERY_KIND, every_kind, write_columns
from support.datasets import open_files
from support.image_files import JPEG
from support.saved_items import JSON, are_same

VALUES = {
    "bytes": st.binary(),
    "image": st.just(JPEG),
    "text": st.text(),
    "json": JSON,
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "label": st.integers(-1, 2),
}

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


def field(kind: str) -> Field:
    return Field("x", kind, ("cat", "dog", "eel") if kind in ("label", "labels") else ())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bytes", "text"), ("image", b"no image"), ("text", b"bytes"), ("text", "\ud800"),
        ("json", (1, 2)), ("json", [{"a": (1,)}]), ("json", {1: 2}), ("json", np.nan), ("json", object()), ("json", CIRCLE), ("json", parse_canonical_json(b"[" * 101 + b"1" + b"]" * 101 + b"\n")),
        ("int", 2**63), ("int", True), ("int", 1.0), ("int", np.zeros(2, int)), ("label", np.zeros(2, int)), ("float", "1"), pytest.param("float", 10**400, id="float-large"), ("float", True),
        ("label", 3), ("label", "owl"), ("label", -2), ("labels", [0, 0]), ("labels", ["owl"]),
        ("labels", "cat"), ("labels", {"cat": 1}), ("labels", 1), ("labels", [-1]),
        ("float32[2]", [1.0, 2.0]), ("float32[2]", np.zeros(3, "f4")), ("float32[2]", np.zeros(2)),
        ("float32[*]", np.zeros((1, 1), "f4")), ("float32[*]", np.zeros(1, ">f4")), ("int8[*,*]", np.zeros((1 << 19, 0), "i1")), ("int8[*,*]", b"\xff" * 4 + bytes(4)),
        *(("json", data) for data in (b"1e999", b"9" * 309 + b".0", b'{"\\ud800":1}', b"[" * 101 + b"1" + b"]" * 101)),
    ],
)  # fmt: skip
def test_what_a_column_cannot_hold_is_refused(kind: str, value: Any) -> None:
    is_stored = isinstance(value, bytes) and kind not in ("text", "image")
    with pytest.raises(BadValue):
        getattr(field(kind).codec, "decode" if is_stored else "encode")(value)


@given(st.sampled_from([*VALUES, "labels", "float32[*,4]", "int16[3]", "bool[*,*]"]), st.binary(max_size=40))
@example("int16[*,*,*]", bytes(4) + b"\xff" * 8)
def test_any_bytes_are_a_value_or_refused(kind: str, data: bytes) -> None:
    with suppress(BadValue):
        field(kind).codec.decode(data)


UNKNOWN = ["", "str", "object[]", "float32", "float32[", "float32[-1]", "float32[1,]", "int32[²]"]


@pytest.mark.parametrize("kind", [*UNKNOWN, "uint8[999999999]", ["int"]])
def test_unknown_kinds_are_refused_and_the_known_ones_named(kind: Any) -> None:
    with pytest.raises(UsageError, match="image, bytes, text"):
        Field("x", kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"": "int"}, {"a/b": "int"}, {".a": "int"}, {"a" * 41: "int"}, {"key": "text"}, {"Image": "image"},
        {"a": "int", "A": "int"}, {f"c{n}": "int" for n in range(257)},
    ],
)  # fmt: skip
def test_names_that_no_column_can_have_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Schema(fields)


class Name(str):
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return super().__eq__(other)


@pytest.mark.parametrize(("kind", "value"), [("label", Name("999")), ("labels", [Name("999")])])
def test_a_class_among_many_is_found_without_comparing_them(kind: str, value: Any) -> None:
    assert (
        int.from_bytes(Field("x", kind, [str(n) for n in range(1000)]).codec.encode(value), "little") == 999
    )
    assert Name.compared < 9


@pytest.mark.parametrize("classes", [(), (1, 2), "cat", ("a", "a")])
def test_classes_that_no_manifest_can_hold_are_refused(classes: Any) -> None:
    with pytest.raises(UsageError, match="needs classes"):
        Field("x", "label", classes)


@pytest.fixture(scope="module", params=CONTAINERS)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "train"
    write_columns(folder, options=PlanOptions(container=request.param, shard_size=9000))
    return folder


def test_every_value_comes_back_with_its_record(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        assert opened.schema == EVERY_KIND
        assert len(opened.manifest.shards) > 1
        for record in opened:
            number = int(record.key[1:])
            expected = every_kind(number) | {"tags": np.array([number % 3], np.int32)}
            assert (record.label, record.image) == (number % 2, JPEG)
            assert tuple(record.columns) == EVERY_KIND.names
            for name, value in expected.items():
                assert are_same(record[name], value), name


def test_all_columns_share_what_may_be_open(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_dataset(dataset) as opened:
        whole = [dict(record.columns) for record in opened]
    monkeypatch.setattr(shard_cache, "MAX_OPEN", 3)
    monkeypatch.setattr(shard_cache, "ROWS_BYTES", 40)  # a few rows at once
    most = 0
    with open_dataset(dataset) as opened:
        for number in (*range(len(opened)), 0):
            for name, value in opened[number].columns.items():
                assert are_same(value, whole[number][name])
                most = max(most, open_files(dataset))
    assert 3 < most <= 2 * 3
    assert open_files(dataset) == 0


def test_a_shard_that_is_none_of_the_records_is_an_error(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        for number in (-1, len(opened.manifest.shards)):  # the next ones are those of columns
            with pytest.raises(IndexError, match=f"shard {number} of"):
                opened.shard(number)


def test_a_record_is_still_a_tuple_and_can_be_pickled(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        record = opened[-1]
        key, label, image = record
        again = pickle.loads(pickle.dumps(record))  # noqa: S301 - of this test
    assert (key, label, image) == tuple(again) == (record[0], record[1], record[2])
    assert again["caption"] == record["caption"]
    for one, names in ((again, "mask, sound, caption"), (Record(*record), "none")):
        with pytest.raises(KeyError, match=f"the columns are: {names}"):
            one["depth"]


@pytest.mark.parametrize("image", [JPEG, JPEG + b"x"])
def test_a_dataset_that_replaced_an_open_or_pickled_one_is_refused(image: bytes, tmp_path: Path) -> None:
    for name, own in (("old", JPEG), ("new", image)):
        write_dataset([{"key": "a", "image": own, "name": name}], tmp_path / name, workers=0)
    with open_dataset(tmp_path / "old") as opened:
        stored = pickle.dumps(opened)
        (tmp_path / "old").rename(tmp_path / "gone")
        (tmp_path / "new").rename(tmp_path / "old")
        with pytest.raises(ManifestDamaged, match="was replaced by another dataset"):
            opened[0]["name"]
    with pytest.raises(SourceDamaged, match="was replaced by another dataset"):
        pickle.loads(stored)  # noqa: S301 - of this test


def test_the_content_root_covers_each_column_and_not_the_container(tmp_path: Path) -> None:
    roots = set()
    for container in CONTAINERS:
        manifest = write_columns(tmp_path / container, options=PlanOptions(container, shard_size=9000))
        roots.add((manifest.content_root, manifest.records_root))
        assert read_manifest(tmp_path / container) == manifest
    other = write_columns(tmp_path / "less", schema=Schema(EVERY_KIND.fields[:-1]))
    ((root, records_root),) = roots
    assert other.records_root == records_root
    assert other.content_root not in (root, records_root)


def test_columns_that_contradict_their_manifest_are_refused(dataset: Path) -> None:
    good = read_manifest(dataset)
    columns, (first, *others) = good.columns, good.column_entries
    assert columns
    tables = [replace(first.table, **change) for change in ({"name": "column-x.npy"}, {"records": 1})]
    wrong = [replace(first, shards=first.shards[1:]), *(replace(first, table=table) for table in tables)]
    hidden = replace(columns, has_images=False)
    for lie in (
        *({"columns": replace(columns, fields=(each, *others))} for each in wrong),
        *({"columns": hidden, "content_root": hidden.content_root}, {"content_root": good.records_root}),
        {"tables": (*good.tables, first.table)},
    ):
        with pytest.raises(ManifestDamaged, match="contradict"):
            Manifest.parse(replace(good, **lie).to_bytes())


def test_a_value_of_another_record_and_a_cut_table_are_errors(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", schema=Schema({"age": "int"}))
    table = tmp_path / "d" / "column-age.npy"
    data = table.read_bytes()
    table.write_bytes(data[:-24] + data[-12:] + data[-24:-12])
    with open_dataset(tmp_path / "d") as opened, pytest.raises(CorruptRecord, match="age"):
        opened[-1]["age"]
    table.write_bytes(data[:-1])
    with open_dataset(tmp_path / "d") as opened, pytest.raises(ManifestDamaged, match="prep repair"):
        opened[0]["age"]


OFFICIAL = LabelSpace.of(official_words())
MAPPINGS = {"sorted_wnid0": [0, 1, 2, -1], "ilsvrc2012_id": [3, 1, 2, -1], "sorted_wnid1_bg": [1, 2, 3, -1]}


@pytest.mark.parametrize("space", SPACES)
def test_a_mapping_gives_each_label_in_another_space_and_keeps_unlabelled(space: str) -> None:
    mapping = LabelSpace.of(["a", "b", "c"], ids={"a": 3, "b": 1, "c": 2}).mapping(space)
    assert mapping.dtype == np.int64
    assert mapping.tolist() == MAPPINGS[space]
    assert mapping[-1] == -1
    with pytest.raises(UsageError, match="converted with the devkit"):
        LabelSpace.of(["a", "b"], ids={"a": 1}).mapping("ilsvrc2012_id")


def test_the_text_and_the_digest_of_the_official_classes_never_change() -> None:
    value = {"b": [1, -2.5, True, None], "a": "é\n", "": {}}
    assert canonical_json(value) == b'{"":{},"a":"\\u00e9\\n","b":[1,-2.5,true,null]}\n'
    assert OFFICIAL.digest == "sha256:9a765b7a8a8604f0c3d8026c4339518b395d0039a9872a2b2c4e700f5b2b9aa2"
    assert sha256_of(value) == "sha256:fedcad82d76705603b4cdc3e949793ce6f5bd8c90ea88b8489ddb7ce0fb92f19"


OTHER_TEXTS = {
    "no newline": b"1",
    "carriage return": b"1\r\n",
    "space": b'{"a": 1}\n',
    "unsorted keys": b'{"b":1,"a":2}\n',
    "duplicate keys": b'{"a":1,"a":1}\n',
    "needless escape": b'"\\u0061"\n',
    "no escape": '"é"\n'.encode(),
    "float with more digits": b"1.50\n",
    "minus zero": b"-0\n",
    "NaN": b"NaN\n",
    "infinity": b"1e400\n",
    "5,000 digits": b"9" * 5000 + b"\n",
    "200,000 lists": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "byte order mark": b"\xef\xbb\xbf1\n",
    "UTF-16": '"a"\n'.encode("utf-16"),
    "invalid UTF-8": b'"\xff"\n',
    "two values": b"1 2\n",
    "nothing": b"",
}


@pytest.mark.parametrize("text", OTHER_TEXTS.values(), ids=OTHER_TEXTS)
def test_every_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|canonical"):
        parse_canonical_json(text)
