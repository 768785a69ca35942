"""Flows of any steps over any sources, in every way to run them, beside what plain lists say that they are.

Each step is compared with what the oracle (``flow_oracle``) makes of the items before it. Of a random step it
says which laws hold: all items once, less than the window away, each flow's in order. Then the whole flow is
run in other ways (threads, processes, resumed, picked, in parts, ...), and must come out the same.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import ArraySpec, Flow
from support import flow_oracle as lists
from support.flow_oracle import KINDS, As, Begins, Refused, Sized, WithNoise
from support.sampling import torture_except


class Known(NamedTuple):
    """What is said of the number of items: "exactly", "at most" with a number, or "unknown"."""

    kind: str
    count: int = 0

    @property
    def exact(self) -> bool:
        return self.kind == "exactly"

    def changed(self, count: Callable[[int], int]) -> Known:
        return self if self.kind == "unknown" else Known(self.kind, count(self.count))

    def filtered(self) -> Known:
        return self if self.kind == "unknown" else Known("at most", self.count)

    def __str__(self) -> str:
        return self.kind if self.kind == "unknown" else f"{self.kind} {self.count}"


UNKNOWN = Known("unknown")


def sum_of(lengths: list[Known]) -> Known:
    kinds = {known.kind for known in lengths}
    if "unknown" in kinds:
        return UNKNOWN
    return Known("exactly" if kinds == {"exactly"} else "at most", sum(known.count for known in lengths))


def shortest_of(lengths: list[Known]) -> Known:
    counts = [known.count for known in lengths if known.kind != "unknown"]
    if not counts:
        return UNKNOWN
    return Known("exactly" if all(known.exact for known in lengths) else "at most", min(counts))


class Pass(NamedTuple):
    """The items of a pass, and whether it ends with a UsageError."""

    items: list[Any]
    refused: bool = False

    @property
    def form(self) -> Any:
        return [lists.form(item) for item in self.items], self.refused


def drawn(items: Iterator[Any], count: int | None = None) -> Pass:
    """What a flow delivers, or the oracle says, until it refuses."""
    found: list[Any] = []
    try:
        for item in islice(items, count):
            found.append(item)
    except (UsageError, Refused):
        return Pass(found, True)
    return Pass(found)


# Sources


@dataclass(frozen=True)
class Source:
    """Items of this kind. ``how`` says what they come from."""

    how: str
    kind: str
    numbers: tuple[int, ...]

    @property
    def items(self) -> list[Any]:
        if self.how == "fake":
            return [(image, label) for image, label in Flow.fake(len(self.numbers), size=(2, 2))]
        return [KINDS[self.kind](number) for number in self.numbers]

    @property
    def parts(self) -> list[list[Any]]:
        """The items as three parts of different sizes."""
        return [self.items[:3], self.items[3:4], self.items[4:]]

    def flow(self) -> Flow:
        if self.how == "fake":
            return Flow.fake(len(self.numbers), size=(2, 2))
        if self.how == "parts":
            return Flow.from_parts(lambda part: iter(self.parts[part]), parts=3)
        if self.how == "flows":
            return Flow.from_parts(lambda part: Flow.from_iterable(self.parts[part]), parts=3)
        if self.how == "callable":
            return Flow.from_callable(Begins(self.items))
        return Flow.from_iterable(self.items if self.how == "sequence" else Sized(self.items))

    @property
    def expected(self) -> list[Any]:
        return lists.in_turn(self.parts) if self.how in ("parts", "flows") else self.items

    @property
    def length(self) -> Known:
        return UNKNOWN if self.how in ("parts", "flows", "callable") else Known("exactly", len(self.numbers))

    @property
    def by_number(self) -> bool:
        return self.how in ("sequence", "fake")


# Steps


@dataclass(frozen=True)
class Step:
    """A step, and what it makes of the passes before it. ``by_number`` is what the table of steps says.

    It is added by the method that has its name, with its fields as arguments.
    """

    by_number = True
    is_random = False

    def on(self, flow: Flow, **how: Any) -> Flow:
        method = re.sub("(?<!^)[A-Z]", r"_\g<0>", type(self).__name__).lower()
        added: Flow = getattr(flow, method)(**vars(self))
        return added

    def length(self, before: Known) -> Known:
        return before

    def may_be_added(self, before: Known) -> bool:
        return True

    def made(self, before: Callable[[int], Pass], number: int) -> Iterator[Any]:
        """The items of a pass, made from those before this step."""
        yield from self.made_of(before(number).items)

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        yield from items

    def check(self, before: Callable[[int], Pass], number: int, found: Pass) -> None:
        """Fail unless this is the step's pass."""
        assert found.form == drawn(self.made(before, number)).form


