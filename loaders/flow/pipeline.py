"""The execution of a flow: its passes, their length, and what is kept between them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from shardprep.formats.conversion.writing.first_items import GivenSchema
from shardprep.formats.conversion.writing.write_dataset import DEFAULT_SHARD_SIZE, write_dataset
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.errors import UsageError
from shardprep.formats.progress import Progress
from shardprep.loaders.batching.keras_hint import KerasHint
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import checked_int
from shardprep.loaders.flow.core.length import Length
from shardprep.loaders.flow.core.meter import PassMeter
from shardprep.loaders.flow.core.node import Node
from shardprep.loaders.flow.core.pass_context import PassContext, PassResources
from shardprep.loaders.flow.sources.parts import FromParts

from .flow_meter import FlowMeter
from .measure import FlowSpeed, makes_batches, measure
from .saving import FlowItems
from .state import FlowPlace, PassProgress, place_from, state_of
from .stats import FlowStats


class Pipeline(KerasHint):
    """A flow without the methods that make nodes; see :class:`.Flow`.

    Iterating it runs the next pass of ``node``, the flow's last step.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._kept = PassResources()
        self._next = FlowPlace()
        self._current = PassProgress(self._next, PassMeter())
        self._meter = FlowMeter(has_rows=makes_batches(node))

    def peek(self, items: int = 1) -> list[Any]:
        """Return the first ``items`` items of pass 0 as a list, and close the pass."""
        count = checked_int(items, "the number of items", least=0)
        with closing(self.at_pass(0)) as found:  # type: ignore[type-var]
            return [item for _, item in zip(range(count), found, strict=False)]

    def measure(self, *, seconds: float = 5.0) -> FlowSpeed:
        """Measure how fast the flow delivers to a consumer that does nothing, for ``seconds`` seconds."""
        return measure(self, seconds=seconds)

    def stats(self) -> FlowStats:
        """Return the counts and times of all passes since the flow was made, to be printed. Thread-safe.

        Each pass that iteration or :meth:`at_pass` began counts, from its beginning. Flows that were made
        from this one count their own.
        """
        return self._meter.read()

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass, or continue where a loaded state was taken."""
        start, self._next = self._next, FlowPlace(self._next.pass_number + 1)
        now = self._pass(start.pass_number)
        self._current = PassProgress(start, now.meter)
        return self._counted(now, start.items)

    def at_pass(self, number: int) -> Iterator[Any]:
        """Begin this pass. Raises UsageError unless 0 <= number < 2**63."""
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
        """The number of parts that can each be made on its own; 1 for all but :meth:`.Flow.from_parts`."""
        return self.node.parts if isinstance(self.node, FromParts) else 1

    def part(self, pass_number: int, number: int) -> Iterator[Any]:
        """Begin one part of this pass. Raises UsageError unless 0 <= ``number`` < :attr:`parts`."""
        if not 0 <= number < self.parts:
            raise UsageError(f"part {number} of a flow of {self.parts}")
        now = self._pass(pass_number)
        return self.node.part(now, number) if isinstance(self.node, FromParts) else self.node.run(now)

    def as_part(self, now: PassContext, number: int) -> Iterator[Any]:
        """Run a pass as the part with this ``number``, within the pass ``now`` of another flow."""
        return self.node.run(PassContext(now.number, self._kept, (*now.branch, number), now.meter, now.group))

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` works: the source has items by number, and every step supports it."""
        return self.node.can_pick

    def pick(self, pass_number: int, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield the items that this pass has at these places, in the order of ``numbers``.

        ``numbers`` are drawn some items ahead of the yielded item. Raises UsageError unless :attr:`can_pick`.
        """
        if not isinstance(numbers, Iterable):
            raise UsageError(f"items are picked by several numbers: give a list, not {numbers!r}")
        return self.node.pick(self._pass(pass_number), numbers)

    def by_number(self) -> FlowItems | None:
        """Return the items of pass 0 by number, for :func:`.write_dataset`; None where they have none."""
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
        """Write the items of pass 0 as a dataset into ``output``: ``Flow.from_dataset(output)`` yields them.

        The arguments, the result and the errors are those of :func:`.write_dataset`. Where the items have
        numbers (:attr:`can_pick`), the writing workers make them, in place of the processes of a ``map``.
        Raises UsageError for an infinite flow.
        """
        if self.length.is_infinite:
            raise UsageError("an infinite flow cannot be saved; use take(n), or leave out repeat()")
        numbered = self.by_number()
        items = self.at_pass(0) if numbered is None else iter(())
        try:
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
        finally:
            end(items)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the pass that was begun last by iteration, as plain JSON values.

        The last item that was yielded counts as delivered, those that steps hold ahead do not. After
        :meth:`load_state_dict`, in another process and with other numbers of threads or processes, the next
        iteration yields what would have followed. Raises UsageError within a pass of a flow that has no items
        by number (:attr:`can_pick`): such a flow has a state between two passes only.
        """
        return state_of(self.node, self._current.place(self.node))

    def state_or_none(self) -> dict[str, Any] | None:
        """Return the state; None where :meth:`state_dict` raises UsageError."""
        place = self._current.place(self.node)
        return state_of(self.node, place) if self.can_pick or not place.items else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where the ``state`` of an equal flow was taken.

        The steps, their options and seeds, and the lengths of sources are compared; functions and contents
        are not. Raises UsageError for the state of another flow; nothing is changed then.
        """
        self._next = place_from(self.node, state)
        self._current = PassProgress(self._next, PassMeter())

    @property
    def length(self) -> Length:
        """The number of items of each pass: exact, an upper bound, unknown or infinite."""
        return self.node.length

    def __len__(self) -> int:
        """Return the number of items of the next iteration: of a pass, or of the rest of a resumed one.

        Raises TypeError where it is not known exactly.
        """
        return self.batches_per_epoch - self._next.items

    @property
    def batches_per_epoch(self) -> int:
        """The number of items of a whole pass. Raises TypeError where it is not known exactly."""
        if not self.length.is_exact:
            raise TypeError(
                f"this flow's length is {self.length}; flow.take(n) or an exact source gives it one"
            )
        return self.length.items

    def __bool__(self) -> bool:
        return True

    @property
    def batches_never_change(self) -> bool:
        """Whether no step writes to an item after it was yielded, so that consumers need no copy."""
        return self.node.never_change

    def close(self) -> None:
        """End this flow's worker processes and drop its caches; the next pass makes new ones. Idempotent.

        Flows that this one was made from, or that were made from it, keep their own workers and caches.
        """
        kept, self._kept = self._kept, PassResources()
        kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.node,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} items, ending in {type(self.node).__name__}>"
