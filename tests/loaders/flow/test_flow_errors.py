"""Invalid arguments are refused by the call that has them, and items by the pass, with number and advice."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import ArraySpec, EvalTransform, Flow

FLOW = Flow.from_iterable(range(10))

NO_COUNTS: list[Any] = ["x", -1, 1.5, math.nan, [], object(), b"x", True, 1 << 70]
NO_FLAGS: list[Any] = ["False", None, 5]
NO_SEEDS: list[Any] = [*NO_COUNTS, None]
NO_FUNCTIONS: list[Any] = ["x", 5, None, []]
NO_TIMES: list[Any] = ["x", -1, 0, math.nan, math.inf, [], True]
NO_WEIGHTS: list[Any] = ["x", 5, [None, 1], ["x", 1], [-1, 1], [0, 0], [1], [math.nan, 1]]
NO_OUTPUTS: list[Any] = [5, "x", [], [1], [ArraySpec("a", (2,), "float32")] * 2]

MISUSES: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    **{name: (getattr(FLOW, name), [*NO_COUNTS, None]) for name in ("take", "skip", "print", "peek")},
    "map": (lambda value: FLOW.map(value), NO_FUNCTIONS),
    "map threads": (lambda value: FLOW.map(abs, threads=value), [*NO_COUNTS, None, 4097]),
    "map processes": (lambda value: FLOW.map(abs, processes=value), [*NO_COUNTS, None, 4097]),
    **{
        f"map {name}": (lambda value, name=name: FLOW.map(abs, **{name: value}), NO_FLAGS)
        for name in ("ordered", "drop_none", "random")
    },
    "map seed": (lambda value: FLOW.map(abs, seed=value), NO_SEEDS),
    "map deadline": (lambda value: FLOW.map(abs, processes=1, deadline=value), NO_TIMES),
    "map outputs": (lambda value: FLOW.map(abs, processes=1, outputs=value), NO_OUTPUTS),
    "ArraySpec": (lambda value: ArraySpec("a", (2,), value), ["no dtype", "object", ",", 5]),
    "ArraySpec shape": (lambda value: ArraySpec("a", value, "u1"), [(-2,), (2.5,), [2], 2, None, (1 << 63,)]),
    "Flow": (Flow, [[1, 2], range(3), None, abs, FLOW]),
    "transform": (FLOW.transform, [*NO_FUNCTIONS, EvalTransform, lambda record: record]),
    "map_component": (lambda value: FLOW.map_component(value, 0), NO_FUNCTIONS),
    "map_component of": (lambda value: FLOW.map_component(abs, value), [1.5, None, True, []]),
    "components": (lambda value: FLOW.select(*value), [(), (0, "a"), ("a", "a"), (1.0,)]),
    "filter": (lambda value: FLOW.filter(value), NO_FUNCTIONS),
    "shuffle": (lambda value: FLOW.shuffle(value), [*NO_COUNTS, None, 0]),
    "shuffle seed": (lambda value: FLOW.shuffle(3, seed=value), NO_SEEDS),
    "batch": (lambda value: FLOW.batch(value), [*NO_COUNTS, None, 0]),
    "batch remainder": (lambda value: FLOW.batch(3, remainder=value), ["x", None, 5, []]),
    "lists remainder": (lambda value: FLOW.batch(3, remainder=value, as_list=True), ["pad"]),
    "batch_by_shape": (lambda value: FLOW.batch_by_shape(value), [*NO_COUNTS, None, 0]),
    "repeat": (lambda value: FLOW.repeat(value), NO_COUNTS),
    "concat": (lambda value: FLOW.concat(value), [[1], None]),
    "mix weights": (lambda value: FLOW.mix(FLOW, weights=value), [*NO_WEIGHTS, [1, 0]]),
    "choose weights": (lambda value: FLOW.choose(FLOW, weights=value), NO_WEIGHTS),
    "prefetch": (lambda value: FLOW.prefetch(value), [*NO_COUNTS, None, 0]),
    "in_process": (lambda value: FLOW.in_process(ahead=value), [*NO_COUNTS, None, 0]),
    "at_pass": (lambda value: FLOW.at_pass(value), [*NO_COUNTS, None, 1 << 63]),
    "pick pass": (lambda value: FLOW.pick(value, [0]), [*NO_COUNTS, None, 1 << 63]),
    "pick numbers": (lambda value: FLOW.pick(0, value), [5, None]),
    "pick a number": (lambda value: list(FLOW.pick(0, [value])), ["x", 1.5, None, True]),
    "measure": (lambda value: FLOW.measure(seconds=value), ["x", -1, math.nan, math.inf, None, True]),
    "from_iterable": (Flow.from_iterable, ["x", b"x", 5, None, {}, iter([1])]),
    "from_callable": (Flow.from_callable, NO_FUNCTIONS),
    "concat to an endless one": (lambda value: FLOW.repeat().concat(value), [FLOW]),
    "measure nothing": (lambda value: value.measure(seconds=0.1), [Flow.from_iterable([])]),
    "fake": (Flow.fake, [*NO_COUNTS, None]),
    "fake seconds": (lambda value: Flow.fake(1, seconds=value), ["x", -1, math.nan, None]),
    "fake seed": (lambda value: Flow.fake(1, seed=value), NO_SEEDS),
}


@pytest.mark.parametrize("name", MISUSES)
def test_an_invalid_argument_is_refused_by_the_call_that_has_it(name: str) -> None:
    use, values = MISUSES[name]
    for value in values:
        with pytest.raises(UsageError) as caught:
            use(value)
        assert str(caught.value)


def over(*items: Any) -> Flow:
    return Flow.from_iterable(items)


def padded(one: Any, other: Any, value: float = 0) -> Flow:
    return over(one, other).batch(2, as_list=True).pad(value)


class Sized:
    """Five items, of which ``len`` says another number."""

    def __init__(self, says: int) -> None:
        self.says = says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def ends_later() -> Flow:
    passes = iter([[1, 2], []])
    return Flow.from_callable(lambda: next(passes)).repeat()


ZEROS, INTS = np.zeros(2), np.zeros(2, np.int64)
IMAGE = ArraySpec("image", (4, 5), "float32")
NO_BATCHES: list[Any] = [
    3,
    np.float32(1),
    np.array(1),
    b"abc",
    (),
    (ZEROS, np.zeros(3)),
    {"a": [1], "b": "x"},
]

REFUSED: list[tuple[Callable[[], Flow], str]] = [
    (lambda: over({"mask": 1}).batch(1, remainder="pad"), "named mask"),
    *(
        (lambda batch=batch: over(ZEROS, batch).unbatch(), "In item 1 of pass 0, at unbatch")
        for batch in NO_BATCHES
    ),
    (lambda: over(ZEROS, ZEROS).batch(2).pad(), "add as_list=True"),
    (lambda: padded(ZEROS, np.zeros((2, 2))), "different numbers of dimensions"),
    (lambda: padded(ZEROS, np.zeros(2, np.int8)), "different dtypes: float64 and int8"),
    (lambda: over({"a": 1, "b": "x"}).batch(1), "(?s)records of text.*In component 'b'.*In item 0"),
    (lambda: padded(np.zeros(2, np.uint8), np.zeros(3, np.uint8), -1), "uint8 does not hold that value"),
    *((lambda v=v: padded(INTS, INTS[:1], v), "int64 does not hold") for v in (0.5, 1e-9, math.nan)),
    (lambda: padded(ZEROS.astype("f2"), np.zeros(1, "f2"), -1e9), "float16 does not hold that value"),
    *(
        (lambda item=item, take=take: take(over(item)), message)
        for take, item, message in [
            (lambda flow: flow.select(2), (1, 2), "item 0 has no component 2: it has 2, numbered from 0"),
            (lambda flow: flow.select(-3), (1, 2), "item 0 has no component -3"),
            (lambda flow: flow.select("a"), (1, 2), "item 0 has no component 'a'"),
            (
                lambda flow: flow.select("c"),
                {"a": 1, "b": 2},
                r"item 0 has no component 'c': it has the names \['a', 'b'\]",
            ),
            (
                lambda flow: flow.map_component(abs, 0),
                {"a": 1},
                "item 0 has no component 0: it has the names",
            ),
            (lambda flow: flow.map_component(abs, "a"), {}, "item 0 has no component 'a': it has the names"),
            (lambda flow: flow.select(0), b"ab", "item 0 is bytes, and only tuples, lists and dicts"),
            (lambda flow: flow.map_component(abs, 0), ZEROS, "item 0 is ndarray"),
            (lambda flow: flow.select(0), None, "item 0 is NoneType"),
        ]
    ),
    (lambda: over(1, 2, 3).map(lambda x: None if x == 3 else x), "item 2.*drop_none=True"),
    (lambda: over(1, 2, 3).map(lambda x: None if x == 3 else x, threads=2), "item 2.*drop_none=True"),
    (lambda: over(1, 2, 3).map(lambda x: None if x == 3 else x, processes=1), "(?s)drop_none=.*In .*item 2"),
    (lambda: over({"a": 1, "b": 2}).zip(over({"b": 3})), r"names in common \(a, b; b\)"),
    (lambda: over(1).map(lambda x: 5, processes=1, outputs=IMAGE), r"float32\[4, 5\] and returns int64\[\]"),
    (lambda: over(5).transform(EvalTransform(8)), r"(?s)items of \(image, label\).*item 0 of pass 0"),
    (lambda: over((ZEROS, 5)).transform(EvalTransform(8)), "needs encoded images, as bytes, not ndarray"),
    (lambda: over((b"", None)).transform(EvalTransform(8)), "needs whole numbers as labels"),
    (lambda: Flow.from_parts(lambda part: 3, parts=1), "returned an object of type int, which has no items"),  # type: ignore[arg-type, return-value]
    *(
        (lambda found=found: Flow.from_callable(lambda: found), "returned|iterable")
        for found in [None, 3, "text", {}]
    ),
    *(
        (lambda n=n: Flow.from_iterable(Sized(n)), f"has {n} items, but pass 0 had 5: give Flow.from_c")
        for n in (4, 6)
    ),
    (lambda: over(1).mix(Flow.from_iterable(Sized(4))), r"mix\(\) has more items than its len says"),
    (lambda: over(1, 2).shuffle(2).repeat().at_pass(1 << 40), "epoch must be between 0 and"),
    (ends_later, "pass 1 of a flow that is repeated without end had no items"),
]


@pytest.mark.parametrize(
    ("make", "says"), REFUSED, ids=[f"{n} {says}" for n, (_, says) in enumerate(REFUSED)]
)
def test_what_a_step_cannot_take_is_an_error_of_the_pass_that_says_what_it_is(
    make: Callable[[], Flow], says: str
) -> None:
    with pytest.raises(UsageError) as raised:
        list(make())
    assert re.search(says, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())]))


def test_two_passes_at_once_cannot_share_one_iterator() -> None:
    items = iter(range(3))
    flow = Flow.from_callable(lambda: items)
    first, second = iter(flow), iter(flow)
    next(first)
    with pytest.raises(UsageError, match="same iterator"):
        next(second)


class Exhausted:
    """A sequence that draws its elements from an iterator that ends too early."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        return next(iter([number] if number < 4 else []))