@dataclass(frozen=True)
class Mapped(Step):
    """A map of a function, which the ways of running run in threads or in processes."""

    function: Callable[..., Any]
    drop_none: bool = False

    def on(self, flow: Flow, **how: Any) -> Flow:
        return flow.map(self.function, drop_none=self.drop_none, **how)

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        return not self.drop_none

    def length(self, before: Known) -> Known:
        return before.filtered() if self.drop_none else before

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        for result in map(self.function, items):
            if result is None and not self.drop_none:
                raise Refused
            if result is not None:
                yield result


@dataclass(frozen=True)
class Noisy(Step):
    kind: str
    seed: int
    is_random = True

    def on(self, flow: Flow, **how: Any) -> Flow:
        return flow.map(WithNoise(self.kind), random=True, seed=self.seed, **how)

    def check(self, before: Callable[[int], Pass], number: int, found: Pass) -> None:
        assert [lists.form(item) for item, _ in found.items] == [
            lists.form(As(self.kind)(x)) for x in before(number).items
        ]
        assert len({noise for _, noise in found.items}) == len(found.items)
        assert not found.refused


@dataclass(frozen=True)
class MapComponent(Step):
    component: int | str
    function: Callable[[Any], Any] = lists.doubled

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        for item in items:
            yield lists.with_part(item, self.component, self.function(lists.part_of(item, self.component)))


@dataclass(frozen=True)
class Select(Step):
    components: tuple[int | str, ...]

    def on(self, flow: Flow, **how: Any) -> Flow:
        return flow.select(*self.components)

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        for item in items:
            parts = tuple(lists.part_of(item, component) for component in self.components)
            named = isinstance(self.components[0], str)
            yield dict(zip(self.components, parts, strict=True)) if named else parts


@dataclass(frozen=True)
class Filter(Step):
    predicate: Callable[[Any], bool] = lists.is_wanted
    by_number = False

    def length(self, before: Known) -> Known:
        return before.filtered()

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        return filter(self.predicate, items)


@dataclass(frozen=True)
class Shuffle(Step):
    window: int
    seed: int
    is_random = True

    def check(self, before: Callable[[int], Pass], number: int, found: Pass) -> None:
        assert lists.moves_less_than(before(number).items, found.items, self.window)
        assert not found.refused


@dataclass(frozen=True)
class Batch(Step):
    size: int
    remainder: Any = "keep"
    as_list: bool = False

    def length(self, before: Known) -> Known:
        return before.changed(
            lambda count: count // self.size if self.remainder == "drop" else -(-count // self.size)
        )

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        for first in range(0, len(items), self.size):
            rows = items[first : first + self.size]
            if len(rows) == self.size or self.remainder != "drop":
                batch = lists.listed(rows) if self.as_list else lists.stacked(rows)
                yield lists.with_mask(batch, len(rows), self.size) if self.remainder == "pad" else batch

    def check(self, before: Callable[[int], Pass], number: int, found: Pass) -> None:
        super().check(before, number, found)
        if not self.as_list:
            for array in lists.arrays_in(found.items):
                assert array.ctypes.data % 64 == 0 or not array.size
                assert array.flags.writeable


@dataclass(frozen=True)
class BatchByShape(Step):
    size: int
    remainder: Any
    by_number = False

    def length(self, before: Known) -> Known:
        return before.filtered().changed(
            lambda count: count // self.size if self.remainder == "drop" else count
        )

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        waiting: dict[Any, list[Any]] = {}
        for item in items:
            rows = waiting.setdefault(lists.shapes_of(item), [])
            rows.append(item)
            if len(rows) == self.size:
                yield lists.stacked(waiting.pop(lists.shapes_of(item)))
        if self.remainder == "keep":
            yield from map(lists.stacked, waiting.values())


@dataclass(frozen=True)
class Pad(Step):
    value: int

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        return (lists.padded(item, self.value) for item in items)


