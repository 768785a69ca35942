"""The execution of a flow: its passes, their state, and its items kept as a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from typing import Any, cast

from shardprep.formats.conversion.save import DEFAULT_SHARD_SIZE, GivenSchema, NumberedItems, write_dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.json_record import natural
from shardprep.formats.runtime.lazy import cached_property
from shardprep.formats.runtime.owned import Closable
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.runtime.sizes import checked_int
from shardprep.formats.shards.manifest import Manifest
from shardprep.loaders.batches.passes import FrameworkHint, ending
from shardprep.loaders.flow.map import Map, MapComponent, Mapped, ThreadMap, Transforming
from shardprep.loaders.flow.node import Length, Node, has
from shardprep.loaders.flow.passes import PassContext, PassMeter, PassResources
from shardprep.loaders.flow.process_map import InProcess, ProcessMap
from shardprep.loaders.flow.sources import FromParts
from shardprep.loaders.flow.stats import FlowMeter, FlowSpeed, FlowStats, makes_batches, measure
from shardprep.loaders.loader.run_card import Resumed, kept_transform, refuse_another

STATE_VERSION = 1


@dataclass(frozen=True)
class FlowPlace:
    """The position in pass ``pass_number`` after ``items`` items."""

    pass_number: int = 0
    items: int = 0


def check_place(node: Node, place: FlowPlace) -> None:
    """Raise UsageError if a pass cannot begin at this position."""
    if place.items and not node.can_pick:
        raise UsageError(
            f"{_first_without_numbers(node).label} has no items by number, so this flow can only continue at "
            "the beginning of a pass: take its state between two passes"
        )
    if place.items and place.items > node.length.items:
        raise UsageError(f"not the state of this flow: a pass has {node.length}, and not {place.items} items")


def structure_of(node: Node) -> Iterator[str]:
    """Yield the descriptions of a flow's steps and sources, from last to first."""
    yield node.description
    for number, source in enumerate(node.sources):
        prefix = f"{number}. " if len(node.sources) > 1 else ""
        yield from (prefix + line for line in structure_of(source))


def kept_transforms(node: Node) -> Iterator[dict[str, Any]]:
    """Yield the transforms of a flow's steps in the form of a state, in the order of :func:`structure_of`."""
    if isinstance(node, Mapped) and isinstance(node.function.call, Transforming):
        yield kept_transform(node.function.call.transform)
    for source in node.sources:
        yield from kept_transforms(source)


def _first_without_numbers(node: Node) -> Node:
    """Return the first step or source whose items cannot be picked."""
    for source in node.sources:
        if not source.can_pick:
            return _first_without_numbers(source)
    return node


@dataclass(frozen=True)
class FlowItems(NumberedItems):
    """The items of pass 0 of a ``node`` that can pick. ``kept`` are its flow's resources, None elsewhere."""

    node: Node
    kept: PassResources | None = None

    def __len__(self) -> int:
        return self.node.length.items

    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        return self.node.pick(PassContext(0, self.kept or PassResources()), numbers)

    def elsewhere(self) -> NumberedItems | None:
        node = _alone(self.node)
        return None if has(node, ProcessMap | InProcess) else FlowItems(node)


def _alone(node: Node) -> Node:
    """Return the node without the threads and processes of its last maps: the writing workers replace them.

    Declared outputs are kept, because they may change the dtype of a result.
    """
    if isinstance(node, ThreadMap) or (isinstance(node, ProcessMap) and node.outputs is None):
        mapped = cast("Mapped", node)
        return Map(
            _alone(mapped.source),
            mapped.function,
            drop_none=mapped.drop_none,
            random=mapped.random,
            seed=mapped.seed,
        )
    return replace(node, source=_alone(node.source)) if isinstance(node, Map | MapComponent) else node