def ended(item: int) -> int:
    return next(iter([item] if item < 4 else []))


@pytest.mark.parametrize(
    ("flow", "says"),
    [
        (Flow.from_iterable(Exhausted()), "item 4 of the Exhausted raised StopIteration"),
        (FLOW.map(ended), r"In item 4 of pass 0, at map\(ended\)"),
        (FLOW.map(ended, threads=3), r"In item 4 of pass 0, at map\(ended\)"),
    ],
)
def test_no_pass_ends_in_silence_at_an_item_that_raises_stop_iteration(flow: Flow, says: str) -> None:
    found: list[int] = []
    with pytest.raises(RuntimeError) as raised:
        found.extend(flow)
    assert found == [0, 1, 2, 3]
    assert re.search(says, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())]))


def test_an_image_that_does_not_decode_is_an_error_of_the_pass() -> None:
    with pytest.raises(BadImage):
        list(over((b"no image", 1)).transform(EvalTransform(8)))


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/2.jpg", "b/10.JPEG", "b/Z.jpg", "b/a.jpg", "a/z.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("below", "options", "message"),
    [
        ("b", {"labels": {"2.jpg": 1}}, "10.JPEG is only among the files"),
        (
            "b",
            {"labels": dict.fromkeys(["10.JPEG", "2.jpg", "Z.jpg", "a.jpg", "c"], 1)},
            "; c is only among the labels",
        ),
        ("b", {"labels": [1, 2, 3]}, "has 4 files, and labels= has 3"),
        ("b", {"labels": [1, 2, 3, "4"]}, "a label must be a whole number"),
        ("b", {"labels": 5}, "labels= must have a label for each file"),
        ("", {"suffixes": [".tiff"]}, "no files that end in .tiff; without labels="),
        ("", {"suffixes": []}, "no files"),
        ("", {"suffixes": ".jpg"}, r"give \['.jpg'\]"),
        *(("", {"seed": wrong}, "seed must be") for wrong in (-1, True)),
        ("nowhere", {}, "is not a folder"),
        ("a/z.png", {}, "is not a folder"),
        ("b", {}, r"\w+.\w+: is not in a class folder"),
    ],
    ids=str,
)
def test_files_and_labels_that_do_not_fit_are_refused(
    folder: Path, below: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Flow.from_files(folder / below, **options)


@pytest.mark.parametrize("component", [(), (0,)], ids=["map", "map_component"])
def test_a_function_of_the_wrong_number_of_parameters_is_refused_with_the_option_it_needs(
    component: tuple[int, ...],
) -> None:
    def step(function: Any, **options: Any) -> Flow:
        return (FLOW.map_component if component else FLOW.map)(function, *component, **options)

    with pytest.raises(UsageError, match=r"called with \(item\); add random=True, .* a tuple is one item"):
        step(lambda item, rng: item)
    with pytest.raises(UsageError, match=r"called with \(item, rng\); leave out random=True"):
        step(lambda item: item, random=True)
    for function in (int, max, lambda *given: given, lambda item, rng=None: item):
        step(function)
        step(function, random=True)