@dataclass(frozen=True)
class Unbatch(Step):
    by_number = False

    def length(self, before: Known) -> Known:
        return UNKNOWN

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        return (row for batch in items for row in lists.rows_of(batch))


@dataclass(frozen=True)
class Repeat(Step):
    """So many passes in one; with ``of_endless``, so many items of endless passes."""

    passes: int
    of_endless: bool = False
    by_number = False

    def on(self, flow: Flow, **how: Any) -> Flow:
        return flow.repeat().take(self.passes) if self.of_endless else flow.repeat(self.passes)

    def length(self, before: Known) -> Known:
        if self.of_endless or not self.passes:
            return Known("exactly", self.passes)
        return before.changed(lambda count: count * self.passes)

    def may_be_added(self, before: Known) -> bool:
        return not (self.of_endless and before == Known("exactly", 0))

    def made(self, before: Callable[[int], Pass], number: int) -> Iterator[Any]:
        if self.of_endless:
            return islice(self._in_turn(before, itertools.count(number << 32)), self.passes)
        return self._in_turn(before, range(number * self.passes, (number + 1) * self.passes))

    def _in_turn(self, before: Callable[[int], Pass], numbers: Iterable[int]) -> Iterator[Any]:
        for number in numbers:
            items, refused = before(number)
            yield from items
            if refused or (self.of_endless and not items):
                raise Refused


@dataclass(frozen=True)
class Take(Step):
    count: int

    def length(self, before: Known) -> Known:
        return Known("at most", self.count) if before == UNKNOWN else before.changed(partial(min, self.count))

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        return iter(items[: self.count])


@dataclass(frozen=True)
class Skip(Step):
    count: int

    def length(self, before: Known) -> Known:
        return before.changed(lambda count: max(0, count - self.count))

    def made_of(self, items: list[Any]) -> Iterator[Any]:
        return iter(items[self.count :])


@dataclass(frozen=True)
class Unchanged(Step):
    """A step that changes how a pass runs, and none of its items."""

    name: str

    def on(self, flow: Flow, **how: Any) -> Flow:
        added: Flow = getattr(flow, self.name)(*{"cache": (), "prefetch": (2,), "print": (0,)}[self.name])
        return added

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        return self.name != "cache"


@dataclass(frozen=True)
class Combination(Step):
    """This flow and others, whose steps are not random."""

    others: tuple[Pipeline, ...]
    how: str
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def on(self, flow: Flow, **how: Any) -> Flow:
        options = {"weights": self.weights, "seed": self.seed} if self.is_random else {}
        added: Flow = getattr(flow, self.how)(*(other.flow() for other in self.others), **options)
        return added

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        return self.how == "zip" and all(other.by_number for other in self.others)

    @property
    def is_random(self) -> bool:  # type: ignore[override]
        return self.how in ("mix", "choose")

    def length(self, before: Known) -> Known:
        lengths = self._lengths(before)
        if self.how == "zip":
            return shortest_of(lengths)
        if self.how != "choose":
            return sum_of(lengths)
        weights = self.weights or [1] * len(lengths)
        lengths = [known for known, weight in zip(lengths, weights, strict=True) if weight]
        return lengths[0] if len(lengths) == 1 else sum_of(lengths).filtered()

    def _lengths(self, before: Known) -> list[Known]:
        return [before, *(other.length for other in self.others)]

    def may_be_added(self, before: Known) -> bool:
        return self.how != "mix" or bool(self.weights) or all(each.exact for each in self._lengths(before))

    def check(self, before: Callable[[int], Pass], number: int, found: Pass) -> None:
        parts = [before(number).items, *(other.expected(number).items for other in self.others)]
        if self.how == "concat":
            expected = Pass([item for part in parts for item in part])
        elif self.how == "zip":
            expected = drawn(map(lists.side_by_side, zip(*parts, strict=False)))
        else:
            ends = lists.ends_of_interleaving(found.items, parts)
            sizes = tuple(map(len, parts))
            if self.how == "mix":
                assert ends == {sizes}
            else:
                assert any(size == end for place in ends for size, end in zip(sizes, place, strict=True))
            expected = Pass(found.items)
        assert found.form == expected.form


# Flows


