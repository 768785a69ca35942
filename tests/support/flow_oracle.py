"""The results of the steps of flows, computed on plain lists; and the functions that the modelled flows call.

Nothing here imports the package, so that nothing agrees with it for a common reason. Workers import it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Refused(Exception):
    """The step cannot make its next item from these."""


class Point(NamedTuple):
    x: Any
    y: Any


KINDS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "int64": np.int64,
    "either": lambda n: n if n % 3 else np.int64(n),
    "float": lambda n: n / 2,
    "bool": lambda n: n % 2 == 0,
    "complex": lambda n: 1j * n,
    "some floats": lambda n: n if n % 7 else float(n),
    "scalar": lambda n: np.asarray(n) if n % 4 else n,
    "array": lambda n: np.full((2, 3), n, np.float32),
    "shaped": lambda n: np.full(1 + n % 3, n),
    "flat": lambda n: np.full((n % 2, 2), n, ">i2"),
    "pair": lambda n: (np.full(2, n, np.float32), n),
    "point": lambda n: Point(n, np.full(2, n)),
    "list": lambda n: [n, n / 2],
    "list or tuple": lambda n: [n, n / 2] if n % 3 else (n, n / 2),
    "dict": lambda n: {"x": np.full(3, n, np.uint8), "n": n},
    "other dict": lambda n: {"y": n},
    "nested": lambda n: {"a": (n, [n / 2, np.full(2, n)]), "b": np.float32(n)},
    "bytes": lambda n: b"%d" % n,
    "text": str,
}


def digest(item: Any) -> int:
    """A whole number that says which item this is."""
    if isinstance(item, dict):
        return digest(list(item.values()))
    if isinstance(item, tuple | list):
        return sum((place + 1) * digest(part) for place, part in enumerate(item))
    if isinstance(item, str | bytes):
        return sum(item.encode() if isinstance(item, str) else item)
    return int(np.sum(np.abs(np.asarray(item))).item() * 2)  # as a number without bounds


@dataclass(frozen=True)
class As:
    """Makes an item of this kind from any item."""

    kind: str

    def __call__(self, item: Any) -> Any:
        return KINDS[self.kind](digest(item) % 50)


@dataclass(frozen=True)
class WithNoise:
    """An item of this kind, and a random number."""

    kind: str

    def __call__(self, item: Any, rng: np.random.Generator) -> tuple[Any, int]:
        return As(self.kind)(item), int(rng.integers(1 << 60))


def reversed_parts(item: Any) -> Any:
    """The item with its parts, or its bytes or rows, the other way round."""
    if isinstance(item, dict):
        return dict(reversed(item.items()))
    if isinstance(item, Point):
        return Point(item.y, item.x)
    if isinstance(item, np.ndarray):  # numpy's pickles of arrays with gaps lose their byte order
        return item[::-1].copy() if item.ndim else item
    return item[::-1] if isinstance(item, tuple | list | str | bytes) else item


def unchanged(item: Any) -> Any:
    return item


def wanted_or_none(item: Any) -> Any:
    return item if digest(item) % 3 else None


def is_wanted(item: Any) -> bool:
    return digest(item) % 3 > 0


def doubled(part: Any) -> Any:
    return part + part if isinstance(part, np.ndarray) else (digest(part), part)


@dataclass(frozen=True)
class Sized:
    """Items with a length and without numbers."""

    items: list[Any]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@dataclass(frozen=True)
class Begins:
    """A function that begins a pass over the items."""

    items: list[Any]

    def __call__(self) -> Iterator[Any]:
        yield from self.items


def form(item: Any) -> Any:
    """The item as a value that can be hashed, equal only for items of the same types, dtypes and values."""
    if isinstance(item, np.ndarray | np.generic):
        return type(item).__name__, item.dtype.str, item.shape, item.tobytes()
    if isinstance(item, dict):
        return "dict", tuple((name, form(part)) for name, part in item.items())
    if isinstance(item, tuple | list):
        return type(item).__name__, tuple(map(form, item))
    return type(item).__name__, item


def arrays_in(item: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(item, np.ndarray):
        yield item
    elif isinstance(item, dict | tuple | list):
        for part in item.values() if isinstance(item, dict) else item:
            yield from arrays_in(part)


def moves_less_than(before: Sequence[Any], after: Sequence[Any], window: int) -> bool:
    """Whether the items of ``after`` can be those of ``before`` at places less than ``window`` away."""
    places: dict[Any, deque[int]] = {}
    for place, item in enumerate(map(form, before)):
        places.setdefault(item, deque()).append(place)
    moved = (abs(places[item].popleft() - place) for place, item in enumerate(map(form, after)))
    return Counter(map(form, before)) == Counter(map(form, after)) and all(by < window for by in moved)


def ends_of_interleaving(found: Sequence[Any], parts: Sequence[Sequence[Any]]) -> set[tuple[int, ...]]:
    """How many items of each part ``found`` may have taken, in order; empty if it is not made of them."""
    sequences = [list(map(form, part)) for part in parts]
    places = {(0,) * len(parts)}
    for item in map(form, found):
        places = {
            (*place[:n], place[n] + 1, *place[n + 1 :])
            for place in places
            for n, sequence in enumerate(sequences)
            if place[n] < len(sequence) and sequence[place[n]] == item
        }
    return places


def stacked(rows: list[Any]) -> Any:
    """Arrays with a first axis more, in the form of the items."""
    if any(isinstance(row, dict | tuple | list) for row in rows):
        return _in_columns(stacked, rows)
    arrays = list(map(np.asarray, rows))
    forms = {(array.dtype.str, array.shape) for array in arrays}
    if len(forms) > 1 or arrays[0].dtype.kind not in "biufc":
        raise Refused
    return np.array(arrays, arrays[0].dtype)


def listed(rows: list[Any]) -> Any:
    """A list of each component's values."""
    return _in_columns(list, rows) if any(isinstance(row, dict | tuple | list) for row in rows) else rows