class Pipeline(FrameworkHint, Closable):
    """The part of :class:`.Flow` that runs passes and keeps their state; ``node`` is the flow's last step."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._kept = PassResources()
        self._next = FlowPlace()
        self._current = self._next, PassMeter()  # start of the current pass, and its counters
        self._waiting: FlowPlace | None = None  # of an iterator that was not asked for an item yet
        self._meter = FlowMeter(has_rows=makes_batches(node))

    def peek(self, items: int = 1) -> list[Any]:
        """Return the first ``items`` items of pass 0 as a list, and close the pass."""
        count = checked_int(items, "the number of items", least=0)
        with ending(self.at_pass(0)) as found:
            return [item for _, item in zip(range(count), found, strict=False)]

    def measure(self, *, seconds: float = 5.0) -> FlowSpeed:
        """Measure for ``seconds`` seconds how fast a consumer that does nothing gets passes 0, 1, ...

        The next iteration begins or continues as without it.
        """
        return measure(map(self.at_pass, count()), has_rows=makes_batches(self.node), seconds=seconds)

    def stats(self) -> FlowStats:
        """Return the printable counts and times of all passes since the flow was made. Thread-safe.

        Includes all passes begun by iteration or :meth:`at_pass`, also unfinished ones. Flows made from this
        one count their own.
        """
        return self._meter.read()

    def __iter__(self) -> Iterator[Any]:
        """Iterate the next pass, or from where a loaded state was taken; it begins with its first item."""
        self._transforms  # noqa: B018 - before calls in this process change them
        self._waiting = self._next
        return self._run()

    def _run(self) -> Iterator[Any]:
        start, self._next = self._next, FlowPlace(self._next.pass_number + 1)
        now = self._pass(start.pass_number)
        self._current = start, now.meter
        yield from self._counted(now, start.items)

    def at_pass(self, number: int) -> Iterator[Any]:
        """Begin pass ``number``. Raises UsageError unless 0 <= number < 2**63."""
        return self._counted(self._pass(number))

    def _counted(self, now: PassContext, start: int = 0) -> Iterator[Any]:
        items = self.node.pick(now, range(start, self.length.items)) if start else self.node.run(now)
        return self._meter.count(items, now.meter)

    def _pass(self, number: int) -> PassContext:
        if checked_int(number, "the number of a pass", least=0) >= 1 << 63:
            raise UsageError(f"the number of a pass must be below 2**63, not {number}")
        return PassContext(int(number), self._kept)

    @property
    def parts(self) -> int:
        """The number of parts that can be made separately; 1 except for :meth:`.Flow.from_parts`."""
        return self.node.parts if isinstance(self.node, FromParts) else 1

    def part(self, pass_number: int, number: int) -> Iterator[Any]:
        """Begin one part of a pass. Raises UsageError unless 0 <= ``number`` < :attr:`parts`."""
        if not 0 <= number < self.parts:
            raise UsageError(f"part {number} of a flow of {self.parts}")
        now = self._pass(pass_number)
        return self.node.part(now, number) if isinstance(self.node, FromParts) else self.node.run(now)

    def as_part(self, now: PassContext, number: int) -> Iterator[Any]:
        """Run a pass as part ``number`` of the pass ``now`` of another flow."""
        return self.node.run(PassContext(now.number, self._kept, (*now.branch, number), now.meter, now.group))

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` works: the source has items by number, and every step supports it."""
        return self.node.can_pick

    def pick(self, pass_number: int, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield the items of a pass with these ``numbers``, in that order.

        ``numbers`` may be drawn some items ahead. Raises UsageError unless :attr:`can_pick`.
        """
        if not isinstance(numbers, Iterable):
            raise UsageError(f"items are picked by several numbers: give a list, not {numbers!r}")
        if not self.can_pick:
            raise UsageError(f"{_first_without_numbers(self.node).label} has no items by number to pick")
        return self.node.pick(self._pass(pass_number), numbers)

    def by_number(self) -> FlowItems | None:
        """Return the items of pass 0 by number, for :func:`.write_dataset`; None if they have no numbers."""
        return FlowItems(self.node, self._kept) if self.can_pick and self.length.is_exact else None

    def save(
        self,
        output: str | os.PathLike[str],
        *,
        schema: GivenSchema | None = None,
        classes: Sequence[str] | None = None,
        split: str = "train",
        container: str = "lmdb",
        shard_size: int = DEFAULT_SHARD_SIZE,
        order: str = "given",
        seed: int = 0,
        workers: int | None = None,
        progress: Progress | None = None,
        restart: bool = False,
    ) -> Manifest:
        """Write the items of pass 0 as a dataset to ``output``; ``Flow.from_dataset(output)`` yields them.

        The arguments, the result and the errors are those of :func:`.write_dataset`. If the items have
        numbers (:attr:`can_pick`), the writing workers make them instead of the processes of a ``map``.
        Raises UsageError for an infinite flow.
        """
        if self.length.is_infinite:
            raise UsageError("an infinite flow cannot be saved; use take(n), or leave out repeat()")
        numbered = self.by_number()
        with ending(self.at_pass(0) if numbered is None else iter(())) as items:
            return write_dataset(
                items if numbered is None else numbered,
                output,
                schema=schema,
                classes=classes,
                split=split,
                container=container,
                shard_size=shard_size,
                order=order,
                seed=seed,
                workers=workers,
                progress=progress,
                restart=restart,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass that iteration began last, as plain JSON values.

        The last yielded item counts as delivered; items that steps hold ahead do not. After
        :meth:`load_state_dict`, even in another process with different numbers of threads or processes, the
        next iteration yields the items that would have followed. Raises UsageError within a pass of a flow
        without items by number (:attr:`can_pick`): such a flow has a state only between two passes.
        """
        start, meter = self._current
        place = FlowPlace(start.pass_number, start.items + meter.items)
        if meter.is_over or (self.length.is_exact and place.items >= self.length.items):
            place = FlowPlace(start.pass_number + 1)
        check_place(self.node, place)
        steps = list(structure_of(self.node))
        state = {"version": STATE_VERSION, "flow": steps, "pass": place.pass_number, "items": place.items}
        return state | ({"transforms": self._transforms} if self._transforms else {})

    def state_or_none(self) -> dict[str, Any] | None:
        """Return the state, None if :meth:`state_dict` raises UsageError."""
        try:
            return self.state_dict()
        except UsageError:
            return None

    @cached_property
    def _transforms(self) -> list[dict[str, Any]]:
        return list(kept_transforms(self.node))

    def load_state_dict(self, state: dict[str, Any], *, transform: Resumed = "same") -> None:
        """Make the next iteration continue at the ``state`` of an equal flow.

        Compares the steps, their options and seeds, the lengths of sources and, unless ``transform`` is
        ``"changed"``, the transforms of :meth:`.Flow.transform`, but not other functions or contents. Raises
        UsageError for the state of a different flow, and then changes nothing.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise UsageError(f"not the state of a flow, or not of version {STATE_VERSION}")
        if not isinstance(structure := state.get("flow"), list):
            raise UsageError("not the state of a flow: it has no list of steps")
        for lines in zip_longest(structure_of(self.node), structure):
            if lines[0] != lines[1]:
                here, there = ("no step" if line is None else str(line)[:200] for line in lines)
                raise UsageError(f"the state is from another flow: it has {there} where this one has {here}")
        known = state.get("transforms", self._transforms)  # older states have none
        refuse_another(known, self._transforms, transform)
        try:
            place = FlowPlace(natural(state.get("pass")), natural(state.get("items")))
        except ValueError as error:
            raise UsageError(f"not the state of a flow: {error}") from error
        check_place(self.node, place)
        self._next, self._current = place, (place, PassMeter())

    @property
    def length(self) -> Length:
        """The number of items of each pass: exact, an upper bound, unknown or infinite."""
        return self.node.length

    def __len__(self) -> int:
        """Return the number of items of the next iteration: of a pass, or of the rest of a resumed one.

        Raises TypeError if it is not known exactly.
        """
        self._refuse_sampler()
        return self.batches_per_epoch - (0 if self._next is self._waiting else self._next.items)

    @property
    def batches_per_epoch(self) -> int:
        """The number of items of a whole pass. Raises TypeError if it is not known exactly."""
        if not self.length.is_exact:
            raise TypeError(
                f"this flow's length is {self.length}; flow.take(n) or an exact source gives it one"
            )
        return self.length.items

    def __bool__(self) -> bool:
        return True

    @property
    def batches_never_change(self) -> bool:
        """Whether no step writes to an item after yielding it, so that consumers need no copy."""
        return self.node.never_change

    def close(self) -> None:
        """End this flow's worker processes and drop its caches; the next pass makes new ones. Idempotent.

        Flows made from this one, and flows that it was made from, keep their own workers and caches.
        """
        kept, self._kept = self._kept, PassResources()
        kept.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.node,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} items, ending in {type(self.node).__name__}>"