@dataclass(frozen=True)
class Pipeline:
    source: Source
    steps: tuple[Step, ...]
    known: dict[Any, Pass] = field(default_factory=dict, compare=False, repr=False)

    def flow(self, **how: Any) -> Flow:
        """The flow; ``how`` is for its last map."""
        flow = self.source.flow()
        for n, step in enumerate(self.steps):
            flow = step.on(flow, **(how if n == self.last_map else {}))
        return flow

    @property
    def last_map(self) -> int:
        return max((n for n, step in enumerate(self.steps) if isinstance(step, Mapped | Noisy)), default=-1)

    def first(self, steps: int) -> Pipeline:
        return replace(self, steps=self.steps[:steps])

    @property
    def length(self) -> Known:
        return reduce(lambda before, step: step.length(before), self.steps, self.source.length)

    @property
    def by_number(self) -> bool:
        return self.source.by_number and all(step.by_number for step in self.steps)

    @property
    def passes_depend_on_each_other(self) -> bool:
        """Whether a cache keeps what is random."""
        caches = [n for n, step in enumerate(self.steps) if step == Unchanged("cache")]
        return any(step.is_random for step in self.steps[: max(caches, default=0)])

    def expected(self, number: int, steps: int | None = None) -> Pass:
        """A pass, in which each step made what it must from what the step before made."""
        steps = len(self.steps) if steps is None else steps
        if (steps, number) not in self.known:
            found = drawn(self.first(steps).flow().at_pass(number))
            if steps:
                self.steps[steps - 1].check(lambda n: self.expected(n, steps - 1), number, found)
            else:
                assert found.form == Pass(self.source.expected).form
            self.known[steps, number] = found
        return self.known[steps, number]

    def cut(self) -> Pipeline | None:
        """The steps up to the first that refuses an item; None where one of these cannot be added."""
        for n, step in enumerate(self.steps, 1):
            before, here = self.first(n - 1), self.first(n)
            if not step.may_be_added(before.length):
                with pytest.raises(UsageError):
                    here.flow()
                return None
            assert (str(here.flow().length), here.flow().can_pick) == (str(here.length), here.by_number)
            if any(self.expected(number, n).refused for number in (0, 1)):
                return here
        return self


def holds(pipeline: Pipeline) -> Pipeline | None:
    """The steps that can be run, each of which made what it must; None where there are none."""
    runnable = pipeline.cut()
    if runnable is not None:
        for number in (0, 1):
            found, length = runnable.expected(number), runnable.length
            assert found.refused or length == UNKNOWN or len(found.items) <= length.count
            assert found.refused or not length.exact or len(found.items) == length.count
    return runnable


def assert_same(found: Pass, expected: Pass) -> None:
    assert found.form == expected.form


# What is drawn


numbers = st.lists(st.integers(0, 40), max_size=24).map(tuple)
kinds = st.sampled_from(sorted(KINDS))
sizes = st.integers(1, 6)
seeds = st.integers(0, 3)
sources = st.builds(
    Source,
    st.sampled_from(["sequence"] * 3 + ["iterable", "callable", "fake", "parts", "flows"]),
    kinds,
    numbers,
)
takes, skips = st.builds(Take, st.integers(0, 20)), st.builds(Skip, st.integers(0, 6))
conversions = st.builds(Mapped, st.builds(As, kinds))
plain_steps = st.one_of(conversions, st.just(Filter()), takes, skips, st.builds(Repeat, st.just(2)))
plain_pipelines = st.builds(Pipeline, sources, st.lists(plain_steps, max_size=2).map(tuple))
others = st.lists(plain_pipelines, min_size=1, max_size=2).map(tuple)
weights = st.sampled_from([0.25, 1.0, 3.0])


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    beside, how = draw(others), draw(st.sampled_from(["concat", "zip", "zip", "mix", "choose"]))
    wanted = draw(st.none() | st.tuples(*[weights] * (len(beside) + 1)))
    if how == "choose" and wanted is not None and draw(st.booleans()):
        wanted = (0.0, *wanted[1:])
    return Combination(beside, how, wanted if how in ("mix", "choose") else None, draw(seeds))