def _in_columns(made: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    if len(set(map(type, rows))) > 1:
        raise Refused
    if isinstance(rows[0], dict):
        if len(set(map(tuple, rows))) > 1:
            raise Refused
        return {name: made([row[name] for row in rows]) for name in rows[0]}
    if len(set(map(len, rows))) > 1:
        raise Refused
    return tuple(made([row[place] for row in rows]) for place in range(len(rows[0])))


def with_mask(batch: Any, rows: int, size: int) -> Any:
    """The batch filled with rows of zeros, and which rows are real."""

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: filled(inner) for name, inner in part.items()}
        if isinstance(part, tuple):
            return tuple(map(filled, part))
        return np.concatenate([part, np.zeros((size - rows, *part.shape[1:]), part.dtype)], dtype=part.dtype)

    mask = np.array([place < rows for place in range(size)])
    if isinstance(batch, dict):
        if "mask" in batch:
            raise Refused
        return {**filled(batch), "mask": mask}
    return (*filled(batch), mask) if isinstance(batch, tuple) else (filled(batch), mask)


def padded(part: Any, value: int) -> Any:
    """Arrays of different sizes as one, filled up to the largest of them."""
    if isinstance(part, dict):
        return {name: padded(inner, value) for name, inner in part.items()}
    if isinstance(part, tuple):
        return tuple(padded(inner, value) for inner in part)
    if not isinstance(part, list):
        raise Refused
    if not all(isinstance(each, bool | int | float | complex | np.ndarray | np.generic) for each in part):
        return part
    arrays = list(map(np.asarray, part))
    if any(array.dtype.kind not in "biufc" for array in arrays):
        return part
    if len({(array.dtype.str, array.ndim) for array in arrays}) != 1:
        raise Refused
    sides = [max(array.shape[axis] for array in arrays) for axis in range(arrays[0].ndim)]
    whole = np.full((len(arrays), *sides), value, arrays[0].dtype)
    for row, array in zip(whole[:, None], arrays, strict=True):
        row[(0, *map(slice, array.shape))] = array
    return whole


def rows_of(part: Any) -> list[Any]:
    """The rows of a batch."""
    if isinstance(part, dict):
        return [dict(zip(part, row, strict=True)) for row in rows_of(tuple(part.values()))]
    if isinstance(part, tuple):
        columns = list(map(rows_of, part))
        if len(set(map(len, columns))) != 1:
            raise Refused
        return list(zip(*columns, strict=True))
    if not isinstance(part, list) and not (isinstance(part, np.ndarray) and part.ndim):
        raise Refused
    return list(part)


def shapes_of(item: Any) -> Any:
    if isinstance(item, dict):
        return tuple((name, shapes_of(part)) for name, part in item.items())
    return tuple(map(shapes_of, item)) if isinstance(item, tuple | list) else np.shape(item)


def side_by_side(parts: Sequence[Any]) -> Any:
    """One item of each flow as one item."""
    if all(isinstance(part, dict) for part in parts):
        names = [name for part in parts for name in part]
        if len(set(names)) < len(names):
            raise Refused
        return {name: part[name] for part in parts for name in part}
    return tuple(inner for part in parts for inner in (part if isinstance(part, tuple | list) else [part]))


def part_of(item: Any, component: int | str) -> Any:
    if isinstance(item, dict) and component in item:
        return item[component]
    if (
        isinstance(item, tuple | list)
        and not isinstance(component, str)
        and -len(item) <= component < len(item)
    ):
        return item[component]
    raise Refused


def with_part(item: Any, component: Any, value: Any) -> Any:
    if isinstance(item, dict):
        return {**item, component: value}
    parts = list(item)
    parts[component] = value
    return Point(*parts) if isinstance(item, Point) else type(item)(parts)


def in_turn(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """One item of each part, again and again, of those that have one left."""
    longest = max(map(len, parts), default=0)
    return [part[place] for place in range(longest) for part in parts if place < len(part)]
