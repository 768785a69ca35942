"""Steps that reorder, batch, cache, limit, repeat or print the items of a flow, or combine several flows."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from heapq import heappop, heappush
from itertools import accumulate, chain, count, islice, repeat
from typing import Any, Literal, Self, get_args

import numpy as np

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.runtime.progress import check_flags, check_seed
from shardprep.loaders.batches.passes import ending, ending_all
from shardprep.loaders.batches.stack import gather_lists, group, group_by_shape, pad_batch, rows_of, stack
from shardprep.loaders.flow.node import (
    INFINITE,
    UNKNOWN,
    Length,
    Node,
    PassContext,
    PickableStep,
    Rearrangement,
    Step,
    map_with_notes,
    share_numbers,
)
from shardprep.loaders.flow.process_map import ProcessMap
from shardprep.loaders.order.parts import MAX_RECORDS, DisplacedOrder
from shardprep.loaders.transforms.contract import check_choice, convert_leaves

Remainder = Literal["keep", "drop", "pad"]


@dataclass(frozen=True)
class Batch(PickableStep):
    """Batches of ``size`` items: new arrays aligned to 64 bytes, or lists. See :meth:`.Flow.batch`."""

    source: Node
    size: int
    remainder: Remainder
    as_list: bool

    title = "batch({0.size})"
    makes_batches = True

    def __post_init__(self) -> None:
        check_choice("remainder", self.remainder, get_args(Remainder))
        check_flags(as_list=self.as_list)
        if self.as_list and self.remainder == "pad":
            raise UsageError("lists cannot be padded: leave out as_list, or keep or drop the remainder")

    @property
    def length(self) -> Length:
        return self.source.length.batches(self.size, drop=self.remainder == "drop")

    @property
    def items_never_change(self) -> bool:
        return not self.as_list or self.source.items_never_change

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        source, source_ctx = self.source, ctx.for_source(self)
        least = self.size if self.remainder == "drop" else 1
        chosen: Iterator[int] | None = None
        sizes: Iterator[int] = repeat(self.size)
        places: Iterator[int] = count()
        if numbers is not None:
            for_items, for_sizes, places = share_numbers(self.check_numbers(numbers), 3)
            chosen = chain.from_iterable(map(self._items_of, for_items))
            sizes = (len(self._items_of(number)) for number in for_sizes)
        if not self.as_list and isinstance(source, ProcessMap) and source.ordered and not source.drop_none:
            with ending(source.batches(source_ctx, chosen, sizes, self.size, least=least)) as batches:
                yield from map(self._finish, batches)
            return
        with ending(source.run(source_ctx) if chosen is None else source.pick(source_ctx, chosen)) as items:
            make = gather_lists if self.as_list else lambda rows: self._finish(stack(rows))
            yield from map_with_notes(make, group(items, sizes, least=least), ctx, places, self.label)

    def _items_of(self, number: int) -> range:
        return range(self.source.length.items)[number * self.size : (number + 1) * self.size]

    def _finish(self, batch: Any) -> Any:
        return pad_batch(batch, self.size) if self.remainder == "pad" else batch


@dataclass(frozen=True)
class BatchByShape(Step):
    """Batches of items of equal shapes. See :meth:`.Flow.batch_by_shape`."""

    source: Node
    size: int
    remainder: Literal["keep", "drop"]
    as_list: bool = False

    title = "batch_by_shape({0.size})"
    makes_batches = True

    def __post_init__(self) -> None:
        check_choice("remainder", self.remainder, ("keep", "drop"))
        check_flags(as_list=self.as_list)

    @property
    def items_never_change(self) -> bool:
        return not self.as_list or self.source.items_never_change

    @property
    def length(self) -> Length:
        least = self.size if self.remainder == "drop" else 1
        return self.source.length.batches(least, drop=True).filtered()

    def run(self, ctx: PassContext) -> Iterator[Any]:
        with ending(self.source.run(ctx.for_source(self))) as items:
            groups = group_by_shape(items, self.size, with_rest=self.remainder == "keep")
            yield from map_with_notes(
                gather_lists if self.as_list else stack, groups, ctx, count(), self.label
            )


@dataclass(frozen=True)
class Unbatch(Step):
    """The rows of each batch: views of arrays, elements of lists. A batch without rows is a UsageError."""

    source: Node

    makes_batches = False

    @property
    def length(self) -> Length:
        return INFINITE if self.source.length.is_infinite else UNKNOWN

    def run(self, ctx: PassContext) -> Iterator[Any]:
        with ending(self.source.run(ctx.for_source(self))) as batches:
            yield from chain.from_iterable(map_with_notes(rows_of, batches, ctx, count(), self.label))


@dataclass(frozen=True)
class Cache(Step):
    """The items of the first complete pass, repeated later; arrays are copied unless they never change."""

    source: Node

    items_never_change = True

    def __post_init__(self) -> None:
        if self.source.length.is_infinite:
            raise UsageError("an infinite flow cannot be kept in memory; use take(n) before it")

    def run(self, ctx: PassContext) -> Iterator[Any]:
        values, key = ctx.resources.values, ctx.key_of(self)
        if (cached := values.get(key)) is not None:
            yield from map(read_only, cached)
            return
        kept: list[Any] = []
        length, items_never_change = self.source.length, self.source.items_never_change

        def keep(item: Any) -> Any:
            kept.append(item if items_never_change else _copy_arrays(item))
            if length.is_exact and len(kept) == length.items:
                values.setdefault(key, kept)
            return read_only(kept[-1])

        with ending(self.source.run(ctx.for_source(self))) as items:
            yield from map(keep, items)
        values.setdefault(key, kept)


def read_only(item: Any) -> Any:
    """Return the item in new tuples, lists and dicts, with read-only views of its arrays."""
    return convert_leaves(item, _read_only_view)


def _read_only_view(part: Any) -> Any:
    if not isinstance(part, np.ndarray):
        return part
    view = part.view()
    view.flags.writeable = False
    return view


_copy_arrays = partial(
    convert_leaves, convert=lambda part: part.copy() if isinstance(part, np.ndarray) else part
)

MAX_PARTS = 16


@dataclass(frozen=True)
class Print(PickableStep):
    """Describes the first ``items`` items of each pass on stderr; all items pass unchanged."""

    source: Node
    items: int = 1

    facts = ""

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        items, places = self.number_items(ctx, numbers)
        seen = count()

        def show(item: Any, number: int) -> Any:
            if next(seen) < self.items:
                print(f"Item {number} of pass {ctx.number}: {describe(item)}", file=sys.stderr)
            return item

        with ending(items):
            yield from map(show, items, places)


def describe(item: Any) -> str:
    """Return a printable line for each part: type, shape, dtype and range."""
    return "\n".join(map(printable, _lines(item, 1)))


def _lines(part: Any, depth: int) -> Iterator[str]:
    kind = type(part).__name__
    if isinstance(part, np.ndarray):
        has_range = part.size and part.dtype.kind in "biuf"
        bounds = f", {part.min()} to {part.max()}" if has_range else ""  # NaN if the array has one
        yield f"{kind} {part.dtype} {list(part.shape)}{bounds}"
    elif isinstance(part, str):
        yield f"{kind} of {len(part):,} characters"
    elif isinstance(part, bytes | bytearray | memoryview):
        yield f"{kind} of {memoryview(part).nbytes:,} bytes"
    elif not isinstance(part, Mapping | tuple | list):
        yield kind
    else:
        yield f"{kind} of {len(part):,}"
        named = part.items() if isinstance(part, Mapping) else enumerate(part)
        for name, value in islice(named, MAX_PARTS):
            first, *rest = _lines(value, depth + 1)
            yield f"{'  ' * depth}{name}: {first}"
            yield from rest
        if len(part) > MAX_PARTS:
            yield f"{'  ' * depth}..."


@dataclass(frozen=True)
class Repeat(Step):
    """``passes`` passes of the source in each pass; None for endless. See :meth:`.Flow.repeat`.

    Endless, pass p runs the passes p * 2**32, p * 2**32 + 1, ... of the source.
    """

    source: Node
    passes: int | None

    def __post_init__(self) -> None:
        if self.source.length.is_infinite:
            raise UsageError("an infinite flow cannot be repeated; omit repeat(), or use take(n) before it")
        if self.passes is None and self.source.length.is_exact and not self.source.length.items:
            raise UsageError("a flow without items cannot be repeated without end")

    @property
    def length(self) -> Length:
        return INFINITE if self.passes is None else self.source.length.times(self.passes)

    def run(self, ctx: PassContext) -> Iterator[Any]:
        if self.passes is None:
            numbers: Iterable[int] = count(ctx.number << 32)
        else:
            numbers = range(ctx.number * self.passes, (ctx.number + 1) * self.passes)
        for number in numbers:
            with ending(self.source.run(ctx.for_source(self, number=number))) as items:
                first = list(islice(items, 1))
                if not first and self.passes is None:
                    raise UsageError(f"pass {number} of a flow that is repeated without end had no items")
                while first:
                    yield first.pop()
                yield from items


@dataclass(frozen=True)
class Take(Rearrangement):
    """The first ``count`` items of each pass, which ends with the last of them."""

    source: Node
    count: int

    @property
    def length(self) -> Length:
        return self.source.length.shortest(Length(self.count))

    def numbers(self, ctx: PassContext, places: Iterable[int]) -> Iterator[int]:
        return iter(places)

    def run(self, ctx: PassContext) -> Iterator[Any]:
        with ending(self.source.run(ctx.for_source(self))) as items:
            yield from islice(items, self.count)


@dataclass(frozen=True)
class Skip(Rearrangement):
    """All but the first ``count`` items of each pass; these are not made if the source can pick."""

    source: Node
    count: int

    @property
    def length(self) -> Length:
        return self.source.length.without(self.count)

    def numbers(self, ctx: PassContext, places: Iterable[int]) -> Iterator[int]:
        return (place + self.count for place in places)

    def run(self, ctx: PassContext) -> Iterator[Any]:
        if self.can_pick:
            yield from self.pick(ctx)
            return
        with ending(self.source.run(ctx.for_source(self))) as items:
            yield from islice(items, self.count, None)


@dataclass(frozen=True)
class LocallyShuffled(Rearrangement):
    """Items sorted by number + ``window`` * u with random u in [0, 1). See :meth:`.Flow.shuffle`."""

    source: Node
    window: int
    seed: int

    title = "shuffle"

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and self.source.length.items <= MAX_RECORDS

    def numbers(self, ctx: PassContext, places: Iterable[int]) -> Iterator[int]:
        items = self.source.length.items
        order = DisplacedOrder(items, window=min(self.window, items), bits=ctx.bits(self, self.seed))
        yield from order.numbers_at(places)

    def run(self, ctx: PassContext) -> Iterator[Any]:
        if self.can_pick:
            yield from self.pick(ctx)
            return
        # (key, number, item): numbers are unique, so items are never compared
        heap: list[tuple[int, int, Any]] = []  # items leave it once no later item can precede them

        def make_entry(number: int, word: int, item: Any) -> tuple[int, int, Any]:
            return (number << 32) + self.window * (word >> 32), number, item

        with ending(self.source.run(ctx.for_source(self))) as items:
            for entry in map(make_entry, count(), random_words(ctx.bits(self, self.seed)), items):
                heappush(heap, entry)
                next_key = entry[1] + 1 << 32
                del entry
                while heap and heap[0][0] <= next_key:
                    yield heappop(heap)[2]
        while heap:
            yield heappop(heap)[2]


BLOCK = 1024


def random_words(bits: np.random.Philox) -> Iterator[int]:
    while True:
        yield from bits.random_raw(BLOCK).tolist()


@dataclass(frozen=True)
class Combination(Node):
    """A step over several flows."""

    nodes: tuple[Node, ...]

    @property
    def sources(self) -> tuple[Node, ...]:
        return self.nodes

    @property
    def length(self) -> Length:
        return reduce(Length.then, (node.length for node in self.nodes))

    @property
    def items_never_change(self) -> bool:
        return all(node.items_never_change for node in self.nodes)

    def begin_all(self, ctx: PassContext) -> list[Iterator[Any]]:
        return [node.run(ctx.for_source(self, n)) for n, node in enumerate(self.nodes)]


@dataclass(frozen=True)
class Concat(Combination):
    """The items of all flows, one flow after the other."""

    def __post_init__(self) -> None:
        if any(node.length.is_infinite for node in self.nodes[:-1]):
            raise UsageError(
                "a flow after an infinite flow is never reached; use take(n) on the infinite one, or mix()"
            )

    def run(self, ctx: PassContext) -> Iterator[Any]:
        for n, node in enumerate(self.nodes):
            with ending(node.run(ctx.for_source(self, n))) as items:
                yield from items


@dataclass(frozen=True)
class Zip(Combination):
    """Items joined from one item of each flow, until one of the flows ends. See :meth:`.Flow.zip`."""

    @property
    def length(self) -> Length:
        return reduce(Length.shortest, (node.length for node in self.nodes))

    @property
    def can_pick(self) -> bool:
        return all(node.can_pick for node in self.nodes)

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        if numbers is None:
            return _zip(self.begin_all(ctx))
        places = share_numbers(self.check_numbers(numbers), len(self.nodes))
        return _zip([node.pick(ctx.for_source(self, n), places[n]) for n, node in enumerate(self.nodes)])


def _zip(passes: list[Iterator[Any]]) -> Iterator[Any]:
    """Yield the joined items. ``zip`` would keep references to them."""
    with ending_all(passes):
        yield from iter(partial(_next_row, passes), None)


def _next_row(passes: Sequence[Iterator[Any]]) -> Any:
    """Return the next joined item, None once a pass has ended; later passes are not drawn from."""
    parts = tuple(map(next, passes))  # a StopIteration ends the tuple
    return join_items(parts) if len(parts) == len(passes) else None


def join_items(parts: Sequence[Any]) -> Any:
    """Join items: dicts into one dict, others into one tuple; tuples and lists are flattened into it."""
    if not all(isinstance(part, Mapping) for part in parts):
        spread = (part if isinstance(part, tuple | list) else (part,) for part in parts)
        return tuple(chain.from_iterable(spread))
    whole = {name: value for part in parts for name, value in part.items()}
    if len(whole) < sum(map(len, parts)):
        names = "; ".join(", ".join(map(str, part)) for part in parts)
        raise UsageError(f"the dicts to join have names in common ({names}); rename them with map()")
    return whole


@dataclass(frozen=True)
class RandomCombination(Combination):
    """A step that chooses the flow of each item at random."""

    weights: tuple[float, ...] | None
    seed: int

    @classmethod
    def of(cls, nodes: tuple[Node, ...], weights: Sequence[float] | None, seed: int) -> Self:
        """Return the step. Raises UsageError for weights or a seed that cannot be meant."""
        try:
            floats = None if weights is None else tuple(map(float, weights))
        except (TypeError, ValueError):
            floats = ()
        if floats is not None and (
            len(floats) != len(nodes) or not any(floats) or not all(0 <= each < math.inf for each in floats)
        ):
            raise UsageError(
                f"weights are finite numbers, not negative and not all 0, one for each of {len(nodes)} flows, "
                f"this flow's first; not {weights!r}"
            )
        return cls(nodes, floats, check_seed(seed))

    @property
    def proportions(self) -> list[int]:
        """The weights as integers; equal without weights."""
        ratios = [weight.as_integer_ratio() for weight in self.weights or [1] * len(self.nodes)]
        common = math.lcm(*(below for _, below in ratios))
        return [above * (common // below) for above, below in ratios]


def weighted_choice(weights: Sequence[int], word: int) -> int:
    """Return the index that a random word selects, by probability ``weights[n] / sum(weights)`` to 2**-64."""
    ends = list(accumulate(weights))
    return bisect_right(ends, word * ends[-1] >> 64)


@dataclass(frozen=True)
class Mix(RandomCombination):
    """All items of all flows, interleaved at random; without weights all interleavings are equally likely."""

    def __post_init__(self) -> None:
        if not all(self.proportions):
            raise UsageError(
                f"a flow of weight 0 is never drawn; leave it out, or use choose(): {self.weights}"
            )
        if self.weights is None and not all(node.length.is_exact for node in self.nodes):
            lengths = ", ".join(str(node.length) for node in self.nodes)
            raise UsageError(f"mix() needs weights where lengths are not exact; the lengths are {lengths}")

    def run(self, ctx: PassContext) -> Iterator[Any]:
        cost = self.weights is None  # then a flow's weight is its number of remaining items
        left = [node.length.items for node in self.nodes] if cost else self.proportions
        word = random_words(ctx.bits(self, self.seed))
        with ending_all(self.begin_all(ctx)) as passes:
            while any(left):
                n = weighted_choice(left, next(word))
                drawn = list(islice(passes[n], 1))
                left[n] = left[n] - cost if drawn else 0
                if drawn:
                    yield drawn.pop()
            if cost and any(list(islice(rest, 1)) for rest in passes):
                raise UsageError(
                    "a flow in mix() has more items than its len says: correct it, or give weights"
                )


@dataclass(frozen=True)
class Choose(RandomCombination):
    """Items from randomly chosen flows, until a chosen flow has ended. See :meth:`.Flow.choose`."""

    @property
    def length(self) -> Length:
        lengths = [node.length for node, weight in zip(self.nodes, self.proportions, strict=True) if weight]
        if len(lengths) == 1 or all(length.is_infinite for length in lengths):
            return lengths[0]
        all_items = reduce(Length.then, lengths)
        return UNKNOWN if all_items.is_infinite else all_items.filtered()

    def run(self, ctx: PassContext) -> Iterator[Any]:
        weights = self.proportions
        with ending_all(self.begin_all(ctx)) as passes:
            for word in random_words(ctx.bits(self, self.seed)):
                drawn = list(islice(passes[weighted_choice(weights, word)], 1))
                if not drawn:
                    return
                yield drawn.pop()