batches = st.one_of(
    st.builds(Batch, sizes, st.sampled_from(["keep", "drop", "pad"])),
    st.builds(Batch, sizes, st.sampled_from(["keep", "drop"]), as_list=st.just(True)),
)
maps = st.one_of(
    conversions,
    st.just(Mapped(lists.reversed_parts)),
    st.just(Mapped(lists.wanted_or_none, drop_none=True)),
    st.builds(Noisy, kinds, seeds),
)
steps = [
    *[maps, conversions, conversions, batches, batches, combinations(), combinations()],
    st.builds(Shuffle, st.integers(1, 30), seeds),
    st.builds(Shuffle, st.integers(1, 5), seeds),
    st.builds(Noisy, kinds, seeds),
    st.builds(MapComponent, st.sampled_from([0, 1, -1, np.int64(0), "x", "a"])),
    st.builds(Select, st.sampled_from([(0,), (1, 0, 1), (-1,), ("x",), ("n", "x"), ("b", "a")])),
    st.just(Filter()),
    st.builds(BatchByShape, st.integers(1, 4), st.sampled_from(["keep", "drop"])),
    st.builds(Repeat, st.integers(0, 3)),
    st.builds(Repeat, st.integers(0, 30), of_endless=st.just(True)),
    takes,
    skips,
    st.builds(Unchanged, st.sampled_from(["cache", "prefetch", "print"])),
    st.sampled_from([Pad(7), Unbatch()]),
]
# steps that meet by chance seldom fit together, so that some come in groups
groups = [
    *[st.tuples(step) for step in steps],
    st.tuples(batches, st.just(Unbatch())),
    st.tuples(
        conversions, st.builds(Batch, sizes, as_list=st.just(True)), st.builds(Pad, st.sampled_from([0, 7]))
    ),
    st.tuples(st.just(Mapped(As("dict"))), st.builds(Select, st.sampled_from([("x",), ("n", "x")]))),
    st.tuples(
        st.sampled_from(["point", "list", "pair"]).map(lambda kind: Mapped(As(kind))),
        st.just(MapComponent(-1)),
    ),
    st.tuples(st.just(Mapped(As("shaped"))), st.builds(BatchByShape, st.integers(1, 4), st.just("keep"))),
]


few_groups = st.lists(st.integers(0, len(groups) - 1), max_size=2)  # each as likely, as ``one_of`` is not


@st.composite
def pipelines(draw: st.DrawFn, group: int | None = None) -> Pipeline:
    """A flow of one to six steps, among which are those of the group."""
    wanted = draw(st.integers(0, len(groups) - 1)) if group is None else group
    chosen = [*draw(few_groups), wanted, *draw(few_groups)]
    pipeline = Pipeline(draw(sources), tuple(step for n in chosen for step in draw(groups[n]))[:6])
    repeated = any(isinstance(step, Repeat) for step in pipeline.steps)
    assume(
        sum(isinstance(step, Repeat) and step.of_endless for step in pipeline.steps) < 2
    )  # passes below 2**63
    assume(not (repeated and pipeline.passes_depend_on_each_other))
    return pipeline


# Ways to run


def assert_each_pass(pipeline: Pipeline, flow: Flow) -> None:
    """A pass that is left early, the next iteration, and any other are each the pass of its number."""
    if pipeline.passes_depend_on_each_other:
        assert_same(drawn(iter(flow)), pipeline.expected(0))
        if pipeline.steps[-1] == Unchanged("cache"):
            assert_same(drawn(iter(flow)), pipeline.expected(0))
        return
    left = iter(flow)
    assert_same(Pass(drawn(left, 2).items), Pass(pipeline.expected(0).items[:2]))
    left.close()  # type: ignore[attr-defined]
    assert_same(drawn(iter(flow)), pipeline.expected(1))
    assert_same(drawn(flow.at_pass(0)), pipeline.expected(0))


def assert_three_at_once(pipeline: Pipeline, flow: Flow) -> None:
    """Passes that run at the same time do not disturb each other."""
    refused = any(pipeline.expected(number).refused for number in (0, 1))
    if not refused and not pipeline.passes_depend_on_each_other:
        both = list(zip_longest(flow.at_pass(0), flow.at_pass(1), flow.at_pass(0), fillvalue=Refused))
        for place, number in enumerate((0, 1, 0)):
            found = Pass([row[place] for row in both if row[place] is not Refused])
            assert_same(found, pipeline.expected(number))


def assert_picked(pipeline: Pipeline, flow: Flow, data: st.DataObject) -> None:
    if not pipeline.by_number:
        with pytest.raises(UsageError, match="by number"):
            list(flow.pick(0, [0]))
        return
    whole = pipeline.expected(1)
    if whole.refused:
        return
    wanted = data.draw(st.lists(st.integers(0, len(whole.items) - 1), max_size=6)) if whole.items else []
    assert_same(drawn(flow.pick(1, iter(wanted))), Pass([whole.items[n] for n in wanted]))
    for wrong in (-1, len(whole.items)):
        with pytest.raises(IndexError):
            list(flow.pick(1, [wrong]))


