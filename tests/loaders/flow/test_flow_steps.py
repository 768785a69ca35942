"""What lists do not say of steps: shared memory, orders that stay forever, lengths, and what is shown."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep.loaders import Flow
from shardprep.loaders.flow.node import INFINITE, UNKNOWN, Length, share_numbers
from shardprep.loaders.flow.steps import describe

ENDLESS = Flow.from_iterable([1]).repeat()


def test_rows_are_views_of_their_batch() -> None:
    batch = {"x": np.arange(6).reshape(3, 2), "y": ([b"a", b"b", b"c"], np.arange(3), {})}
    rows = list(Flow.from_iterable([batch]).unbatch())

    assert [row["x"].tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert [row["y"] for row in rows] == [(b"a", 0, {}), (b"b", 1, {}), (b"c", 2, {})]
    assert all(np.shares_memory(row["x"], batch["x"]) for row in rows)


class Pair(NamedTuple):
    image: Any
    label: Any


def test_a_named_tuple_stays_one_where_its_lists_are_padded() -> None:
    (padded,) = Flow.from_iterable([Pair(image=[np.ones(1), np.ones(2)], label=["a", "b"])]).pad(-1)

    assert (type(padded), padded.label) == (Pair, ["a", "b"])
    assert padded.image.tolist() == [[1, -1], [1, 1]]


def test_kept_items_are_read_only() -> None:
    zeros = [np.zeros(2) for _ in range(5)]
    source = [{"x": zeros[0], "more": [zeros[1], {"y": zeros[2]}]}, Pair(zeros[3], 1), zeros[4], "t"]
    flow = Flow.from_iterable(source).cache()
    for _ in range(2):
        first, second, third, text = flow
        for array in (first["x"], first["more"][0], first["more"][1]["y"], second.image, third):
            assert array.tolist() == [0, 0]
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 1
        assert (second.label, text) == (1, "t")
        first["x"] = "spoilt"
        first["more"].clear()
    for array in zeros:
        array[:] = 7  # the source's own is another
    assert next(iter(flow))["x"].tolist() == [0, 0]


def test_an_array_that_the_source_writes_to_again_is_copied_and_only_such_a_source_changes_any() -> None:
    def begin() -> Iterator[np.ndarray]:
        row = np.zeros(2)
        for number in range(3):
            row[:] = number
            yield row

    flow = Flow.from_callable(begin).cache()
    assert [row.tolist() for row in flow] == [row.tolist() for row in flow] == [[0, 0], [1, 1], [2, 2]]
    assert flow.batches_never_change
    assert Flow.fake(3, size=(2, 2)).shuffle(3).batches_never_change
    assert not Flow.from_callable(lambda: iter([1])).shuffle(3).batches_never_change


def test_random_orders_stay_what_they_are() -> None:
    first, second = (Flow.from_iterable([name] * count) for name, count in (("a", 6), ("b", 4)))

    assert "".join(first.mix(second, seed=5).at_pass(1)) == "bbabbaaaaa"
    assert "".join(first.choose(second, weights=[2, 1], seed=5).at_pass(1)) == "bbabba"
    shuffled = Flow.from_iterable(range(12)).shuffle(5, seed=7)
    assert list(shuffled.at_pass(2)) == [1, 2, 0, 3, 5, 4, 6, 8, 7, 10, 9, 11]


def test_only_numbers_are_shuffled_where_there_are_some() -> None:
    drawn: list[int] = []
    flow = Flow.from_iterable(range(1000)).map(lambda number: drawn.append(number) or number)
    assert list(islice(flow.shuffle(1000), 3)) == drawn


def test_a_number_that_one_reader_has_drawn_is_there_for_another_while_the_next_is_awaited() -> None:
    waits, go_on = threading.Event(), threading.Event()

    def numbers() -> Iterator[int]:
        yield 0
        waits.set()
        assert go_on.wait(60)

    ahead, behind = share_numbers(numbers(), 2)
    assert next(ahead) == 0
    thread = threading.Thread(target=list, args=(ahead,))
    thread.start()
    assert waits.wait(60)
    assert (next(behind), go_on.is_set()) == (0, False)
    go_on.set()
    thread.join()


def test_dicts_of_one_batch_may_have_their_names_in_any_order() -> None:
    flow = Flow.from_iterable([{"a": 1, "b": 2}, {"b": 4, "a": 3}])
    for (batch,) in (flow.batch_by_shape(2), flow.map_component(str, "b").batch_by_shape(2, as_list=True)):
        assert {name: list(map(int, part)) for name, part in batch.items()} == {"a": [1, 3], "b": [2, 4]}


@pytest.mark.parametrize(
    ("flows", "weights", "length"),
    [
        ([3, 4], None, Length(7, is_certain=False)),
        ([3, None], None, UNKNOWN),
        ([None, None], None, INFINITE),
        ([3, None], [0, 1], INFINITE),
        ([3, None], [1, 0], Length(3)),
        ([3], None, Length(3)),
    ],
    ids=str,
)
def test_how_many_are_chosen_is_said_as_far_as_it_is_known(flows: Any, weights: Any, length: Any) -> None:
    first, *others = [Flow.from_iterable(range(count)) if count else ENDLESS for count in flows]
    assert first.choose(*others, weights=weights).length == length


def test_files_come_in_the_order_of_their_paths_bytes_with_their_classs_place(tmp_path: Path) -> None:
    order = ["a-b/1.jpg", "a/sub/deep/1.jpg", "a/z.png", "b/10.JPEG", "b/2.jpg", "b/Z.jpg", "b/a.jpg"]
    order.append("é/ü.jpg")
    labels = {"a": 0, "a-b": 1, "b": 2, "empty": 3, "é": 4}
    for name in [*reversed(order), "a/notes.txt", "b/.hidden.jpg", "README"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "empty").mkdir()

    flow = Flow.from_files(tmp_path)

    assert list(flow) == list(flow) == [(name.encode(), labels[name.partition("/")[0]]) for name in order]
    assert (len(flow), flow.batches_never_change) == (len(order), True)


def test_a_measurement_counts_bytes_at_any_depth_and_is_json_and_a_sentence() -> None:
    item = {"x": (np.zeros((2, 3)), [b"abc", memoryview(bytearray(4))]), "y": "text", "z": np.int16(1)}
    speed = Flow.from_iterable([item]).measure(seconds=0)
    of_batches = (flow := Flow.from_iterable(np.zeros((10, 2))).batch(4)).measure(seconds=0.01)

    assert speed.megabytes_per_second == pytest.approx(speed.items_per_second * (48 + 3 + 4 + 2) / 1e6)
    assert json.loads(json.dumps(of_batches.to_dict())) == of_batches.to_dict()
    assert all(word in str(of_batches) for word in ("items/s", "rows/s", "MB/s", " pass", "ms", "CPU"))
    assert [word in str(shown) for word, shown in (("\n", of_batches), ("rows/s", speed))] == [False, False]
    assert "1,234 ms" in str(type(speed)(**speed.to_dict() | {"p50_milliseconds": 1234.4}))
    assert flow.state_dict()["pass"] == 0


class Broken:
    """An object of which every method raises."""

    def __repr__(self) -> str:
        raise ValueError

    __str__ = __hash__ = __len__ = __repr__  # type: ignore[assignment]


LOOKS: dict[str, tuple[Any, str]] = {
    "nested": (
        (
            np.array([[3, 250]], np.uint8),
            {"label": 12345, "key": "secret", "raw": b"secret", "more": [None, 0.5]},
        ),
        "tuple of 2\n"
        "  0: ndarray uint8 [1, 2], 3 to 250\n"
        "  1: dict of 4\n"
        "    label: int\n"
        "    key: str of 6 characters\n"
        "    raw: bytes of 6 bytes\n"
        "    more: list of 2\n"
        "      0: NoneType\n"
        "      1: float",
    ),
    "named tuple": (Pair(1, np.zeros(0)), "Pair of 2\n  0: int\n  1: ndarray float64 [0]"),
    "not a number": (np.array([1, np.nan]), "ndarray float64 [2], nan to nan"),
    "no range": (np.array(["secret"]), "ndarray <U6 [1]"),
    "no axis": (np.array(7), "ndarray int64 [], 7 to 7"),
    "numpy's number": (np.float32(3), "float32"),
    "memory": (memoryview(np.zeros((2, 3))), "memoryview of 48 bytes"),
    "broken": (Broken(), "Broken"),
    "within": ([Broken()], "list of 1\n  0: Broken"),
    "long": ([*range(1000)], "\n".join(["list of 1,000", *(f"  {n}: int" for n in range(16)), "  ..."])),
    "other dict": (OrderedDict(a=1), "OrderedDict of 1\n  a: int"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_types_shapes_and_ranges_are_shown_and_never_the_data(name: str) -> None:
    item, expected = LOOKS[name]
    assert describe(item) == expected
