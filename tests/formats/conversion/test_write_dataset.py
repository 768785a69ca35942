"""Any items as a dataset: they come back equal, for any form, interruption and number of workers."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from shardprep.formats import Record, join, open_dataset, read_manifest, report, verify, write_dataset
from shardprep.formats.conversion.save import BadItem
from shardprep.formats.errors import PlanMismatch, UsageError
from shardprep.formats.records.schema import DTYPES
from shardprep.formats.runtime.progress import NoProgress
from shardprep.loaders import Flow
from support.datasets import tree
from support.image_files import JPEG
from support.saved_items import JSON, NUMBER, are_same, made

SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=3)
OF_ARRAYS = st.sampled_from(DTYPES).map(np.dtype)
COLUMNS: st.SearchStrategy[st.SearchStrategy[Any]] = st.one_of(
    st.sampled_from(
        [st.binary(max_size=40), st.text(max_size=20), st.integers(-(1 << 63), (1 << 63) - 1), st.integers()]
    ),
    st.sampled_from([st.floats(), JSON]),
    OF_ARRAYS.map(arrays.from_dtype),
    OF_ARRAYS.map(lambda dtype: arrays.arrays(dtype, SHAPES)),
    OF_ARRAYS.map(lambda dtype: arrays.arrays(dtype, (2, 3))),
)
"""Columns of one kind each, as a strategy for their values."""


@st.composite
def items(draw: st.DrawFn) -> list[Any]:
    """Items of one form, with columns of a few kinds each of which stays the same in all items."""
    names = draw(
        st.lists(st.sampled_from(["a", "B2", "c.d", "0e", "_f"]), min_size=1, max_size=3, unique=True)
    )
    columns = {name: draw(COLUMNS) for name in names}
    count = draw(st.integers(1, 4))
    rows = [{name: draw(column) for name, column in columns.items()} for _ in range(count)]
    match draw(st.sampled_from(["dict", "own", "tuple", "list", "value"])):
        case "dict":
            return rows
        case "own":
            labels = st.integers(-1, 9)
            return [
                {"image": JPEG, "key": f"k{n}", "label": draw(labels), **row} for n, row in enumerate(rows)
            ]
        case "tuple":
            return [tuple(row.values()) for row in rows]
        case "list":
            return [list(row.values()) for row in rows]
    return [row[names[0]] for row in rows if not isinstance(row[names[0]], list | dict)] or [0]


def numbered() -> Flow:
    return Flow.from_iterable(range(NUMBER)).map(made, random=True, seed=3)


def same(found: Any, wanted: Any) -> bool:
    return are_same(list(found), list(wanted))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(items(), st.booleans(), st.sampled_from(["lmdb", "hdf5"]))
def test_saved_items_come_back_as_they_were(given_items: list[Any], stream: bool, container: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = iter(given_items) if stream else given_items
        write_dataset(source, folder, workers=0, shard_size=2000, container=container)

        assert same(Flow.from_dataset(folder), given_items)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "train"
    numbered().save(output, workers=0, shard_size=8000)
    return output


def test_records_come_back_with_key_label_image_and_columns(tmp_path: Path) -> None:
    samples = [
        {"key": f"n{n}", "image": JPEG, "label": ["dog", "cat"][n % 2], "age": n, "box": np.zeros((n, 4))}
        for n in range(6)
    ]
    names: Any = np.array(["dog", "cat"])
    write_dataset(samples, tmp_path / "one", classes=names, workers=0)

    with open_dataset(tmp_path / "one") as dataset:
        write_dataset(dataset, tmp_path / "two", workers=0)
        assert dataset.classes == ("cat", "dog")
        assert [record.label for record in dataset] == [1, 0] * 3

    found = list(Flow.from_dataset(tmp_path / "two"))
    assert all(isinstance(record, Record) for record in found)
    assert [(record.key, record.label, record.image) for record in found] == [
        (f"n{n}", 1 - n % 2, JPEG) for n in range(6)
    ]
    assert found[3]["box"].shape == (3, 4)
    assert found[3].columns["age"] == 3
    assert repr(found[3]) == f"<Record 'n3': label 0, {len(JPEG):,} bytes, columns age, box>"
    assert same(Flow.from_dataset(tmp_path / "one"), samples)


def test_labels_without_names_stay_the_same_numbers(tmp_path: Path) -> None:
    samples, progress = iter([{"label": n, "v": 0} for n in (11, 2, -1)]), Mock(wraps=NoProgress())
    manifest = write_dataset(samples, tmp_path / "out", progress=progress)

    progress.task.assert_called_once_with("save", records=3, size=0)
    assert [record.label for record in open_dataset(tmp_path / "out")] == [11, 2, -1]
    assert manifest.labels.classes[11].name == "00011"


@pytest.mark.torture
def test_the_bytes_do_not_depend_on_workers_or_on_where_items_are_made(whole: Path, tmp_path: Path) -> None:
    numbered().save(tmp_path / "two", workers=2, shard_size=8000)
    mapped = Flow.from_iterable(range(NUMBER)).map(made, random=True, seed=3, processes=1)
    mapped.save(tmp_path / "mapped", workers=1, shard_size=8000)
    mapped.close()
    write_dataset(list(numbered().at_pass(0)), tmp_path / "held", workers=1, shard_size=8000)

    assert tree(tmp_path / "two") == tree(tmp_path / "mapped") == tree(whole)
    assert tree(tmp_path / "held") == tree(whole)
    assert len(read_manifest(whole).shards) > 3
    assert same(Flow.from_dataset(whole), numbered().at_pass(0))
    assert verify(whole).findings == []


def test_shuffled_items_are_all_there_and_in_another_order(whole: Path, tmp_path: Path) -> None:
    manifest = numbered().save(tmp_path / "out", order="shuffled", seed=1, workers=0)
    names = [item["name"] for item in Flow.from_dataset(tmp_path / "out")]
    assert manifest.plan["order"] == "given-shuffled"
    assert "given-shuffled, seed 1" in report(tmp_path / "out", pixels="none", workers=0).to_html()
    assert names != [item["name"] for item in Flow.from_dataset(whole)]
    assert sorted(names) == sorted(item["name"] for item in numbered().at_pass(0))
    with pytest.raises(UsageError, match="only items with numbers"):
        write_dataset(iter([1]), tmp_path / "iterator", order="shuffled")


MASKED = [
    ("a", np.ma.array([1.0, 2.0], mask=[False, True]), "float64[2]"),
    ("a", np.ma.masked, "float"),
    ("a", np.ma.array(5, mask=True), "int"),
    ("label", np.ma.array(5, mask=True), "label"),
]
BAD_ITEMS: list[tuple[list[Any], dict[str, str] | None, str]] = [
    *(
        ([*({"a": n} for n in range(150)), different, {"a": 1}], None, f"item 150: {said}")
        for different, said in (
            ({"a": 1.5}, "a: expected int, not float 1.5; schema="),
            ({"a": None}, "a: expected int, not NoneType"),
            ({"b": 1}, "is a dict of b, expected a dict of a"),
            ((1,), "is a tuple of 1, expected a dict of a"),
        )
    ),
    (
        [{"x": np.zeros((1 + n // 4, 300), "f4")} for n in range(9)],
        None,
        "item 4: x: .*; schema=",
    ),  # as 3 are large
    ([{"label": n, "v": 0} for n in (0, 100_000)], None, "item 1: label: .* -1 to 99999"),
    *(
        ([{"label": 0, "v": 0}, {"label": v, "v": 0}], None, "item 1: label: .* a label")
        for v in ("dog", 1.5)
    ),
    *(([{"key": key, "v": 0}], None, "item 0: key: .* 1 to .* bytes and no NUL") for key in ("", "a\0b")),
    ([{"image": np.zeros((2, 2, 3)), "v": 0}], None, "item 0: image: .*encode pixels, or give them another"),
    ([{"key": f"k{n % 7}", "v": n} for n in range(9)], None, "item 7: its key is that of item 0, 'k0'$"),
    *(
        ([{"a": [1]}, {"a": value}], None, "item 1: ")
        for value in (object(), np.array(["x"]), (1, 2), np.zeros(2, ">i4"), {1: 2}, "\ud800")
    ),
    *(
        ([{name: value, "b": 0}], schema, rf"item 0: .*{name}.* lose its mask: give filled\(value\)")
        for name, value, kind in MASKED
        for schema in (None, {name: kind, "b": "int"})
    ),
]


@patch("shardprep.formats.conversion.save.FIRST_BYTES", 3600)
@pytest.mark.parametrize("give", [list, iter])
@pytest.mark.parametrize(("samples", "schema", "message"), BAD_ITEMS)
def test_an_item_that_differs_or_cannot_be_held_is_named(
    samples: list[Any], schema: dict[str, str] | None, message: str, give: Any, tmp_path: Path
) -> None:
    with pytest.raises(BadItem, match=message) as caught:
        write_dataset(give(samples), tmp_path / "out", schema=schema, workers=0)

    assert message.startswith(f"item {caught.value.number}: ")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_given_schema_holds_more_than_the_first_items_show(tmp_path: Path) -> None:
    items = [{"a": np.zeros(size, np.int8), "key": f"{n}"} for n, size in enumerate((2, 2, 3))]
    write_dataset(items, tmp_path / "out", schema={"a": "int8[*]", "key": "text"}, workers=0)

    assert same(Flow.from_dataset(tmp_path / "out"), items)
    with pytest.raises(UsageError, match="differ in b"):
        write_dataset(items, tmp_path / "other", schema={"a": "int8[*]", "b": "int"})


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        *((samples, {}, "no(thing|t| items)") for samples in ([], iter([]), {}, b"abc", 7, [{}], [()])),
        (SimpleNamespace(iloc=None, ndim=2), {}, "give its rows"),
        ([1], {"workers": -1}, "workers must be"),
        ([1], {"shard_size": "64MB"}, "the shard size must be"),
        ([1], {"seed": "1"}, "a seed must be"),
        ([{"label": 0, "v": 1}], {"classes": ["dog", "cat"]}, "give the names as labels"),
        *(([{"label": "a", "v": 1}], {"classes": n}, "unique names") for n in ("ab", ["a", "a"], ["\ud800"])),
        ([1], {"split": "dev"}, "the split is one of train, val, test, not 'dev'"),
        ([1], {"order": "random"}, "the order is one of given, shuffled, not 'random'"),
        ([{"a": 1}], {"classes": ["dog"]}, "classes need items with a label"),
        ([{"label": "dog", "v": 1}], {}, "the labels are names; give classes="),
        ([1], {"schema": {"value": int}}, "unknown kind <class 'int'>"),
        ([1], {"schema": ["value"]}, "a dict of names and kinds, .* not 'value'"),
        ([{"a": 1, "A": 2}], {}, "the column a occurs twice, ignoring case"),
        ([dict.fromkeys(map(str, range(1 << 18)), 1)], {}, "are 262144 columns; at most 256"),
    ],
)
def test_what_has_no_items_or_columns_and_options_that_cannot_be_meant_are_refused(
    samples: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        write_dataset(samples, tmp_path / "out", **options)


def test_items_have_the_same_form_after_a_column_is_joined(tmp_path: Path) -> None:
    write_dataset([{"a": 1}, {"a": 2}], tmp_path / "out", workers=0)
    np.save(tmp_path / "b.npy", [3, 4])
    join(tmp_path / "out", {"b": tmp_path / "b.npy"}, workers=0)

    assert list(Flow.from_dataset(tmp_path / "out")) == [{"a": 1}, {"a": 2}]
    assert [record["b"] for record in open_dataset(tmp_path / "out")] == [3, 4]


def test_the_boxes_of_a_dataset_become_columns(splits: Path, tmp_path: Path) -> None:
    write_dataset(open_dataset(splits / "val"), tmp_path / "out", workers=0)

    found, wanted = ([dict(r.columns) for r in open_dataset(p)] for p in (tmp_path / "out", splits / "val"))
    assert any(len(record["boxes"]) for record in wanted)
    assert same(found, wanted)


def test_a_column_of_pandas_has_its_values_in_order_and_not_by_label(tmp_path: Path) -> None:
    column: Any = SimpleNamespace(iloc=None, ndim=1, array=[3, 1, 2])
    write_dataset(column, tmp_path / "out")
    assert [*Flow.from_iterable(column)] == [*Flow.from_dataset(tmp_path / "out")] == [3, 1, 2]


def test_a_finished_output_is_recognised_and_others_are_refused(whole: Path) -> None:
    before = tree(whole)
    assert numbered().save(whole, workers=0, shard_size=8000) == read_manifest(whole)
    with pytest.raises(PlanMismatch):
        numbered().save(whole, workers=0)
    other = Flow.from_iterable(range(NUMBER)).map(made, random=True, seed=4)
    with pytest.raises(PlanMismatch, match="holds a finished dataset of other items"):
        other.save(whole, workers=0, shard_size=8000)
    assert tree(whole) == before


class Counted:
    """Items by number that count how often one was made, and fail at one of them once."""

    def __init__(self, fail_at: int) -> None:
        self.made, self.fail_at = 0, fail_at

    def __len__(self) -> int:
        return 400

    def __getitem__(self, number: int) -> bytes:
        self.made += 1
        if number == self.fail_at:
            self.fail_at = -1
            raise RuntimeError("once")
        return bytes([number % 256]) * 1500


@pytest.mark.slow
def test_finished_shards_are_kept_and_a_generator_begins_anew(tmp_path: Path) -> None:
    numbered_items, stream = Counted(350), Counted(350)
    for _ in range(2):
        if numbered_items.fail_at < 0:
            numbered_items.made = 0
        for source, name in ((numbered_items, "numbered"), ((stream[n] for n in range(400)), "stream")):
            try:
                write_dataset(source, tmp_path / name, workers=0, shard_size=30_000)
            except RuntimeError:
                assert not (tmp_path / name / "manifest.json").exists()
                with pytest.raises(PlanMismatch, match=r"an unfinished conversion: items changed; give"):
                    write_dataset([b"other"], tmp_path / name, workers=0, shard_size=30_000)

    assert numbered_items.made < 100 + 100  # the first items, and those of unfinished shards
    assert stream.made == 351 + 400
    for name in ("numbered", "stream"):
        assert same(Flow.from_dataset(tmp_path / name), [bytes([n % 256]) * 1500 for n in range(400)])
        assert not (tmp_path / name / ".prep").exists()