def assert_resumed(pipeline: Pipeline, make: Callable[[], Flow], data: st.DataObject) -> None:
    """A flow that is stopped twice, each time in another one, delivers the rest."""
    wholes = [pipeline.expected(number) for number in range(3)]
    if pipeline.passes_depend_on_each_other or any(whole.refused for whole in wholes):
        return
    number, at, exact = 0, 0, pipeline.length.exact
    with ExitStack() as opened:
        flow = opened.enter_context(make())
        for _ in range(2):
            left = wholes[number].items[at:]
            stop = data.draw(st.integers(0, len(left)))
            assert_same(drawn(iter(flow), stop), Pass(left[:stop]))
            at += stop
            if exact and at >= len(wholes[number].items):
                number, at = min(number + 1, 2), 0
            if at and not pipeline.by_number:
                with pytest.raises(UsageError, match="between two passes"):
                    flow.state_dict()
                assert flow.state_or_none() is None
                return
            state = json.loads(json.dumps(flow.state_dict()))
            assert state["items"] == at
            flow = opened.enter_context(make())
            flow.load_state_dict(state | {"pass": number})
            if exact:
                assert len(flow) == len(wholes[number].items) - at
        assert_same(drawn(iter(flow)), Pass(wholes[number].items[at:]))


def assert_same_in_parts(pipeline: Pipeline, flow: Flow) -> None:
    """A flow of two such flows has one item of each in turn; the first is as random as the flow alone."""
    if pipeline.expected(1).refused:
        return
    parts = [drawn(flow.part(1, n)) for n in range(2)]
    for number, says in ((2, "the parts 0 to 1, not 2"), (-1, "at least 0")):
        with pytest.raises(UsageError, match=says):
            flow.part(1, number)
    assert_same(parts[0], pipeline.expected(1))
    if not any(step.is_random for step in pipeline.steps):
        assert_same(parts[1], pipeline.expected(1))
    if not parts[1].refused:  # which other random values may lead to
        assert_same(drawn(flow.at_pass(1)), Pass(lists.in_turn([part.items for part in parts])))


def assert_same_unordered(pipeline: Pipeline, flow: Flow) -> None:
    """The same items, in any order."""
    if not pipeline.expected(1).refused:
        assert Counter(map(lists.form, flow.at_pass(1))) == Counter(
            map(lists.form, pipeline.expected(1).items)
        )
    assert not flow.can_pick


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "examples"),
    [*((group, 10) for group in range(len(groups))), pytest.param(None, 400, marks=pytest.mark.torture)],
)
def test_a_flow_is_what_lists_say_in_every_way_to_run_it(group: int | None, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(pipeline=pipelines(group), data=st.data())
    def check(pipeline: Pipeline, data: st.DataObject) -> None:
        whole = holds(pipeline)
        if whole is None:
            return
        ways: list[Callable[[], Flow]] = [
            whole.flow,
            lambda: whole.flow(threads=2),
            lambda: whole.flow().prefetch(2),
        ]
        if whole.source.how not in ("parts", "flows"):  # which cannot be sent
            ways.append(lambda: pickle.loads(pickle.dumps(whole.flow(), protocol=5)))  # noqa: S301
        for way in ways:
            with way() as flow:
                assert_each_pass(whole, flow)
                assert_three_at_once(whole, flow)
        with data.draw(st.sampled_from(ways))() as flow:
            assert_picked(whole, flow, data)
        assert_resumed(whole, lambda: data.draw(st.sampled_from([ways[0], ways[1]]))(), data)
        with Flow.from_parts(lambda part: whole.flow(), parts=2) as flow:
            assert_same_in_parts(whole, flow)
        if whole.last_map == len(whole.steps) - 1 >= 0:
            with whole.flow(threads=2, ordered=False) as flow:
                assert_same_unordered(whole, flow)

    check()


# In processes


def mapped_in_processes(whole: Pipeline, data: st.DataObject) -> None:
    with whole.flow(processes=data.draw(st.integers(1, 2))) as flow:
        assert_each_pass(whole, flow)
        assert_picked(whole, flow, data)
        copy = pickle.loads(pickle.dumps(flow, protocol=5))  # noqa: S301
    if whole.last_map == len(whole.steps) - 1:
        with whole.flow(processes=2, ordered=False) as flow:
            assert_same_unordered(whole, flow)
    with pytest.raises(UsageError, match="cannot run in another process"):
        copy.in_process()


def resumed_in_processes(whole: Pipeline, data: st.DataObject) -> None:
    turns = iter([{}, {"processes": 2}, {}])
    assert_resumed(whole, lambda: whole.flow(**next(turns)), data)


def in_one_other_process(whole: Pipeline, data: st.DataObject) -> None:
    ahead = data.draw(st.integers(1, 20))
    if Unchanged("cache") in whole.steps:
        with pytest.raises(UsageError, match="put it after in_process"):
            whole.flow().in_process()
        return
    with whole.flow().in_process(ahead=ahead) as flow:
        assert_each_pass(whole, flow)
        assert not flow.can_pick


many = st.integers(100, 200).map(lambda count: tuple(range(count)))


@st.composite
def with_a_map(draw: st.DrawFn) -> Pipeline:
    """Flows with a map, over more items than the workers are sent at once."""
    pipeline = draw(pipelines())
    source = replace(pipeline.source, numbers=draw(many | numbers))
    return Pipeline(source, (*pipeline.steps, *(() if pipeline.last_map >= 0 else (draw(maps),))))


@pytest.mark.slow
@pytest.mark.parametrize("examples", torture_except([4, 8], 4))
@pytest.mark.parametrize("way", [mapped_in_processes, resumed_in_processes, in_one_other_process])
def test_it_is_the_same_in_processes(way: Callable[[Pipeline, st.DataObject], None], examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(pipeline=with_a_map(), data=st.data())
    def check(pipeline: Pipeline, data: st.DataObject) -> None:
        whole = holds(pipeline)
        if whole is not None and (whole.last_map >= 0 or way is in_one_other_process):
            way(whole, data)

    check()


# Batches that workers write

MIXED = [
    ["int", "int64", "either", "scalar"],
    ["int", "some floats", "bool"],
    ["list", "list or tuple"],
    ["list", "point", "pair"],
    ["dict", "other dict"],
]
alike = (st.sampled_from(MIXED) | kinds.map(lambda kind: [kind])).flatmap(
    lambda kinds: st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 40)), max_size=24)
)


class Batching:
    """Maps in processes before batches, with the same workers for all examples."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.steps = [
            *(Batch(3, remainder) for remainder in ("keep", "drop", "pad")),
            Batch(1),
            Batch(3, as_list=True),
        ]
        source = Flow.from_callable(lambda: iter(self.items))
        self.flows = [step.on(source.map(lists.unchanged, processes=1)) for step in self.steps]


@pytest.fixture
def batching() -> Iterator[Batching]:
    kept = Batching()
    with ExitStack() as opened:
        for flow in kept.flows:
            opened.enter_context(flow)
        yield kept


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_items=alike, way=st.integers(0, 4))
def test_workers_write_batches_as_stacking_would(
    batching: Batching, drawn_items: list[tuple[str, int]], way: int
) -> None:
    made = [KINDS[kind](number) for kind, number in drawn_items]
    step, flow = batching.steps[way], batching.flows[way]
    for items in (made[:1] * 4, made):  # so that the workers know a form before they see another
        batching.items = items
        step.check(lambda _, items=items: Pass(items), 0, drawn(iter(flow)))  # type: ignore[misc]
    assert flow.batches_never_change or step.as_list


SPECS = {
    "array": [ArraySpec("image", (2, 3), "float32")],
    "pair": [ArraySpec("image", (2,), "float32"), ArraySpec("number", (), "int64")],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_declared_outputs_arrive_alone_and_in_batches(kind: str) -> None:
    items = [KINDS[kind](number) for number in range(101)]
    outputs = SPECS[kind][0] if kind == "array" else tuple(SPECS[kind])
    mapped = Flow.from_iterable(range(101)).map(KINDS[kind], processes=1, outputs=outputs)
    step = Batch(25)
    with step.on(mapped) as flow:
        step.check(lambda _: Pass(items), 0, drawn(iter(flow)))
    with mapped:
        np.testing.assert_equal(list(mapped), items)
